"""Decode: a query's keys are cut into partitions of 256, shared out in aligned groups.

A program takes one KV head of one query, with all the query heads that read it, and some groups of
partitions in a row. Inside a partition it sweeps key tiles with an online softmax; partitions join
in the tree of `_softmax`, its last levels in a second launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minfer.format import KvFormat
from minfer.kernels_triton._arguments import planes
from minfer.kernels_triton._call import Call
from minfer.kernels_triton._gather import cell_of, query_window
from minfer.kernels_triton._softmax import (
    PARTITION,
    combine,
    join,
    no_keys,
    overlaps,
    partials,
    share_size,
    splits,
    store_state,
    weight,
)
from minfer.kernels_triton._tile import FORMATS, load_rows
from minfer.ops import Config

MMA_ROWS = 16  # the least rows of a tensor-core tile


@triton.jit
def _query_tile(q, rows, held, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of q [.., d] as float32 [r, BLOCK_D]; 0 where not held and past D."""
    d = tl.arange(0, BLOCK_D)
    mask = held[:, None] & (d < D)[None, :]
    return tl.load(q + rows[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def _key_tile(m, l, acc, q, k, v, seen, factor):
    """One online-softmax step: rows [r] against keys [n] of which `seen` [n] are seen."""
    EXACT: tl.constexpr = q.dtype == tl.float32
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"  # of f16 operands it means nothing
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    s = tl.where(seen[None, :], s, float("-inf"))
    top = tl.maximum(m, tl.max(s, axis=1))
    p = tl.where(seen[None, :], tl.exp2((s - top[:, None]) * factor), 0.0)
    decay = weight(m, top, factor)
    l = l * decay + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return top, l, acc


@triton.jit
def _attn_split_kernel(
    q,  # float32 [n_q, n_head, d]
    k,
    k_scales,
    v,
    v_scales,
    window,
    positions,
    states,  # float32 [n_q, n_head, n_groups, 2]
    accs,  # float32 [n_q, n_head, n_groups, d]
    n_head_kv,
    row_stride,
    scale_stride,
    n_groups,
    n_splits,
    width,
    factor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FMT: tl.constexpr,
    TYPE: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # `combine` waits for the end of this by itself
    # neighbours read other heads of the same cells: lines of scales are fetched once
    query, head = tl.program_id(0) // n_head_kv, tl.program_id(0) % n_head_kv
    pos = tl.load(positions + query)
    first, e0, e1, e2, b0, b1, b2, b3 = query_window(window, query, pos, width, MODE)
    p_first, p_last = first // PARTITION, pos // PARTITION
    size, share = share_size(p_first, p_last, n_splits)
    begin = p_first // size
    group = begin + tl.program_id(1) * share
    r = tl.arange(0, ROWS)
    q_rows = (query * n_head_kv * GROUP + head * GROUP + r).to(tl.int64)
    q_tile = _query_tile(q, q_rows, r < GROUP, D, BLOCK_D).to(TYPE)
    # s0: a partition that waits for its right neighbour; s1: the pair before it
    m0, l0, acc0 = no_keys(ROWS, BLOCK_D)
    m1, l1, acc1 = no_keys(ROWS, BLOCK_D)
    m, l, acc = no_keys(ROWS, BLOCK_D)
    at = q_rows * n_groups - begin
    start = tl.maximum(group * size * PARTITION, first // BLOCK_N * BLOCK_N)
    stop = tl.minimum((group + share) * size * PARTITION, pos + 1)
    for index in range(start, stop, BLOCK_N):
        keys = index + tl.arange(0, BLOCK_N)
        seen = (keys >= first) & (keys <= pos)
        cells = cell_of(keys, e0, e1, e2, b0, b1, b2, b3, MODE)
        # fmt: off
        k_tile = load_rows(k, k_scales, cells, seen, head, row_stride, scale_stride,
                           D, BLOCK_D, FMT, TYPE)
        v_tile = load_rows(v, v_scales, cells, seen, head, row_stride, scale_stride,
                           D, BLOCK_D, FMT, TYPE)
        # fmt: on
        m, l, acc = _key_tile(m, l, acc, q_tile, k_tile, v_tile, seen, factor)
        after = index + BLOCK_N
        if (after % PARTITION == 0) | (after >= stop):
            if (after - 1) // PARTITION % 2 == 0:
                m0, l0, acc0 = m, l, acc
            else:
                m, l, acc = join(m0, l0, acc0, m, l, acc, factor)
                m1, l1, acc1 = join(m1, l1, acc1, m, l, acc, factor)
                m0, l0, acc0 = no_keys(ROWS, BLOCK_D)
            m, l, acc = no_keys(ROWS, BLOCK_D)
            if (after % (size * PARTITION) == 0) | (after >= stop):
                m1, l1, acc1 = join(m1, l1, acc1, m0, l0, acc0, factor)
                place = at + (after - 1) // PARTITION // size
                store_state(states, accs, place, m1, l1, acc1, r < GROUP, D, BLOCK_D)
                m0, l0, acc0 = no_keys(ROWS, BLOCK_D)
                m1, l1, acc1 = no_keys(ROWS, BLOCK_D)


def block_n(head_dim: int) -> int:
    """Keys of a tile; three of K and V fit shared memory."""
    return 64 if head_dim <= 128 else 32


def attend_split(call: Call, config: Config) -> torch.Tensor:
    """Run `split` on a checked call."""
    if not call.n_q:
        return call.empty_out()
    exact = call.fmt is KvFormat.F32
    room = partials(call, splits(call, config["waves"]))
    grid = (call.n_q * call.n_head_kv, room.n_splits)
    _attn_split_kernel[grid](
        call.q,
        *planes(call.k),
        *planes(call.v),
        call.window_or_positions,
        call.positions,
        room.states,
        room.accs,
        call.n_head_kv,
        *call.strides,
        room.n_groups,
        room.n_splits,
        call.width,
        call.factor,
        GROUP=call.group,
        ROWS=triton.next_power_of_2(call.group if exact else max(call.group, MMA_ROWS)),
        D=call.head_dim,
        BLOCK_D=triton.next_power_of_2(max(call.head_dim, 16)),
        BLOCK_N=block_n(call.head_dim),
        FMT=FORMATS[call.fmt],
        TYPE=tl.float32 if exact else tl.float16,
        MODE=call.mode,
        PDL=overlaps(),
        num_warps=4,
        num_stages=config["stages"],
        enable_fp_fusion=False,
    )
    return combine(call, room, call.factor)
