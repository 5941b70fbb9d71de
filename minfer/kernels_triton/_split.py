"""Decode: a query's keys are cut into partitions of 256, shared out in aligned groups.

A program takes one KV head of one query, with all the query heads that read it, and some groups of
partitions in a row. Inside a partition it sweeps key tiles with an online softmax; partitions join
in the tree of `_softmax`. Where several programs share a query's keys, a second launch joins their
groups; a program that has them all writes the answer itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minfer.format import KvFormat
from minfer.kernels_triton._arguments import architecture, planes
from minfer.kernels_triton._call import Call
from minfer.kernels_triton._combine import combine, overlaps
from minfer.kernels_triton._gather import RUNS, cell_of, query_window
from minfer.kernels_triton._shares import PARTITION, partials, share_size, splits
from minfer.kernels_triton._softmax import (
    add_leaf,
    join_all,
    join_groups,
    no_keys,
    store_answer,
    store_state,
    weight,
)
from minfer.kernels_triton._tile import FORMATS, load_rows
from minfer.kernels_triton._tunables import changes
from minfer.ops import Config

MMA_ROWS = 16  # the least rows of a tensor-core tile
ROOMY = (80, 90, 100, 103)  # of their shared memory a program may have more than 99 KiB


@triton.jit
def _query_tile(q, rows, held, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of q [.., d] as float32 [r, BLOCK_D]; 0 where not held and past D."""
    d = tl.arange(0, BLOCK_D)
    mask = held[:, None] & (d < D)[None, :]
    return tl.load(q + rows[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def _add_tile(state, q, k, v, seen, factor):
    """One online-softmax step: rows [r] against keys [n] of which `seen` [n] are seen."""
    m, l, acc = state
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
    k,  # [n_cells, STRIDE]
    k_scales,  # float16 [n_cells, SCALES] of q8_0
    v,
    v_scales,
    window,
    positions,
    states,  # float32 [n_q, n_head, n_rows, 2]
    accs,  # float32 [n_q, n_head, n_rows, d]
    out,  # float32 [n_q, n_head, d]
    n_rows,
    n_groups,
    n_splits,
    width,
    factor,
    N_HEAD_KV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FMT: tl.constexpr,
    TYPE: tl.constexpr,
    MODE: tl.constexpr,
    ALONE: tl.constexpr,  # there is one program a query and KV head
    PDL: tl.constexpr,
):
    tl.static_assert(PARTITION % BLOCK_N == 0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # `combine` waits for the end of this by itself
    # neighbours read other heads of the same cells: lines of scales are fetched once
    query, head = tl.program_id(0) // N_HEAD_KV, tl.program_id(0) % N_HEAD_KV
    pos = tl.load(positions + query)
    first, e0, e1, e2, b0, b1, b2, b3 = query_window(window, query, pos, width, MODE)
    p_first, p_last = first // PARTITION, pos // PARTITION
    level, share = share_size(p_first, p_last, n_splits)
    g_first = p_first >> level
    group = g_first + tl.program_id(1) * share
    # keys [start, stop); what is past the last one is not multiplied, it may not fit 32 bits
    begin, end = group << level, group + share << level
    start = tl.where(begin > p_last, pos + 1, begin * PARTITION)
    start = tl.maximum(start, first // BLOCK_N * BLOCK_N)
    stop = tl.where(end > p_last, pos + 1, end * PARTITION)
    r, n = tl.arange(0, ROWS), tl.arange(0, BLOCK_N)
    held, rows = r < GROUP, (query * N_HEAD_KV * GROUP + head * GROUP + r).to(tl.int64)
    q_tile = _query_tile(q, rows, held, D, BLOCK_D).to(TYPE)
    at = rows * n_rows
    none = no_keys(ROWS, BLOCK_D)
    s0, s1, s2, s3, leaf = none, none, none, none, none
    for index in range(start, stop, BLOCK_N):
        keys = index + n
        seen = (keys >= first) & (keys <= pos)
        if MODE == RUNS:
            cell, cells = 0, cell_of(keys, e0, e1, e2, b0, b1, b2, b3, MODE).to(tl.int64)
        else:
            cell, cells = (index + b0).to(tl.int64), n
        # fmt: off
        k_tile = load_rows(k, k_scales, head, cell, cells, seen,
                           D, BLOCK_D, STRIDE, SCALES, FMT, TYPE)
        v_tile = load_rows(v, v_scales, head, cell, cells, seen,
                           D, BLOCK_D, STRIDE, SCALES, FMT, TYPE)
        # fmt: on
        leaf = _add_tile(leaf, q_tile, k_tile, v_tile, seen, factor)
        after = index + BLOCK_N
        if (after % PARTITION == 0) | (after >= stop):
            partition = (after - 1) // PARTITION
            s0, s1, s2, s3 = add_leaf(s0, s1, s2, s3, leaf, partition, factor, ROWS, BLOCK_D)
            leaf = no_keys(ROWS, BLOCK_D)
            if ((partition + 1) % (1 << level) == 0) & (after < stop):
                place = at + (partition >> level) - g_first
                store_state(states, accs, place, join_all(s0, s1, s2, s3, factor), held, D, BLOCK_D)
                none = no_keys(ROWS, BLOCK_D)
                s0, s1, s2, s3 = none, none, none, none
    whole, g_last = join_all(s0, s1, s2, s3, factor), (stop - 1) // PARTITION >> level
    if ALONE:
        waiting = at + n_groups
        answer = join_groups(
            whole, g_first, g_last, states, accs, at, waiting, held, factor, D, BLOCK_D
        )
        store_answer(out, rows, answer, held, D, BLOCK_D)
    elif start < stop:
        store_state(states, accs, at + g_last - g_first, whole, held, D, BLOCK_D)


class Blocks(NamedTuple):
    """How a program is cut. `block_n` and `warps` may change bits, the others do not."""

    block_n: int  # keys of a tile
    warps: int
    programs: int  # that share a multiprocessor
    stages: int  # tiles of keys that are loaded ahead, and one more
    registers: int | None = None  # of a thread at most; None: the compiler's choice


def blocks_of(fmt: KvFormat, head_dim: int, mode: int, arch: int) -> Blocks:
    """Blocks that fit the registers and shared memory of sm_`arch`; those of sm_90 are measured."""
    block_d = triton.next_power_of_2(head_dim)
    small, programs = block_d <= 64, 3 if block_d <= 64 else 2
    roomy = arch in ROOMY
    if fmt is KvFormat.F32:
        warps = 4 if arch < 100 else 8
        return Blocks(64 if block_d <= 128 else 32, warps, programs, 3 if roomy else 2)
    if fmt is KvFormat.Q8_0:
        return Blocks(64 if block_d <= 128 else 32, 4 if small else 8, programs, 3, 255)
    if small:  # three programs share a multiprocessor's registers; with runs some would be spilled
        free = block_d == 16 or (block_d == 64 and mode == RUNS.value)
        return Blocks(128, 4, programs, 3, None if free else 168)
    stages = 4 if roomy and arch >= 90 else 3
    return Blocks(8192 // block_d, 4 if block_d <= 128 else 8, programs, stages)


def attend_split(call: Call, config: Config) -> torch.Tensor:
    """Run `split` on a checked call."""
    out, exact = call.empty_out(), call.fmt is KvFormat.F32
    if not call.n_q:
        return out
    measured = blocks_of(call.fmt, call.head_dim, call.mode_value, architecture())
    blocks = measured._replace(**changes(measured, config))
    room = partials(call, splits(call, blocks.programs, config["waves"]))
    (stride, scale_stride), alone = call.strides, room.n_splits == 1
    _attn_split_kernel[(call.n_q * call.n_head_kv, room.n_splits)](
        call.q,
        *planes(call.k),
        *planes(call.v),
        call.window_or_positions,
        call.positions,
        room.states,
        room.accs,
        out,
        room.n_rows,
        room.n_groups,
        room.n_splits,
        call.width,
        call.factor,
        N_HEAD_KV=call.n_head_kv,
        GROUP=call.group,
        ROWS=triton.next_power_of_2(call.group if exact else max(call.group, MMA_ROWS)),
        D=call.head_dim,
        BLOCK_D=triton.next_power_of_2(call.head_dim),
        STRIDE=stride,
        SCALES=scale_stride,
        BLOCK_N=blocks.block_n,
        FMT=FORMATS[call.fmt],
        TYPE=tl.float32 if exact else tl.float16,
        MODE=call.mode_value,
        ALONE=alone,
        PDL=overlaps() and not alone,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        maxnreg=blocks.registers,
        enable_fp_fusion=False,
    )
    return out if alone else combine(call, room, out, call.factor)
