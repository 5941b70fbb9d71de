"""Windows: which cells each query attends to, and how queries are cut into tiles (contract 2).

Positions and windows are data. A window comes in one of three modes, told apart by the size of
its input. The *logical index* of a key is its position; partitions of `PARTITION` keys and the
binary tree that joins them are aligned to it, so bits do not depend on where rows lie.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from minfer.errors import Refusal
from minfer.format import Int32

KV_MAP_MAX_SPANS = 4
PARTITION = 256
LAST_POSITION = 2**31 - 2


class CellSpan(NamedTuple):
    """`length` consecutive positions from `position` on, held in cells from `cell` on."""

    position: int
    cell: int
    length: int


class WindowMode(enum.Enum):
    """How a window is written down."""

    CAUSAL = "causal"
    SPAN = "span"
    RUNS = "runs"

    @property
    def op(self) -> str:
        """The attention op that reads this mode."""
        return "attn_map" if self is WindowMode.RUNS else "attn_window"


@dataclass(frozen=True, eq=False)
class Causal:
    """Cells [0, position] for every query: no input at all."""

    mode = WindowMode.CAUSAL
    array: None = None


@dataclass(frozen=True, eq=False)
class Span:
    """One [lo, hi) cell range a query: int32 [n_q, 2]."""

    array: Int32
    mode = WindowMode.SPAN


@dataclass(frozen=True, eq=False)
class Runs:
    """Up to four (cell, length) runs a query in position order: int32 [n_q, 4, 2]."""

    array: Int32
    mode = WindowMode.RUNS


Window: TypeAlias = Causal | Span | Runs


def mode_of(size: int, n_q: int) -> WindowMode:
    """The mode of a window input of `size` numbers for `n_q` queries (contract 2.2)."""
    span, runs = 2 * n_q, n_q * KV_MAP_MAX_SPANS * 2
    if size == 0:
        return WindowMode.CAUSAL
    if size == span:
        return WindowMode.SPAN
    if size == runs:
        return WindowMode.RUNS
    raise Refusal(
        "2.2",
        f"a window input of {size} numbers fits no mode for {n_q} queries: "
        f"a span has {span}, runs have {runs}, a causal window has none",
        {"size": size, "n_q": n_q, "span": span, "runs": runs},
    )


def wrap(array: Int32 | None, n_q: int) -> Window:
    """The window object of a raw input array (None: causal) for `n_q` queries."""
    mode = mode_of(0 if array is None else int(array.size), n_q)
    if array is None or mode is WindowMode.CAUSAL:
        return Causal()
    if mode is WindowMode.SPAN:
        return Span(array.reshape(n_q, 2))
    return Runs(array.reshape(n_q, KV_MAP_MAX_SPANS, 2))


def runs(spans: Sequence[CellSpan], pos: int, width: int = 0) -> list[tuple[int, int]]:
    """(cell, length) of every part of `spans` that position `pos` sees, in position order.

    width: sliding width of the layer, 0 for none. A fifth non-empty run is refused, never
    truncated (contract 2.4); so is a position that no span holds (2.5).
    """
    first = max(0, pos - width + 1) if width else 0
    seen: list[tuple[int, int]] = []
    end = 0
    for span in spans:
        end = max(end, span.position + span.length)
        lo, hi = max(span.position, first), min(span.position + span.length, pos + 1)
        if lo < hi:
            seen.append((span.cell + lo - span.position, hi - lo))
    if not 0 <= pos < end:
        raise Refusal(
            "2.5",
            f"position {pos} lies outside the rows of its sequence, [0, {end})",
            {"position": pos, "readable": end},
        )
    if len(seen) > KV_MAP_MAX_SPANS:
        raise Refusal(
            "2.4",
            f"position {pos} sees {len(seen)} runs of cells and a window holds "
            f"{KV_MAP_MAX_SPANS}; compact the store first",
            {"position": pos, "runs": len(seen), "max": KV_MAP_MAX_SPANS},
        )
    return seen


def span(spans: Sequence[CellSpan], pos: int, width: int = 0) -> tuple[int, int]:
    """The one [lo, hi) of position `pos`; a sequence of several spans is refused (contract 2.3)."""
    if len(spans) > 1:
        raise Refusal(
            "2.3",
            f"a sequence of {len(spans)} spans has no single [lo, hi); read it through runs",
            {"position": pos, "spans": len(spans)},
        )
    ((cell, length),) = runs(spans, pos, width)
    return cell, cell + length


Groups: TypeAlias = Sequence[tuple[Sequence[CellSpan], Sequence[int]]]


def span_array(groups: Groups, width: int = 0) -> Int32:
    """int32 [n_q, 2] for groups of (spans of a sequence, positions); width clips it, 0 does not."""
    rows = [span(spans, pos, width) for spans, positions in groups for pos in positions]
    return np.array(rows, dtype=np.int32).reshape(-1, 2)


def runs_array(groups: Groups, width: int = 0) -> Int32:
    """int32 [n_q, 4, 2], zero padded, for groups as `span_array` takes them."""
    n_q = sum(len(positions) for _, positions in groups)
    table = np.zeros((n_q, KV_MAP_MAX_SPANS, 2), dtype=np.int32)
    query = 0
    for spans, positions in groups:
        for pos in positions:
            seen = runs(spans, pos, width)
            table[query, : len(seen)] = seen
            query += 1
    return table


def n_tiles_max(n_tokens: int, n_groups: int, block_m: int, *, decode: bool) -> int:
    """Static number of tile rows, so that a captured grid never changes (contract 2.7)."""
    return n_tokens if decode else -(-n_tokens // block_m) + n_groups


def tiles(groups: Sequence[int], block_m: int, *, decode: bool = False) -> Int32:
    """Cut consecutive queries into tiles of at most `block_m`, never across groups.

    groups: number of queries of each group, in order. Returns int32 [n_tiles_max, 2] of
    (first query, count), zero padded.
    """
    if block_m < 1 or any(n < 1 for n in groups):
        raise Refusal(
            "2.7",
            f"tiles need block_m and every group to hold a query; got block_m {block_m} "
            f"and groups {list(groups)}",
            {"block_m": block_m, "groups": list(groups)},
        )
    total = sum(groups)
    table = np.zeros((n_tiles_max(total, len(groups), block_m, decode=decode), 2), dtype=np.int32)
    row = query = 0
    for n in groups:
        for first in range(0, n, block_m):
            table[row] = query + first, min(block_m, n - first)
            row += 1
        query += n
    return table


def check(window: Window, positions: Int32, n_cells: int) -> None:
    """Refuse a window that reads outside the arena or is empty (contract 2.5)."""
    if len(positions) and int(positions.min()) < 0:
        query = int(np.argmin(positions))
        raise Refusal(
            "2.5",
            f"query {query} is at position {int(positions[query])}; positions start at 0, and a "
            "window holds at least one cell",
            {"query": query, "position": int(positions[query])},
        )
    if len(positions) and int(positions.max()) > LAST_POSITION:
        query = int(np.argmax(positions))
        raise Refusal(
            "2.5",
            f"query {query} is at position {int(positions[query])}; the last one is "
            f"{LAST_POSITION}, whose successor is still an int32",
            {"query": query, "position": int(positions[query])},
        )
    if isinstance(window, Causal):
        if len(positions) and int(positions.max()) >= n_cells:
            raise Refusal(
                "2.5",
                f"position {int(positions.max())} lies past the last cell, {n_cells - 1}",
                {"position": int(positions.max()), "n_cells": n_cells},
            )
        return
    if len(window.array) != len(positions):
        raise Refusal(
            "2.5",
            f"a window of {len(window.array)} rows for {len(positions)} queries; give one a query",
            {"rows": len(window.array), "n_q": len(positions)},
        )
    bad = _bad_windows(window, positions, n_cells)
    if bad.any():
        query = int(np.argmax(bad))
        shown = window.array[query].tolist()
        raise Refusal(
            "2.5",
            f"the window of query {query}, {shown}, is empty, longer than its position "
            f"allows or outside cells [0, {n_cells})",
            {"query": query, "window": shown, "n_cells": n_cells},
        )


def _bad_windows(window: Span | Runs, positions: Int32, n_cells: int) -> NDArray[np.bool_]:
    """Which queries read outside the arena, read nothing, or see past their position."""
    array = window.array.astype(np.int64)
    if isinstance(window, Span):
        first, end = array[:, :1], array[:, 1:]
    else:
        first, end = array[..., 0], array[..., 0] + array[..., 1]
    outside = ((first < 0) | (end < first) | (end > n_cells)).any(axis=1)
    seen = (end - first).sum(axis=1)
    return np.asarray(outside | (seen < 1) | (seen > positions.astype(np.int64) + 1))
