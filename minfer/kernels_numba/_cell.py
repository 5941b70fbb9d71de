"""The bytes of a cell: the only file of this package that knows them.

f32 and f16 cells are their elements in order; a q8_0 cell is blocks of 34 bytes, an f16 scale and
32 int8 codes (contract 3.5). `load_*` pieces are emitted into larger kernels; the intrinsics at
the end work on whole rows given by address.
"""

from __future__ import annotations

from typing import Any

from minfer.format import BLOCK, BLOCK_BYTES, KvFormat
from minfer.kernels_numba._emit import (
    F32,
    I8,
    I16,
    I32,
    LANES,
    ROUND,
    VF,
    VH,
    VI,
    Emitter,
    vector,
)
from minfer.kernels_numba._ir import intrinsic_of

CHAIN = 32  # elements of a head row that one fma chain of a score covers; part of the answer
CODES = 2  # byte offset of a block's codes
FLIP = -0x7F7F7F80  # 0x80808080: int8 to uint8, 128 added to each byte
F16_NAN, F16_INF, F32_INF = 0x7E00, 0x7C00, 0x7F800000
ROUND_BITS = 0x4B400000  # the bits of ROUND


def head_bytes(fmt: KvFormat, head_dim: int) -> int:
    """Bytes from one KV head's elements to the next inside a cell (q8_0: whole blocks)."""
    if fmt is KvFormat.Q8_0:
        return head_dim // BLOCK * BLOCK_BYTES
    return head_dim * (4 if fmt is KvFormat.F32 else 2)


# -- reading --------------------------------------------------------------------------------------


def _load_scale(e: Emitter, block: Any) -> Any:
    """The scale of a q8_0 block in sixteen f32 lanes."""
    return e.f16_to_f32(e.load_splat(I16, block))


def _load_codes(e: Emitter, block: Any, half: int) -> Any:
    """Codes 16 * half .. + 15 of a q8_0 block, as f32."""
    codes = e.load(vector(I8), block, CODES + LANES * half)
    return e.builder.sitofp(e.builder.sext(codes, VI), VF)


def load_block(e: Emitter, block: Any) -> tuple[Any, Any]:
    """The 32 elements of a q8_0 block as two <16 x float>, exact (contract 4.6)."""
    scale = _load_scale(e, block)
    low, high = (_load_codes(e, block, half) for half in (0, 1))
    return e.builder.fmul(low, scale), e.builder.fmul(high, scale)


def load_16(e: Emitter, fmt: KvFormat, row: Any, count: Any = None) -> Any:
    """The first 16 elements of an f32 or f16 row as <16 x float>, exact.

    count (i64, below 16): only so many are read, the other lanes are zero.
    """
    kind = VF if fmt is KvFormat.F32 else VH
    values = e.load(kind, row) if count is None else e.load_first(row, 0, count, kind)
    return values if fmt is KvFormat.F32 else e.f16_to_f32(values)


def row_quads(e: Emitter, first: Any, stride: Any) -> list[Any]:
    """Addresses of 16 rows from four bases and three strides: few enough for registers."""
    steps = [0, stride, e.mul(stride, 2), e.mul(stride, 3)]
    bases = e.rows(first, e.mul(stride, 4), 4)
    return [e.add(base, step) for base in bases for step in steps]


def load_16_rows(e: Emitter, fmt: KvFormat, first: Any, stride: Any) -> list[Any]:
    """Sixteen elements of 16 f32 or f16 rows: vector i holds element i, lane r is row r."""
    rows = row_quads(e, first, stride)

    def load_quad(row: int, quad: int) -> Any:
        if fmt is KvFormat.F32:
            return e.load(vector(F32, 4), rows[row], 16 * quad)
        return e.f16_to_f32(e.load(vector(I16, 4), rows[row], 8 * quad))

    return e.transpose(load_quad, LANES // 4)


def load_16_blocks(e: Emitter, first: Any, stride: Any) -> tuple[list[Any], Any]:
    """The q8_0 blocks of 16 rows at `first`, a row a lane.

    Returns eight <16 x i32>, each four codes of every row with 128 added to make them unsigned,
    and the 16 scales as f32: one conversion for all.
    """
    rows = row_quads(e, first, stride)
    quads = e.transpose(
        lambda row, quad: e.load(vector(I32, 4), rows[row], CODES + 16 * quad), BLOCK // 16
    )
    codes = [e.builder.xor(four, e.const(VI, FLIP)) for four in quads]
    return codes, e.f16_to_f32(e.gather(I16, rows))


def dot_16_blocks(e: Emitter, first: Any, stride: Any, codes: Any) -> tuple[Any, Any]:
    """The q8_0 blocks of 16 rows at `first` times the 32 int8 at `codes`, a row a lane.

    Returns sums <16 x i32>, too large by 128 times the sum of `codes`, and the scales as f32.
    One product of codes needs fewer shuffles this way than by `load_16_blocks`.
    """
    build, rows, half = e.builder, row_quads(e, first, stride), vector(I32, 8)
    right = e.load(half, codes)
    right = e.concat(right, right)
    sums = []
    for r in range(LANES // 2):
        left = e.concat(e.load(half, rows[r], CODES), e.load(half, rows[r + 8], CODES))
        left = build.xor(left, e.const(VI, FLIP))
        sums.append(e.dot_u8_s8(e.const(VI, 0), left, right))
    # neighbours of a row are added while rows r and r + 8 spread over the lanes
    for width, low, high in (
        (4, [0, 4, 1, 5], [2, 6, 3, 7]),
        (4, [0, 1, 4, 5], [2, 3, 6, 7]),
        (8, [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
    ):
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [
            build.add(e.interleave(a, b, low, width), e.interleave(a, b, high, width))
            for a, b in pairs
        ]
    return sums[0], e.f16_to_f32(e.gather(I16, rows))


def dot_one_block(e: Emitter, block: Any, codes: Any) -> tuple[Any, Any]:
    """`dot_16_blocks` of one row: the sum as i32 and the scale as f32."""
    half = vector(I32, 8)
    left = e.builder.xor(e.load(half, block, CODES), e.const(half, FLIP))
    both = [e.concat(side, e.const(half, 0)) for side in (left, e.load(half, codes))]
    total = e.reduce(e.dot_u8_s8(e.const(VI, 0), *both), e.builder.add)
    return total, e.lane(e.f16_to_f32(e.load_splat(I16, block, 0, 4)), 0)


# -- q8_0 blocks ----------------------------------------------------------------------------------


def quantize_block(e: Emitter, source: Any) -> tuple[Any, tuple[Any, Any], Any]:
    """32 f32 at `source` by contract 4.1 and 4.2.

    Returns the scale's f16 bits (i16), the codes as two <16 x i32>, and the scale as f32.
    """
    build = e.builder
    values = (e.load(VF, source), e.load(VF, source, 4 * LANES))
    magnitudes = [build.and_(build.bitcast(v, VI), e.const(VI, 0x7FFFFFFF)) for v in values]

    def unsigned_max(a: Any, b: Any) -> Any:
        return build.select(build.icmp_unsigned(">", a, b), a, b)

    amax = e.reduce(unsigned_max(*magnitudes), unsigned_max)
    d = build.fdiv(build.bitcast(amax, F32), e.const(F32, 127.0))
    scale = e.lane(e.f32_to_f16(e.splat(d, 4)), 0)
    damaged = build.icmp_unsigned(">=", amax, e.const(I32, F32_INF))
    infinite = build.icmp_unsigned("==", scale, e.const(I16, F16_INF))
    poisoned = build.or_(damaged, infinite)
    empty = build.or_(poisoned, build.icmp_unsigned("==", scale, e.const(I16, 0)))
    scale = build.select(poisoned, e.const(I16, F16_NAN), scale)
    inverse, clear = e.splat(build.fdiv(e.const(F32, 1.0), d)), e.splat(empty)
    codes = []
    for v in values:
        # v * inverse + ROUND has the code in its low bits; no float is converted, NaN is harmless
        shifted = build.fadd(build.fmul(v, inverse), e.const(VF, ROUND))
        code = build.sub(build.bitcast(shifted, VI), e.const(VI, ROUND_BITS))
        codes.append(build.select(clear, e.const(VI, 0), code))
    decoded = e.lane(e.f16_to_f32(e.splat(scale, 4)), 0)
    return scale, (codes[0], codes[1]), decoded


def _quantize_row(e: Emitter, source: Any, cell: Any, n: Any) -> None:
    blocks = e.builder.udiv(n, e.index(BLOCK))
    with e.loop(blocks) as i:
        scale, codes, _ = quantize_block(e, e.add(source, e.mul(i, 4 * BLOCK)))
        block = e.add(cell, e.mul(i, BLOCK_BYTES))
        e.store(scale, block)
        for half in (0, 1):
            e.store(e.builder.trunc(codes[half], vector(I8)), block, CODES + LANES * half)
    # 34 bytes a block: an odd number of blocks leaves two bytes of the last word
    odd = e.builder.icmp_unsigned("==", e.builder.and_(blocks, e.index(1)), e.index(1))
    with e.when(odd):
        e.store(e.const(I16, 0), cell, e.mul(blocks, BLOCK_BYTES))


def _dequantize_row(e: Emitter, cell: Any, target: Any, n: Any) -> None:
    with e.loop(e.builder.udiv(n, e.index(BLOCK))) as i:
        block, out = e.add(cell, e.mul(i, BLOCK_BYTES)), e.add(target, e.mul(i, 4 * BLOCK))
        for half, values in enumerate(load_block(e, block)):
            e.store(values, out, 4 * LANES * half)


def dot_block(e: Emitter, a: Any, b: Any) -> Any:
    """The term of contract 4.5 of two q8_0 blocks: float(isum) * (sa * sb), f32."""
    build, bytes32, pairs = e.builder, vector(I8, 32), vector(I16, 32)
    codes = [build.sext(e.load(bytes32, block, CODES), pairs) for block in (a, b)]
    total = e.reduce(e.pair_sums(*codes), build.add)
    scales = [e.lane(e.f16_to_f32(e.load_splat(I16, block, 0, 4)), 0) for block in (a, b)]
    return build.fmul(build.sitofp(total, F32), build.fmul(*scales))


def _dot_row(e: Emitter, a: Any, b: Any, n: Any) -> Any:
    total = e.variable(e.const(F32, 0.0))
    with e.loop(e.builder.udiv(n, e.index(BLOCK))) as i:
        offset = e.mul(i, BLOCK_BYTES)
        term = dot_block(e, e.add(a, offset), e.add(b, offset))
        e.set(total, e.builder.fadd(e.get(total), term))
    return e.get(total)


# -- f32 and f16 rows -----------------------------------------------------------------------------


def _store_f32(e: Emitter, source: Any, cell: Any, n: Any) -> None:
    _copy(e, source, cell, n, 4, 4, lambda v: v)


def _store_f16(e: Emitter, source: Any, cell: Any, n: Any) -> None:
    _copy(e, source, cell, n, 4, 2, e.f32_to_f16)
    odd = e.builder.icmp_unsigned("==", e.builder.and_(n, e.index(1)), e.index(1))
    with e.when(odd):
        e.store(e.const(I16, 0), cell, e.mul(n, 2))


def _load_f16(e: Emitter, cell: Any, target: Any, n: Any) -> None:
    _copy(e, cell, target, n, 2, 4, e.f16_to_f32)


def _copy(
    e: Emitter, source: Any, target: Any, n: Any, width: int, out_width: int, convert: Any
) -> None:
    """n elements of `width` bytes through `convert`, sixteen at a time, then one at a time."""
    kind = F32 if width == 4 else I16
    whole = e.builder.and_(n, e.index(-LANES))
    with e.loop(e.builder.udiv(whole, e.index(LANES))) as i:
        values = e.load(vector(kind), source, e.mul(i, LANES * width))
        e.store(convert(values), target, e.mul(i, LANES * out_width))
    with e.loop(e.builder.sub(n, whole)) as i:
        at = e.add(whole, i)
        value = convert(e.load_splat(kind, source, e.mul(at, width), 4))
        e.store(e.lane(value, 0), target, e.mul(at, out_width))


# -- whole rows by address: (source, target, n elements) ------------------------------------------

quantize_row = intrinsic_of("ppp:v", _quantize_row)  # f32 row, q8_0 cell, n % 32 == 0
dequantize_row = intrinsic_of("ppp:v", _dequantize_row)  # q8_0 cell, f32 row, n % 32 == 0
dot_row = intrinsic_of("ppp:f", _dot_row)  # q8_0 cell, q8_0 cell, n % 32 == 0
store_f32 = intrinsic_of("ppp:v", _store_f32)  # f32 row, f32 cell
store_f16 = intrinsic_of("ppp:v", _store_f16)  # f32 row, f16 cell, padding zeroed
load_f16 = intrinsic_of("ppp:v", _load_f16)  # f16 cell, f32 row

STORE_ROW = {KvFormat.F32: store_f32, KvFormat.F16: store_f16, KvFormat.Q8_0: quantize_row}
LOAD_ROW = {KvFormat.F32: store_f32, KvFormat.F16: load_f16, KvFormat.Q8_0: dequantize_row}
