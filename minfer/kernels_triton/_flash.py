"""`flash`: prefill attention, work cut into (rows, KV head), late tiles first.

A program owns one KV head and ROWS rows: consecutive queries of a tile times the heads of the
group. It passes once over key tiles that are aligned in logical index, in order, and keeps a
running softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022).

The keys that all its queries see lie in up to four runs of cells. A run holds a stretch of tiles
that are read in one piece and without masks; tiles between stretches are gathered row by row and
masked. Both kinds do the same arithmetic in the same order, and a key that is masked changes
nothing, so a row's bits depend neither on the other rows nor on where runs begin and end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minfer.format import KvFormat
from minfer.kernels_triton._arguments import architecture, planes
from minfer.kernels_triton._call import Call
from minfer.kernels_triton._gather import RUNS, cell_of, own_cell, query_window
from minfer.kernels_triton._softmax import no_keys
from minfer.kernels_triton._tile import F32, FORMATS, load_rows
from minfer.kernels_triton._tunables import changes
from minfer.ops import Config


@triton.jit
def _scores(q, k, FMT: tl.constexpr):
    """float32 [rows, n] of q [rows, d] and k [n, d]."""
    if FMT == F32:
        return tl.dot(q, tl.trans(k), input_precision="ieee")
    return tl.dot(q, tl.trans(k))


@triton.jit
def _add_keys(m, l, acc, scores, v, factor, FMT: tl.constexpr):
    """The running softmax of every row after one more tile of keys.

    m: largest score so far, times `factor` unless cells are f32; -inf before the first key.
    """
    largest = tl.max(scores, axis=1)
    if FMT == F32:
        top = tl.maximum(m, largest)
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2((scores - base[:, None]) * factor)
        decay = tl.exp2((m - base) * factor)
        acc = tl.fma(acc, decay[:, None], tl.dot(p, v, input_precision="ieee"))
    else:
        top = tl.maximum(m, largest * factor)
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(tl.fma(scores, factor, -base[:, None]))
        decay = tl.exp2(m - base)
        acc = tl.dot(p.to(tl.float16), v, acc * decay[:, None])
    return top, tl.fma(l, decay, tl.sum(p, axis=1)), acc


@triton.jit
def _stretch(r, n_runs, done, n_tiles, begin, end, e0, e1, e2, BLOCK_N: tl.constexpr,
             MODE: tl.constexpr):  # fmt: skip
    """Tiles [first, after) not before `done` that lie in run r and in keys [begin, end), wholly.

    Behind the last run: the empty stretch at n_tiles.
    """
    start, stop = begin, end
    if MODE == RUNS:
        start = tl.where(r == 0, begin, tl.where(r == 1, e0, tl.where(r == 2, e1, e2)))
        stop = tl.where(r == 0, e0, tl.where(r == 1, e1, tl.where(r == 2, e2, end)))
    first = tl.maximum(tl.cdiv(tl.maximum(start, begin), BLOCK_N), done)
    first = tl.where(r == n_runs, n_tiles, tl.minimum(first, n_tiles))
    return first, tl.maximum(tl.minimum(stop, end) // BLOCK_N, first)


@triton.jit
def _runs_in_use(last, e0, e1, e2, MODE: tl.constexpr):
    """How many runs hold keys up to `last`."""
    if MODE == RUNS:
        return 1 + tl.where(last >= e2, 3, tl.where(e2 > e1, 2, tl.where(e1 > e0, 1, 0)))
    return 1


@triton.jit
def _early_cells(window, query, pos, width, j, seen, MODE: tl.constexpr):
    """Cells of keys that queries after `query`, which stands at `pos`, may have slid past."""
    _0, e0, e1, e2, b0, b1, b2, b3 = query_window(window, query, pos, width, MODE)
    own = own_cell(window, query + j - pos, j, seen & (j > pos), MODE)
    return tl.where(j > pos, own, cell_of(j, e0, e1, e2, b0, b1, b2, b3, MODE))


@triton.jit
def _attend_flash_kernel(
    q,  # float32 [n_q, n_head, D]
    k,  # [n_cells, STRIDE]
    k_scales,  # float16 [n_cells, SCALES] of q8_0
    v,
    v_scales,
    window,
    positions,  # int32 [n_q]
    tiles,  # int32 [n, 2] (first query, count)
    out,  # float32 [n_q, n_head, D]
    width,
    factor,
    N_HEAD_KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    FMT: tl.constexpr,
    MODE: tl.constexpr,
    PARTS: tl.constexpr,  # programs that share a tile and KV head
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    head, part = index % N_HEAD_KV, index // N_HEAD_KV % PARTS
    tile = tiles + 2 * (index // N_HEAD_KV // PARTS)
    QUERIES: tl.constexpr = ROWS // GROUP
    n = tl.minimum(tl.load(tile + 1) - part * QUERIES, QUERIES)
    if n <= 0:
        return
    query = tl.load(tile) + part * QUERIES
    pos = tl.load(positions + query)
    last = pos + n - 1
    row, d, key = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    step = tl.minimum(row // GROUP, n - 1)  # queries after the first; spare rows are the last's
    ends = pos + step
    begins, _0, _1, _2, _3, _4, _5, _6 = query_window(window, query + step, ends, width, MODE)
    first, _0, _1, _2, _3, _4, _5, _6 = query_window(window, query, pos, width, MODE)
    begin, e0, e1, e2, b0, b1, b2, b3 = query_window(window, query + n - 1, last, width, MODE)

    start = (query.to(tl.int64) * N_HEAD_KV + head) * (GROUP * D)
    at = (row // GROUP * (N_HEAD_KV * GROUP) + row % GROUP)[:, None] * D + d[None, :]
    used = (row < n * GROUP)[:, None] & (d < D)[None, :]
    q_tile = tl.load(q + start + at, mask=used, other=0.0)
    TYPE: tl.constexpr = tl.float32 if FMT == F32 else tl.float16
    q_tile, every = q_tile.to(TYPE), key >= 0

    m, l, acc = no_keys(ROWS, BLOCK_D)
    done, n_tiles = first // BLOCK_N, last // BLOCK_N + 1
    n_runs = _runs_in_use(last, e0, e1, e2, MODE)
    for r in range(n_runs + 1):
        whole, after = _stretch(r, n_runs, done, n_tiles, begin, pos + 1, e0, e1, e2, BLOCK_N, MODE)
        for t in tl.range(done, whole, num_stages=2):
            j = t * BLOCK_N + key
            seen = (j >= first) & (j <= last)
            cells = cell_of(j, e0, e1, e2, b0, b1, b2, b3, MODE)
            if MODE == RUNS and t * BLOCK_N < begin:  # keys that the last query does not see
                early = _early_cells(window, query, pos, width, j, seen, MODE)
                cells = tl.where(j < begin, early, cells)
            cells = cells.to(tl.int64)
            k_tile = load_rows(
                k, k_scales, head, 0, cells, seen, D, BLOCK_D, STRIDE, SCALES, FMT, TYPE
            )
            v_tile = load_rows(
                v, v_scales, head, 0, cells, seen, D, BLOCK_D, STRIDE, SCALES, FMT, TYPE
            )
            scores = _scores(q_tile, k_tile, FMT)
            mine = (j[None, :] >= begins[:, None]) & (j[None, :] <= ends[:, None])
            scores = tl.where(mine, scores, float("-inf"))
            m, l, acc = _add_keys(m, l, acc, scores, v_tile, factor, FMT)
        origin = cell_of(whole * BLOCK_N, e0, e1, e2, b0, b1, b2, b3, MODE)
        for t in tl.range(whole, after, num_stages=STAGES):
            cell = (origin + (t - whole) * BLOCK_N).to(tl.int64)
            k_tile = load_rows(
                k, k_scales, head, cell, key, every, D, BLOCK_D, STRIDE, SCALES, FMT, TYPE, True
            )
            v_tile = load_rows(
                v, v_scales, head, cell, key, every, D, BLOCK_D, STRIDE, SCALES, FMT, TYPE, True
            )
            m, l, acc = _add_keys(m, l, acc, _scores(q_tile, k_tile, FMT), v_tile, factor, FMT)
        done = after
    result = acc * (1.0 / l)[:, None] + 0.0  # no negative zero, which masked keys could flip
    tl.store(out + start + at, result, mask=used)


class Blocks(NamedTuple):
    """How a program is cut: `rows`, `block_n` and `warps` may change bits, others do not."""

    rows: int  # (query, head) pairs of a program
    block_n: int  # keys of a tile
    warps: int
    stages: int  # tiles of keys that are loaded ahead, and one more
    registers: int | None = None  # of a thread at most; None: the compiler's choice


def blocks_of(fmt: KvFormat, head_dim: int, arch: int) -> Blocks:
    """Blocks that fit the registers and shared memory of sm_`arch`; those of sm_90 are measured."""
    block_d = triton.next_power_of_2(head_dim)
    if fmt is KvFormat.F32:
        return Blocks(64, 32, {16: 4, 128: 16}.get(block_d, 8), 2)
    packed = fmt is KvFormat.Q8_0
    crowded = block_d > 64 and (packed or head_dim != 128)
    if arch // 10 != 9:
        return Blocks(64, 32 if crowded else 64, 8, 3 if packed and crowded else 2)
    if block_d > 128:
        return Blocks(64, 64, 8, 2)
    if block_d <= 64:  # as few registers as let four programs share a multiprocessor
        return Blocks(64, 64, 4, 3, registers=None if packed else 128)
    return Blocks(128, 64 if head_dim != 128 else 128, 8, 2 if packed else 3)


def attend_flash(call: Call, tiles: torch.Tensor, config: Config) -> torch.Tensor:
    """Run `flash` on a checked call and its tiles, int32 [n, 2]: float32 [n_q, n_head, d]."""
    measured = blocks_of(call.fmt, call.head_dim, architecture())
    blocks = measured._replace(**changes(measured, config))
    return launch_flash(call, tiles, config["block_m"], blocks)


def launch_flash(call: Call, tiles: torch.Tensor, block_m: int, blocks: Blocks) -> torch.Tensor:
    """`attend_flash` in given blocks; `block_m`: queries of a tile at most."""
    out, (k, k_scales), (v, v_scales) = call.empty_out(), planes(call.k), planes(call.v)
    stride, scale_stride = call.strides
    # a scale of 0 would make a masked score NaN; zero queries give the same equal weights
    q, factor = (call.q, call.factor) if call.factor else (torch.zeros_like(call.q), 1.0)
    parts = triton.cdiv(block_m, blocks.rows // call.group)
    _attend_flash_kernel[(tiles.shape[0] * parts * call.n_head_kv,)](
        q,
        k,
        k_scales,
        v,
        v_scales,
        call.window_or_positions,
        call.positions,
        tiles,
        out,
        call.width,
        factor,
        N_HEAD_KV=call.n_head_kv,
        GROUP=call.group,
        D=call.head_dim,
        BLOCK_D=triton.next_power_of_2(call.head_dim),
        STRIDE=stride,
        SCALES=scale_stride,
        FMT=FORMATS[call.fmt],
        MODE=call.mode_value,
        PARTS=parts,
        ROWS=blocks.rows,
        BLOCK_N=blocks.block_n,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        maxnreg=blocks.registers,
        enable_fp_fusion=False,
    )
    return out
