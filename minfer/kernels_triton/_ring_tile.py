"""What `ring` computes on one tile of keys: layouts, scores, values.

Scores are exact int8 products. The 16 rows of an MMA are (digit, block, head): a query head is
16-bit fixed point, 256 * hi + lo, and a row is zero outside the 32-element blocks of its parity,
so that one product keeps the scales of two blocks apart. Values are decoded to f16 in registers.
Which element of a head a lane holds is free as long as both operands agree; layouts are chosen so
that a lane reads 16 neighbouring bytes of K, and D/8 of V, and nothing moves between lanes.

W warps work on W tiles of BN keys: dimension 0 of every tensor is the warp.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

HEADS = tl.constexpr(4)  # query heads of a KV head that one program serves
DIGITS = tl.constexpr(127 * 256 + 127)  # the largest 256 * hi + lo of two signed digits


@gluon.constexpr_function
def _bits(first, end):
    """Powers of two: first, 2 * first, ... below end."""
    return [1 << i for i in range(first.bit_length() - 1, end.bit_length() - 1)]


@gluon.constexpr_function
def _warps(W, rank):
    return [[b] + [0] * (rank - 1) for b in _bits(1, W)]


@gluon.constexpr_function
def mma_layout(W):
    """A product a warp."""
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8]
    )


@gluon.jit
def score_layout(W: gl.constexpr, BN: gl.constexpr):
    """A tensor in the layout of scores [W, 8, BN]."""
    return _digit_rows(gl.zeros([W, 16, BN], gl.int32, layout=mma_layout(W)))[0]


@gluon.jit
def _digit_rows(x):
    """[W, 16, BN] as the rows of hi and those of lo, [W, 8, BN]."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, 8, x.shape[2]]), [0, 2, 3, 1]))


@gluon.constexpr_function
def copy_layout(W, BN, D):
    """Codes [W, BN, D/4] as they are copied: 16 bytes a lane, lanes along a row first."""
    move = [[0, 0, b] for b in _bits(4, D // 4)] + [[0, b, 0] for b in _bits(1, BN)]
    regs = [[0, 0, 1], [0, 0, 2], *move[5:]]
    return gl.DistributedLinearLayout(regs, move[:5], _warps(W, 3), [], [W, BN, D // 4])


@gluon.constexpr_function
def key_layout(W, BN, D):
    """K [W, BN, D/4] as the product reads it: lane (t, g) has bytes 16t of key g, per 64 bytes."""
    regs = [[0, 0, 1], [0, 0, 2]] + [[0, 0, b] for b in _bits(16, D // 4)]
    regs += [[0, b, 0] for b in _bits(8, BN)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, _warps(W, 3), [], [W, BN, D // 4])


@gluon.constexpr_function
def _part_layout(W, BN):
    """`key_layout` of 64 bytes. `join` makes a joined dimension the fastest of this one."""
    regs = [[0, 0, 1], [0, 0, 2]] + [[0, b, 0] for b in _bits(8, BN)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, _warps(W, 3), [], [W, BN, 16])


@gluon.constexpr_function
def value_layout(W, BN, D):
    """V [W, BN, D/4]: lane (t, g) has chunk g, D/8 bytes, of keys 2t and 2t + 1."""
    C = D // 32  # words of a chunk
    regs = [[0, 0, b] for b in _bits(1, C)] + [[0, 1, 0]] + [[0, b, 0] for b in _bits(8, BN)]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, C], [0, 0, 2 * C], [0, 0, 4 * C]]
    return gl.DistributedLinearLayout(regs, lanes, _warps(W, 3), [], [W, BN, D // 4])


@gluon.constexpr_function
def _pair_layout(W, BN, D):
    """Pairs of keys [W, BN/2, 8, D/32]: `value_layout` without the parity of the key."""
    C = D // 32
    regs = [[0, 0, 0, b] for b in _bits(1, C)] + [[0, b, 0, 0] for b in _bits(4, BN // 2)]
    lanes = [[0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, _warps(W, 4), [], [W, BN // 2, 8, C])


@gluon.constexpr_function
def ring_layout(W, BN, D):
    """A slot [W, BN, D/4] in shared memory, without bank conflicts for the three layouts above.

    Keys 2t and chunks g of V must fall into different banks, and so must keys g and chunks t of
    K: two bits of the key are added (exclusive or) to bits of the bank that chunks leave alone.
    """
    bases = [[0, 0, b] for b in _bits(1, D // 4)]
    if D == 64:
        bases += [[0, 1, 0], [0, 2, 8], [0, 5, 0]]
    else:
        bases += [[0, 1, 16], [0, 2, 8], [0, 4, 16]]
    bases += [[0, b, 0] for b in _bits(8, BN)]
    return gl.SharedLinearLayout(bases + _warps(W, 3))


@gluon.jit
def _query_part(q_ptr, n_heads, L: gl.constexpr, W: gl.constexpr, D: gl.constexpr):
    """64 elements of each head [W, 16, 64]: rows (digit, block, head).

    Column 16 a + 4 t + e is element 16 t + 4 a + e: lane t holds neighbouring bytes of a key.
    """
    r = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    w = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    d = 16 * (k // 4 % 4) + 4 * (k // 16) + k % 4
    at = (r % 4 * D)[None, :, None] + d[None, None, :] + (w * 0)[:, None, None]
    live = (r % 4 < n_heads)[None, :, None] & (d >= 0)[None, None, :] & (w >= 0)[:, None, None]
    return gl.load(q_ptr + at, mask=live, other=0.0)


@gluon.jit
def _digits(q, inverse, L: gl.constexpr):
    """Rows hi and lo of round(q * inverse), zero where the element is not of the row's block."""
    r = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    whole = ((q * inverse[:, :, None] + 12582912.0) - 12582912.0).to(gl.int32)
    hi = (whole + 128) >> 8
    digit = gl.where(r < 8, hi, whole - hi * 256)
    return gl.where(r // 4 % 2 == k // 8 % 2, digit, 0).to(gl.int8)


@gluon.jit
def query_digits(q_ptr, n_heads, factor, L: gl.constexpr, W: gl.constexpr, D: gl.constexpr):
    """Digits of a query's first and last 64 elements, and what scores are multiplied by [W, 8]."""
    MMA: gl.constexpr = mma_layout(W)
    LQ: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    a = _query_part(q_ptr, n_heads, LQ, W, D)
    b = _query_part(q_ptr + (D - 64), n_heads, LQ, W, D)
    amax = gl.max(gl.maximum(gl.abs(a), gl.abs(b)), axis=2)
    damage = gl.sum((a - a) + (b - b), axis=2)  # NaN if something is not finite, else 0
    d = gl.div_rn(gl.maximum(amax, 1e-30), DIGITS * 1.0)
    inverse = gl.div_rn(1.0, d)
    slope = gl.maximum(d * factor, 1e-37) + damage
    slope = gl.convert_layout(slope, gl.SliceLayout(2, MMA))
    slope, _ = gl.split(gl.permute(gl.reshape(slope, [W, 2, 8]), [0, 2, 1]))
    slope = gl.convert_layout(slope, gl.SliceLayout(2, L))
    return _digits(a, inverse, LQ), _digits(b, inverse, LQ), slope


@gluon.jit
def _products(q, words, W: gl.constexpr, BN: gl.constexpr):
    """q digits [W, 16, 64] times K words [W, BN, 16], f32 [W, 8, BN]: row 4 * block + head."""
    MMA: gl.constexpr = mma_layout(W)
    words = gl.convert_layout(words, _part_layout(W, BN), assert_trivial=True)
    two = gl.join(words, words)
    four = gl.reshape(gl.join(two, two), [W, BN, 64])  # four times a word: one for each byte
    codes = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [four], dtype=gl.int8, is_pure=True, pack=4
    )
    codes = gl.permute(gl.reshape(codes, [W, BN, 4, 4, 4]), [0, 3, 2, 4, 1])
    codes = gl.convert_layout(gl.reshape(codes, [W, 64, BN]), gl.DotOperandLayout(1, MMA, 4))
    hi, lo = _digit_rows(mma_v2(q, codes, gl.zeros([W, 16, BN], gl.int32, layout=MMA)))
    return (hi * 256 + lo).to(gl.float32)


@gluon.jit
def _block_scales(words, L: gl.constexpr):
    """The f16 scales of two blocks, int32 [W, BN], as f32 [W, 8, BN]: row 4 * block + head."""
    r = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    bits = words[:, None, :] >> (r // 4 * 16)[None, :, None]
    return bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _halves(words, W: gl.constexpr, BN: gl.constexpr):
    """[W, BN, 32] as two [W, BN, 16]."""
    return gl.split(gl.permute(gl.reshape(words, [W, BN, 2, 16]), [0, 1, 3, 2]))


@gluon.jit
def scores(q_a, q_b, words, scales, L: gl.constexpr, W: gl.constexpr, BN: gl.constexpr,
           D: gl.constexpr):  # fmt: skip
    """Scores over the query's scale, f32 [W, 8, BN], row 4 * half + head: halves are equal."""
    if D == 64:
        s = _products(q_a, words, W, BN) * _block_scales(scales, L)
    else:
        words_a, words_b = _halves(words, W, BN)
        s = _products(q_a, words_a, W, BN) * _block_scales(scales.to(gl.int32), L)
        scales_b = _block_scales((scales >> 32).to(gl.int32), L)
        s = gl.fma(_products(q_b, words_b, W, BN), scales_b, s)
    s = gl.sum(gl.reshape(s, [W, 2, 4, BN]), axis=1)
    s = gl.reshape(s[:, None, :, :].broadcast_to([W, 2, 4, BN]), [W, 8, BN])
    return gl.convert_layout(s, L)


@gluon.jit
def weights(s, seen, slope, m, l, acc, W: gl.constexpr):
    """One step of the online softmax: weights f16 [W, BN, 8] as an operand, and the state.

    m is the largest score times slope, so that weights are exp2 of differences of it.
    """
    MMA: gl.constexpr = mma_layout(W)
    s = gl.where(seen, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, axis=2) * slope)
    safe = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(gl.fma(s, slope[:, :, None], -safe[:, :, None]))
    decay = gl.exp2(m - safe)
    l = l * decay + gl.sum(p, axis=2)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, MMA))[:, None, :]
    p = gl.permute(p.to(gl.float16), [0, 2, 1])
    return gl.convert_layout(p, gl.DotOperandLayout(1, MMA, 2)), top, l, acc


@gluon.jit
def no_keys(L: gl.constexpr, W: gl.constexpr, D: gl.constexpr):
    """The state of no keys: m, l [W, 8], acc [W, D, 8], column 4 * half + head."""
    LM: gl.constexpr = gl.SliceLayout(2, L)
    m = gl.full([W, 8], float("-inf"), gl.float32, layout=LM)
    l = gl.zeros([W, 8], gl.float32, layout=LM)
    return m, l, gl.zeros([W, D, 8], gl.float32, layout=mma_layout(W))


@gluon.jit
def values(words, scales, W: gl.constexpr, BN: gl.constexpr, D: gl.constexpr):
    """V words [W, BN, D/4] and scales [W, BN] as f16 [W, D, BN], row 8 * byte + chunk."""
    C: gl.constexpr = D // 32
    PAIR: gl.constexpr = _pair_layout(W, BN, D)
    CHUNK: gl.constexpr = gl.SliceLayout(3, PAIR)
    even, odd = gl.split(gl.permute(gl.reshape(words, [W, BN // 2, 2, 8, C]), [0, 1, 3, 4, 2]))
    even = gl.convert_layout(even, PAIR)
    odd = gl.convert_layout(odd, PAIR)
    chunk = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, CHUNK)))
    shift = (chunk * C // 8 * 16)[None, None, :].to(scales.dtype)
    s_even, s_odd = gl.split(gl.reshape(scales, [W, BN // 2, 2]))
    s_even = gl.convert_layout(s_even, gl.SliceLayout(2, CHUNK))[:, :, None] >> shift
    s_odd = gl.convert_layout(s_odd, gl.SliceLayout(2, CHUNK))[:, :, None] >> shift
    pair = (s_odd.to(gl.int32) << 16) | (s_even.to(gl.int32) & 0xFFFF)
    pair = pair[:, :, :, None].broadcast_to([W, BN // 2, 8, C])
    x0, x1, x2, x3 = gl.inline_asm_elementwise(
        """{
        .reg .b32 e, o, t, u, c, g;
        mov.b32 c, 0x64806480;
        mov.b32 g, 0x64646464;
        xor.b32 e, $4, 0x80808080;
        xor.b32 o, $5, 0x80808080;
        prmt.b32 t, e, o, 0x5140;
        prmt.b32 u, e, o, 0x7362;
        prmt.b32 $0, t, g, 0x4140;
        prmt.b32 $1, t, g, 0x4342;
        prmt.b32 $2, u, g, 0x4140;
        prmt.b32 $3, u, g, 0x4342;
        sub.rn.f16x2 $0, $0, c;
        sub.rn.f16x2 $1, $1, c;
        sub.rn.f16x2 $2, $2, c;
        sub.rn.f16x2 $3, $3, c;
        mul.rn.f16x2 $0, $0, $6;
        mul.rn.f16x2 $1, $1, $6;
        mul.rn.f16x2 $2, $2, $6;
        mul.rn.f16x2 $3, $3, $6;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [even, odd, pair],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )  # bytes of two keys: 0x6400 + code + 128 is the f16 1152 + code, then times the scales
    pairs = gl.join(gl.join(x0, x2), gl.join(x1, x3))
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [pairs],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    v = gl.reshape(gl.join(even, odd), [W, BN // 2, 8, D // 8, 2])
    v = gl.reshape(gl.permute(v, [0, 3, 2, 1, 4]), [W, D, BN])
    return gl.convert_layout(v, gl.DotOperandLayout(0, mma_layout(W), 2))
