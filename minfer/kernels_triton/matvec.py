"""x @ weight.T for a few rows; a row's bits depend on it and the weight only (contract 6.5).

matvec
  lanes   f32 and f16: a program takes a few weight rows; every product is lanes of fma chains in k
          order, then one fixed tree. f16 is decoded in registers. With activations f16 or bf16
          both operands are rounded to that type and go through one tile of the tensor cores.
  blocks  q8_0: rows of x are quantized (contract 4.1); every product is the exact sums of blocks
          times both scales, blocks in order (4.5).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.kernels_triton._arguments import interpreted, product
from minfer.kernels_triton._cell import BLOCK_BYTES, CODES, quantize_blocks
from minfer.kernels_triton._tile import BLOCK
from minfer.ops import ACTIVATIONS, F32, Config, Tunable, variant

ROUNDED = Tunable(F32, ACTIVATIONS, numeric=True, searched=False)
TYPES = {"f32": tl.float32, "f16": tl.float16, "bf16": tl.bfloat16}
ROUNDING = {KvFormat.Q8_0: "q8_0"}  # how products round x, as activations say for the others
COLUMNS = 16  # rows of x that count as few
STEP_BYTES = 1024  # of a weight row that `lanes` takes at once
PACK_BYTES = 8 << 20  # from here on a weight is worth a launch that quantizes x once for all
ALIGNED = 16  # bytes; and elements from one row to the next, as Triton counts them


def steady(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where its address or the distance of its rows is odd.

    Kernels are compiled for what addresses are multiples of, and lanes, so the order of sums, may
    follow: rows of one width must look alike wherever they lie.
    """
    apart = x.stride(0) == x.shape[1] or x.stride(0) % ALIGNED == x.shape[1] % ALIGNED == 0
    if apart and x.data_ptr() % ALIGNED == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def product_type(activations: str) -> Any:
    """The type whose products `activations` ask for."""
    if activations == "bf16" and interpreted():
        raise Refusal(
            "4.6",
            "Triton's interpreter multiplies no bf16; use f32 or f16 there",
            {"activations": activations},
        )
    return TYPES[activations]


def operands(weight: Any, x: Any, fmt: KvFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A checked weight, `steady` rows, and room for their product, float32 [n, n_out]."""
    weight, x = product(weight, x, fmt)
    x = steady(x)
    return weight, x, x.new_empty((len(x), len(weight)))


# -- lanes ----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n", "n_out"])
def _matvec_lanes_kernel(
    weight,  # float32 or float16 [n_out, n_in]
    x,  # float32 [n, n_in], rows x_stride apart
    out,  # float32 [n, n_out]
    n,
    n_in,
    n_out,
    x_stride,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,  # 1 or 4, which changes no bits
    STAGES: tl.constexpr,
):
    groups = tl.cdiv(n, COLUMNS)
    column = tl.program_id(0) % groups * COLUMNS
    row = tl.program_id(0) // groups * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    inside, left = row < n_out, n - column
    source = weight + row.to(tl.int64)[:, None] * n_in
    x += column.to(tl.int64) * x_stride
    sum_0 = tl.zeros([ROWS, LANES], tl.float32)
    sum_1 = sum_0
    sum_2 = sum_0
    sum_3 = sum_0
    for start in tl.range(0, n_in, LANES, num_stages=STAGES):
        k = start + lane
        seen = k < n_in
        w = tl.load(source + k[None, :], mask=inside[:, None] & seen[None, :], other=0.0)
        w = w.to(tl.float32)
        x_0 = tl.load(x + k, mask=seen, other=0.0)
        sum_0 = tl.fma(w, x_0[None, :], sum_0)
        if COLUMNS == 4:
            x_1 = tl.load(x + x_stride + k, mask=seen & (left > 1), other=0.0)
            x_2 = tl.load(x + 2 * x_stride + k, mask=seen & (left > 2), other=0.0)
            x_3 = tl.load(x + 3 * x_stride + k, mask=seen & (left > 3), other=0.0)
            sum_1 = tl.fma(w, x_1[None, :], sum_1)
            sum_2 = tl.fma(w, x_2[None, :], sum_2)
            sum_3 = tl.fma(w, x_3[None, :], sum_3)
    out += column.to(tl.int64) * n_out + row
    tl.store(out, tl.sum(sum_0, axis=1), mask=inside)
    if COLUMNS == 4:
        tl.store(out + n_out, tl.sum(sum_1, axis=1), mask=inside & (left > 1))
        tl.store(out + 2 * n_out, tl.sum(sum_2, axis=1), mask=inside & (left > 2))
        tl.store(out + 3 * n_out, tl.sum(sum_3, axis=1), mask=inside & (left > 3))


@triton.jit(do_not_specialize=["n", "n_out"])
def _matvec_tile_kernel(
    weight,
    x,
    out,
    n,
    n_in,
    n_out,
    x_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,  # of k, one a warp
    DEPTH: tl.constexpr,  # of a part
    STAGES: tl.constexpr,
    TYPE: tl.constexpr,
):
    groups = tl.cdiv(n, COLUMNS)
    row = tl.program_id(0) // groups * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % groups * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PARTS)[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    source = weight + row.to(tl.int64)[None, :, None] * n_in
    given = x + column.to(tl.int64)[None, :, None] * x_stride
    sums = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, n_in, PARTS * DEPTH, num_stages=STAGES):
        k = (start + part)[:, None, :]
        w = tl.load(source + k, mask=(k < n_in) & (row < n_out)[None, :, None], other=0.0)
        xs = tl.load(given + k, mask=(k < n_in) & (column < n)[None, :, None], other=0.0)
        sums = tl.dot(w.to(TYPE), tl.permute(xs.to(TYPE), (0, 2, 1)), sums)
    out += column.to(tl.int64)[None, :] * n_out + row[:, None]
    inside = (row < n_out)[:, None] & (column < n)[None, :]
    tl.store(out, tl.sum(sums, axis=0), mask=inside)


@variant(formats=(KvFormat.F32, KvFormat.F16), space={"activations": ROUNDED})
def matvec_lanes(weight: Any, x: Any, *, fmt: KvFormat, config: Config) -> Any:
    """x [n, n_in] @ weight.T, weight float32 or float16 [n_out, n_in]: f32 [n, n_out]."""
    weight, x, out = operands(weight, x, fmt)
    (n, n_in), n_out = x.shape, len(weight)
    if not out.numel():
        return out
    args = (weight, x, out, n, n_in, n_out, x.stride(0))
    if config["activations"] == "f32":
        columns = 1 if n == 1 else 4
        _matvec_lanes_kernel[(triton.cdiv(n_out, 4) * triton.cdiv(n, columns),)](
            *args,
            ROWS=4,
            LANES=STEP_BYTES // weight.element_size(),
            COLUMNS=columns,
            STAGES=4,
            num_warps=4,
            enable_fp_fusion=False,
        )
    else:
        _matvec_tile_kernel[(triton.cdiv(n_out, 16) * triton.cdiv(n, COLUMNS),)](
            *args,
            ROWS=16,
            COLUMNS=COLUMNS,
            PARTS=8,
            DEPTH=128 // weight.element_size(),
            STAGES=3,
            TYPE=product_type(config["activations"]),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out


# -- blocks ---------------------------------------------------------------------------------------


@triton.jit
def _quantize_rows_kernel(x, codes, scales, n, n_blocks, x_stride, BLOCKS: tl.constexpr):
    """Rows f32 [n, n_blocks * 32] to int8 codes of that shape and float16 scales [n_blocks, n]."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < n_blocks
    k = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + row * x_stride + k, mask=inside[:, None], other=0.0)
    code, scale = quantize_blocks(value)
    tl.store(codes + row * (n_blocks * BLOCK) + k, code, mask=inside[:, None])
    tl.store(scales + block.to(tl.int64) * n + row, scale, mask=inside)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows f32 [n, n_in] by contract 4.1: int8 codes [n, n_in], float16 scales [n_in / 32, n]."""
    n, n_blocks = len(x), x.shape[1] // BLOCK.value
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty((n_blocks, n), dtype=torch.float16, device=x.device)
    _quantize_rows_kernel[(n, triton.cdiv(n_blocks, 32))](
        x, codes, scales, n, n_blocks, x.stride(0), BLOCKS=32, num_warps=4, enable_fp_fusion=False
    )
    return codes, scales


@triton.jit
def load_block_codes(block):
    """Codes int8 [A, B, 32] of the canonical blocks at pointers [A, B].

    Blocks are 34 bytes, so that codes can be read two at a time and no more.
    """
    A: tl.constexpr = block.shape[0]
    B: tl.constexpr = block.shape[1]
    pair = (block + CODES).to(tl.pointer_type(tl.int16))[:, :, None]
    pairs = tl.load(pair + tl.arange(0, BLOCK // 2)[None, None, :])
    return tl.reshape(tl.join(pairs.to(tl.int8), (pairs >> 8).to(tl.int8)), [A, B, BLOCK])


@triton.jit
def load_block_scales(block, inside):
    """Scales, as f32, of the canonical blocks at pointers of any shape: 0 where not `inside`."""
    return tl.load(block.to(tl.pointer_type(tl.float16)), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _add_in_order(total, terms, DEPTH: tl.constexpr):
    """total [R, C] + terms[:, :, 0] + terms[:, :, 1] and so on, each sum rounded."""
    R: tl.constexpr = terms.shape[0]
    C: tl.constexpr = terms.shape[1]
    if DEPTH == 1:
        total += tl.reshape(terms, [R, C])
    else:
        halves = tl.permute(tl.reshape(terms, [R, C, 2, DEPTH // 2]), (0, 1, 3, 2))
        first, second = tl.split(halves)
        total = _add_in_order(total, first, DEPTH // 2)
        total = _add_in_order(total, second, DEPTH // 2)
    return total


@triton.jit(do_not_specialize=["n", "n_out"])
def _matvec_blocks_kernel(
    weight,  # uint8 [n_out, n_blocks * 34]
    x,  # float32 [n, n_blocks * 32], rows x_stride apart; or their codes
    scales,  # float16 [n_blocks, n] of codes, else unused
    out,  # float32 [n, n_out]
    n,
    n_out,
    x_stride,
    N_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # rows of x at once, which the tensor cores take
    READ: tl.constexpr,  # of them, 1 for one row: it stands for all
    DEPTH: tl.constexpr,  # blocks at once, over the warps
    QUANTIZED: tl.constexpr,  # whether x is codes
):
    groups = tl.cdiv(n, COLUMNS)
    row = tl.program_id(0) // groups * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) % groups * COLUMNS
    column = first + tl.arange(0, READ)
    source = weight + tl.minimum(row, n_out - 1).to(tl.int64)[None, :] * (N_BLOCKS * BLOCK_BYTES)
    given = x + column.to(tl.int64)[None, :, None] * x_stride + tl.arange(0, BLOCK)[None, None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, N_BLOCKS, DEPTH):
        block = (start + tl.arange(0, DEPTH))[:, None]
        # past the end codes are those of the last block and row, and scales are 0
        at = source + tl.minimum(block, N_BLOCKS - 1) * BLOCK_BYTES
        w = load_block_codes(at)
        w_scale = load_block_scales(at, (block < N_BLOCKS) & (row < n_out)[None, :])
        there = (block < N_BLOCKS) & (column < n)[None, :]
        xs = tl.load(given + (block * BLOCK)[:, :, None], mask=there[:, :, None], other=0)
        if QUANTIZED:
            x_scale = tl.load(scales + block.to(tl.int64) * n + column, mask=there, other=0.0)
        else:
            xs, x_scale = quantize_blocks(tl.reshape(xs, [DEPTH * READ, BLOCK]))
            xs = tl.reshape(xs, [DEPTH, READ, BLOCK])
            x_scale = tl.reshape(x_scale, [DEPTH, READ])
        xs = tl.broadcast_to(xs, [DEPTH, COLUMNS, BLOCK])
        sums = tl.dot(w, tl.permute(xs, (0, 2, 1)), out_dtype=tl.int32)
        both = w_scale[:, :, None] * x_scale.to(tl.float32)[:, None, :]
        terms = tl.permute(sums.to(tl.float32) * both, (1, 2, 0))
        total = _add_in_order(total, terms, DEPTH)
    column = first + tl.arange(0, COLUMNS)
    out += column.to(tl.int64)[None, :] * n_out + row[:, None]
    tl.store(out, total, mask=(row < n_out)[:, None] & (column < n)[None, :])


@variant(formats=(KvFormat.Q8_0,), query=ROUNDING)
def matvec_blocks(weight: Any, x: Any, *, fmt: KvFormat, config: Config) -> Any:
    """x [n, n_in] @ weight.T, weight q8_0 blocks uint8 [n_out, n_in / 32 * 34]: f32 [n, n_out]."""
    weight, x = product(weight, x, fmt)
    n, n_out = len(x), len(weight)
    out = torch.empty((n, n_out), dtype=torch.float32, device=x.device)
    if not out.numel():
        return out
    pack = weight.numel() >= PACK_BYTES
    codes, scales = quantized(x) if pack else (x, x)
    _matvec_blocks_kernel[(triton.cdiv(n_out, 16) * triton.cdiv(n, 8),)](
        weight,
        codes,
        scales,
        out,
        n,
        n_out,
        codes.stride(0),
        N_BLOCKS=x.shape[1] // BLOCK.value,
        ROWS=16,
        COLUMNS=8,
        READ=1 if n == 1 else 8,
        DEPTH=16 if pack else 32,  # of a small weight all at once, for the least latency
        QUANTIZED=pack,
        num_warps=4 if pack else 16,
        enable_fp_fusion=False,
    )
    return out
