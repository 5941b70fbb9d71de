"""`ring`: decode over q8_0 cells in Gluon; every warp streams its own keys through shared memory.

A program serves one (query, KV head). Its W warps are W streams that never meet: each takes one
aligned group of partitions of 256 keys, copies tiles of BN keys asynchronously into a ring of
STAGES slots, and writes the state of the group, which `combine` joins with the others.

Scores are exact int8 products. The 16 rows of an MMA are (digit, block, head): a query head is
16-bit fixed point, 256 * hi + lo, and a row is zero outside the 32-element blocks of its parity,
so that one product keeps the scales of two blocks apart. Values are decoded to f16 in registers.
Which element of a head a lane holds is free as long as both operands agree; layouts are chosen so
that a lane reads 16 neighbouring bytes of K, and D/8 of V, and nothing moves between lanes.

The 8 columns of the values' accumulator are (half, head): it holds two partitions. A row of the
half that a tile is not in sees no key of it, which is exactly neutral.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from minfer.kernels_triton import _gather, _softmax
from minfer.kernels_triton._arguments import multiprocessors
from minfer.kernels_triton._call import Call
from minfer.ops import Config

WARPS = 12  # that a multiprocessor holds
REGISTERS = 168  # a thread may have, so that they fit
HEADS = tl.constexpr(4)  # query heads of a KV head that one program serves
DIGITS = tl.constexpr(127 * 256 + 127)  # the largest 256 * hi + lo of two signed digits
PARTITION = _softmax.PARTITION
LARGEST = tl.constexpr(1 << 22)  # partitions of a group: no limit

query_window = gluon.jit(_gather.query_window.fn)
cell_of = gluon.jit(_gather.cell_of.fn)
group_size = gluon.jit(_softmax.group_size.fn)


@gluon.constexpr_function
def _bits(first, end):
    """Powers of two: first, 2 * first, ... below end."""
    return [1 << i for i in range(first.bit_length() - 1, end.bit_length() - 1)]


@gluon.constexpr_function
def _warps(W, rank):
    return [[b] + [0] * (rank - 1) for b in _bits(1, W)]


@gluon.constexpr_function
def _copy_layout(W, BN, D):
    """Codes [W, BN, D/4] as they are copied: 16 bytes a lane, lanes along a row first."""
    move = [[0, 0, b] for b in _bits(4, D // 4)] + [[0, b, 0] for b in _bits(1, BN)]
    regs = [[0, 0, 1], [0, 0, 2]] + move[5:]
    return gl.DistributedLinearLayout(regs, move[:5], _warps(W, 3), [], [W, BN, D // 4])


@gluon.constexpr_function
def _key_layout(W, BN, D):
    """K [W, BN, D/4] as the product reads it: lane (t, g) has bytes 16t of key g, per 64 bytes."""
    regs = [[0, 0, 1], [0, 0, 2]] + [[0, 0, b] for b in _bits(16, D // 4)]
    regs += [[0, b, 0] for b in _bits(8, BN)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, _warps(W, 3), [], [W, BN, D // 4])


@gluon.constexpr_function
def _part_layout(W, BN):
    """`_key_layout` of 64 bytes. `join` makes a joined dimension the fastest of this one."""
    regs = [[0, 0, 1], [0, 0, 2]] + [[0, b, 0] for b in _bits(8, BN)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, _warps(W, 3), [], [W, BN, 16])


@gluon.constexpr_function
def _value_layout(W, BN, D):
    """V [W, BN, D/4]: lane (t, g) has chunk g, D/8 bytes, of keys 2t and 2t + 1."""
    C = D // 32  # words of a chunk
    regs = [[0, 0, b] for b in _bits(1, C)] + [[0, 1, 0]] + [[0, b, 0] for b in _bits(8, BN)]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, C], [0, 0, 2 * C], [0, 0, 4 * C]]
    return gl.DistributedLinearLayout(regs, lanes, _warps(W, 3), [], [W, BN, D // 4])


@gluon.constexpr_function
def _pair_layout(W, BN, D):
    """Pairs of keys [W, BN/2, 8, D/32]: `_value_layout` without the parity of the key."""
    C = D // 32
    regs = [[0, 0, 0, b] for b in _bits(1, C)] + [[0, b, 0, 0] for b in _bits(4, BN // 2)]
    lanes = [[0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, _warps(W, 4), [], [W, BN // 2, 8, C])


@gluon.constexpr_function
def _ring_layout(W, BN, D):
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
def _issue(
    K, KS, V, VS, k_slot, v_slot, ks_slot, vs_slot, start, step, window, n_keys,
    ROW: gl.constexpr, SCALE_ROW: gl.constexpr, W: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Start copying one tile a warp, keys start + w * step; all but 0 .. n_keys-1 become zeros."""
    L: gl.constexpr = _copy_layout(W, BN, D)
    w = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    word = gl.arange(0, D // 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    key = start + w[:, None, None] * step + n[None, :, None]
    at = _cell(key, window, MODE).to(gl.int64) * ROW + word
    seen = (key.to(gl.uint32) < n_keys.to(gl.uint32)) & (word >= 0)
    LS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    w = gl.arange(0, W, layout=gl.SliceLayout(1, LS))
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, LS))
    key = start + w[:, None] * step + n[None, :]
    scale_at = _cell(key, window, MODE).to(gl.int64) * SCALE_ROW
    scale_seen = key.to(gl.uint32) < n_keys.to(gl.uint32)
    async_copy.async_copy_global_to_shared(k_slot, K + at, mask=seen)
    async_copy.async_copy_global_to_shared(ks_slot, KS + scale_at, mask=scale_seen)
    async_copy.async_copy_global_to_shared(v_slot, V + at, mask=seen)
    async_copy.async_copy_global_to_shared(vs_slot, VS + scale_at, mask=scale_seen)
    async_copy.commit_group()


@gluon.jit
def _cell(key, window, MODE: gl.constexpr):
    e0, e1, e2, b0, b1, b2, b3 = window
    return cell_of(key, e0, e1, e2, b0, b1, b2, b3, MODE)


@gluon.jit
def _query_part(q_ptr, n_heads, L: gl.constexpr, D: gl.constexpr):
    """64 elements of each head, [W, 16, 64]: row 8 * digit + 4 * block + head, column
    16w + 4t + e for element 16t + 4w + e, the order in which lanes hold a key."""
    r = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    W: gl.constexpr = gl.num_warps()
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
def _products(q, words, MMA: gl.constexpr, W: gl.constexpr, BN: gl.constexpr):
    """q digits [W, 16, 64] times K words [W, BN, 16], f32 [W, 8, BN]: row 4 * block + head."""
    words = gl.convert_layout(words, _part_layout(W, BN), assert_trivial=True)
    two = gl.join(words, words)
    four = gl.reshape(gl.join(two, two), [W, BN, 64])
    codes = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [four], dtype=gl.int8, is_pure=True, pack=4
    )
    codes = gl.permute(gl.reshape(codes, [W, BN, 4, 4, 4]), [0, 3, 2, 4, 1])
    codes = gl.convert_layout(gl.reshape(codes, [W, 64, BN]), gl.DotOperandLayout(1, MMA, 4))
    sums = mma_v2(q, codes, gl.zeros([W, 16, BN], gl.int32, layout=MMA))
    hi, lo = gl.split(gl.permute(gl.reshape(sums, [W, 2, 8, BN]), [0, 2, 3, 1]))
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
def _scores(q0, q1, words, scales, MMA: gl.constexpr, L: gl.constexpr, W: gl.constexpr, BN: gl.constexpr,
            D: gl.constexpr):  # fmt: skip
    """Scores over the query's scale, f32 [W, 8, BN], row 4 * half + head: halves are equal."""
    if D == 64:
        s = _products(q0, words, MMA, W, BN) * _block_scales(scales, L)
    else:
        words0, words1 = _halves(words, W, BN)
        s = _products(q0, words0, MMA, W, BN) * _block_scales(scales.to(gl.int32), L)
        scales1 = _block_scales((scales >> 32).to(gl.int32), L)
        s = gl.fma(_products(q1, words1, MMA, W, BN), scales1, s)
    s = gl.sum(gl.reshape(s, [W, 2, 4, BN]), axis=1)
    s = gl.reshape(s[:, None, :, :].broadcast_to([W, 2, 4, BN]), [W, 8, BN])
    return gl.convert_layout(s, L)


@gluon.jit
def _values(words, scales, MMA: gl.constexpr, W: gl.constexpr, BN: gl.constexpr, D: gl.constexpr):
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
    return gl.convert_layout(v, gl.DotOperandLayout(0, MMA, 2))


@gluon.jit
def _join(m0, l0, acc0, m1, l1, acc1):
    """One state of two: m, l [W, 4], acc [W, 4, D]."""
    m = gl.maximum(m0, m1)
    safe = gl.where(m == float("-inf"), 0.0, m)
    w0, w1 = gl.exp2(m0 - safe), gl.exp2(m1 - safe)
    wide: gl.constexpr = gl.SliceLayout(2, acc0.type.layout)
    a0, a1 = gl.convert_layout(w0, wide)[:, :, None], gl.convert_layout(w1, wide)[:, :, None]
    return m, l0 * w0 + l1 * w1, acc0 * a0 + acc1 * a1


@gluon.jit
def _join_halves(m, l, acc, W: gl.constexpr, D: gl.constexpr):
    """The state of two partitions, as `_join` has it, of m, l [W, 8] and acc [W, D, 8]."""
    m = gl.reshape(m, [W, 2, 4])
    top = gl.max(m, axis=1)
    weight = gl.exp2(m - gl.where(top == float("-inf"), 0.0, top)[:, None, :])
    total = gl.sum(gl.reshape(l, [W, 2, 4]) * weight, axis=1)
    weight = gl.convert_layout(gl.reshape(weight, [W, 8]), gl.SliceLayout(1, acc.type.layout))
    acc = gl.reshape(acc * weight[:, None, :], [W, D // 8, 8, 2, 4])
    return top, total, gl.reshape(gl.permute(gl.sum(acc, axis=3), [0, 3, 2, 1]), [W, 4, D])


@gluon.jit
def _rows(state_ptr, acc_ptr, row, n_rows, n_heads, live, m, acc):
    """Where row `row` + w * step of each head lies in both arrays, and which exist."""
    L1: gl.constexpr = m.type.layout
    L2: gl.constexpr = acc.type.layout
    W: gl.constexpr = m.shape[0]
    h = gl.arange(0, 4, layout=gl.SliceLayout(0, L1))[None, :]
    w = gl.arange(0, W, layout=gl.SliceLayout(1, L1))[:, None]
    states = state_ptr + (h * n_rows + row + w) * 2
    states_live = (h < n_heads) & (w < live)
    h = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, L2)))[None, :, None]
    w = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, L2)))[:, None, None]
    d = gl.arange(0, acc.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, L2)))[None, None, :]
    accs = acc_ptr + (h * n_rows + row + w) * acc.shape[2] + d
    return states, states_live, accs, (h < n_heads) & (w < live) & (d >= 0)


@gluon.jit
def _push(m, l, acc, index, last, state_ptr, acc_ptr, row, spare, spare_step, n_rows, n_heads, live,
          W: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Join pair `index` of a group with those before it, in tree order; write what came of it.

    A pair waits in row spare + level * spare_step until its right neighbour of 2**level pairs is
    complete. The last pair takes all that wait, and goes to `row`.
    """
    m, l, acc = _join_halves(m, l, acc, W, D)
    left = gl.where(last, index, index & ~(index + 1))
    while left > 0:
        if left & 1:
            states, states_live, accs, accs_live = _rows(
                state_ptr, acc_ptr, spare, n_rows, n_heads, live, m, acc
            )
            m0 = gl.load(states, mask=states_live, other=float("-inf"))
            l0 = gl.load(states + 1, mask=states_live, other=0.0)
            m, l, acc = _join(m0, l0, gl.load(accs, mask=accs_live, other=0.0), m, l, acc)
        left = left >> 1
        spare += spare_step
    states, states_live, accs, accs_live = _rows(
        state_ptr, acc_ptr, gl.where(last, row, spare), n_rows, n_heads, live, m, acc
    )
    gl.store(states, m + (l - l), mask=states_live)  # NaN where the sum is
    gl.store(states + 1, l, mask=states_live)
    gl.store(accs, acc, mask=accs_live)


@gluon.jit
def _query(
    q_ptr, n_heads, factor, MMA: gl.constexpr, LM: gl.constexpr, W: gl.constexpr, D: gl.constexpr
):
    """Digits of a query's first and last 64 elements, and what scores are multiplied by [W, 8]."""
    L: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    a = _query_part(q_ptr, n_heads, L, D)
    b = _query_part(q_ptr + (D - 64), n_heads, L, D)
    amax = gl.max(gl.maximum(gl.abs(a), gl.abs(b)), axis=2)
    damage = gl.sum((a - a) + (b - b), axis=2)  # NaN if something is not finite, else 0
    amax = gl.maximum(amax, 1e-30)
    slope = gl.maximum(amax * (1.0 / DIGITS) * factor, 1e-37) + damage
    slope = gl.convert_layout(slope, gl.SliceLayout(2, MMA))
    slope, _ = gl.split(gl.permute(gl.reshape(slope, [W, 2, 8]), [0, 2, 1]))
    return (
        _digits(a, DIGITS / amax, L), _digits(b, DIGITS / amax, L), gl.convert_layout(slope, LM)
    )  # fmt: skip


@gluon.jit
def _score_layout(MMA: gl.constexpr, W: gl.constexpr, BN: gl.constexpr):
    """A tensor in the layout of scores [W, 8, BN]."""
    z = gl.zeros([W, 16, BN], gl.int32, layout=MMA)
    z, _ = gl.split(gl.permute(gl.reshape(z, [W, 2, 8, BN]), [0, 2, 3, 1]))
    return z


@gluon.jit(do_not_specialize=["width", "n_split", "n_rows"])
def _attn_ring_kernel(
    q_ptr, k_ptr, ks_ptr, v_ptr, vs_ptr, positions_ptr, window_ptr, state_ptr, acc_ptr,
    width, factor, n_split, n_rows,
    HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, MODE: gl.constexpr,
    W: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Program (query, split, KV head, up to four of its query heads); neighbours share cells.

    q f32 [n_q, n_head, D]; codes as int32 [n_cells, HKV * D/4]; scales of a head as one int32 or
    int64 [n_cells, HKV]; state f32 [n_q, n_head, n_rows, 2], acc f32 [n_q, n_head, n_rows, D].
    """
    PACKS: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8]
    )
    L: gl.constexpr = _score_layout(MMA, W, BN).type.layout
    LM: gl.constexpr = gl.SliceLayout(2, L)
    LV: gl.constexpr = _value_layout(W, BN, D)
    ROW: gl.constexpr = HKV * (D // 4)
    program = gl.program_id(0)
    pack = program % PACKS
    kv = program // PACKS % HKV
    split = program // (PACKS * HKV) % n_split
    query = program // (PACKS * HKV) // n_split

    pos = gl.load(positions_ptr + query)
    first, e0, e1, e2, b0, b1, b2, b3 = query_window(window_ptr, query, pos, width, MODE)
    # keys are counted from the first one seen
    window = (e0 - first, e1 - first, e2 - first, b0 + first, b1 + first, b2 + first, b3 + first)
    n_keys = pos + 1 - first
    p_first, p_last = first // PARTITION, pos // PARTITION
    span = group_size(p_first, p_last, n_split * W, LARGEST) * PARTITION  # keys of a group
    n_groups = pos // span - first // span + 1
    start = (first // span + split * W) * span - first
    if split * W < n_groups:
        n_heads = gl.minimum(GROUP - pack * HEADS, HEADS)
        head = (query * HKV + kv).to(gl.int64) * GROUP + pack * HEADS
        qa, qb, slope = _query(q_ptr + head * D, n_heads, factor, MMA, LM, W, D)
        state_ptr += head * n_rows * 2
        acc_ptr += head * n_rows * D
        k_ptr += kv * (D // 4)
        v_ptr += kv * (D // 4)
        ks_ptr += kv
        vs_ptr += kv

        SCALE: gl.constexpr = ks_ptr.dtype.element_ty
        RING: gl.constexpr = _ring_layout(W, BN, D)
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        k_ring = gl.allocate_shared_memory(gl.int32, [STAGES, W, BN, D // 4], RING)
        v_ring = gl.allocate_shared_memory(gl.int32, [STAGES, W, BN, D // 4], RING)
        ks_ring = gl.allocate_shared_memory(SCALE, [STAGES, W, BN], PLAIN)
        vs_ring = gl.allocate_shared_memory(SCALE, [STAGES, W, BN], PLAIN)
        end = gl.minimum(span, n_keys - start)  # of the offsets of keys in a group
        for i in gl.static_range(STAGES - 1):
            _issue(k_ptr, ks_ptr, v_ptr, vs_ptr, k_ring.index(i), v_ring.index(i),
                   ks_ring.index(i), vs_ring.index(i), start + i * BN, span, window,
                   gl.where(i * BN < end, n_keys, 0), ROW, HKV, W, BN, D, MODE)  # fmt: skip
        slot = 0
        free = STAGES - 1
        half = gl.arange(0, 8, layout=gl.SliceLayout(0, LM)) // 4
        w = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
        n = gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
        keys = start + w * span + n

        for pair in range(0, end, 2 * PARTITION):
            m = gl.full([W, 8], float("-inf"), gl.float32, layout=LM)
            l = gl.zeros([W, 8], gl.float32, layout=LM)
            acc = gl.zeros([W, D, 8], gl.float32, layout=MMA)
            for offset in range(pair, gl.minimum(pair + 2 * PARTITION, end), BN):
                async_copy.wait_group(STAGES - 2)
                k = k_ring.index(slot).load(_key_layout(W, BN, D))
                ks = ks_ring.index(slot).load(gl.SliceLayout(1, L))
                v = v_ring.index(slot).load(LV)
                vs = vs_ring.index(slot).load(gl.SliceLayout(2, LV))
                ahead = offset + (STAGES - 1) * BN
                _issue(k_ptr, ks_ptr, v_ptr, vs_ptr, k_ring.index(free), v_ring.index(free),
                       ks_ring.index(free), vs_ring.index(free), start + ahead, span, window,
                       gl.where(ahead < end, n_keys, 0), ROW, HKV, W, BN, D, MODE)  # fmt: skip
                slot = gl.where(slot == STAGES - 1, 0, slot + 1)
                free = gl.where(free == STAGES - 1, 0, free + 1)

                s = _scores(qa, qb, k, ks, MMA, L, W, BN, D)
                seen = gl.where(half == (offset - pair) // PARTITION, n_keys, 0).to(gl.uint32)
                s = gl.where((keys + offset).to(gl.uint32) < seen[None, :, None], s, float("-inf"))
                top = gl.maximum(m, gl.max(s, axis=2) * slope)
                safe = gl.where(top == float("-inf"), 0.0, top)
                p = gl.exp2(gl.fma(s, slope[:, :, None], -safe[:, :, None]))
                alpha = gl.exp2(m - safe)
                m = top
                l = l * alpha + gl.sum(p, axis=2)
                alpha = gl.convert_layout(alpha, gl.SliceLayout(1, MMA))
                p = gl.permute(p.to(gl.float16), [0, 2, 1])
                p = gl.convert_layout(p, gl.DotOperandLayout(1, MMA, 2))
                acc = mma_v2(_values(v, vs, MMA, W, BN, D), p, acc * alpha[:, None, :])
            _push(m, l, acc, pair // (2 * PARTITION), pair + 2 * PARTITION >= end, state_ptr, acc_ptr,
                  split * W, (n_split + split) * W, n_split * W, n_rows, n_heads,
                  n_groups - split * W, W, D)  # fmt: skip
        async_copy.wait_group(0)


def attend_ring(call: Call, config: Config) -> torch.Tensor:
    """Run `ring` on a checked call over q8_0 cells; float32 [n_q, n_head, d]."""
    if not call.n_q:
        return call.empty_out()
    warps, heads = config["warps"], call.n_head_kv * triton.cdiv(call.group, HEADS.value)
    room = _room(call, heads, warps, config["waves"])
    word = torch.int64 if call.head_dim == 128 else torch.int32  # the scales of a head's row
    (k, k_scales), (v, v_scales) = call.planes(call.k), call.planes(call.v)
    n_split = room.n_splits // warps
    _attn_ring_kernel[(call.n_q * heads * n_split,)](
        call.q,
        k.view(torch.int32),
        k_scales.view(word),
        v.view(torch.int32),
        v_scales.view(word),
        call.positions,
        call.window_or_positions,
        room.states,
        room.accs,
        call.width,
        call.factor,
        n_split,
        room.n_groups,
        HKV=call.n_head_kv,
        GROUP=call.group,
        D=call.head_dim,
        MODE=call.mode,
        W=warps,
        BN=config["block_n"],
        STAGES=config["stages"],
        num_warps=warps,
        maxnreg=REGISTERS,
        enable_fp_fusion=False,
    )
    return _softmax.combine(call, room, 1.0)


def _room(call: Call, heads: int, warps: int, waves: int) -> _softmax.Partials:
    """Rows for the states of all streams, and for the pairs that wait inside a group.

    There are as many streams as run at once, `waves` times.
    """
    fitting = waves * WARPS * multiprocessors() // (call.n_q * heads * warps)
    streams = warps * max(1, min(fitting, triton.cdiv(call.most_partitions, warps)))
    largest = triton.next_power_of_2(triton.cdiv(call.most_partitions, streams - 1))
    n_rows = streams * max(1, largest.bit_length() - 1)
    shape = (call.n_q, call.n_head, n_rows)
    states, accs = call.q.new_empty((*shape, 2)), call.q.new_empty((*shape, call.head_dim))
    return _softmax.Partials(states, accs, n_rows, streams, LARGEST.value)
