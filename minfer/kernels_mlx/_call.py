"""What every attention launcher does before a kernel runs: checks, and arrays for the kernels.

Windows given as host arrays are checked in full; mlx arrays were checked by whoever filled them
(contract 7.5). A causal window is the span [0, pos + 1), see `_gather`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from minfer import window
from minfer.format import KvFormat, Region
from minfer.kernels_mlx._arguments import check_region, floats, host, int32s, planes, tensor
from minfer.ops import Limits, attention, cell_arguments
from minfer.ops.arguments import host_int32s
from minfer.window import WindowMode

# Names under which kernels get what `Call.arguments` gives.
ARGUMENTS = (
    *("q", "k_rows", "k_scales", "v_rows", "v_scales", "window", "positions"),
    *("n_head", "n_head_kv", "row_width", "n_scales", "width", "causal", "factor"),
)


class Call(NamedTuple):
    """A checked call."""

    fmt: KvFormat
    q: mx.array  # float32 [n_q, n_head, d], times -1 if the scale is negative
    k: Region
    v: Region
    positions: mx.array  # int32 [n_q]
    window: mx.array | None  # int32 [n_q, 2] or [n_q, 4, 2]; None if causal
    runs: bool
    width: int
    factor: float  # |scale| * log2(e), what weights multiply differences of scores by
    host_windows: tuple[Any, Any] | None  # positions, first index each sees; None if on the device

    @property
    def n_q(self) -> int:
        return int(self.q.shape[0])

    @property
    def n_head(self) -> int:
        return int(self.q.shape[1])

    @property
    def n_head_kv(self) -> int:
        return self.k.n_head_kv

    @property
    def head_dim(self) -> int:
        return self.k.head_dim

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.n_head // self.n_head_kv

    @property
    def most_partitions(self) -> int:
        """No query's keys lie in more partitions than these."""
        n_cells = min(self.k.n_cells, self.v.n_cells)
        return attention.most_partitions(self.host_windows, n_cells, self.width)

    @property
    def causal(self) -> bool:
        return self.window is None

    @property
    def window_or_positions(self) -> mx.array:
        """An array for kernels, which causal ones do not read."""
        return self.positions if self.window is None else self.window

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


def prepare(
    op: str,
    q: Any,
    k: Region,
    v: Region,
    positions: Any,
    array: Any,
    *,
    fmt: KvFormat,
    scale: float,
    width: int,
    limits: Limits | None = None,
) -> Call:
    """Check one attention call.

    array: the window input, whose size tells its mode (contract 2.2), which must be one that `op`
    reads. limits: those of the variant; only the head_dim is looked at.
    """
    for region in (k, v):
        check_region(region, fmt)
    cell_arguments.check_pair(k, v)
    q = floats(q, "q", 3)
    attention.check_query(tuple(q.shape), k)
    limits = limits or Limits()
    attention.check_head_dim(k.head_dim, fmt, limits.head_dim_multiple, limits.max_head_dim)
    attention.check_scalars(scale, width)
    n_q, seen = len(q), None
    if host(positions):
        positions = host_int32s(positions, "positions")
    if array is not None and host(array):
        array = host_int32s(array, "the window", None)
    attention.check_count(len(positions), n_q)
    if host(positions) and (array is None or host(array)):
        n_cells = min(k.n_cells, v.n_cells)
        seen = attention.firsts(op, positions, array, n_cells, int(width))
    mode = window.mode_of(0 if array is None else math.prod(array.shape), n_q)
    attention.check_mode(op, mode, n_q)
    return Call(
        fmt=fmt,
        q=-q if scale < 0 else q,
        k=k,
        v=v,
        positions=int32s(positions, "positions"),
        window=None if mode is WindowMode.CAUSAL else int32s(array, "the window", None),
        runs=mode is WindowMode.RUNS,
        width=int(width),
        factor=float(np.float32(abs(float(scale)) * math.log2(math.e))),
        host_windows=None if seen is None else (positions, seen),
    )


def tiles_of(call: Call, tiles: Any, block_m: int) -> mx.array:
    """Tiles int32 [n, 2] of (first query, count); host ones are refused if they cut wrongly."""
    if host(tiles):
        return tensor(attention.host_tiles(tiles, call.host_windows, block_m))
    given = int32s(tiles, "tiles", 2)
    attention.check_tile_shape(tuple(given.shape))
    return given
