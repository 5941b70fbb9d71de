"""A problem is one call of an op on the host: arguments in two versions, and what must come out.

The versions differ in content only. Whoever times a call changes from one to the other between
rounds, so that an answer which is not computed anew is a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from minfer.format import KvFormat
from minfer.ops import Numerics, Shape
from tuning.bench.cases import Work
from tuning.bench.checks import Check

VERSIONS = (0, 1)
Judge = Callable[[int, Numerics, Any], Check]


@dataclass(frozen=True, eq=False)
class Problem:
    """Arguments of an op, and a judge of its answers.

    tensors: in the order of the op, as numpy arrays, canonical regions or None, or something with
    `on(device)` that makes them there; where `TILES` stands, `tiles` cuts them for a `block_m`.
    other: by index, what takes a tensor's place in version 1. changed: indices of the regions that
    the op changes. read: indices of what is read from memory, which timed calls rotate over copies
    of. judge: of (version, numerics of the variant, answer on the host).
    """

    op: str
    tensors: tuple[Any, ...]
    scalars: Mapping[str, Any]
    other: Mapping[int, Any]
    judge: Judge
    changed: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    tiles: Callable[[int], Any] | None = None


TILES = object()  # where the tiles of a problem go


@dataclass(frozen=True)
class Case:
    """One shape of an op, by name.

    shape: what a choice of variant may depend on. cold: what is read comes from memory, not from
    a cache.
    """

    op: ClassVar[str]
    name: str

    @property
    def shape(self) -> Shape:
        raise NotImplementedError

    @property
    def cold(self) -> bool:
        return False

    @property
    def gate_key(self) -> Hashable:
        """Equal for cases whose gates are equal."""
        return self.name

    @property
    def head_dim(self) -> int:
        """Of a question: 0 where there are no heads."""
        return 0

    def fits(self, fmt: KvFormat) -> bool:
        """Whether rows are whole blocks, where the format needs it."""
        return True

    def work(self, fmt: KvFormat) -> Work:
        """The least work of a call."""
        return Work()

    def problem(self, fmt: KvFormat) -> Problem:
        """The call that is timed."""
        raise NotImplementedError

    def gate(self, fmt: KvFormat) -> list[Problem]:
        """Small odd calls that must be right before this one is timed."""
        return []


@dataclass
class Truths:
    """Expected answers by version and numerics, made once each."""

    make: Callable[[int, Numerics], Any]
    made: dict[tuple[int, Numerics], Any] = field(default_factory=dict)

    def __call__(self, version: int, numerics: Numerics) -> Any:
        key = (version, numerics)
        if key not in self.made:
            self.made[key] = self.make(version, numerics)
        return self.made[key]


def within(error: Any, allowed: float, unit: str) -> Check:
    """A check of an error; NaN is beyond everything."""
    error = float(error)
    return Check(bool(error <= allowed), error, allowed, unit)


def misshapen(found: Any, shape: tuple[int, ...], dtype: Any = np.float32) -> Check | None:
    """A failed check of an answer that is no array of that shape and type; None if it is one."""
    wanted = (tuple(shape), np.dtype(dtype))
    if isinstance(found, np.ndarray) and (found.shape, found.dtype) == wanted:
        return None
    given = f"{getattr(found, 'dtype', type(found).__name__)} {list(np.shape(found))}"
    return Check(False, float("nan"), 0, f"{given}, not {wanted[1]} {list(shape)}")


def same_values(found: Any, wanted: Any) -> Check:
    """Equal shapes, and equal values or both NaN."""
    if np.shape(found) != np.shape(wanted):
        return Check(False, float("nan"), 0, f"values: shape {np.shape(found)}, not {wanted.shape}")
    found, wanted = np.asarray(found), np.asarray(wanted)
    differ = (found != wanted) & ~((found != found) & (wanted != wanted))
    return within(np.count_nonzero(differ), 0, "values that differ")
