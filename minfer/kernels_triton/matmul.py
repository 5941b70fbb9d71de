"""x @ weight.T for many rows; a row's bits depend on it and the weight only (contract 6.5).

matmul
  tiles   f32 and f16: one tile of rows by columns a program; every product is one fma chain in k
          order. f16 is decoded first. With activations f16 or bf16 both operands are rounded to
          that type and go to the tensor cores.
  blocks  q8_0: rows of x are quantized (contract 4.1) and blocks of the weight are taken apart
          into codes and scales; products are those of `matvec_blocks` to the bit.

Tiles are the same for any number of rows, those past the last one are masked: no row's sums can
tell how many others there are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from minfer.format import KvFormat
from minfer.kernels_triton._arguments import ACTIVATIONS, product
from minfer.kernels_triton._cell import BLOCK_BYTES
from minfer.kernels_triton._tile import BLOCK
from minfer.kernels_triton.matvec import (
    COLUMNS,
    ROUNDED,
    ROUNDING,
    load_block_codes,
    load_block_scales,
    matvec_blocks,
    operands,
    product_type,
    quantized,
)
from minfer.ops import Config, variant

WIDE = 2048  # weight rows from which large tiles fill a GPU, and x is read often


@triton.jit(do_not_specialize=["n", "n_out"])
def _matmul_tiles_kernel(
    weight,  # [n_out, n_in]
    x,  # [n, n_in], rows x_stride apart
    out,  # float32 [n, n_out]
    n,
    n_in,
    n_out,
    x_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    TYPE: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)[None, :]
    given = x + row.to(tl.int64)[:, None] * x_stride + k
    source = weight + column.to(tl.int64)[:, None] * n_in + k
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, n_in, DEPTH, num_stages=STAGES):
        seen = k < n_in - start
        xs = tl.load(given + start, mask=seen & (row < n)[:, None], other=0.0)
        w = tl.load(source + start, mask=seen & (column < n_out)[:, None], other=0.0)
        sums = tl.dot(xs.to(TYPE), tl.trans(w.to(TYPE)), sums, input_precision="ieee")
    out += row.to(tl.int64)[:, None] * n_out + column[None, :]
    tl.store(out, sums, mask=(row < n)[:, None] & (column < n_out)[None, :])


def _tile_of(weight: torch.Tensor, activations: str) -> dict[str, int]:
    """Rows, columns, depth, stages and warps of a tile; of the weight alone."""
    if activations == "f32":
        return {"ROWS": 64, "COLUMNS": 128, "DEPTH": 16, "STAGES": 3, "num_warps": 8}
    depth = 128 // weight.element_size()
    side, warps = (128, 8) if len(weight) >= WIDE else (64, 4)
    return {"ROWS": side, "COLUMNS": side, "DEPTH": depth, "STAGES": 3, "num_warps": warps}


@variant(formats=(KvFormat.F32, KvFormat.F16), space={"activations": ROUNDED})
def matmul_tiles(weight: Any, x: Any, *, fmt: KvFormat, config: Config) -> Any:
    """x [n, n_in] @ weight.T, weight float32 or float16 [n_out, n_in]: f32 [n, n_out]."""
    weight, x, out = operands(weight, x, fmt)
    (n, n_in), n_out = x.shape, len(weight)
    if not out.numel():
        return out
    activations = config["activations"]
    tile = _tile_of(weight, activations)
    if activations == "f32":
        # decoded in a tile it would cost registers, and for sm_100 Triton would make it TF32
        weight = weight.float()
    elif n_out >= WIDE:
        x = x.to(ACTIVATIONS[activations])  # once, instead of in every column of tiles
    _matmul_tiles_kernel[(triton.cdiv(n, tile["ROWS"]), triton.cdiv(n_out, tile["COLUMNS"]))](
        weight,
        x,
        out,
        n,
        n_in,
        n_out,
        x.stride(0),
        TYPE=product_type(activations),
        enable_fp_fusion=False,
        **tile,
    )
    return out


# -- blocks ---------------------------------------------------------------------------------------


@triton.jit
def _take_apart_kernel(weight, codes, scales, n_out, n_blocks, BLOCKS: tl.constexpr):
    """Blocks [n_out, n_blocks * 34] to int8 [n_out, n_blocks * 32] and f32 [n_blocks, n_out]."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside, last = block < n_blocks, n_blocks - 1
    at = weight + row * (n_blocks * BLOCK_BYTES) + tl.minimum(block, last) * BLOCK_BYTES
    code = tl.reshape(load_block_codes(at[None, :]), [BLOCKS, BLOCK])
    k = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(codes + row * (n_blocks * BLOCK) + k, code, mask=inside[:, None])
    place = scales + block.to(tl.int64) * n_out + row
    tl.store(place, load_block_scales(at, inside), mask=inside)


def _taken_apart(weight: torch.Tensor, n_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [n_out, n_in] and scales f32 [n_in / 32, n_out] of a q8_0 weight."""
    n_out, device = len(weight), weight.device
    codes = torch.empty((n_out, n_blocks * BLOCK.value), dtype=torch.int8, device=device)
    scales = torch.empty((n_blocks, n_out), dtype=torch.float32, device=device)
    _take_apart_kernel[(n_out, triton.cdiv(n_blocks, 64))](
        weight, codes, scales, n_out, n_blocks, BLOCKS=64, num_warps=4, enable_fp_fusion=False
    )
    return codes, scales


@triton.jit(do_not_specialize=["n", "n_out"])
def _matmul_blocks_kernel(
    weight,  # int8 [n_out, n_in]
    w_scales,  # float32 [n_in / 32, n_out]
    x,  # int8 [n, n_in]
    x_scales,  # float16 [n_in / 32, n]
    out,  # float32 [n, n_out]
    n,
    n_in,
    n_out,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,  # at once
    STAGES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK)[None, :]
    given = x + row.to(tl.int64)[:, None] * n_in + k
    source = weight + column.to(tl.int64)[:, None] * n_in + k
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, n_in, BLOCKS * BLOCK, num_stages=STAGES):
        for i in tl.static_range(BLOCKS):
            at = start + i * BLOCK
            here, there = (row < n) & (at < n_in), (column < n_out) & (at < n_in)
            xs = tl.load(given + at, mask=here[:, None], other=0)
            w = tl.load(source + at, mask=there[:, None], other=0)
            block = (at // BLOCK).to(tl.int64)
            x_scale = tl.load(x_scales + block * n + row, mask=here, other=0.0).to(tl.float32)
            w_scale = tl.load(w_scales + block * n_out + column, mask=there, other=0.0)
            sums = tl.dot(xs, tl.trans(w), out_dtype=tl.int32)
            total += sums.to(tl.float32) * (w_scale[None, :] * x_scale[:, None])
    out += row.to(tl.int64)[:, None] * n_out + column[None, :]
    tl.store(out, total, mask=(row < n)[:, None] & (column < n_out)[None, :])


@variant(formats=(KvFormat.Q8_0,), query=ROUNDING)
def matmul_blocks(weight: Any, x: Any, *, fmt: KvFormat, config: Config) -> Any:
    """x [n, n_in] @ weight.T, weight q8_0 blocks uint8 [n_out, n_in / 32 * 34]: f32 [n, n_out].

    A few rows go the way of `matvec_blocks`: the same bits, sooner than blocks are taken apart.
    """
    weight, x = product(weight, x, fmt)
    if len(x) <= COLUMNS:
        return matvec_blocks(weight, x, fmt=fmt, config=config)
    (n, n_in), n_out = x.shape, len(weight)
    out = torch.empty((n, n_out), dtype=torch.float32, device=x.device)
    if not x.numel() or not n_out:
        return out.zero_()
    _matmul_blocks_kernel[(triton.cdiv(n, 64), triton.cdiv(n_out, 64))](
        *_taken_apart(weight, n_in // BLOCK.value),
        *quantized(x),
        out,
        n,
        n_in,
        n_out,
        ROWS=64,
        COLUMNS=64,
        BLOCKS=4,
        STAGES=3,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out
