"""One attention call over arrays of an accelerator: what its launchers check, and what they keep.

Windows given as host arrays are checked in full; arrays that lie where kernels run were checked by
whoever filled them (contract 7.5): to look at them would stop the device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import numpy as np

from minfer import window
from minfer.format import KvFormat, Region
from minfer.ops import attention, cell_arguments
from minfer.ops.arguments import host_int32s
from minfer.ops.arrays import Arguments
from minfer.ops.declaration import Limits
from minfer.window import WindowMode


class AttentionCall(NamedTuple):
    """A checked call; arrays lie where kernels run. A package adds what its kernels are given."""

    fmt: KvFormat
    q: Any  # float32 [n_q, n_head, d], times -1 if the scale is negative
    k: Region
    v: Region
    positions: Any  # int32 [n_q]
    window: Any  # int32 [n_q, 2] or [n_q, 4, 2]; None if causal
    mode: WindowMode
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
    def window_or_positions(self) -> Any:
        """An array for kernels, which causal ones do not read."""
        return self.positions if self.window is None else self.window


Call = TypeVar("Call", bound=AttentionCall)


def checked(
    make: type[Call],
    own: Arguments,
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
    """Check one attention call, and `make` it.

    array: the window input, whose size tells its mode (contract 2.2), which must be one that `op`
    reads. limits: those of the variant; only the head_dim is looked at.
    """
    for region in (k, v):
        own.check_region(region, fmt)
    cell_arguments.check_pair(k, v)
    q = own.floats(q, "q", 3)
    attention.check_query(tuple(q.shape), k)
    limits = limits or Limits()
    attention.check_head_dim(k.head_dim, fmt, limits.head_dim_multiple, limits.max_head_dim)
    attention.check_scalars(scale, width)
    n_q, seen = len(q), None
    if own.host(positions):
        positions = host_int32s(positions, "positions")
    if array is not None and own.host(array):
        array = host_int32s(array, "the window", None)
    attention.check_count(len(positions), n_q)
    if own.host(positions) and (array is None or own.host(array)):
        seen = attention.firsts(op, positions, array, min(k.n_cells, v.n_cells), int(width))
    mode = window.mode_of(0 if array is None else math.prod(array.shape), n_q)
    attention.check_mode(op, mode, n_q)
    return make(
        fmt=fmt,
        q=-q if scale < 0 else q,
        k=k,
        v=v,
        positions=own.int32s(positions, "positions"),
        window=None if mode is WindowMode.CAUSAL else own.int32s(array, "the window", None),
        mode=mode,
        width=int(width),
        factor=float(np.float32(abs(float(scale)) * math.log2(math.e))),
        host_windows=None if seen is None else (positions, seen),
    )


def tiles_of(own: Arguments, call: AttentionCall, tiles: Any, block_m: int) -> Any:
    """Tiles int32 [n, 2] of (first query, count); host ones are refused if they cut wrongly."""
    if own.host(tiles):
        return own.int32s(attention.host_tiles(tiles, call.host_windows, block_m), "tiles", 2)
    given = own.int32s(tiles, "tiles", 2)
    attention.check_tile_shape(tuple(given.shape))
    return given
