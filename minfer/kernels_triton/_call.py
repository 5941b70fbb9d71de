"""A checked attention call, and what the kernels of this package are given of it."""

from __future__ import annotations

from functools import partial

import torch

from minfer.kernels_triton import _arguments
from minfer.kernels_triton._arguments import planes
from minfer.kernels_triton._gather import CAUSAL, RUNS, SPAN
from minfer.ops import call
from minfer.window import WindowMode

MODES: dict[WindowMode, int] = {
    WindowMode.CAUSAL: CAUSAL.value,
    WindowMode.SPAN: SPAN.value,
    WindowMode.RUNS: RUNS.value,
}


class Call(call.AttentionCall):
    """A checked call over tensors."""

    __slots__ = ()

    @property
    def mode_value(self) -> int:
        """The mode of the window as kernels tell it."""
        return MODES[self.mode]

    @property
    def strides(self) -> tuple[int, int]:
        """Elements from one cell's row, and its scales, to the next cell's."""
        rows, scales = planes(self.k)
        return rows.stride(0), scales.stride(0)

    def empty_out(self) -> torch.Tensor:
        return torch.empty_like(self.q)


prepare = partial(call.checked, Call, _arguments)
tiles_of = partial(call.tiles_of, _arguments)
