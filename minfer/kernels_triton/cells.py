"""Rows into cells, and cells from where they lie (contract 4.1, 4.7, 5.6, 7.2).

store_cells, qkv_rope_store
  rows  a program for some elements or heads of a row, converted on the way; padding becomes zero.
move_cells
  rows  blocks of rows over the grid; where a move overlaps itself, programs own columns instead.
map_q8_0_cells
  rows  a program for some heads of a cell: dequantize, rotate all by the same angles, quantize.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from minfer.format import KvFormat, Region, refuse_odd_blocks
from minfer.kernels_triton import _arguments
from minfer.kernels_triton._arguments import (
    check_region,
    checked_cells,
    checked_moves,
    planes,
    tensor,
)
from minfer.kernels_triton._cell import load_elements, store_elements, store_padding
from minfer.kernels_triton._move import launches, move_words
from minfer.kernels_triton._rotate import (
    interleaved,
    load_turned,
    partner_of,
    turn_halves,
    turn_interleaved,
)
from minfer.kernels_triton._tile import BLOCK, FORMATS, Q8_0
from minfer.ops import Config, arrays, check_pairing, variant

TILE = 512  # elements of a program that stores
WARPS = 4


@triton.jit
def _store_cells_rows_kernel(
    source,  # float32 [n, N], rows `row_stride` apart
    plane,
    scales,
    cells,  # int32 [n]
    row_stride,
    N: tl.constexpr,
    FMT: tl.constexpr,
    C: tl.constexpr,
):
    row, start = tl.program_id(0), tl.program_id(1) * C
    cell = tl.load(cells + row)
    first = start + tl.arange(0, 1)
    element = first[:, None] + tl.arange(0, C)[None, :]
    x = tl.load(source + row.to(tl.int64) * row_stride + element, mask=element < N, other=0.0)
    store_elements(plane, scales, cell, first, N - start, x, N, FMT)
    if start == 0:
        store_padding(plane, scales, cell, N, FMT)


@variant()
def store_cells_rows(
    region: Region, rows: Any, cells: Any, *, fmt: KvFormat, config: Config
) -> Region:
    """Rows f32 [n, n_head_kv, d] into cells int32 [n] of a region, in place.

    Refuses another format, another row type or shape, and a cell outside the region.
    """
    check_region(region, fmt)
    cells = checked_cells(region, cells)
    given, n = arrays.checked_rows(_arguments, region, rows, "rows", len(cells)), region.row_elems
    width = min(TILE, max(int(BLOCK), triton.next_power_of_2(n)))
    if len(cells):
        _store_cells_rows_kernel[(len(cells), triton.cdiv(n, width))](
            given,
            *planes(region),
            cells,
            given.stride(0),
            N=n,
            FMT=FORMATS[fmt],
            C=width,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return region


@triton.jit
def _qkv_rope_store_rows_kernel(
    q,  # float32 [n, N_HEAD, D], rows `q_stride` apart; k and v alike
    k,
    v,
    k_plane,
    k_scales,
    v_plane,
    v_scales,
    positions,  # int32 [n]
    cells,  # int32 [n]
    cos,  # float32 [n_pos, HALF]
    sin,
    out,  # float32 [n, N_HEAD, D]
    q_stride,
    k_stride,
    v_stride,
    N_HEAD: tl.constexpr,
    N_HEAD_KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FMT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    q_parts: tl.constexpr = (N_HEAD + HEADS - 1) // HEADS
    kv_parts: tl.constexpr = (N_HEAD_KV + HEADS - 1) // HEADS
    N: tl.constexpr = N_HEAD_KV * D
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, BLOCK_D)[None, :]
    position, cell = tl.load(positions + row), tl.load(cells + row)
    if part < q_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        mask = (head < N_HEAD)[:, None] & (dim < D)
        x = load_turned(
            q + row * q_stride, head, mask, position, cos, sin, D, BLOCK_D, HALF, INTERLEAVED
        )
        tl.store(out + row * (N_HEAD * D) + head[:, None] * D + dim, x, mask=mask)
    elif part < q_parts + kv_parts:
        head = (part - q_parts) * HEADS + tl.arange(0, HEADS)
        mask = (head < N_HEAD_KV)[:, None] & (dim < D)
        x = load_turned(
            k + row * k_stride, head, mask, position, cos, sin, D, BLOCK_D, HALF, INTERLEAVED
        )
        store_elements(k_plane, k_scales, cell, head * D, D, x, N, FMT)
    else:
        head = (part - q_parts - kv_parts) * HEADS + tl.arange(0, HEADS)
        mask = (head < N_HEAD_KV)[:, None] & (dim < D)
        x = tl.load(v + row * v_stride + head[:, None] * D + dim, mask=mask, other=0.0)
        store_elements(v_plane, v_scales, cell, head * D, D, x, N, FMT)
    if part == 0:
        store_padding(k_plane, k_scales, cell, N, FMT)
        store_padding(v_plane, v_scales, cell, N, FMT)


@variant()
def qkv_rope_store_rows(
    q: Any,
    k: Any,
    v: Any,
    k_region: Region,
    v_region: Region,
    positions: Any,
    cells: Any,
    cos: Any,
    sin: Any,
    *,
    fmt: KvFormat,
    pairing: str,
    config: Config,
) -> tuple[torch.Tensor, Region, Region]:
    """Rotate q and k [n, heads, d] by position, store k and v by cell, in one launch.

    Rows of q, k and v may be parts of wider ones. Returns the rotated q and both regions, which
    are the ones given.
    """
    q, k, v, cells = arrays.checked_store(_arguments, q, k, v, k_region, v_region, cells, fmt)
    n_head_kv, d = k_region.n_head_kv, k_region.head_dim
    at, cos, sin = arrays.checked_rope(_arguments, q, positions, cos, sin, pairing)
    arrays.checked_rope(_arguments, k, at, cos, sin, pairing)
    n, n_head = q.shape[:2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    heads, block_d = _heads(d)
    parts = triton.cdiv(n_head, heads) + 2 * triton.cdiv(n_head_kv, heads)
    if n:
        _qkv_rope_store_rows_kernel[(n, parts)](
            *(q, k, v, *planes(k_region), *planes(v_region), at, cells, cos, sin, out),
            *(x.stride(0) for x in (q, k, v)),
            N_HEAD=n_head,
            N_HEAD_KV=n_head_kv,
            D=d,
            HALF=cos.shape[1],
            INTERLEAVED=interleaved(pairing),
            FMT=FORMATS[fmt],
            HEADS=heads,
            BLOCK_D=block_d,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return out, k_region, v_region


@variant()
def move_cells_rows(region: Region, moves: Any, *, config: Config) -> Region:
    """Copy cells by int32 [n, 3] of (src, dst, rows), in order, each like memmove, in place.

    Cells of any format move verbatim, padding included. Refuses a move that leaves the region,
    before the first one.
    """
    check_region(region, region.fmt)
    table = checked_moves(region, moves)
    table = table[(table[:, 2] > 0) & (table[:, 0] != table[:, 1])]
    if not len(table):
        return region
    at_home = tensor(table, "moves")
    for plane in region.arrays:
        for first, last, n_rows in launches(table):
            move_words(plane.view(torch.int32), at_home, first, last, n_rows)
    return region


@triton.jit
def _map_q8_0_cells_rows_kernel(
    codes,  # int8 [n_cells, N_HEAD * D]
    scales,
    cells,  # int32 [n]
    cos,  # float32 [HALF]
    sin,
    N_HEAD: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    N: tl.constexpr = N_HEAD * D
    cell, part = tl.load(cells + tl.program_id(0)), tl.program_id(1)
    head = part * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < N_HEAD)[:, None] & (dim < D)
    element = head[:, None] * D + dim
    own = load_elements(codes, scales, cell, element, mask, N, Q8_0)
    if INTERLEAVED:
        x = turn_interleaved(own, cos, sin, HALF)
    else:
        element = head[:, None] * D + partner_of(dim, HALF)
        partner = load_elements(codes, scales, cell, element, mask, N, Q8_0)
        x = turn_halves(own, partner, cos, sin, HALF)
    tl.debug_barrier()  # a head is read by all threads before one writes
    store_elements(codes, scales, cell, head * D, D, x, N, Q8_0)
    if part == 0:
        store_padding(codes, scales, cell, N, Q8_0)


@variant()
def map_q8_0_cells_rows(
    region: Region, cells: Any, cos: Any, sin: Any, *, pairing: str, config: Config
) -> Region:
    """Rotate every head of the cells int32 [n] by cos, sin f32 [1, n_rot / 2], in place.

    Refuses another format than q8_0, a cell outside the region or named twice, and tables of more
    than one row or more pairs than a head has.
    """
    check_region(region, KvFormat.Q8_0)
    cells, cos, sin = arrays.checked_turn(_arguments, region, cells, cos, sin)
    check_pairing(pairing)
    refuse_odd_blocks(region.fmt, region.head_dim, region.row_elems)
    heads, block_d = _heads(region.head_dim)
    if len(cells):
        _map_q8_0_cells_rows_kernel[(len(cells), triton.cdiv(region.n_head_kv, heads))](
            *region.arrays,
            cells,
            cos,
            sin,
            N_HEAD=region.n_head_kv,
            D=region.head_dim,
            HALF=cos.shape[1],
            INTERLEAVED=interleaved(pairing),
            HEADS=heads,
            BLOCK_D=block_d,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return region


def _heads(head_dim: int) -> tuple[int, int]:
    """Heads of a program, and a power of two of whole blocks that holds one."""
    block_d = max(int(BLOCK), triton.next_power_of_2(head_dim))
    return max(1, TILE // block_d), block_d
