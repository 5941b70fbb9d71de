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

from minfer.kernels_triton._arguments import architecture, multiprocessors
from minfer.kernels_triton._call import Call
from minfer.kernels_triton._gather import query_window
from minfer.window import PARTITION as PARTITION_KEYS

PARTITION = tl.constexpr(PARTITION_KEYS)
UNLIMITED = tl.constexpr(1 << 22)  # partitions
LARGEST = tl.constexpr(4)  # partitions of a group, where a program takes several groups
FEW = 8  # groups of most queries of a large batch
LEVELS = 16  # of the tree above chunks


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
def share_size(p_first, p_last, n_splits):
    """Partitions of a group, and groups of a program, where each takes several in a row.

    The largest groups with which the longest program is at most an eighth longer than it must be.
    """
    least = (p_last - p_first) // n_splits + 1
    size = p_first * 0 + LARGEST
    share = (p_last // size - p_first // size) // n_splits + 1
    while (size > 1) & (8 * share * size > 9 * least):
        size = size // 2
        share = (p_last // size - p_first // size) // n_splits + 1
    return size, share


@triton.jit
def _join_rows(m, l, acc, factor, N: tl.constexpr, LOW: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of 2 * N * LOW states, [.., BLOCK_D] each: 2i of the leading part with 2i + 1."""
    m_a, m_b = tl.split(tl.permute(tl.reshape(m, [N, 2, LOW, BLOCK_D]), [0, 2, 3, 1]))
    l_a, l_b = tl.split(tl.permute(tl.reshape(l, [N, 2, LOW, BLOCK_D]), [0, 2, 3, 1]))
    acc_a, acc_b = tl.split(tl.permute(tl.reshape(acc, [N, 2, LOW, BLOCK_D]), [0, 2, 3, 1]))
    m = tl.maximum(m_a, m_b)
    w_a, w_b = weight(m_a, m, factor), weight(m_b, m, factor)
    return m, l_a * w_a + l_b * w_b, acc_a * w_a + acc_b * w_b


@triton.jit
def _chunk(states, accs, chunk, begin, end, d, factor, D: tl.constexpr, BLOCK_D: tl.constexpr,
           CHUNK: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """The groups of one chunk that lie in [begin, end) as one state [1, BLOCK_D] each.

    Row 0 of the partials is group `begin`. A thread holds every LANES-th row of a tile, so rows are
    ordered that the groups it holds are neighbours, and joins those without asking others.
    """
    ROWS: tl.constexpr = CHUNK // LANES
    r = tl.arange(0, CHUNK)
    group = chunk * CHUNK + r % LANES * ROWS + r // LANES
    held, at = (group >= begin) & (group < end), group - begin
    m = tl.load(states + 2 * at, mask=held, other=float("-inf"))
    l = tl.load(states + 2 * at + 1, mask=held, other=0.0)
    mask = held[:, None] & (d < D)[None, :]
    acc = tl.load(accs + at[:, None] * D + d[None, :], mask=mask, other=0.0)
    m = tl.broadcast_to(m[:, None], [CHUNK, BLOCK_D])
    l = tl.broadcast_to(l[:, None], [CHUNK, BLOCK_D])
    for level in tl.static_range(ROWS.bit_length() - 1):
        m, l, acc = _join_rows(m, l, acc, factor, ROWS >> (level + 1), LANES, BLOCK_D)
    for level in tl.static_range(LANES.bit_length() - 1):
        m, l, acc = _join_rows(m, l, acc, factor, LANES >> (level + 1), 1, BLOCK_D)
    shape: tl.constexpr = [1, BLOCK_D]
    return tl.reshape(m, shape), tl.reshape(l, shape), tl.reshape(acc, shape)


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
    SHARED: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the groups of one (query, head), for BLOCK_D elements, and divide.

    Chunks of CHUNK groups are whole subtrees; where there are several they join as a binary counter
    counts: row i of a stack holds a finished subtree of 2**i chunks that waits for its right
    neighbour.
    """
    row = tl.program_id(0)
    query = row // n_head
    pos = tl.load(positions + query)
    first, _0, _1, _2, _3, _4, _5, _6 = query_window(window, query, pos, width, MODE)
    if SHARED:
        size, _ = share_size(first // PARTITION, pos // PARTITION, n_splits)
    else:
        size = group_size(first // PARTITION, pos // PARTITION, n_splits, UNLIMITED)
    begin, end = first // PARTITION // size, pos // PARTITION // size + 1
    base = row.to(tl.int64) * n_groups
    states, accs = states + 2 * base, accs + D * base
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    chunk, last = begin // CHUNK, (end - 1) // CHUNK
    if PDL:
        tl.extra.cuda.gdc_wait()  # launched early; now the partials are there
    if begin // FEW == (end - 1) // FEW:
        m, l, acc = _chunk(states, accs, begin // FEW, begin, end, d, factor, D, BLOCK_D, FEW, 4)
    else:
        m, l, acc = _chunk(states, accs, chunk, begin, end, d, factor, D, BLOCK_D, CHUNK, LANES)
    if chunk != last:
        level_of = tl.arange(0, LEVELS)[:, None] + tl.zeros_like(d)[None, :]
        waiting_m = tl.full([LEVELS, BLOCK_D], float("-inf"), tl.float32)
        waiting_l = tl.zeros([LEVELS, BLOCK_D], tl.float32)
        waiting_acc = tl.zeros([LEVELS, BLOCK_D], tl.float32)
        while chunk <= last:
            level, rest = chunk * 0, chunk
            while (rest % 2 == 1) | ((chunk == last) & (rest > 0)):
                # the last chunk takes all that wait; a level without one changes nothing
                here = level_of == level
                m_a = tl.max(tl.where(here, waiting_m, float("-inf")), axis=0, keep_dims=True)
                l_a = tl.sum(tl.where(here, waiting_l, 0.0), axis=0, keep_dims=True)
                acc_a = tl.sum(tl.where(here, waiting_acc, 0.0), axis=0, keep_dims=True)
                top = tl.maximum(m_a, m)
                w_a, w = weight(m_a, top, factor), weight(m, top, factor)
                m, l, acc = top, l_a * w_a + l * w, acc_a * w_a + acc * w
                waiting_m = tl.where(here, float("-inf"), waiting_m)
                waiting_l = tl.where(here, 0.0, waiting_l)
                waiting_acc = tl.where(here, 0.0, waiting_acc)
                level, rest = level + 1, rest // 2
            chunk += 1
            if chunk <= last:
                here = level_of == level
                waiting_m = tl.where(here, m, waiting_m)
                waiting_l = tl.where(here, l, waiting_l)
                waiting_acc = tl.where(here, acc, waiting_acc)
                m, l, acc = _chunk(
                    states, accs, chunk, begin, end, d, factor, D, BLOCK_D, CHUNK, LANES
                )
    target = out + row.to(tl.int64) * D + d[None, :]
    # adding +0 leaves no negative zero, which masked keys could flip
    tl.store(target, acc / l + 0.0, mask=(d < D)[None, :])


def overlaps() -> bool:
    """Whether a launch may begin before the one it waits for ends: from Hopper on."""
    return architecture() >= 90


class Partials(NamedTuple):
    """Room for the states of all groups, and how many groups a query has at most."""

    states: torch.Tensor  # float32 [n_q, n_head, n_groups, 2]
    accs: torch.Tensor  # float32 [n_q, n_head, n_groups, d]
    n_groups: int
    n_splits: int
    shared: bool  # whether a program takes several groups in a row, by `share_size`

    @classmethod
    def of(cls, call: Call, n_groups: int, n_splits: int, *, shared: bool) -> Partials:
        """Room for n_groups a query head of a call."""
        shape = (call.n_q, call.n_head, n_groups)
        states, accs = call.q.new_empty((*shape, 2)), call.q.new_empty((*shape, call.head_dim))
        return cls(states, accs, n_groups, n_splits, shared)


def partials(call: Call, n_splits: int) -> Partials:
    """Room for a call whose queries are each shared out to n_splits programs."""
    # groups are smaller only where a program has few partitions: see `share_size`
    n_groups = max(64 * n_splits, call.most_partitions // LARGEST.value) + 2
    n_groups = min(n_groups, call.most_partitions)
    return Partials.of(call, n_groups, n_splits, shared=True)


def splits(call: Call, waves: int) -> int:
    """Programs a (query, KV head), so that they all run at once, `waves` times.

    A free choice: partials join in the same tree whatever it is.
    """
    fitting = waves * (2 if call.head_dim > 64 else 3)
    wanted = fitting * multiprocessors() // max(1, call.n_q * call.n_head_kv)
    return max(1, min(wanted, call.most_partitions))


def combine(call: Call, given: Partials, factor: float) -> torch.Tensor:
    """Join the partials of every (query, head): float32 [n_q, n_head, d].

    factor: of differences of the m that are in `given`.
    """
    out = call.empty_out()
    rows, block_d = call.n_q * call.n_head, triton.next_power_of_2(call.head_dim)
    chunk: int = max(FEW, triton.next_power_of_2(given.n_groups))
    if rows * block_d <= 256 * multiprocessors():  # few programs: small ones, many groups at once
        chunk, block_d = min(chunk, 128), min(block_d, 32)
        warps, lanes = max(1, chunk // 32), 4 * max(1, chunk // 32)
    else:
        chunk, block_d, warps, lanes = min(chunk, 32), min(block_d, 128), 4, 4
    _combine_kernel[(rows, triton.cdiv(call.head_dim, block_d))](
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
        BLOCK_D=block_d,
        MODE=call.mode,
        SHARED=given.shared,
        FEW=FEW,
        CHUNK=chunk,
        LANES=lanes,  # a warp's tile is 4 rows of 8 lanes of 4 elements, or one of 32
        LEVELS=LEVELS,
        PDL=overlaps(),
        num_warps=warps,
        **({"launch_pdl": True} if overlaps() else {}),
        enable_fp_fusion=False,
    )
    return out
