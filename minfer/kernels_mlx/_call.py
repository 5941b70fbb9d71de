"""A checked attention call, and what the kernels of this package are given of it."""

from __future__ import annotations

from functools import partial
from typing import Any

from minfer.kernels_mlx import _arguments
from minfer.kernels_mlx._arguments import planes
from minfer.ops import call
from minfer.window import WindowMode

# Names under which kernels get what `Call.arguments` gives.
ARGUMENTS = (
    *("q", "k_rows", "k_scales", "v_rows", "v_scales", "window", "positions"),
    *("n_head", "n_head_kv", "row_width", "n_scales", "width", "causal", "factor"),
)


class Call(call.AttentionCall):
    """A checked call over mlx arrays."""

    __slots__ = ()

    @property
    def causal(self) -> bool:
        """Whether windows are spans [0, pos + 1), which need no array."""
        return self.window is None

    @property
    def runs(self) -> bool:
        return self.mode is WindowMode.RUNS

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Inputs of a kernel, in the order of `ARGUMENTS`."""
        rows, scales = planes(self.k)
        return (
            *(self.q, rows, scales, *planes(self.v), self.window_or_positions, self.positions),
            *(self.n_head, self.n_head_kv, rows.shape[1], scales.shape[1]),
            *(self.width, int(self.causal), self.factor),
        )

    @property
    def template(self) -> dict[str, Any]:
        """Constants of every attention kernel: types of planes, head_dim, kind of window."""
        rows, scales = planes(self.k)
        return {"T": rows.dtype, "S": scales.dtype, "D": self.head_dim, "RUNS": self.runs}


prepare = partial(call.checked, Call, _arguments)
tiles_of = partial(call.tiles_of, _arguments)
