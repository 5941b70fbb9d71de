"""q8_0 cells: `quantize` rows, `dequantize` cells, `dot` of two cells (contract 4.1 to 4.5).

blocks  canonical cells; equal to the numpy oracle to the bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from minfer.format import BLOCK as BLOCK_ELEMENTS
from minfer.format import KvFormat, cell_bytes, word
from minfer.kernels_triton._arguments import blocks, floats, tensor
from minfer.kernels_triton._cell import load_canonical, store_canonical
from minfer.kernels_triton._tile import BLOCK
from minfer.ops import Config, cell_arguments, variant

BLOCKS = 64  # blocks of a program, an even number
WARPS = 4


@triton.jit
def _quantize_q8_0_blocks_kernel(rows, codes, scales, n_blocks, width, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    source = row.to(tl.int64) * (n_blocks * BLOCK) + block * BLOCK
    place = source[:, None] + tl.arange(0, BLOCK)[None, :]
    x = tl.load(rows + place, mask=(block < n_blocks)[:, None], other=0.0)
    store_canonical(codes, scales, row, block, n_blocks, x, width)


@variant()
def quantize_q8_0_blocks(rows: Any, *, config: Config) -> torch.Tensor:
    """f32 [n, m] to canonical cells uint8 [n, cell_bytes]; refuses m % 32 != 0."""
    rows = floats(rows, "rows", 2)
    n, m = rows.shape
    cell_arguments.check_blocks(m)
    width, n_blocks = cell_bytes(KvFormat.Q8_0, m), m // BLOCK_ELEMENTS
    cells = torch.empty((n, width), dtype=torch.uint8, device=rows.device)
    if cells.numel():
        _quantize_q8_0_blocks_kernel[(n, triton.cdiv(n_blocks, BLOCKS))](
            rows,
            *_views(cells),
            n_blocks,
            width,
            BLOCKS=BLOCKS,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return cells


@triton.jit
def _dequantize_q8_0_blocks_kernel(codes, scales, rows, n_blocks, width, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    mask = block < n_blocks
    code, scale = load_canonical(codes, scales, row, block, mask, width)
    target = row.to(tl.int64) * (n_blocks * BLOCK) + block * BLOCK
    place = target[:, None] + tl.arange(0, BLOCK)[None, :]
    tl.store(rows + place, code.to(tl.float32) * scale[:, None], mask=mask[:, None])


@variant()
def dequantize_q8_0_blocks(cells: Any, *, n: int, config: Config) -> torch.Tensor:
    """Canonical cells uint8 [rows, cell_bytes] to f32 [rows, n], exact."""
    cells = _checked_cells(cells, n)
    rows = torch.empty((len(cells), n), dtype=torch.float32, device=cells.device)
    n_blocks = n // BLOCK_ELEMENTS
    if rows.numel():
        _dequantize_q8_0_blocks_kernel[(len(rows), triton.cdiv(n_blocks, BLOCKS))](
            *_views(cells),
            rows,
            n_blocks,
            cells.shape[1],
            BLOCKS=BLOCKS,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return rows


@triton.jit
def _dot_q8_0_blocks_kernel(
    a_codes, a_scales, b_codes, b_scales, out, n_rows, n_blocks, width, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < n_rows
    total = tl.zeros([ROWS], tl.float32)
    for i in range(n_blocks):
        block = tl.full([ROWS], i, tl.int32)
        a, a_scale = load_canonical(a_codes, a_scales, row, block, mask, width)
        b, b_scale = load_canonical(b_codes, b_scales, row, block, mask, width)
        products = tl.sum(a.to(tl.int32) * b.to(tl.int32), axis=1)
        total = total + products.to(tl.float32) * (a_scale * b_scale)
    tl.store(out + row, total, mask=mask)


@variant()
def dot_q8_0_blocks(a: Any, b: Any, *, n: int, config: Config) -> torch.Tensor:
    """Row by row product of two sets of cells [rows, cell_bytes]: f32 [rows]."""
    a, b = _checked_cells(a, n), _checked_cells(b, n)
    cell_arguments.check_pairs_of_cells(len(a), len(b))
    out = torch.zeros(len(a), dtype=torch.float32, device=a.device)
    if a.numel():
        _dot_q8_0_blocks_kernel[(triton.cdiv(len(a), BLOCKS),)](
            *_views(a),
            *_views(b),
            out,
            len(a),
            n // BLOCK_ELEMENTS,
            a.shape[1],
            ROWS=BLOCKS,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return out


def _views(cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cells as kernels read them: by byte and by float16."""
    return cells.view(torch.int8), cells.view(torch.float16)


def _checked_cells(cells: Any, n: int) -> torch.Tensor:
    """The cells, contiguous, if they are wide enough for n elements."""
    given = tensor(cells, "cells")
    cell_arguments.check_canonical(n, word(given.dtype), given.shape)
    return blocks(given)
