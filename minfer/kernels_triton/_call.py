"""What every attention launcher does before a kernel runs: checks, and tensors where kernels run.

Windows given as host arrays are checked in full; tensors that lie where kernels run were checked by
whoever filled them (contract 7.5). A window keeps its mode down to the kernel's addresses.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from minfer import window
from minfer.format import KvFormat, Region
from minfer.kernels_triton._arguments import (
    check_region,
    floats,
    host,
    int32s,
    planes,
    tensor,
)
from minfer.kernels_triton._gather import CAUSAL, RUNS, SPAN
from minfer.ops import attention, cell_arguments
from minfer.ops.arguments import host_int32s
from minfer.window import WindowMode

MODES = {
    WindowMode.CAUSAL: CAUSAL.value,
    WindowMode.SPAN: SPAN.value,
    WindowMode.RUNS: RUNS.value,
}


class Call(NamedTuple):
    """A checked call; tensors lie where kernels run."""

    fmt: KvFormat
    q: torch.Tensor  # float32 [n_q, n_head, d], times -1 if the scale is negative
    k: Region
    v: Region
    positions: torch.Tensor  # int32 [n_q]
    window: torch.Tensor | None  # int32 [n_q, 2] or [n_q, 4, 2]
    mode: int
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
    def window_or_positions(self) -> torch.Tensor:
        """A pointer for kernels, which causal ones do not read."""
        return self.positions if self.window is None else self.window

    @property
    def strides(self) -> tuple[int, int]:
        """Elements from one cell's row, and its scales, to the next cell's."""
        rows, scales = planes(self.k)
        return rows.stride(0), scales.stride(0)

    def empty_out(self) -> torch.Tensor:
        return torch.empty_like(self.q)


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
    multiple: int = 1,
) -> Call:
    """Check one attention call.

    array: the window input, whose size tells its mode (contract 2.2), which must be one that `op`
    reads. multiple: what must divide head_dim.
    """
    for region in (k, v):
        check_region(region, fmt)
    cell_arguments.check_pair(k, v)
    q = floats(q, "q", 3)
    attention.check_query(tuple(q.shape), k)
    attention.check_head_dim(k.head_dim, fmt, multiple)
    attention.check_scalars(scale, width)
    n_q, seen = len(q), None
    if host(positions):
        positions = host_int32s(positions, "positions")
    if array is not None and host(array):
        array = host_int32s(array, "the window", None)
    attention.check_count(len(positions), n_q)
    if host(positions) and (array is None or host(array)):
        seen = attention.firsts(op, positions, array, min(k.n_cells, v.n_cells), int(width))
    size = 0 if array is None else int(np.prod(array.shape))
    mode = window.mode_of(size, n_q)
    attention.check_mode(op, mode, n_q)
    return Call(
        fmt=fmt,
        q=-q if scale < 0 else q,
        k=k,
        v=v,
        positions=int32s(positions, "positions"),
        window=None if mode is WindowMode.CAUSAL else int32s(array, "the window", None),
        mode=MODES[mode],
        width=int(width),
        factor=float(np.float32(abs(float(scale)) * math.log2(math.e))),
        host_windows=None if seen is None else (positions, seen),
    )


def tiles_of(call: Call, tiles: Any, block_m: int) -> torch.Tensor:
    """Tiles int32 [n, 2] of (first query, count); host ones are refused if they cut wrongly."""
    if not host(tiles):
        given = int32s(tiles, "tiles", 2)
        attention.check_tile_shape(tuple(given.shape))
        return given
    return tensor(attention.host_tiles(tiles, call.host_windows, block_m), "tiles")
