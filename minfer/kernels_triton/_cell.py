"""The bytes of a cell, as kernels write them (contract 3.5, 4.1).

f32 and f16 cells are rows of their elements, f16 ones padded to an even number. q8_0 cells lie in
two planes: int8 codes, and a float16 scale for every 32 of them, padded to an even number.
A canonical cell is its blocks of 34 bytes in order, a scale and then its codes.
"""

import triton
import triton.language as tl

from minfer import format
from minfer.kernels_triton._tile import BLOCK, F16, Q8_0

BLOCK_BYTES = tl.constexpr(format.BLOCK_BYTES)
CODES = tl.constexpr(format.BLOCK_BYTES - format.BLOCK)  # byte offset of a block's codes
F16_NAN = tl.constexpr(0x7E00)
F16_INF = tl.constexpr(0x7C00)
F32_INF = tl.constexpr(0x7F800000)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest whole number, to even
ROUND_BITS = tl.constexpr(0x4B400000)


@triton.jit
def quantize_blocks(x):
    """x f32 [n, 32] by contract 4.1 and 4.2: int8 codes [n, 32] and float16 scales [n]."""
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    d = tl.div_rn(amax.to(tl.float32, bitcast=True), 127.0)
    scale = d.to(tl.float16).to(tl.int16, bitcast=True)
    poisoned = (amax >= F32_INF) | (scale == F16_INF)
    empty = poisoned | (scale == 0)
    inverse = tl.div_rn(1.0, tl.where(empty, 1.0, d))
    # x * inverse + ROUND has the code in its low bits; no float is converted, NaN is harmless
    shifted = x * inverse[:, None] + ROUND
    codes = shifted.to(tl.int32, bitcast=True) - ROUND_BITS
    codes = tl.where(empty[:, None], 0, codes).to(tl.int8)
    scale = tl.where(poisoned, F16_NAN, scale).to(tl.int16)
    return codes, scale.to(tl.float16, bitcast=True)


@triton.jit
def to_f16(x):
    """f32 to the nearest float16, to even; overflow is inf, and NaN keeps its sign and payload."""
    bits = x.to(tl.int32, bitcast=True)
    nan = ((bits >> 16) & 0x8000) | ((bits >> 13) & 0x1FF) | F16_NAN
    rounded = x.to(tl.float16).to(tl.int16, bitcast=True)
    stored = tl.where((bits & 0x7FFFFFFF) > F32_INF, nan.to(tl.int16), rounded)
    return stored.to(tl.float16, bitcast=True)


@triton.jit
def load_elements(plane, scales, cell, element, mask, N: tl.constexpr, FMT: tl.constexpr):
    """Elements of cells of N as f32, decoded exactly; 0 where not `mask`.

    cell, element: int32, of shapes that broadcast to that of `mask`.
    """
    at = cell.to(tl.int64)
    if FMT == Q8_0:
        n_scales: tl.constexpr = (N // BLOCK + 1) // 2 * 2
        code = tl.load(plane + (at * N + element), mask=mask, other=0)
        scale = tl.load(scales + (at * n_scales + element // BLOCK), mask=mask, other=0.0)
        return code.to(tl.float32) * scale.to(tl.float32)
    width: tl.constexpr = (N + 1) // 2 * 2 if FMT == F16 else N
    return tl.load(plane + (at * width + element), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_elements(plane, scales, cell, first, limit, x, N: tl.constexpr, FMT: tl.constexpr):
    """x f32 [R, C] into a cell of N elements: row r to elements first[r] and on, `limit` at most.

    A row whose first is N or more is left out. q8_0: first, C and limit are whole blocks.
    """
    at = cell.to(tl.int64)
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    inside = (first < N)[:, None]
    column = tl.arange(0, C)[None, :]
    place, mask = first[:, None] + column, inside & (column < limit)
    if FMT == Q8_0:
        n_scales: tl.constexpr = (N // BLOCK + 1) // 2 * 2
        codes, scale = quantize_blocks(tl.reshape(x, [R * C // BLOCK, BLOCK]))
        tl.store(plane + (at * N + place), tl.reshape(codes, [R, C]), mask=mask)
        block = tl.arange(0, C // BLOCK)[None, :]
        place, mask = first[:, None] // BLOCK + block, inside & (block < limit // BLOCK)
        scale = tl.reshape(scale, [R, C // BLOCK])
        tl.store(scales + (at * n_scales + place), scale, mask=mask)
    else:
        width: tl.constexpr = (N + 1) // 2 * 2 if FMT == F16 else N
        tl.store(plane + (at * width + place), to_f16(x) if FMT == F16 else x, mask=mask)


@triton.jit
def store_padding(plane, scales, cell, N: tl.constexpr, FMT: tl.constexpr):
    """Zeros past the elements of a cell of N."""
    at = cell.to(tl.int64)
    if FMT == F16 and N % 2 == 1:
        tl.store(plane + at * (N + 1) + N, 0.0)
    if FMT == Q8_0 and N // BLOCK % 2 == 1:
        n_blocks: tl.constexpr = N // BLOCK
        tl.store(scales + at * (n_blocks + 1) + n_blocks, 0.0)


@triton.jit
def load_canonical(codes, scales, row, block, mask, width):
    """q8_0 blocks of canonical cells: int8 codes [n, 32] and f32 scales [n]; 0 where not `mask`.

    codes, scales: the same cells as int8 and as float16. row, block: int32 [n]. width: bytes.
    """
    start = row.to(tl.int64) * width + block * BLOCK_BYTES
    place = (start + CODES)[:, None] + tl.arange(0, BLOCK)[None, :]
    code = tl.load(codes + place, mask=mask[:, None], other=0)
    return code, tl.load(scales + start // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_canonical(codes, scales, row, block, n_blocks, x, width):
    """x f32 [n, 32] to the blocks [n] of a row of canonical cells, padding included.

    Blocks from n_blocks on are zeros in x; the first of them is the padding of an odd number.
    """
    code, scale = quantize_blocks(x)
    start = row.to(tl.int64) * width + block * BLOCK_BYTES
    place = (start + CODES)[:, None] + tl.arange(0, BLOCK)[None, :]
    tl.store(codes + place, code, mask=(block < n_blocks)[:, None])
    tl.store(scales + start // 2, scale, mask=block < n_blocks + n_blocks % 2)
