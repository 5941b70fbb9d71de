"""Rows into cells, and cells from where they lie (contract 4.1, 4.7, 5.6, 7.2).

store_cells, qkv_rope_store
  rows  one row after the other, converted on the way; padding bytes of a cell become zero.
move_cells
  rows  the rows of a move at once, on the calling thread: one thread fills the memory's bandwidth.
map_q8_0_cells
  rows  one cell after the other: dequantize, rotate every head by the same angles, quantize.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minfer.errors import Refusal
from minfer.format import Bytes, Floats, Int32, KvFormat, Region
from minfer.kernels_numba._arguments import (
    check_region,
    checked_cells,
    checked_moves,
    checked_turn,
    floats,
    int32s,
    read_only,
)
from minfer.kernels_numba._cell import LOAD_ROW, STORE_ROW, dequantize_row, quantize_row
from minfer.kernels_numba._ir import address, move_bytes
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._rotate import check_rope, rotate
from minfer.kernels_numba._workers import THREADS, Worker, read, row_threads, run, share
from minfer.ops import INTERLEAVED, Config, cell_arguments, check_pairing, variant


def _store_kernel(fmt: KvFormat) -> Worker:
    store_row = STORE_ROW[fmt]

    @Worker
    @kernel(key=fmt.value)
    def store_cells(t: Any, n_threads: Any, pointer: Any) -> int:
        rows, arena, cells = read(pointer)
        begin, end = share(t, n_threads, rows.shape[0])
        for row in range(begin, end):
            store_row(address(rows[row]), address(arena[cells[row]]), rows.shape[1])
        return 0

    return store_cells


def _load_kernel(fmt: KvFormat) -> Worker:
    load_row = LOAD_ROW[fmt]

    @Worker
    @kernel(key=fmt.value)
    def load_cells(t: Any, n_threads: Any, pointer: Any) -> int:
        arena, row_bytes, cells, rows = read(pointer)
        begin, end = share(t, n_threads, rows.shape[0])
        for row in range(begin, end):
            load_row(arena + cells[row] * row_bytes, address(rows[row]), rows.shape[1])
        return 0

    return load_cells


def _qkv_rope_store_kernel(fmt: KvFormat) -> Worker:
    store_row = STORE_ROW[fmt]

    @Worker
    @kernel(key=fmt.value)
    def qkv_rope_store(t: Any, n_threads: Any, pointer: Any) -> int:
        qkv, arenas, places, tables, interleaved, out = read(pointer)
        q, k, v = qkv
        k_arena, v_arena = arenas
        positions, cells = places
        cos, sin = tables
        q_out, k_out = out
        m = k.shape[1] * k.shape[2]
        begin, end = share(t, n_threads, q.shape[0])
        for row in range(begin, end):
            at, cell = positions[row], cells[row]
            rotate(q[row], cos[at], sin[at], interleaved, q_out[row])
            rotate(k[row], cos[at], sin[at], interleaved, k_out[row])
            store_row(address(k_out[row]), address(k_arena[cell]), m)
            store_row(address(v[row]), address(v_arena[cell]), m)
        return 0

    return qkv_rope_store


STORE_KERNELS = {fmt: _store_kernel(fmt) for fmt in KvFormat}
QKV_KERNELS = {fmt: _qkv_rope_store_kernel(fmt) for fmt in KvFormat}
LOAD_KERNELS = {fmt: _load_kernel(fmt) for fmt in KvFormat}


@variant(space={"threads": THREADS})
def store_cells_rows(
    region: Region, rows: Floats, cells: Int32, *, fmt: KvFormat, config: Config
) -> Region:
    """Rows f32 [n, n_head_kv, d] into cells int32 [n] of a canonical region, in place.

    Refuses another format, another row type or shape, and a cell outside the region.
    """
    arena, cells = _writable(region, fmt), checked_cells(region, cells)
    flat = _checked_rows(region, rows, "rows", len(cells)).reshape(len(cells), region.row_elems)
    args = (flat, arena, cells)
    run(row_threads(flat.size, config), STORE_KERNELS[fmt], None, args)
    return region


@variant(space={"threads": THREADS})
def qkv_rope_store_rows(
    q: Floats,
    k: Floats,
    v: Floats,
    k_region: Region,
    v_region: Region,
    positions: Int32,
    cells: Int32,
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
    arenas = _writable(k_region, fmt), _writable(v_region, fmt)
    cell_arguments.check_pair(k_region, v_region)
    cells = checked_cells(k_region if k_region.n_cells < v_region.n_cells else v_region, cells)
    k = _checked_rows(k_region, k, "k", len(cells))
    v = _checked_rows(v_region, v, "v", len(cells))
    q, positions = floats(q, "q", 3), int32s(positions, "positions")
    cos, sin = read_only(cos, "cos", 2), read_only(sin, "sin", 2)
    interleaved = check_rope(q, positions, cos, sin, pairing)
    check_rope(k, positions, cos, sin, pairing)
    out, rotated = np.empty_like(q), np.empty_like(k)
    args = (
        (q, k, v),
        arenas,
        (positions, cells),
        (cos, sin),
        interleaved,
        (out, rotated),
    )
    run(row_threads(q.size, config), QKV_KERNELS[fmt], None, args)
    return out, k_region, v_region


@Worker
@kernel
def _move_cells_rows_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    arena, moves = read(pointer)
    first, width = address(arena), arena.shape[1]
    for i in range(moves.shape[0]):
        source, target = first + moves[i, 0] * width, first + moves[i, 1] * width
        move_bytes(source, target, moves[i, 2] * width)
    return 0


@variant()
def move_cells_rows(region: Region, moves: Int32, *, config: Config) -> Region:
    """Copy cells by int32 [n, 3] of (src, dst, rows), in order, each like memmove, in place.

    Cells of any format move verbatim, padding included. Refuses a move that leaves the region,
    before the first one.
    """
    arena, moves = _writable(region, region.fmt), checked_moves(region, moves)
    run(1, _move_cells_rows_kernel, None, (arena, moves))
    return region


@Worker
@kernel
def _map_q8_0_cells_rows_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    arena, cells, cos, sin, interleaved, rows = read(pointer)
    row = rows[t]  # [n_head_kv, d]
    begin, end = share(t, n_threads, cells.size)
    for i in range(begin, end):
        cell = address(arena[cells[i]])
        dequantize_row(cell, address(row), row.size)
        rotate(row, cos[0], sin[0], interleaved, row)
        quantize_row(address(row), cell, row.size)
    return 0


@variant(space={"threads": THREADS})
def map_q8_0_cells_rows(
    region: Region, cells: Int32, cos: Floats, sin: Floats, *, pairing: str, config: Config
) -> Region:
    """Rotate every head of the cells int32 [n] by cos, sin f32 [1, n_rot / 2], in place.

    Refuses another format than q8_0, a cell outside the region or named twice, and tables of more
    than one row or more pairs than a head has.
    """
    arena = _writable(region, KvFormat.Q8_0)
    cells, cos, sin = checked_turn(region, cells, cos, sin)
    check_pairing(pairing)
    threads = row_threads(cells.size * region.row_elems, config)
    rows = np.empty((threads, region.n_head_kv, region.head_dim), np.float32)
    args = (arena, cells, cos, sin, pairing == INTERLEAVED, rows)
    run(threads, _map_q8_0_cells_rows_kernel, None, args)
    return region


def load_cells(region: Region, cells: Int32, threads: int) -> Floats:
    """The rows in cells int32 [n], decoded exactly: f32 [n, n_head_kv, d]."""
    check_region(region, region.fmt)
    cells = checked_cells(region, cells)
    rows = np.empty((len(cells), region.row_elems), np.float32)
    args = (region.arrays[0].ctypes.data, region.row_bytes, cells, rows)
    run(threads, LOAD_KERNELS[region.fmt], None, args)
    return rows.reshape(len(cells), region.n_head_kv, region.head_dim)


def _writable(region: Region, fmt: KvFormat) -> Bytes:
    """The cells of a region of `fmt` that may be written."""
    check_region(region, fmt)
    if not region.arrays[0].flags.writeable:
        raise Refusal("10", "the region's array is read-only; store into a writable one")
    arena: Bytes = region.arrays[0]
    return arena


def _checked_rows(region: Region, rows: Floats, name: str, n: int) -> Floats:
    rows = floats(rows, name, 3)
    cell_arguments.check_rows(region, name, rows.shape, n)
    return rows
