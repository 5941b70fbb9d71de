"""Partial softmax states, and how they join (contract 6.3c).

A state of a query head is (m, l, acc): largest score, sum of weights, weighted values; weights are
exp2((score - m) * factor). States of partitions of 256 keys join in one binary tree over aligned
power-of-two groups of absolute partition indices. The state of no keys is (-inf, 0, 0), and joining
it changes nothing, so a program may own any aligned group without changing bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minfer.kernels_triton._arguments import multiprocessors
from minfer.kernels_triton._call import Call
from minfer.kernels_triton._gather import query_window
from minfer.window import PARTITION as PARTITION_KEYS

PARTITION = tl.constexpr(PARTITION_KEYS)
LARGEST = 4  # partitions of a group
CHUNK = 32  # groups that are joined at once
LEVELS = 8  # of the tree above chunks


@triton.jit
def weight(m, top, factor):
    """exp2((m - top) * factor); 0 for a state of no keys, also where both are of none."""
    return tl.where(m == float("-inf"), 0.0, tl.exp2((m - top) * factor))


@triton.jit
def no_keys(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The state of no keys."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    return m, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK_D], tl.float32)


@triton.jit
def store_state(states, accs, at, m, l, acc, held, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Put the states of rows [r] of which `held` are real at `at` int64 [r] of a `Partials`."""
    tl.store(states + 2 * at, m, mask=held)
    tl.store(states + 2 * at + 1, l, mask=held)
    d = tl.arange(0, BLOCK_D)
    mask = held[:, None] & (d < D)[None, :]
    tl.store(accs + at[:, None] * D + d[None, :], acc, mask=mask)


@triton.jit
def join(m_a, l_a, acc_a, m_b, l_b, acc_b, factor):
    """The state of both; m and l [rows], acc [rows, d]."""
    m = tl.maximum(m_a, m_b)
    w_a, w_b = weight(m_a, m, factor), weight(m_b, m, factor)
    return m, l_a * w_a + l_b * w_b, acc_a * w_a[:, None] + acc_b * w_b[:, None]


@triton.jit
def group_size(p_first, p_last, n_splits, LARGEST: tl.constexpr):
    """Partitions of a group: the smallest power of two with at most n_splits groups, or LARGEST."""
    size = p_first * 0 + 1
    while (size < LARGEST) & (p_last // size - p_first // size >= n_splits):
        size = size * 2
    return size


@triton.jit
def _tree(m, l, acc, factor, N: tl.constexpr, BLOCK_D: tl.constexpr):
    """N states, an aligned group of a power of two, as one: m, l [1], acc [1, d]."""
    for level in tl.static_range(N.bit_length() - 1):
        m_a, m_b = tl.split(tl.reshape(m, [N >> (level + 1), 2]))
        l_a, l_b = tl.split(tl.reshape(l, [N >> (level + 1), 2]))
        pairs = tl.reshape(acc, [N >> (level + 1), 2, BLOCK_D])
        acc_a, acc_b = tl.split(tl.permute(pairs, [0, 2, 1]))
        m, l, acc = join(m_a, l_a, acc_a, m_b, l_b, acc_b, factor)
    return m, l, acc


@triton.jit
def _chunk(states, accs, chunk, begin, end, factor, D: tl.constexpr, BLOCK_D: tl.constexpr,
           CHUNK: tl.constexpr):  # fmt: skip
    """The groups of one chunk that lie in [begin, end) as one state; row 0 is group `begin`."""
    group, d = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
    held, at = (group >= begin) & (group < end), group - begin
    m = tl.load(states + 2 * at, mask=held, other=float("-inf"))
    l = tl.load(states + 2 * at + 1, mask=held, other=0.0)
    mask = held[:, None] & (d < D)[None, :]
    acc = tl.load(accs + at[:, None] * D + d[None, :], mask=mask, other=0.0)
    return _tree(m, l, acc, factor, CHUNK, BLOCK_D)


@triton.jit
def _row(stack_m, stack_l, stack_acc, here):
    """The one row of a stack that `here` [LEVELS] marks: m, l [1], acc [1, d]."""
    m = tl.max(tl.where(here, stack_m, float("-inf")), axis=0, keep_dims=True)
    l = tl.sum(tl.where(here, stack_l, 0.0), axis=0, keep_dims=True)
    return m, l, tl.sum(tl.where(here[:, None], stack_acc, 0.0), axis=0, keep_dims=True)


@triton.jit
def _chunks(states, accs, begin, end, factor, D: tl.constexpr, BLOCK_D: tl.constexpr,
            CHUNK: tl.constexpr, LEVELS: tl.constexpr):  # fmt: skip
    """All groups [begin, end) as one state, where they are more than a chunk.

    Chunks are whole subtrees; they join as a binary counter counts: row i of the stack holds a
    finished subtree of 2**i chunks that waits for its right neighbour.
    """
    level_of = tl.arange(0, LEVELS)
    stack_m = tl.full([LEVELS], float("-inf"), tl.float32)
    stack_l = tl.zeros([LEVELS], tl.float32)
    stack_acc = tl.zeros([LEVELS, BLOCK_D], tl.float32)
    for chunk in range(begin // CHUNK, (end - 1) // CHUNK + 1):
        m, l, acc = _chunk(states, accs, chunk, begin, end, factor, D, BLOCK_D, CHUNK)
        level, rest = chunk * 0, chunk
        while rest % 2 == 1:
            here = level_of == level
            m_a, l_a, acc_a = _row(stack_m, stack_l, stack_acc, here)
            m, l, acc = join(m_a, l_a, acc_a, m, l, acc, factor)
            stack_m = tl.where(here, float("-inf"), stack_m)
            stack_l = tl.where(here, 0.0, stack_l)
            stack_acc = tl.where(here[:, None], 0.0, stack_acc)
            level, rest = level + 1, rest // 2
        here = level_of == level
        stack_m = tl.where(here, m, stack_m)
        stack_l = tl.where(here, l, stack_l)
        stack_acc = tl.where(here[:, None], acc, stack_acc)
    m, l, acc = _row(stack_m, stack_l, stack_acc, level_of == 0)
    for level in range(1, LEVELS):
        m_a, l_a, acc_a = _row(stack_m, stack_l, stack_acc, level_of == level)
        m, l, acc = join(m_a, l_a, acc_a, m, l, acc, factor)
    return m, l, acc


@triton.jit
def _combine_kernel(
    states,  # float32 [n_q, n_head, n_groups, 2]
    accs,  # float32 [n_q, n_head, n_groups, d]
    window,
    positions,
    out,  # float32 [n_q, n_head, d]
    n_head,
    n_groups,
    n_splits,
    width,
    factor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MODE: tl.constexpr,
    LARGEST: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Join the groups of one (query, head) and divide by the sum of weights."""
    row = tl.program_id(0)
    query = row // n_head
    pos = tl.load(positions + query)
    first, _0, _1, _2, _3, _4, _5, _6 = query_window(window, query, pos, width, MODE)
    size = group_size(first // PARTITION, pos // PARTITION, n_splits, LARGEST)
    begin, end = first // PARTITION // size, pos // PARTITION // size + 1
    base = row.to(tl.int64) * n_groups
    states, accs = states + 2 * base, accs + D * base
    if begin // CHUNK == (end - 1) // CHUNK:
        chunk = begin // CHUNK
        _m, l, acc = _chunk(states, accs, chunk, begin, end, factor, D, BLOCK_D, CHUNK)
    else:
        _m, l, acc = _chunks(states, accs, begin, end, factor, D, BLOCK_D, CHUNK, LEVELS)
    d = tl.arange(0, BLOCK_D)
    result = acc / l[:, None] + 0.0  # no negative zero, which masked keys could flip
    target = out + row.to(tl.int64) * D + d[None, :]
    tl.store(target, result, mask=(d < D)[None, :])


class Partials(NamedTuple):
    """Room for the states of all groups, and how many groups a query has at most."""

    states: torch.Tensor  # float32 [n_q, n_head, n_groups, 2]
    accs: torch.Tensor  # float32 [n_q, n_head, n_groups, d]
    n_groups: int
    n_splits: int
    largest: int = LARGEST  # partitions of a group


def partials(call: Call, n_splits: int) -> Partials:
    """Room for a call whose queries are each shared out to n_splits programs."""
    n_groups = max(n_splits, call.most_partitions // LARGEST + 2)
    shape = (call.n_q, call.n_head, n_groups)
    states = torch.empty((*shape, 2), dtype=torch.float32, device=call.q.device)
    accs = torch.empty((*shape, call.head_dim), dtype=torch.float32, device=call.q.device)
    return Partials(states, accs, n_groups, n_splits)


def splits(call: Call, waves: int) -> int:
    """Programs a (query, KV head), so that `waves` of them fall on each multiprocessor.

    A free choice: partials join in the same tree whatever it is.
    """
    wanted = waves * multiprocessors() // max(1, call.n_q * call.n_head_kv)
    power: int = triton.next_power_of_2(max(1, wanted))
    return max(1, min(power, call.most_partitions))


def combine(call: Call, given: Partials, factor: float) -> torch.Tensor:
    """Join the partials of every (query, head): float32 [n_q, n_head, d].

    factor: of differences of the m that are in `given`.
    """
    out = call.empty_out()
    _combine_kernel[(call.n_q * call.n_head,)](
        given.states,
        given.accs,
        call.window_or_positions,
        call.positions,
        out,
        call.n_head,
        given.n_groups,
        given.n_splits,
        call.width,
        factor,
        D=call.head_dim,
        BLOCK_D=triton.next_power_of_2(call.head_dim),
        MODE=call.mode,
        LARGEST=given.largest,
        CHUNK=CHUNK,
        LEVELS=LEVELS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out
