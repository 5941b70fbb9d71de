"""`ring`: decode over q8_0 cells in Gluon; every warp streams its own keys through shared memory.

A program serves one (query, KV head). Its W warps are W streams that never meet: each takes one
aligned group of partitions of 256 keys, copies tiles of BN keys asynchronously into a ring of
STAGES slots, and writes the state of the group, which `combine` joins with the others.

The 8 columns of the values' accumulator are (half, head): it holds two partitions. A row of the
half that a tile is not in sees no key of it, which is exactly neutral.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from minfer.kernels_triton import _gather, _shares
from minfer.kernels_triton._arguments import architecture, multiprocessors, planes
from minfer.kernels_triton._call import Call
from minfer.kernels_triton._combine import combine
from minfer.kernels_triton._ring_tile import (
    HEADS,
    copy_layout,
    key_layout,
    no_keys,
    query_digits,
    ring_layout,
    score_layout,
    scores,
    value_layout,
    values,
    weights,
)
from minfer.kernels_triton._ring_tree import join_halves, push
from minfer.ops import Config

WARPS = 12  # that a multiprocessor holds
REGISTERS = {80: 168, 90: 168}  # a thread may have, so that they fit, by architecture
MORE_REGISTERS = 176  # elsewhere, or a few are spilled
PARTITION = _shares.PARTITION

query_window = gluon.jit(_gather.query_window.fn)
cell_of = gluon.jit(_gather.cell_of.fn)
group_level = gluon.jit(_shares.group_level.fn)


@gluon.jit
def _rings(SCALE: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr, BN: gl.constexpr,
           D: gl.constexpr):  # fmt: skip
    """Shared memory for STAGES tiles a warp: codes and scales of K, then of V."""
    RING: gl.constexpr = ring_layout(W, BN, D)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    k = gl.allocate_shared_memory(gl.int32, [STAGES, W, BN, D // 4], RING)
    k_scales = gl.allocate_shared_memory(SCALE, [STAGES, W, BN], PLAIN)
    v = gl.allocate_shared_memory(gl.int32, [STAGES, W, BN, D // 4], RING)
    v_scales = gl.allocate_shared_memory(SCALE, [STAGES, W, BN], PLAIN)
    return k, k_scales, v, v_scales


@gluon.jit
def _copy(planes, rings, slot, start, step, window, n_keys,
          HKV: gl.constexpr, W: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
          MODE: gl.constexpr):  # fmt: skip
    """Start copying one tile a warp, keys start + w * step; all but 0 .. n_keys-1 become zeros."""
    L: gl.constexpr = copy_layout(W, BN, D)
    w = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    word = gl.arange(0, D // 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    key = start + w[:, None, None] * step + n[None, :, None]
    at = _cell(key, window, MODE).to(gl.int64) * (HKV * (D // 4)) + word
    seen = (key.to(gl.uint32) < n_keys.to(gl.uint32)) & (word >= 0)
    LS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    w = gl.arange(0, W, layout=gl.SliceLayout(1, LS))
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, LS))
    key = start + w[:, None] * step + n[None, :]
    scale_at = _cell(key, window, MODE).to(gl.int64) * HKV
    scale_seen = key.to(gl.uint32) < n_keys.to(gl.uint32)
    async_copy.async_copy_global_to_shared(rings[0].index(slot), planes[0] + at, mask=seen)
    async_copy.async_copy_global_to_shared(
        rings[1].index(slot), planes[1] + scale_at, mask=scale_seen
    )
    async_copy.async_copy_global_to_shared(rings[2].index(slot), planes[2] + at, mask=seen)
    async_copy.async_copy_global_to_shared(
        rings[3].index(slot), planes[3] + scale_at, mask=scale_seen
    )
    async_copy.commit_group()


@gluon.jit
def _read(rings, slot, L: gl.constexpr, W: gl.constexpr, BN: gl.constexpr, D: gl.constexpr):
    """One slot in registers: codes of K and their scales, codes of V and their scales."""
    LV: gl.constexpr = value_layout(W, BN, D)
    k = rings[0].index(slot).load(key_layout(W, BN, D))
    k_scales = rings[1].index(slot).load(gl.SliceLayout(1, L))
    v = rings[2].index(slot).load(LV)
    return k, k_scales, v, rings[3].index(slot).load(gl.SliceLayout(2, LV))


@gluon.jit
def _offsets(step, L: gl.constexpr, W: gl.constexpr, BN: gl.constexpr):
    """w * step + n for key n of warp w's tile, [W, 1, BN]."""
    w = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    return w * step + n


@gluon.jit
def _cell(key, window, MODE: gl.constexpr):
    e0, e1, e2, b0, b1, b2, b3 = window
    return cell_of(key, e0, e1, e2, b0, b1, b2, b3, MODE)


@gluon.jit(
    do_not_specialize=["width", "n_split", "n_rows"],
    do_not_specialize_on_alignment=["positions_ptr", "window_ptr"],
)
def _attn_ring_kernel(
    q_ptr, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, positions_ptr, window_ptr, states_ptr,
    accs_ptr, width, factor, n_split, n_rows,
    HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, MODE: gl.constexpr,
    W: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Program (query, split, KV head, up to four of its query heads); neighbours share cells.

    q f32 [n_q, n_head, D]; codes as int32 [n_cells, HKV * D/4]; scales of a head as one int32 or
    int64 [n_cells, HKV]; states f32 [n_q, n_head, n_rows, 2], accs f32 [n_q, n_head, n_rows, D].
    """
    PACKS: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    L: gl.constexpr = score_layout(W, BN).type.layout
    LM: gl.constexpr = gl.SliceLayout(2, L)
    PAIR: gl.constexpr = 2 * PARTITION
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
    n_streams = n_split * W
    span = PARTITION << group_level(first // PARTITION, pos // PARTITION, n_streams)
    n_groups = pos // span - first // span + 1
    start = (first // span + split * W) * span - first  # of warp 0's group; the next is span on
    if split * W < n_groups:
        planes = (
            k_ptr + kv * (D // 4), k_scales_ptr + kv, v_ptr + kv * (D // 4), v_scales_ptr + kv
        )  # fmt: skip
        rings = _rings(k_scales_ptr.dtype.element_ty, STAGES, W, BN, D)
        end = gl.minimum(span, n_keys - start)  # keys of warp 0, which has the most
        for i in gl.static_range(STAGES - 1):
            live = gl.where(i * BN < end, n_keys, 0)
            _copy(planes, rings, i, start + i * BN, span, window, live, HKV, W, BN, D, MODE)
        head = (query * HKV + kv).to(gl.int64) * GROUP + pack * HEADS
        n_heads = gl.minimum(GROUP - pack * HEADS, HEADS)
        q_a, q_b, slope = query_digits(q_ptr + head * D, n_heads, factor, L, W, D)
        half = gl.arange(0, 8, layout=gl.SliceLayout(0, LM)) // 4
        keys = start + _offsets(span, L, W, BN)
        slot = 0
        free = STAGES - 1
        for pair in range(0, end, PAIR):
            m, l, acc = no_keys(L, W, D)
            for offset in range(pair, gl.minimum(pair + PAIR, end), BN):
                async_copy.wait_group(STAGES - 2)
                k, k_scales, v, v_scales = _read(rings, slot, L, W, BN, D)
                ahead = offset + (STAGES - 1) * BN
                live = gl.where(ahead < end, n_keys, 0)
                _copy(planes, rings, free, start + ahead, span, window, live, HKV, W, BN, D, MODE)
                slot = gl.where(slot == STAGES - 1, 0, slot + 1)
                free = gl.where(free == STAGES - 1, 0, free + 1)
                limit = gl.where(half == (offset - pair) // PARTITION, n_keys, 0).to(gl.uint32)
                seen = (keys + offset).to(gl.uint32) < limit[None, :, None]
                s = scores(q_a, q_b, k, k_scales, L, W, BN, D)
                p, m, l, acc = weights(s, seen, slope, m, l, acc, W)
                acc = mma_v2(values(v, v_scales, W, BN, D), p, acc)
            m, l, acc = join_halves(m, l, acc, W, D)
            push(m, l, acc, pair // PAIR, pair + PAIR >= end, states_ptr, accs_ptr,
                 head * n_rows + split * W, n_streams, n_rows, n_heads,
                 n_groups - split * W)  # fmt: skip
        async_copy.wait_group(0)


def attend_ring(call: Call, config: Config) -> torch.Tensor:
    """Run `ring` on a checked call over q8_0 cells; float32 [n_q, n_head, d]."""
    if not call.n_q:
        return call.empty_out()
    warps, heads = config["warps"], call.n_head_kv * triton.cdiv(call.group, HEADS.value)
    room = _room(call, heads, warps, config["waves"])
    word = torch.int64 if call.head_dim == 128 else torch.int32  # the scales of a head's row
    (k, k_scales), (v, v_scales) = planes(call.k), planes(call.v)
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
        room.n_rows,
        HKV=call.n_head_kv,
        GROUP=call.group,
        D=call.head_dim,
        MODE=call.mode_value,
        W=warps,
        BN=config["block_n"],
        STAGES=config["stages"],
        num_warps=warps,
        maxnreg=REGISTERS.get(architecture(), MORE_REGISTERS),
        enable_fp_fusion=False,
    )
    return combine(call, room, call.empty_out(), 1.0)


def _room(call: Call, heads: int, warps: int, waves: int) -> _shares.Partials:
    """Rows for the states of all streams, and for the pairs that wait inside a group.

    There are as many streams as run at once, `waves` times.
    """
    fitting = waves * WARPS * multiprocessors() // (call.n_q * heads * warps)
    streams = warps * max(1, min(fitting, triton.cdiv(call.most_partitions, warps)))
    largest = triton.next_power_of_2(triton.cdiv(call.most_partitions, streams - 1))
    n_waiting = streams * max(0, largest.bit_length() - 2)
    return _shares.Partials.of(call, streams, n_waiting, streams, shared=False)
