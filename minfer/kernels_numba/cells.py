"""Rows into cells: `store_cells`, and `qkv_rope_store`: rope and two stores (contract 4.1, 7.2).

rows  one row after the other, converted on the way; padding bytes of a cell become zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from minfer.errors import Refusal
from minfer.format import KvFormat, Region
from minfer.kernels_numba._ir import address
from minfer.kernels_numba._jit import (
    THREADS,
    constant,
    first_outside,
    kernel,
    launch,
    row_threads,
)
from minfer.kernels_numba._rotate import check_rope, rotate
from minfer.kernels_numba._rows import LOAD_ROW, STORE_ROW
from minfer.ops import Config, variant

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def _store_kernel(fmt: KvFormat) -> Any:
    store_row = STORE_ROW[fmt]

    @kernel(parallel=True, serial=True, key=(fmt.value,))
    def store_cells(_n_threads: Any, rows: Any, arena: Any, cells: Any) -> None:
        n, m = rows.shape
        for row in prange(n):
            store_row(address(rows[row]), address(arena[cells[row]]), m)

    return store_cells


def _load_kernel(fmt: KvFormat) -> Any:
    load_row = LOAD_ROW[fmt]

    @kernel(parallel=True, key=(fmt.value,))
    def load_cells(_n_threads: Any, arena: Any, cells: Any, rows: Any) -> None:
        n, m = rows.shape
        for row in prange(n):
            load_row(address(arena[cells[row]]), address(rows[row]), m)

    return load_cells


def _qkv_rope_store_kernel(fmt: KvFormat) -> Any:
    store_row = STORE_ROW[fmt]

    @kernel(parallel=True, serial=True, key=(fmt.value,))
    def qkv_rope_store(
        _n_threads: Any, qkv: Any, arenas: Any, places: Any, tables: Any, interleaved: Any, out: Any
    ) -> None:
        q, k, v = qkv
        k_arena, v_arena = arenas
        positions, cells = places
        cos, sin = tables
        q_out, k_out = out
        m = k.shape[1] * k.shape[2]
        for row in prange(q.shape[0]):
            at, cell = positions[row], cells[row]
            rotate(q[row], cos[at], sin[at], interleaved, q_out[row])
            rotate(k[row], cos[at], sin[at], interleaved, k_out[row])
            store_row(address(k_out[row]), address(k_arena[cell]), m)
            store_row(address(v[row]), address(v_arena[cell]), m)

    return qkv_rope_store


STORE_KERNELS = {fmt: _store_kernel(fmt) for fmt in KvFormat}
QKV_KERNELS = {fmt: _qkv_rope_store_kernel(fmt) for fmt in KvFormat}
LOAD_KERNELS = {fmt: _load_kernel(fmt) for fmt in KvFormat}


@variant(space={"threads": THREADS})
def store_cells_rows(
    region: Region, rows: Floats, cells: Ints, *, fmt: KvFormat, config: Config
) -> Region:
    """Rows f32 [n, n_head_kv, d] into cells int32 [n] of a canonical region, in place.

    Refuses another format, another row shape, and a cell outside the region.
    """
    cells = checked_cells(region, cells)
    _check_store(region, rows, cells, fmt)
    flat = np.ascontiguousarray(rows, np.float32).reshape(len(rows), region.row_elems)
    launch(STORE_KERNELS[fmt], row_threads(flat, config), flat, region.arrays[0], cells)
    return region


@variant(space={"threads": THREADS})
def qkv_rope_store_rows(
    q: Floats,
    k: Floats,
    v: Floats,
    k_region: Region,
    v_region: Region,
    positions: Ints,
    cells: Ints,
    cos: Floats,
    sin: Floats,
    *,
    fmt: KvFormat,
    pairing: str,
    config: Config,
) -> tuple[Floats, Region, Region]:
    """Rotate q and k [n, heads, d] by position, store k and v by cell.

    Returns the rotated q and both regions, which are the ones given.
    """
    cells = checked_cells(k_region, cells)
    for region, rows in ((k_region, k), (v_region, v)):
        _check_store(region, rows, checked_cells(region, cells), fmt)
    q, k, v = (np.ascontiguousarray(rows, np.float32) for rows in (q, k, v))
    positions = np.ascontiguousarray(positions, np.int32)
    cos, sin = constant(cos), constant(sin)
    interleaved = check_rope(q, positions, cos, sin, pairing)
    check_rope(k, positions, cos, sin, pairing)
    out, rotated = np.empty_like(q), np.empty_like(k)
    launch(
        QKV_KERNELS[fmt],
        row_threads(q, config),
        (q, k, v),
        (k_region.arrays[0], v_region.arrays[0]),
        (positions, cells),
        (cos, sin),
        interleaved,
        (out, rotated),
    )
    return out, k_region, v_region


def load_cells(region: Region, cells: Ints, threads: int) -> Floats:
    """The rows in cells int32 [n], decoded exactly: f32 [n, n_head_kv, d]."""
    cells = checked_cells(region, cells)
    rows = np.empty((len(cells), region.row_elems), np.float32)
    launch(LOAD_KERNELS[region.fmt], threads, region.arrays[0], cells, rows)
    return rows.reshape(len(cells), region.n_head_kv, region.head_dim)


def checked_cells(region: Region, cells: Ints) -> Ints:
    """The cells as contiguous int32, refused if one is outside the region."""
    cells = np.ascontiguousarray(cells, np.int32)
    bad = first_outside(cells, region.n_cells)
    if bad >= 0:
        raise Refusal(
            "2.5",
            f"cell {cells[bad]} of row {bad} is outside the region of {region.n_cells} cells",
            {"cell": int(cells[bad]), "row": int(bad), "n_cells": region.n_cells},
        )
    return cells


def _check_store(region: Region, rows: Floats, cells: Ints, fmt: KvFormat) -> None:
    if region.fmt is not fmt or region.layout != "canonical":
        raise Refusal(
            "3.2",
            f"a {region.fmt} region in layout {region.layout} does not take {fmt} rows",
            {"region": str(region.fmt), "layout": region.layout, "fmt": str(fmt)},
        )
    wanted = (len(cells), region.n_head_kv, region.head_dim)
    if rows.shape != wanted:
        raise Refusal(
            "2.5",
            f"rows {list(rows.shape)} for {len(cells)} cells of this region must be {list(wanted)}",
            {"shape": tuple(rows.shape), "wanted": wanted},
        )
