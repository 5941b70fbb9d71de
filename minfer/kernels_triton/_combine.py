"""The second launch of decode, where several programs share the keys of a query."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minfer.kernels_triton._arguments import architecture, multiprocessors
from minfer.kernels_triton._call import Call
from minfer.kernels_triton._gather import query_window
from minfer.kernels_triton._shares import PARTITION, Partials, group_level, share_size
from minfer.kernels_triton._softmax import weight

CHUNK_LEVELS = 16  # of the tree above chunks
LEAST_CHUNK = 8  # groups
ELEMENTS = 256  # of a chunk, a warp, of MOST_WARPS at most
MOST_WARPS = 4


@triton.jit
def _join(m_a, l_a, acc_a, m_b, l_b, acc_b, factor):
    """The state of both, element by element: all six have one shape."""
    m = tl.maximum(m_a, m_b)
    w_a, w_b = weight(m_a, m, factor), weight(m_b, m, factor)
    return m, l_a * w_a + l_b * w_b, acc_a * w_a + acc_b * w_b


@triton.jit
def _join_rows(m, l, acc, factor, N: tl.constexpr, LOW: tl.constexpr, BLOCK_D: tl.constexpr):
    """Join rows seen as [N, 2, LOW, BLOCK_D] along the 2, to [N, LOW, BLOCK_D]."""
    m_a, m_b = tl.split(tl.permute(tl.reshape(m, [N, 2, LOW, BLOCK_D]), [0, 2, 3, 1]))
    l_a, l_b = tl.split(tl.permute(tl.reshape(l, [N, 2, LOW, BLOCK_D]), [0, 2, 3, 1]))
    acc_a, acc_b = tl.split(tl.permute(tl.reshape(acc, [N, 2, LOW, BLOCK_D]), [0, 2, 3, 1]))
    return _join(m_a, l_a, acc_a, m_b, l_b, acc_b, factor)


@triton.jit
def _chunk(states, accs, chunk, begin, end, d, factor, D: tl.constexpr, BLOCK_D: tl.constexpr,
           CHUNK: tl.constexpr, SPREAD: tl.constexpr):  # fmt: skip
    """The groups of one chunk that lie in [begin, end) as one state [1, BLOCK_D] each.

    Row 0 of the partials is group `begin`. A thread holds every SPREAD-th row of a tile, so rows
    are ordered that the groups it holds are neighbours, and joins those without asking others.
    """
    ROWS: tl.constexpr = CHUNK // SPREAD
    r = tl.arange(0, CHUNK)
    group = chunk * CHUNK + r % SPREAD * ROWS + r // SPREAD
    held, at = (group >= begin) & (group < end), group - begin
    m = tl.load(states + 2 * at, mask=held, other=float("-inf"))
    l = tl.load(states + 2 * at + 1, mask=held, other=0.0)
    mask = held[:, None] & (d < D)[None, :]
    acc = tl.load(accs + at[:, None] * D + d[None, :], mask=mask, other=0.0)
    m = tl.broadcast_to(m[:, None], [CHUNK, BLOCK_D])
    l = tl.broadcast_to(l[:, None], [CHUNK, BLOCK_D])
    for level in tl.static_range(ROWS.bit_length() - 1):
        m, l, acc = _join_rows(m, l, acc, factor, ROWS >> (level + 1), SPREAD, BLOCK_D)
    for level in tl.static_range(SPREAD.bit_length() - 1):
        m, l, acc = _join_rows(m, l, acc, factor, SPREAD >> (level + 1), 1, BLOCK_D)
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
    SPREAD: tl.constexpr,
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
    p_first, p_last = first // PARTITION, pos // PARTITION
    if SHARED:
        level, _ = share_size(p_first, p_last, n_splits)
    else:
        level = group_level(p_first, p_last, n_splits)
    begin, end = p_first >> level, (p_last >> level) + 1
    base = row.to(tl.int64) * n_rows
    states, accs = states + 2 * base, accs + D * base
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    chunk, last = begin // CHUNK, (end - 1) // CHUNK
    if PDL:
        tl.extra.cuda.gdc_wait()  # launched early; now the partials are there
    m, l, acc = _chunk(states, accs, chunk, begin, end, d, factor, D, BLOCK_D, CHUNK, SPREAD)
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
                m, l, acc = _join(m_a, l_a, acc_a, m, l, acc, factor)
                waiting_m = tl.where(here, float("-inf"), waiting_m)
                waiting_l = tl.where(here, 0.0, waiting_l)
                waiting_acc = tl.where(here, 0.0, waiting_acc)
                level, rest = level + 1, rest // 2
            chunk += 1
            if chunk <= last:
                here = level_of == tl.minimum(level, CHUNK_LEVELS - 1)  # one at most is as large
                waiting_m = tl.where(here, m, waiting_m)
                waiting_l = tl.where(here, l, waiting_l)
                waiting_acc = tl.where(here, acc, waiting_acc)
                m, l, acc = _chunk(
                    states, accs, chunk, begin, end, d, factor, D, BLOCK_D, CHUNK, SPREAD
                )
    target = out + row.to(tl.int64) * D + d[None, :]
    # adding +0 leaves no negative zero, which masked keys could flip
    tl.store(target, acc / l + 0.0, mask=(d < D)[None, :])


def overlaps() -> bool:
    """Whether a launch may begin before the one it waits for ends: from Hopper on."""
    return architecture() >= 90


def combine(call: Call, given: Partials, out: torch.Tensor, factor: float) -> torch.Tensor:
    """Join the partials of every (query, head) into `out`, float32 [n_q, n_head, d].

    factor: of differences of the m that are in `given`.
    """
    rows, block_d = call.n_q * call.n_head, triton.next_power_of_2(call.head_dim)
    # as many groups at once as there are programs; a few rows are cut into more pieces
    most_groups, most_d = (128, 32) if rows * block_d <= 256 * multiprocessors() else (32, 128)
    chunk = min(max(LEAST_CHUNK, triton.next_power_of_2(given.n_splits)), most_groups)
    block_d = min(block_d, most_d)
    warps = min(max(1, chunk * block_d // ELEMENTS), MOST_WARPS)
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
        MODE=call.mode_value,
        SHARED=given.shared,
        CHUNK=chunk,
        SPREAD=warps
        * max(
            1, 128 // block_d
        ),  # rows of a tile that lie in different threads: 32 lanes of a warp hold 4 elements each
        CHUNK_LEVELS=CHUNK_LEVELS,
        PDL=overlaps(),
        num_warps=warps,
        **({"launch_pdl": True} if overlaps() else {}),
        enable_fp_fusion=False,
    )
    return out
