"""What every attention launcher does before a kernel runs: checks, and windows as runs.

Kernels know one kind of window, runs in position order: a causal one is the run (0, pos + 1), a
span the run (lo, hi - lo). All checks stand here, because kernels do not raise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minfer import window
from minfer.errors import Refusal
from minfer.format import BLOCK, KvFormat, Region
from minfer.kernels_numba._gather import Dims
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._rows import head_bytes
from minfer.window import PARTITION, Causal, Int32, Span, Window

Floats = NDArray[np.float32]
Int64 = NDArray[np.int64]


class Plan(NamedTuple):
    """Windows of all queries. A slot is one (query, partition), queries in order."""

    positions: Int64  # [n_q]
    runs: Int32  # [n_q, 1 or 4, 2] (cell, length)
    firsts: Int64  # [n_q] first logical index a query sees
    slots: Int64  # [n_q] first slot of a query
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
    plan: Plan
    scale: np.float32  # multiplied by log2(e): weights are powers of two
    regions: tuple[Region, Region]

    def empty_out(self) -> Floats:
        return np.empty(self.q.shape, np.float32)


def prepare(
    q: Floats,
    k: Region,
    v: Region,
    positions: Int32,
    windows: Window,
    *,
    fmt: KvFormat,
    scale: float,
    width: int,
    multiple: int = 1,
) -> Call:
    """Check one attention call and lay out its windows; `multiple` is what head_dim must divide."""
    n_q = _check_query(q, k)
    for region in (k, v):
        _check_region(region, fmt, k)
    head_dim, n_cells = k.head_dim, min(k.n_cells, v.n_cells)
    rule, unit = ("3.3", BLOCK) if fmt is KvFormat.Q8_0 else ("2.8", multiple)
    if head_dim % unit:
        raise Refusal(
            rule,
            f"head_dim {head_dim} is no multiple of {unit}, which this variant needs for {fmt}; "
            "the variant rows takes every head_dim in f32 and f16",
            {"head_dim": head_dim, "multiple": unit},
        )
    if width < 0 or not math.isfinite(scale):
        raise Refusal(
            "2.4",
            f"a sliding width of {width} or a scale of {scale} makes no window; "
            "width is 0 (unlimited) or positive, scale finite",
            {"width": width, "scale": scale},
        )
    positions = _integers(positions, "positions")
    if positions.shape != (n_q,):
        raise Refusal(
            "2.5", f"{n_q} queries need as many positions, not {positions.shape}", {"n_q": n_q}
        )
    window.check(windows, positions, n_cells)
    dims = Dims(q.shape[1], k.n_head_kv, head_dim, 4 * k.row_words, head_bytes(fmt, head_dim))
    return Call(
        fmt=fmt,
        dims=dims,
        q=_owned(q, np.float32),
        k=k.arrays[0].ctypes.data,
        v=v.arrays[0].ctypes.data,
        plan=_plan(positions, windows, width),
        scale=np.float32(scale * math.log2(math.e)),
        regions=(k, v),
    )


def wrap_window(array: Int32 | None, n_q: int) -> Window:
    """A window input as its mode's object, int32; its size tells the mode (contract 2.2)."""
    return window.wrap(None if array is None else _integers(array, "the window"), n_q)


def _integers(array: Any, name: str) -> Int32:
    array = np.asarray(array)
    if array.dtype.kind not in "iu":
        raise Refusal(
            "2.2", f"{name} must be int32, not {array.dtype}", {"dtype": str(array.dtype)}
        )
    owned: Int32 = _owned(array, np.int32)
    return owned


def _owned(array: Any, dtype: Any) -> Any:
    array = np.ascontiguousarray(array, dtype)
    return array if array.flags.writeable else array.copy()


def _check_query(q: Floats, k: Region) -> int:
    if q.ndim != 3 or q.dtype != np.float32 or q.shape[2] != k.head_dim:
        raise Refusal(
            "2.8",
            f"queries must be float32 [n_q, n_head, {k.head_dim}], not {q.dtype} {q.shape}",
            {"shape": q.shape, "dtype": str(q.dtype), "head_dim": k.head_dim},
        )
    if q.shape[1] < 1 or q.shape[1] % k.n_head_kv:
        raise Refusal(
            "2.8",
            f"{q.shape[1]} query heads are no multiple of {k.n_head_kv} KV heads",
            {"n_head": q.shape[1], "n_head_kv": k.n_head_kv},
        )
    return int(q.shape[0])


def _check_region(region: Region, fmt: KvFormat, other: Region) -> None:
    if region.fmt is not fmt or region.layout != "canonical":
        raise Refusal(
            "3.2",
            f"this call reads canonical {fmt} cells and the region holds {region.layout} "
            f"{region.fmt}",
            {"fmt": fmt.value, "region": region.fmt.value, "layout": region.layout},
        )
    cells = region.arrays[0]
    fits = cells.dtype == np.uint8 and cells.flags.c_contiguous and cells.ndim == 2
    if not fits or cells.shape[1] != 4 * region.row_words:
        raise Refusal(
            "3.5",
            f"a {fmt} region of {region.n_head_kv} heads of {region.head_dim} is contiguous uint8 "
            f"[n_cells, {4 * region.row_words}], not {cells.dtype} {cells.shape}",
            {"shape": cells.shape, "row_bytes": 4 * region.row_words},
        )
    if (region.n_head_kv, region.head_dim) != (other.n_head_kv, other.head_dim):
        raise Refusal(
            "2.8",
            f"K has {other.n_head_kv} heads of {other.head_dim}, V has {region.n_head_kv} "
            f"of {region.head_dim}",
            {"n_head_kv": region.n_head_kv, "head_dim": region.head_dim},
        )


@kernel
def _lay_out(positions, runs, width):
    """Firsts, slots and owners of a plan."""
    n_q = positions.shape[0]
    firsts, slots, total = np.empty(n_q, np.int64), np.empty(n_q, np.int64), 0
    for query in range(n_q):
        length = np.int64(0)
        for r in range(runs.shape[1]):
            length += runs[query, r, 1]
        end = np.int64(positions[query]) + 1
        firsts[query] = max(end - length, end - width) if width else end - length
        slots[query] = total
        total += (end - 1) // PARTITION - firsts[query] // PARTITION + 1
    owners, query = np.empty(total, np.int64), 0
    for slot in range(total):
        if query + 1 < n_q and slots[query + 1] == slot:
            query += 1
        owners[slot] = query
    return firsts, slots, owners


def _plan(positions: Int32, windows: Window, width: int) -> Plan:
    if isinstance(windows, Causal):
        runs = np.zeros((len(positions), 1, 2), np.int32)
        runs[:, 0, 1] = positions + 1
    elif isinstance(windows, Span):
        runs = windows.array[:, None].copy()
        runs[:, 0, 1] -= runs[:, 0, 0]
    else:
        runs = windows.array
    return Plan(positions.astype(np.int64), runs, *_lay_out(positions, runs, width))


@kernel
def bounds(plan, slot):
    """Query of a slot, and the keys [lo, hi) of its partition that the query sees."""
    query = plan.owners[slot]
    part = plan.firsts[query] // PARTITION + slot - plan.slots[query]
    lo = max(plan.firsts[query], part * PARTITION)
    return query, lo, min(plan.positions[query] + 1, (part + 1) * PARTITION)


def check_tiles(tiles: Int32, plan: Plan) -> Int64:
    """Tiles with queries, int64 [n, 2], those with most keys first (contract 2.7).

    They must cover the queries in order, and the queries of a tile must be consecutive positions
    of one sequence, so that no window starts before that of the tile's first query.
    """
    used = _integers(tiles, "tiles").reshape(-1, 2).astype(np.int64)
    used = used[used[:, 1] > 0]
    n_q = len(plan.positions)
    ends = np.cumsum(used[:, 1])
    if not len(used) or ends[-1] != n_q or (used[:, 0] != ends - used[:, 1]).any():
        raise Refusal(
            "2.7", f"tiles {used.tolist()} do not cover {n_q} queries in order", {"n_q": n_q}
        )
    inside = np.ones(n_q, bool)
    inside[used[:, 0]] = False
    steps = np.diff(plan.positions, prepend=0), np.diff(plan.firsts, prepend=0)
    bad = inside & ((steps[0] != 1) | (steps[1] < 0))
    if bad.any():
        query = int(np.argmax(bad))
        raise Refusal(
            "2.7",
            f"query {query} at position {plan.positions[query]} does not continue its tile's "
            "sequence; cut the tile there",
            {"query": query},
        )
    lasts = used[:, 0] + used[:, 1] - 1
    keys = plan.positions[lasts] + 1 - plan.firsts[used[:, 0]]
    return used[np.argsort(-keys * used[:, 1], kind="stable")]
