"""How a backend is timed: seconds of a call, over several calls in a row on rotating inputs.

CPU: the wall clock, after one untimed call that wakes the workers. CUDA: events around replays of
one graph that holds a call on every set of inputs, whose outputs were filled with NaN. Metal: the
wall clock around one `mx.eval` of all calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter  # by name: a variant may put its own into `time`
from typing import Any, Protocol

from minfer.device import Device, DeviceKind

Call = Callable[[], Any]


class Timer(Protocol):
    """sample: seconds of one call, over about n. answer: the output of the last timed call.

    trouble: why calls are not timed as they should be, "" if they are.
    """

    trouble: str

    def sample(self, n: int) -> float: ...
    def answer(self) -> Any: ...


class WallTimer:
    """Calls that are done when they return."""

    trouble = ""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls, self.turn = calls, 0
        self.out: Any = None

    def sample(self, n: int) -> float:
        self._run(self._next(1))
        chosen = self._next(n)
        start = perf_counter()
        self.out = self._run(chosen)
        return (perf_counter() - start) / n

    def _run(self, calls: Sequence[Call]) -> Any:
        out = None
        for call in calls:
            out = call()
        return out

    def _next(self, n: int) -> list[Call]:
        self.turn += n
        return [self.calls[(self.turn + i) % len(self.calls)] for i in range(n)]

    def answer(self) -> Any:
        return self.out


class MetalTimer(WallTimer):
    """Calls that are made when `mx.eval` asks for their outputs."""

    def _run(self, calls: Sequence[Call]) -> Any:
        import mlx.core as mx

        outs = [call() for call in calls]
        mx.eval([_arrays(out) for out in outs])
        return outs[-1]


class GraphTimer:
    """Calls recorded in one CUDA graph."""

    def __init__(self, calls: Sequence[Call]) -> None:
        from tuning.columns.replay import Replay

        self.replay = Replay(calls)
        self.trouble = self.replay.trouble

    def sample(self, n: int) -> float:
        import torch

        for out in self.replay.outs:
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                out.fill_(math.nan)
        return self.replay.sample(n)

    def answer(self) -> Any:
        return self.replay.outs[-1]


def _arrays(out: Any) -> Any:
    """The arrays of an output, which may hold regions."""
    if isinstance(out, tuple):
        return [_arrays(part) for part in out]
    return list(out.arrays) if hasattr(out, "arrays") else out


def timer_of(device: Device, calls: Sequence[Call]) -> Timer:
    """The timer of a device, ready to be sampled."""
    if device.kind is DeviceKind.METAL:
        return MetalTimer(calls)
    if device.kind is DeviceKind.CUDA and device.package().compute_capability() is not None:
        return GraphTimer(calls)
    return WallTimer(calls)
