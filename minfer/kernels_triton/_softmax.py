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
CHUNK_LEVELS = 16  # of the tree above chunks
LEAST_CHUNK = 8
ELEMENTS = 1024  # of a chunk, a warp
LEVELS = tl.constexpr(4)  # of the tree that a program keeps in registers
TREE_LEVELS = tl.constexpr(20)  # above them, up to 2**31 keys


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
def store_state(states, accs, at, state, held, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Put the state of rows [r] of which `held` are real at `at` int64 [r] of a `Partials`."""
    tl.store(states + 2 * at, state[0], mask=held)
    tl.store(states + 2 * at + 1, state[1], mask=held)
    d = tl.arange(0, BLOCK_D)
    mask = held[:, None] & (d < D)[None, :]
    tl.store(accs + at[:, None] * D + d[None, :], state[2], mask=mask)


@triton.jit
def load_state(states, accs, at, held, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """What `store_state` put there; states of no keys where not `held`."""
    m = tl.load(states + 2 * at, mask=held, other=float("-inf"))
    l = tl.load(states + 2 * at + 1, mask=held, other=0.0)
    d = tl.arange(0, BLOCK_D)
    mask = held[:, None] & (d < D)[None, :]
    return m, l, tl.load(accs + at[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_answer(out, rows, state, held, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Put acc / l of a state into the `rows` int64 [r] that are `held`; out float32 [.., D]."""
    d = tl.arange(0, BLOCK_D)
    # adding +0 leaves no negative zero, which masked keys could flip
    answer = state[2] / state[1][:, None] + 0.0
    tl.store(out + rows[:, None] * D + d[None, :], answer, mask=held[:, None] & (d < D)[None, :])


@triton.jit
def group_size(p_first, p_last, n_splits, LARGEST: tl.constexpr):
    """Partitions of a group: the smallest power of two with at most n_splits groups, or LARGEST."""
    size = p_first * 0 + 1
    while (size < LARGEST) & (p_last // size - p_first // size >= n_splits):
        size = size * 2
    return size


@triton.jit
def share_size(p_first, p_last, n_splits):
    """log2 of the partitions of a group, and groups of a program, which takes several in a row.

    The largest groups with which the longest program is at most an eighth longer than it must be.
    """
    n = p_last - p_first + 1
    least = (n - 1) // n_splits + 1
    level = p_first * 0
    while (level < LEVELS) & ((n_splits == 1) | (1 << level < least)):
        level += 1
    share = ((p_last >> level) - (p_first >> level)) // n_splits + 1
    while 8 * tl.minimum(share << level, n) > 9 * least:
        level -= 1
        share = ((p_last >> level) - (p_first >> level)) // n_splits + 1
    return level, share


@triton.jit
def join(a, b, factor):
    """The state of both: m, l [rows] and acc [rows, d]."""
    m = tl.maximum(a[0], b[0])
    w_a, w_b = weight(a[0], m, factor), weight(b[0], m, factor)
    return m, a[1] * w_a + b[1] * w_b, a[2] * w_a[:, None] + b[2] * w_b[:, None]


@triton.jit
def add_leaf(s0, s1, s2, s3, leaf, index, factor, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Join leaf `index` with subtrees to its left, as a binary counter counts.

    s0, s1, s2: a subtree of 1, 2, 4 leaves that waits for its right neighbour. s3: one of 8, joined
    with the next. Returns all four.
    """
    if index % 2 == 0:
        s0 = leaf
    else:
        pair = join(s0, leaf, factor)
        s0 = no_keys(ROWS, BLOCK_D)
        if index // 2 % 2 == 0:
            s1 = pair
        else:
            four = join(s1, pair, factor)
            s1 = no_keys(ROWS, BLOCK_D)
            if index // 4 % 2 == 0:
                s2 = four
            else:
                s3 = join(s3, join(s2, four, factor), factor)
                s2 = no_keys(ROWS, BLOCK_D)
    return s0, s1, s2, s3


@triton.jit
def join_all(s0, s1, s2, s3, factor):
    """The state of all subtrees of `add_leaf`."""
    return join(s3, join(s2, join(s1, s0, factor), factor), factor)


@triton.jit
def _join_left(state, n_waits, index, last, begin, states, accs, waiting, held, factor,
               D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Join leaf `index` of those from `begin` on with the subtrees to its left that it completes.

    The last one completes all. n_waits subtrees lie in rows `waiting` int64 [rows] and after, the
    nearest last. Returns a state, and how many still wait.
    """
    tl.debug_barrier()  # other threads may have stored what is loaded
    for level in range(TREE_LEVELS):
        ends = (index + 1) % (1 << level) == 0
        if ((index >> level) % 2 == 1) & (ends | last) & (index >> level << level > begin):
            n_waits -= 1
            left = load_state(states, accs, waiting + n_waits, held, D, BLOCK_D)
            state = join(left, state, factor)
    return state, n_waits


@triton.jit
def join_groups(whole, first, last, states, accs, at, waiting, held, factor,
                D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The state of group `last` joined with those from group `first` on, which lie in rows `at`.

    at, waiting: int64 [rows]; room for what waits lies in rows `waiting` and after.
    """
    n_waits = first * 0
    for g in range(first, last):
        tl.debug_barrier()
        state = load_state(states, accs, at + g - first, held, D, BLOCK_D)
        state, n_waits = _join_left(state, n_waits, g, False, first, states, accs, waiting, held,
                                    factor, D, BLOCK_D)  # fmt: skip
        store_state(states, accs, waiting + n_waits, state, held, D, BLOCK_D)
        n_waits += 1
    whole, n_waits = _join_left(whole, n_waits, last, True, first, states, accs, waiting, held,
                                factor, D, BLOCK_D)  # fmt: skip
    return whole


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
    states,  # float32 [n_q, n_head, n_rows, 2]
    accs,  # float32 [n_q, n_head, n_rows, d]
    window,
    positions,
    out,  # float32 [n_q, n_head, d]
    n_head,
    n_rows,
    n_splits,
    width,
    factor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MODE: tl.constexpr,
    SHARED: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK_LEVELS: tl.constexpr,
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
        level, _ = share_size(first // PARTITION, pos // PARTITION, n_splits)
        size = 1 << level
    else:
        size = group_size(first // PARTITION, pos // PARTITION, n_splits, UNLIMITED)
    begin, end = first // PARTITION // size, pos // PARTITION // size + 1
    base = row.to(tl.int64) * n_rows
    states, accs = states + 2 * base, accs + D * base
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    chunk, last = begin // CHUNK, (end - 1) // CHUNK
    if PDL:
        tl.extra.cuda.gdc_wait()  # launched early; now the partials are there
    m, l, acc = _chunk(states, accs, chunk, begin, end, d, factor, D, BLOCK_D, CHUNK, LANES)
    if chunk != last:
        level_of = tl.arange(0, CHUNK_LEVELS)[:, None] + tl.zeros_like(d)[None, :]
        waiting_m = tl.full([CHUNK_LEVELS, BLOCK_D], float("-inf"), tl.float32)
        waiting_l = tl.zeros([CHUNK_LEVELS, BLOCK_D], tl.float32)
        waiting_acc = tl.zeros([CHUNK_LEVELS, BLOCK_D], tl.float32)
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
    """Room for states, first those of groups, then those that wait inside of one.

    n_groups: a query has at most. shared: a program takes several in a row, by `share_size`.
    """

    states: torch.Tensor  # float32 [n_q, n_head, n_rows, 2]
    accs: torch.Tensor  # float32 [n_q, n_head, n_rows, d]
    n_groups: int
    n_splits: int
    shared: bool

    @property
    def n_rows(self) -> int:
        return self.states.shape[2]

    @classmethod
    def of(
        cls, call: Call, n_groups: int, n_waiting: int, n_splits: int, *, shared: bool
    ) -> Partials:
        """Room for so many groups and waiting states a query head of a call."""
        shape = (call.n_q, call.n_head, n_groups + n_waiting)
        states, accs = call.q.new_empty((*shape, 2)), call.q.new_empty((*shape, call.head_dim))
        return cls(states, accs, n_groups, n_splits, shared)


def partials(call: Call, n_splits: int) -> Partials:
    """Room for a call whose queries are each shared out to n_splits programs."""
    # a program takes 36 groups at most, or they are the largest: see `share_size`
    n_groups = max(36 * n_splits, (call.most_partitions >> LEVELS.value) + 2)
    n_groups = min(n_groups, call.most_partitions)
    n_waiting = n_groups.bit_length() if n_splits == 1 else 0
    return Partials.of(call, n_groups, n_waiting, n_splits, shared=True)


def splits(call: Call, programs: int, waves: int) -> int:
    """Programs a (query, KV head), so that all run at once, `waves` times.

    programs: that a multiprocessor holds. A free choice: partials join in the same tree whatever
    it is.
    """
    pairs, wanted = max(1, call.n_q * call.n_head_kv), waves * programs * multiprocessors()
    if waves == 1 and 8 * pairs >= 7 * multiprocessors():
        return 1  # one a multiprocessor reads as fast, and needs no second launch
    return max(1, min(wanted // pairs, call.most_partitions))


def combine(call: Call, given: Partials, out: torch.Tensor, factor: float) -> torch.Tensor:
    """Join the partials of every (query, head) into `out`, float32 [n_q, n_head, d].

    factor: of differences of the m that are in `given`.
    """
    rows, block_d = call.n_q * call.n_head, triton.next_power_of_2(call.head_dim)
    # as many groups as most queries have, and more programs where there are few
    most_groups, most_d = (128, 32) if rows * block_d <= 256 * multiprocessors() else (32, 128)
    chunk = min(max(LEAST_CHUNK, triton.next_power_of_2(given.n_splits)), most_groups)
    block_d = min(block_d, most_d)
    warps = max(1, chunk * block_d // ELEMENTS)
    _combine_kernel[(rows, triton.cdiv(call.head_dim, block_d))](
        given.states,
        given.accs,
        call.window_or_positions,
        call.positions,
        out,
        call.n_head,
        given.n_rows,
        given.n_splits,
        call.width,
        factor,
        D=call.head_dim,
        BLOCK_D=block_d,
        MODE=call.mode,
        SHARED=given.shared,
        CHUNK=chunk,
        LANES=warps * max(1, 128 // block_d),  # a warp holds 4 elements a lane
        CHUNK_LEVELS=CHUNK_LEVELS,
        PDL=overlaps(),
        num_warps=warps,
        **({"launch_pdl": True} if overlaps() else {}),
        enable_fp_fusion=False,
    )
    return out
