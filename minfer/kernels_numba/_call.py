"""What every attention launcher does before a kernel runs: checks, and windows as runs.

Kernels know one kind of window, runs in position order: a causal one is the run (0, pos + 1), a
span the run (lo, hi - lo). All checks stand here, because kernels do not raise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minfer import window
from minfer.errors import Refusal
from minfer.format import BLOCK, Floats, Int32, KvFormat, Region
from minfer.kernels_numba._arguments import check_pair, check_region, floats, int32s
from minfer.kernels_numba._cell import head_bytes
from minfer.kernels_numba._gather import Dims
from minfer.kernels_numba._jit import kernel
from minfer.window import PARTITION, Causal, Span, Window

Int64 = NDArray[np.int64]

SCALE_END = 2.0**127  # times log2(e) it is still a float32


class Slots(NamedTuple):
    """Windows of all queries, cut into slots: one a (query, partition), queries in order."""

    positions: Int64  # [n_q]
    runs: Int32  # [n_q, 1 or 4, 2] (cell, length)
    firsts: Int64  # [n_q] first logical index a query sees
    starts: Int64  # [n_q] first slot of a query
    owners: Int64  # [n_slots] query of a slot


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call: arrays are contiguous and writable, so that their Numba types are known.

    k, v: addresses of cell 0; `regions` keeps what lies there alive.
    """

    fmt: KvFormat
    dims: Dims
    q: Floats
    k: int
    v: int
    slots: Slots
    scale: np.float32  # multiplied by log2(e): weights are powers of two
    regions: tuple[Region, Region]

    def empty_out(self) -> Floats:
        return np.empty(self.q.shape, np.float32)


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
    windows = _wrap(op, array, n_q)
    window.check(windows, positions, min(k.n_cells, v.n_cells))
    return Call(
        fmt=fmt,
        dims=Dims(q.shape[1], k.n_head_kv, head_dim, k.row_bytes, head_bytes(fmt, head_dim)),
        q=q,
        k=k.arrays[0].ctypes.data,
        v=v.arrays[0].ctypes.data,
        slots=_slots(positions, windows, width),
        scale=np.float32(scale * math.log2(math.e)),
        regions=(k, v),
    )


def _wrap(op: str, array: Int32 | None, n_q: int) -> Window:
    """The window input as its mode's object, refused where another op reads that mode."""
    windows = window.wrap(None if array is None else int32s(array, "the window", None), n_q)
    if n_q and windows.mode.op != op:
        raise Refusal(
            "2.2",
            f"a window input for {n_q} queries is {windows.mode.value}, which {op} does not read; "
            f"{windows.mode.op} does",
            {"op": op, "mode": windows.mode.value, "n_q": n_q},
        )
    return windows


def _check_scalars(scale: float, width: int) -> None:
    if not isinstance(scale, (int, float, np.floating)) or not abs(scale) < SCALE_END:
        raise Refusal(
            "10", f"scale {scale!r} is no finite float32; it multiplies scores", {"scale": scale}
        )
    if not isinstance(width, (int, np.integer)) or width < 0:
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


@kernel
def _lay_out(positions, runs, width):
    """`firsts`, `starts` and `owners` of `Slots`."""
    n_q = positions.shape[0]
    firsts, starts, total = np.empty(n_q, np.int64), np.empty(n_q, np.int64), 0
    for query in range(n_q):
        length = np.int64(0)
        for r in range(runs.shape[1]):
            length += runs[query, r, 1]
        end = np.int64(positions[query]) + 1
        firsts[query] = max(end - length, end - width) if width else end - length
        starts[query] = total
        total += (end - 1) // PARTITION - firsts[query] // PARTITION + 1
    owners, query = np.empty(total, np.int64), 0
    for slot in range(total):
        if query + 1 < n_q and starts[query + 1] == slot:
            query += 1
        owners[slot] = query
    return firsts, starts, owners


def _slots(positions: Int32, windows: Window, width: int) -> Slots:
    if isinstance(windows, Causal):
        runs = np.zeros((len(positions), 1, 2), np.int32)
        runs[:, 0, 1] = positions + 1
    elif isinstance(windows, Span):
        runs = windows.array[:, None].copy()
        runs[:, 0, 1] -= runs[:, 0, 0]
    else:
        runs = windows.array
    return Slots(positions.astype(np.int64), runs, *_lay_out(positions, runs, width))


@kernel
def bounds(slots, slot):
    """Query of a slot, and the keys [lo, hi) of its partition that the query sees."""
    query = slots.owners[slot]
    part = slots.firsts[query] // PARTITION + slot - slots.starts[query]
    lo = max(slots.firsts[query], part * PARTITION)
    return query, lo, min(slots.positions[query] + 1, (part + 1) * PARTITION)


def check_tiles(tiles: Int32, slots: Slots) -> Int64:
    """Tiles with queries, int64 [n, 2], those with most keys first (contract 2.7).

    They must cover the queries in order, and the queries of a tile must be consecutive positions
    of one sequence, so that no window starts before that of the tile's first query.
    """
    table = int32s(tiles, "tiles", 2).astype(np.int64)
    if table.shape[1] != 2:
        raise Refusal(
            "2.7", f"tiles must be [n_tiles, 2], not {list(table.shape)}", {"shape": table.shape}
        )
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
    return used[np.argsort(-keys * used[:, 1], kind="stable")]
