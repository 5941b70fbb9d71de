"""What launchers of every kernel package refuse of cells and regions (contract 3, 5).

Sizes and numbers come in, arrays stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from minfer import planes
from minfer.errors import Refusal
from minfer.format import BLOCK, Int32, KvFormat, Region, cell_bytes
from minfer.ops.arguments import Sizes, host_int32s


def check_fill(fill: float) -> None:
    """Refuse to fill cells with anything but 0.0 and NaN."""
    if not (fill == 0 or math.isnan(fill)):
        raise Refusal("5.10", f"cells are cleared to 0 or NaN, not {fill}", {"fill": fill})


def check_bytes(region: Region, rows: Any, n: int) -> None:
    """Refuse canonical bytes that are not those of `n` cells of the region."""
    wanted = (n, region.row_bytes)
    if rows.dtype != np.uint8 or rows.shape != wanted:
        raise Refusal(
            "3.5",
            f"bytes of {n} cells are uint8 {list(wanted)}, not {rows.dtype} {list(rows.shape)}",
            {"shape": tuple(rows.shape), "wanted": wanted},
        )


def check_layout(region: Region, fmt: KvFormat, layout: str) -> None:
    """Refuse a region of another format or layout."""
    if region.fmt is not fmt or region.layout != layout:
        raise Refusal(
            "3.2",
            f"this call wants {fmt} cells in {layout} and the region holds {region.layout} "
            f"{region.fmt}",
            {"fmt": fmt.value, "region": region.fmt.value, "layout": region.layout},
        )


def check_planes(region: Region, given: Any, contiguous: bool = True) -> None:
    """Refuse planes, `given` as (shape, dtype) each, that are not what the region's sizes say."""
    wanted = planes.shapes(region.fmt, region.n_cells, region.row_elems)
    if given != wanted or not contiguous:
        need, shown = (
            ", ".join(f"{dtype} {list(shape)}" for shape, dtype in some) for some in (wanted, given)
        )
        raise Refusal(
            "3.5",
            f"a {region.fmt} region of {region.n_head_kv} heads of {region.head_dim} is contiguous "
            f"{need}, not {shown}",
            {"given": shown, "wanted": need},
        )


def check_pair(k: Region, v: Region) -> None:
    """Refuse K and V regions of different heads."""
    if (k.n_head_kv, k.head_dim) != (v.n_head_kv, v.head_dim):
        raise Refusal(
            "10",
            f"K has {k.n_head_kv} heads of {k.head_dim}, V has {v.n_head_kv} of {v.head_dim}",
            {"k": (k.n_head_kv, k.head_dim), "v": (v.n_head_kv, v.head_dim)},
        )


def check_heads(region: Region, shape: Sizes, n: int) -> None:
    """Refuse queries whose heads are not as long as those of K; n: of cells."""
    if shape[2] != region.head_dim:
        raise Refusal(
            "10",
            f"q {list(shape)} must be [{n}, n_head, {region.head_dim}], as K's heads are",
            {"shape": tuple(shape), "head_dim": region.head_dim},
        )


def refuse_cell(cell: int, row: int, n_cells: int) -> NoReturn:
    """Refuse a cell outside a region."""
    raise Refusal(
        "2.5",
        f"cell {cell} of row {row} is outside the region of {n_cells} cells",
        {"cell": int(cell), "row": int(row), "n_cells": n_cells},
    )


def host_cells(cells: Any, n_cells: int) -> Int32:
    """Host cells as int32 [n], refused if one is outside a region of `n_cells`."""
    checked = host_int32s(cells, "cells")
    bad = np.flatnonzero((checked < 0) | (checked >= n_cells))
    if len(bad):
        refuse_cell(checked[bad[0]], bad[0], n_cells)
    return checked


def host_moves(moves: Any, n_cells: int) -> Int32:
    """Host moves as int32 [n, 3], refused if one of them leaves a region of `n_cells`."""
    checked = host_int32s(moves, "moves", 2)
    check_moves_shape(checked.shape)
    wide = checked.astype(np.int64)
    beyond = (wide < 0).any(axis=1) | (wide[:, :2].max(axis=1) + wide[:, 2] > n_cells)
    if beyond.any():
        bad = int(np.argmax(beyond))
        refuse_move(bad, checked[bad].tolist(), n_cells)
    return checked


def check_once(cells: Int32) -> None:
    """Refuse host cells of which one is named twice."""
    seen, first = np.unique(cells, return_index=True)
    if len(seen) != len(cells):
        row = int(np.setdiff1d(np.arange(len(cells)), first)[0])
        refuse_repeated(cells[row], row)


def check_moves_shape(shape: Sizes) -> None:
    """Refuse moves that are not [n, 3]."""
    if shape[1] != 3:
        raise Refusal(
            "5.6",
            f"moves {list(shape)} must be [n, 3]: src, dst and rows of each",
            {"shape": tuple(shape)},
        )


def refuse_move(index: int, move: Sequence[int], n_cells: int) -> NoReturn:
    """Refuse a move (src, dst, rows) that leaves a region."""
    src, dst, rows = move
    raise Refusal(
        "5.6",
        f"move {index} of {rows} rows from cell {src} to {dst} does not lie in the region of "
        f"{n_cells} cells",
        {"move": int(index), "src": src, "dst": dst, "rows": rows, "n_cells": n_cells},
    )


def refuse_repeated(cell: int, row: int) -> NoReturn:
    """Refuse a cell that a call has named before."""
    raise Refusal(
        "5.7",
        f"cell {cell} of row {row} was named before; a call turns a cell once",
        {"cell": int(cell), "row": int(row)},
    )


def check_turn(cos: Sizes, sin: Sizes, head_dim: int) -> None:
    """Refuse tables, by their shapes, that are not one row of the pairs of a head."""
    if tuple(cos) != tuple(sin) or cos[0] != 1 or 2 * cos[1] > head_dim:
        raise Refusal(
            "5.7",
            f"tables {list(cos)} and {list(sin)} are not one row of the pairs of "
            f"heads of {head_dim}",
            {"cos": tuple(cos), "sin": tuple(sin), "head_dim": head_dim},
        )


def check_blocks(m: object) -> None:
    """Refuse a number of elements that is no whole number of q8_0 blocks."""
    if not isinstance(m, int | np.integer) or m < 0 or m % BLOCK:
        raise Refusal(
            "3.3", f"q8_0 rows of {m!r} elements are not whole blocks of {BLOCK}", {"m": m}
        )


def check_canonical(n: int, dtype: str, shape: Sizes) -> None:
    """Refuse arrays that are not canonical q8_0 cells of n elements."""
    check_blocks(n)
    width = cell_bytes(KvFormat.Q8_0, n)
    if dtype != "uint8" or len(shape) != 2 or shape[1] != width:
        raise Refusal(
            "3.4",
            f"q8_0 cells of {n} elements are uint8 [rows, {width}], not {dtype} {list(shape)}",
            {"n": n, "width": width, "shape": tuple(shape)},
        )


def check_pairs_of_cells(n_a: int, n_b: int) -> None:
    """Refuse two sets of cells that cannot be multiplied row by row."""
    if n_a != n_b:
        raise Refusal(
            "10",
            f"{n_a} cells cannot be multiplied by {n_b} row by row",
            {"a": n_a, "b": n_b},
        )


def check_rows(region: Region, name: str, shape: Sizes, n: int) -> None:
    """Refuse rows, by their shape, that are not those of `n` cells of the region."""
    wanted = (n, region.n_head_kv, region.head_dim)
    if tuple(shape) != wanted:
        raise Refusal(
            "10",
            f"{name} {list(shape)} for {n} cells of this region must be {list(wanted)}",
            {"name": name, "shape": tuple(shape), "wanted": wanted},
        )
