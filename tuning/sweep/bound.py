"""A problem bound to a device: its arguments there, which change version in place."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from minfer.cases.carrying import given, returned
from minfer.device import Device
from minfer.format import Region
from minfer.memory import zeroed
from minfer.registry import Choice
from tuning.sweep.problem import TILES, Problem, same_values

HUGE = 1 << 20  # bytes from which copies lie in huge pages, as weights and caches do


class Bound:
    """The tensors of a problem on a device, in `copies` sets that differ in where they lie."""

    def __init__(self, problem: Problem, device: Device, copies: int = 1) -> None:
        self.problem, self.package = problem, device.package()
        self.shared = [self._given(tensor, device) for tensor in problem.tensors]
        self.sets = [self.shared]
        for _ in range(copies - 1):
            self.sets.append(self._copies(problem.read))
        self.current = 0

    def _given(self, tensor: Any, device: Device) -> Any:
        if isinstance(tensor, np.ndarray):  # versions are written into the copy
            return given(self.package, _copied(self.package, tensor))
        return tensor.on(device) if hasattr(tensor, "on") else given(self.package, tensor)

    def _copies(self, indices: Sequence[int]) -> list[Any]:
        """The shared tensors, with copies of those at `indices`."""
        chosen = list(self.shared)
        for i in indices:
            chosen[i] = _copied(self.package, chosen[i])
        return chosen

    def turn(self, version: int) -> None:
        """Write the content of a version into the tensors."""
        if version == self.current:
            return
        self.current = version
        for i in self.problem.other:
            _overwrite(self.shared[i], given(self.package, self._content(i)))

    def _content(self, i: int) -> Any:
        """What the current version says of tensor i, whatever calls made of it."""
        original = self.problem.tensors[i]
        return self.problem.other.get(i, original) if self.current else original

    def _fresh(self) -> list[Any]:
        """The shared tensors, with what the op changes as it was before the first call."""
        chosen = list(self.shared)
        for i in self.problem.changed:
            chosen[i] = given(self.package, self._content(i))
        return chosen

    def arguments(self, choice: Choice, of: int = 0, fresh: bool = False) -> list[Any]:
        """What a launch takes: set `of`; fresh: with what the op changes as no call left it."""
        tensors = self._fresh() if fresh else self.sets[of]
        cut = self.problem.tiles
        if cut is None:
            return list(tensors)
        tiles = given(self.package, cut(choice.block_m))
        return [tiles if t is TILES else t for t in tensors]

    def launch(self, choice: Choice, arguments: Sequence[Any]) -> Any:
        """One call."""
        return choice.launch(*arguments, **self.problem.scalars, config=choice.config)

    def answer(self, out: Any) -> Any:
        """An answer on the host, as it is now: whoever still writes to it comes too late."""
        return _kept(returned(self.package, out))

    def altered(self) -> list[int]:
        """Indices of arrays and regions of the host that differ from the current version.

        Those that the op changes aside.
        """
        read = set(range(len(self.shared))) - {*self.problem.changed}
        return [i for i in sorted(read) if _differs(self.package, self.shared[i], self._content(i))]


def _kept(value: Any) -> Any:
    """A copy of an answer."""
    if isinstance(value, tuple):
        return tuple(map(_kept, value))
    return value.copy() if isinstance(value, np.ndarray) else value


def _differs(package: ModuleType, value: Any, content: Any) -> bool:
    """Whether what lies on a device is not what was given; False where that is not known."""
    if isinstance(content, Region):
        return not np.array_equal(returned(package, value).arrays[0], content.arrays[0])
    if not isinstance(content, np.ndarray):
        return False
    return not same_values(returned(package, value), content).passed


def _copied(package: ModuleType, value: Any) -> Any:
    """A copy on the device, of a region or an array."""
    if isinstance(value, Region):
        made: Region = package.empty_region(
            value.fmt, value.n_cells, value.n_head_kv, value.head_dim
        )
        _overwrite(made, value)
        return made
    if isinstance(value, np.ndarray):
        if value.nbytes < HUGE:
            return value.copy()
        (area,) = zeroed([value.nbytes])
        made_array = area.view(value.dtype).reshape(value.shape)
        made_array[...] = value
        return made_array
    return value.clone() if hasattr(value, "clone") else type(value)(value)


def _overwrite(target: Any, source: Any) -> None:
    """Content of the same shape into a region or an array."""
    if isinstance(target, Region):
        for a, b in zip(target.arrays, source.arrays, strict=True):
            a[...] = b
    else:
        target[...] = source
