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
from minfer.errors import Refusal
from minfer.format import BLOCK, Floats, Int32, KvFormat, Region
from minfer.kernels_numba._arguments import check_pair, check_region, floats, int32s
from minfer.kernels_numba._cell import head_bytes
from minfer.kernels_numba._gather import Dims
from minfer.kernels_numba._ir import address
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._workers import ALONE_PRODUCTS, n_workers
from minfer.window import PARTITION, Causal, Span, Window

Int64 = NDArray[np.int64]

SCALE_END = 2.0**127  # times log2(e) it is still a float32
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
    check_pair(k, v)
    q = _checked_query(q, k)
    n_q, head_dim = len(q), k.head_dim
    rule, unit = ("3.3", BLOCK) if fmt is KvFormat.Q8_0 else ("10", multiple)
    if head_dim % unit:
        raise Refusal(
            rule,
            f"head_dim {head_dim} is no multiple of {unit}, which this variant needs for {fmt}; "
            "the variant rows takes every head_dim in f32 and f16",
            {"head_dim": head_dim, "multiple": unit},
        )
    _check_scalars(scale, width)
    positions = int32s(positions, "positions")
    if len(positions) != n_q:
        raise Refusal(
            "2.5",
            f"{n_q} queries need as many positions, not {len(positions)}",
            {"n_q": n_q, "positions": len(positions)},
        )
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


def _wrap(op: str, table: bytes | None, n_q: int) -> Window:
    """The window input as its mode's object, refused where another op reads that mode."""
    windows = window.wrap(None if table is None else np.frombuffer(table, np.int32), n_q)
    if n_q and windows.mode.op != op:
        raise Refusal(
            "2.2",
            f"a window input for {n_q} queries is {windows.mode.value}, which {op} does not read; "
            f"{windows.mode.op} does",
            {"op": op, "mode": windows.mode.value, "n_q": n_q},
        )
    return windows


def _check_scalars(scale: float, width: int) -> None:
    real = isinstance(scale, (int, float, np.floating)) and not isinstance(scale, bool)
    if not real or not abs(scale) < SCALE_END:
        raise Refusal(
            "10", f"scale {scale!r} is no finite float32; it multiplies scores", {"scale": scale}
        )
    whole = isinstance(width, (int, np.integer)) and not isinstance(width, bool)
    if not whole or width < 0:
        raise Refusal(
            "2.4",
            f"width {width!r} is no sliding width; give 0 (unlimited) or a positive whole number",
            {"width": width},
        )


def _checked_query(q: Floats, k: Region) -> Floats:
    q = floats(q, "q", 3)
    if q.shape[2] != k.head_dim:
        raise Refusal(
            "10",
            f"q must be [n_q, n_head, {k.head_dim}], not {list(q.shape)}",
            {"shape": q.shape, "head_dim": k.head_dim},
        )
    if q.shape[1] < 1 or q.shape[1] % k.n_head_kv:
        raise Refusal(
            "2.8",
            f"{q.shape[1]} query heads are no multiple of {k.n_head_kv} KV heads",
            {"n_head": q.shape[1], "n_head_kv": k.n_head_kv},
        )
    return q


@lru_cache(maxsize=LAYOUTS)
def _lay_out(op: str, at: bytes, table: bytes | None, n_cells: int, width: int) -> Layout:
    """The windows of queries at positions `at`, checked. at, table: int32, as bytes."""
    positions = np.frombuffer(at, np.int32)
    windows = _wrap(op, table, len(positions))
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

    They must cover the queries in order, and the queries of a tile must be consecutive positions
    of one sequence, so that no window starts before that of the tile's first query.
    """
    table = int32s(tiles, "tiles", 2)
    if table.shape[1] != 2:
        raise Refusal(
            "2.7", f"tiles must be [n_tiles, 2], not {list(table.shape)}", {"shape": table.shape}
        )
    return _order(table.tobytes(), layout)


@lru_cache(maxsize=LAYOUTS)
def _order(tiles: bytes, layout: Layout) -> Int64:
    """`ordered_tiles` of int32 [n, 2], as bytes."""
    slots, table = layout.slots, np.frombuffer(tiles, np.int32).reshape(-1, 2).astype(np.int64)
    used = table[table[:, 1] > 0]
    n_q = len(slots.positions)
    ends = np.cumsum(used[:, 1])
    if not len(used) or ends[-1] != n_q or (used[:, 0] != ends - used[:, 1]).any():
        raise Refusal(
            "2.7", f"tiles {used.tolist()} do not cover {n_q} queries in order", {"n_q": n_q}
        )
    inside = np.ones(n_q, bool)
    inside[used[:, 0]] = False
    steps = np.diff(slots.positions, prepend=0), np.diff(slots.firsts, prepend=0)
    bad = inside & ((steps[0] != 1) | (steps[1] < 0))
    if bad.any():
        query = int(np.argmax(bad))
        raise Refusal(
            "2.7",
            f"query {query} at position {slots.positions[query]} does not continue its tile's "
            "sequence; cut the tile there",
            {"query": query},
        )
    lasts = used[:, 0] + used[:, 1] - 1
    keys = slots.positions[lasts] + 1 - slots.firsts[used[:, 0]]
    ordered: Int64 = frozen(used[np.argsort(-keys * used[:, 1], kind="stable")])
    return ordered
