"""What the attention launchers of every kernel package check on the host (contract 2, 10)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from minfer import window
from minfer.errors import Refusal
from minfer.format import BLOCK, Int32, KvFormat, Region
from minfer.ops.arguments import host_int32s
from minfer.window import PARTITION, Causal, Span, Window

INT32_MAX = 2**31 - 1
SCALE_END = 2.0**127  # times log2(e) it is still a float32


def check_query(shape: tuple[int, ...], k: Region) -> None:
    """Refuse queries of `shape` whose heads do not fit the region's."""
    if shape[2] != k.head_dim:
        raise Refusal(
            "10",
            f"q must be [n_q, n_head, {k.head_dim}], not {list(shape)}",
            {"shape": tuple(shape), "head_dim": k.head_dim},
        )
    if shape[1] < 1 or shape[1] % k.n_head_kv:
        raise Refusal(
            "2.8",
            f"{shape[1]} query heads are no multiple of {k.n_head_kv} KV heads",
            {"n_head": shape[1], "n_head_kv": k.n_head_kv},
        )


def check_head_dim(head_dim: int, fmt: KvFormat, multiple: int, largest: int = 0) -> None:
    """Refuse a head_dim that is no multiple of `multiple`, or of a block, or over `largest`.

    largest: 0 takes every length.
    """
    if 0 < largest < head_dim:
        raise Refusal(
            "10",
            f"head_dim {head_dim} is over {largest}, the most that this variant takes; the variant "
            "rows takes every head_dim",
            {"head_dim": head_dim, "largest": largest},
        )
    rule, unit = ("3.3", BLOCK) if fmt is KvFormat.Q8_0 else ("10", multiple)
    if head_dim % unit:
        raise Refusal(
            rule,
            f"head_dim {head_dim} is no multiple of {unit}, which this variant needs for {fmt}; "
            "the variant rows takes every head_dim in f32 and f16",
            {"head_dim": head_dim, "multiple": unit},
        )


def check_scalars(scale: object, width: object) -> None:
    """Refuse a scale that is no finite float32 and a width that is no whole number."""
    real = isinstance(scale, (int, float, np.floating)) and not isinstance(scale, bool)
    if not real or not abs(scale) < SCALE_END:  # type: ignore[arg-type]
        raise Refusal(
            "10", f"scale {scale!r} is no finite float32; it multiplies scores", {"scale": scale}
        )
    whole = isinstance(width, (int, np.integer)) and not isinstance(width, bool)
    if not whole or not 0 <= width <= INT32_MAX:  # type: ignore[operator]
        raise Refusal(
            "2.4",
            f"width {width!r} is no sliding width; give 0 (unlimited) or a positive int32",
            {"width": width},
        )


def check_count(n_positions: int, n_q: int) -> None:
    """Refuse another number of positions than queries."""
    if n_positions != n_q:
        raise Refusal(
            "2.5",
            f"{n_q} queries need as many positions, not {n_positions}",
            {"n_q": n_q, "positions": n_positions},
        )


def wrap(op: str, array: Int32 | None, n_q: int) -> Window:
    """The window input as its mode's object, refused where another op reads that mode."""
    windows = window.wrap(array, n_q)
    check_mode(op, windows.mode, n_q)
    return windows


def check_mode(op: str, mode: window.WindowMode, n_q: int) -> None:
    """Refuse a mode that `op` does not read."""
    if n_q and mode.op != op:
        raise Refusal(
            "2.2",
            f"a window input for {n_q} queries is {mode.value}, which {op} does not read; "
            f"{mode.op} does",
            {"op": op, "mode": mode.value, "n_q": n_q},
        )


def firsts(
    op: str, positions: Int32, array: Int32 | None, n_cells: int, width: int
) -> NDArray[np.int64]:
    """First logical index each query sees, int64 [n_q]; refuses windows that are none.

    positions int32 [n_q] and the window input lie on the host. n_cells: of the region.
    """
    windows = wrap(op, array, len(positions))
    window.check(windows, positions, n_cells)
    ends = positions.astype(np.int64) + 1
    if isinstance(windows, Causal):
        lengths = ends
    elif isinstance(windows, Span):
        lengths = windows.array[:, 1].astype(np.int64) - windows.array[:, 0]
    else:
        lengths = windows.array[..., 1].sum(axis=1, dtype=np.int64)
    seen: NDArray[np.int64] = ends - (np.minimum(lengths, width) if width else lengths)
    return seen


def most_partitions(host_windows: tuple[Any, Any] | None, n_cells: int, width: int) -> int:
    """No query's keys lie in more partitions than these.

    host_windows: positions and first index each sees. Windows on the device (None) are not looked
    at: they name a cell once, as a store's do.
    """
    if host_windows is not None:
        ends, seen = host_windows
        parts = ends // PARTITION - seen // PARTITION + 1
        return int(parts.max()) if len(parts) else 1
    return (min(n_cells, width) if width else n_cells) // PARTITION + 2


def host_tiles(tiles: Any, host_windows: tuple[Any, Any] | None, block_m: int) -> Int32:
    """Host tiles as int32 [n, 2] of (first query, count), refused if they cut wrongly."""
    table = host_int32s(tiles, "tiles", 2)
    check_tile_shape(table.shape)
    if host_windows is not None:
        used_tiles(table.astype(np.int64), *host_windows)
    if len(table) and table[:, 1].max() > block_m:
        most = int(table[:, 1].max())
        raise Refusal(
            "2.7",
            f"a tile of {most} queries is larger than block_m {block_m}; cut it, or give block_m",
            {"queries": most, "block_m": block_m},
        )
    return table


def check_tile_shape(shape: tuple[int, ...]) -> None:
    """Refuse tiles that are not [n, 2]."""
    if shape[1] != 2:
        raise Refusal("2.7", f"tiles must be [n_tiles, 2], not {list(shape)}", {"shape": shape})


def used_tiles(table: NDArray[Any], positions: Any, firsts: Any) -> NDArray[Any]:
    """The rows of `table` [n, 2] that hold queries.

    firsts: first logical index each query sees. The tiles must cover the queries in order, and the
    queries of a tile must be consecutive positions of one sequence, so that no window starts before
    that of the tile's first query (contract 2.7).
    """
    used = table[table[:, 1] > 0]
    n_q = len(positions)
    ends = np.cumsum(used[:, 1])
    if used[:, 1].sum() != n_q or (used[:, 0] != ends - used[:, 1]).any():
        raise Refusal(
            "2.7", f"tiles {used.tolist()} do not cover {n_q} queries in order", {"n_q": n_q}
        )
    inside = np.ones(n_q, bool)
    inside[used[:, 0]] = False
    steps = np.diff(positions, prepend=0), np.diff(firsts, prepend=0)
    bad = inside & ((steps[0] != 1) | (steps[1] < 0))
    if bad.any():
        query = int(np.argmax(bad))
        raise Refusal(
            "2.7",
            f"query {query} at position {positions[query]} does not continue its tile's "
            "sequence; cut the tile there",
            {"query": query},
        )
    return used
