"""What every attention launcher does before a kernel runs: checks, and windows as runs.

Kernels know one kind of window, runs in position order: a causal one is the run (0, pos + 1), a
span the run (lo, hi - lo). All checks stand here, because kernels do not raise.

All layers of a step read the same windows. So a layout is a function of the *bytes* of its inputs
and the last few are kept: an array that was changed has other bytes and gets its own layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minfer import window
from minfer.format import Floats, Int32, KvFormat, Region
from minfer.kernels_numba._arguments import check_region, floats, int32s
from minfer.kernels_numba._cell import head_bytes
from minfer.kernels_numba._gather import Dims
from minfer.kernels_numba._ir import address
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._workers import ALONE_PRODUCTS, n_workers
from minfer.ops import attention, cell_arguments
from minfer.window import PARTITION, Causal, Span

Int64 = NDArray[np.int64]

LAYOUTS = 8  # kept: a step has one for every sliding width of its model


class Slots(NamedTuple):
    """Windows of all queries, cut into slots: one a (query, partition), queries in order."""

    positions: Int64  # [n_q]
    runs: Int32  # [n_q, 1 or 4, 2] (cell, length)
    firsts: Int64  # [n_q] first logical index a query sees
    starts: Int64  # [n_q + 1] first slot of a query, then the number of slots


@dataclass(frozen=True, eq=False)
class Layout:
    """Checked windows; its arrays are read-only. n_keys: keys that all queries see together."""

    slots: Slots
    n_keys: int


class Call(NamedTuple):
    """A checked call.

    q is contiguous and writable, the layout's arrays are read-only: their Numba types are known.
    k, v: addresses of cell 0; `regions` keeps what lies there alive.
    """

    fmt: KvFormat
    dims: Dims
    q: Floats  # times -1 if the scale is negative
    k: int
    v: int
    layout: Layout
    factor: np.float32  # |scale| * log2(e), what weights multiply differences of scores by
    regions: tuple[Region, Region]

    @property
    def n_slots(self) -> int:
        return int(self.layout.slots.starts[-1])

    def empty_out(self) -> Floats:
        return np.empty(self.q.shape, np.float32)

    def workers(self, threads: object) -> int:
        """`threads`, or 1 where there is too little to do for more."""
        given, dims = n_workers(threads), self.dims
        return 1 if self.layout.n_keys * dims.n_head * dims.head_dim <= ALONE_PRODUCTS else given


@kernel
def where(array):
    """Address of the first element; a fifth of the time that `array.ctypes.data` takes."""
    return address(array)


def prepare(
    op: str,
    q: Floats,
    k: Region,
    v: Region,
    positions: Int32,
    array: Int32 | None,
    *,
    fmt: KvFormat,
    scale: float,
    width: int,
    multiple: int = 1,
) -> Call:
    """Check one attention call and lay out its windows.

    array: the window input, whose size tells its mode (contract 2.2), which must be one that `op`
    reads. multiple: what head_dim must divide.
    """
    for region in (k, v):
        check_region(region, fmt)
    cell_arguments.check_pair(k, v)
    q = floats(q, "q", 3)
    attention.check_query(q.shape, k)
    n_q, head_dim = len(q), k.head_dim
    attention.check_head_dim(head_dim, fmt, multiple)
    attention.check_scalars(scale, width)
    positions = int32s(positions, "positions")
    attention.check_count(len(positions), n_q)
    table = None if array is None else int32s(array, "the window", None).tobytes()
    n_cells = min(k.n_cells, v.n_cells)
    return Call(
        fmt=fmt,
        dims=Dims(q.shape[1], k.n_head_kv, head_dim, k.row_bytes, head_bytes(fmt, head_dim)),
        q=-q if scale < 0 else q,
        k=where(k.arrays[0]),
        v=where(v.arrays[0]),
        layout=_lay_out(op, positions.tobytes(), table, n_cells, int(width)),
        factor=np.float32(abs(float(scale)) * math.log2(math.e)),
        regions=(k, v),
    )


@lru_cache(maxsize=LAYOUTS)
def _lay_out(op: str, at: bytes, table: bytes | None, n_cells: int, width: int) -> Layout:
    """The windows of queries at positions `at`, checked. at, table: int32, as bytes."""
    positions = np.frombuffer(at, np.int32)
    array = None if table is None else np.frombuffer(table, np.int32)
    windows = attention.wrap(op, array, len(positions))
    window.check(windows, positions, n_cells)
    if isinstance(windows, Causal):
        runs = np.zeros((len(positions), 1, 2), np.int32)
        runs[:, 0, 1] = positions + 1
    elif isinstance(windows, Span):
        runs = windows.array[:, None].copy()
        runs[:, 0, 1] -= runs[:, 0, 0]
    else:
        runs = windows.array.copy()
    wide = positions.astype(np.int64)
    firsts, starts = np.empty(len(wide), np.int64), np.empty(len(wide) + 1, np.int64)
    n_keys = _cut(wide, runs, width, firsts, starts)
    return Layout(Slots(frozen(wide), frozen(runs), frozen(firsts), frozen(starts)), n_keys)


def frozen(array: Any) -> Any:
    """The array, which nobody can write to any more."""
    array.flags.writeable = False
    return array


@kernel
def _cut(positions, runs, width, firsts, starts):
    """Fill `firsts` and `starts` of `Slots`; returns the keys that all queries see together."""
    n_keys = np.int64(0)
    starts[0] = 0
    for query in range(positions.shape[0]):
        length = np.int64(0)
        for r in range(runs.shape[1]):
            length += runs[query, r, 1]
        end = positions[query] + 1
        firsts[query] = max(end - length, end - width) if width else end - length
        parts = (end - 1) // PARTITION - firsts[query] // PARTITION + 1
        starts[query + 1] = starts[query] + parts
        n_keys += end - firsts[query]
    return n_keys


@kernel
def n_slots(slots):
    """How many slots there are."""
    return slots.starts[slots.positions.shape[0]]


@kernel
def bounds(slots, slot):
    """Query of a slot, and the keys [lo, hi) of its partition that the query sees."""
    query, after = 0, slots.positions.shape[0]
    while after - query > 1:  # starts[query] <= slot < starts[after]
        middle = (query + after) // 2
        if slots.starts[middle] <= slot:
            query = middle
        else:
            after = middle
    part = slots.firsts[query] // PARTITION + slot - slots.starts[query]
    lo = max(slots.firsts[query], part * PARTITION)
    return query, lo, min(slots.positions[query] + 1, (part + 1) * PARTITION)


def ordered_tiles(tiles: Int32, layout: Layout) -> Int64:
    """Tiles with queries, int64 [n, 2], those with most keys first (contract 2.7).

    See `attention.used_tiles` for what they must be.
    """
    table = int32s(tiles, "tiles", 2)
    attention.check_tile_shape(table.shape)
    return _order(table.tobytes(), layout)


@lru_cache(maxsize=LAYOUTS)
def _order(tiles: bytes, layout: Layout) -> Int64:
    """`ordered_tiles` of int32 [n, 2], as bytes."""
    slots, table = layout.slots, np.frombuffer(tiles, np.int32).reshape(-1, 2).astype(np.int64)
    used = attention.used_tiles(table, slots.positions, slots.firsts)
    lasts = used[:, 0] + used[:, 1] - 1
    keys = slots.positions[lasts] + 1 - slots.firsts[used[:, 0]]
    ordered: Int64 = frozen(used[np.argsort(-keys * used[:, 1], kind="stable")])
    return ordered
