"""Inner loops of prefill: six rows of queries against a packed panel of keys, then values.

A panel holds 64 keys (q8_0: 32) transposed, so that a lane is a key: f32 element j of every key,
then element j + 1; q8_0 per block eight steps of four codes a key, 128 added, then the scales.
"""

from __future__ import annotations

from typing import Any

from minfer.format import BLOCK, BLOCK_BYTES, KvFormat
from minfer.kernels_numba._cell import CHAIN, head_bytes, load_16_blocks, load_16_rows
from minfer.kernels_numba._emit import F32, I32, LANES, VF, VI, Emitter
from minfer.kernels_numba._gather import SCORE_STRIDE, TILE
from minfer.kernels_numba._ir import intrinsic_of
from minfer.kernels_numba._query import QUERY_BLOCK, QUERY_SCALE, QUERY_SUM

ROWS = 6  # rows of a micro-tile: 6 x 4 accumulators of 16 lanes fill the registers
BLOCK_STEP = BLOCK * 32 + 128  # bytes of a q8_0 block of 32 keys: codes, then scales


def panel_keys(fmt: KvFormat) -> int:
    """Keys of one panel."""
    return 2 * TILE if fmt is KvFormat.Q8_0 else 4 * TILE


def panel_bytes(fmt: KvFormat, head_dim: int) -> int:
    """Bytes of one panel."""
    if fmt is KvFormat.Q8_0:
        return head_dim // BLOCK * BLOCK_STEP
    return 4 * head_dim * panel_keys(fmt)


# -- keys into a panel: (k, stride, panel + 64 * tile, d) -----------------------------------------


def _pack_elements(e: Emitter, fmt: KvFormat, k: Any, stride: Any, panel: Any, d: Any) -> None:
    size = head_bytes(fmt, LANES)
    with e.loop(e.builder.udiv(d, e.index(LANES))) as step:
        elements = load_16_rows(e, fmt, e.add(k, e.mul(step, size)), stride)
        out = e.add(panel, e.mul(step, LANES * 256))
        for i, keys in enumerate(elements):
            e.store(keys, out, 256 * i)


def _pack_blocks(e: Emitter, k: Any, stride: Any, panel: Any, d: Any) -> None:
    with e.loop(e.builder.udiv(d, e.index(BLOCK))) as block:
        codes, scales = load_16_blocks(e, e.add(k, e.mul(block, BLOCK_BYTES)), stride)
        out = e.add(panel, e.mul(block, BLOCK_STEP))
        for i, four in enumerate(codes):
            e.store(four, out, 128 * i)
        e.store(scales, out, BLOCK_STEP - 128)


def pack_keys(fmt: KvFormat) -> Any:
    """Intrinsic that packs 16 keys."""
    if fmt is KvFormat.Q8_0:
        return intrinsic_of("pppp:v", _pack_blocks)
    return intrinsic_of("pppp:v", lambda e, *a: _pack_elements(e, fmt, *a))


# -- products -------------------------------------------------------------------------------------


def multiply(
    e: Emitter, slots: list[list[Any]], a: Any, a_stride: Any, b: Any, b_stride: Any, n: Any
) -> None:
    """slots[r][i] += a[r, k] * b[k, 16 i ..] for k in order, one fma chain per element."""
    rows = e.rows(a, a_stride, ROWS)
    with e.loop(n) as k:
        right = e.add(b, e.mul(k, b_stride))
        columns = [e.load(VF, right, 64 * i) for i in range(len(slots[0]))]
        for row, line in zip(rows, slots, strict=True):
            left = e.load_splat(F32, row, e.mul(k, 4))
            for slot, column in zip(line, columns, strict=True):
                e.set(slot, e.fma(left, column, e.get(slot)))


def _score_elements(e: Emitter, q: Any, q_stride: Any, d: Any, panel: Any, out: Any) -> None:
    """Six rows against 64 keys: one fma chain per CHAIN elements of d, the chains added in order.

    One chain over all of d would lose two more bits at a head_dim of 256.
    """
    totals = [[e.variable(e.const(VF, 0.0)) for _ in range(4)] for _ in range(ROWS)]

    def chain(slots: list[list[Any]], done: Any) -> None:
        left, most = e.builder.sub(d, done), e.index(CHAIN)
        n = e.builder.select(e.builder.icmp_unsigned("<", left, most), left, most)
        keys = e.add(panel, e.mul(done, 256))
        multiply(e, slots, e.add(q, e.mul(done, 4)), q_stride, keys, 256, n)

    chain(totals, e.index(0))
    with e.loop(e.builder.udiv(e.builder.sub(d, e.index(1)), e.index(CHAIN))) as i:
        slots = [[e.variable(e.const(VF, 0.0)) for _ in line] for line in totals]
        chain(slots, e.mul(e.add(i, 1), CHAIN))
        for line, chains in zip(totals, slots, strict=True):
            for total, more in zip(line, chains, strict=True):
                e.set(total, e.builder.fadd(e.get(total), e.get(more)))
    for row, line in enumerate(totals):
        for i, total in enumerate(line):
            e.store(e.get(total), out, row * SCORE_STRIDE + 64 * i)


def multiply_blocks(
    e: Emitter, totals: list[list[Any]], q: Any, q_stride: Any, panel: Any, d: Any
) -> None:
    """totals[r][i] += q[r] times 16 keys of a q8_0 panel of 32, d elements (contract 4.5).

    Block sums are exact, blocks are added in index order.
    """
    build, rows = e.builder, e.rows(q, q_stride, ROWS)
    with e.loop(build.udiv(d, e.index(BLOCK))) as block:
        codes = e.add(panel, e.mul(block, BLOCK_STEP))
        here = [e.add(row, e.mul(block, QUERY_BLOCK)) for row in rows]
        sums = [[e.load_splat(I32, query, QUERY_SUM)] * 2 for query in here]
        for step in range(BLOCK // 4):
            keys = [e.load(VI, codes, 128 * step + 64 * i) for i in (0, 1)]
            for row, query in enumerate(here):
                four = e.load_splat(I32, query, 4 * step)
                sums[row] = [
                    e.dot_u8_s8(total, key, four)
                    for total, key in zip(sums[row], keys, strict=True)
                ]
        scales = [e.load(VF, codes, BLOCK_STEP - 128 + 64 * i) for i in (0, 1)]
        for row, query in enumerate(here):
            scale_q = e.load_splat(F32, query, QUERY_SCALE)
            for i in (0, 1):
                term = build.fmul(build.sitofp(sums[row][i], VF), build.fmul(scales[i], scale_q))
                e.set(totals[row][i], build.fadd(e.get(totals[row][i]), term))


def _score_blocks(e: Emitter, q: Any, q_stride: Any, d: Any, panel: Any, out: Any) -> None:
    """Six rows against 32 keys."""
    totals = [[e.variable(e.const(VF, 0.0)) for _ in (0, 1)] for _ in range(ROWS)]
    multiply_blocks(e, totals, q, q_stride, panel, d)
    for row, line in enumerate(totals):
        for i, total in enumerate(line):
            e.store(e.get(total), out, row * SCORE_STRIDE + 64 * i)


def score_panel(fmt: KvFormat) -> Any:
    """Intrinsic (q, q_stride, d, panel, out): scores of six rows against a panel."""
    emit = _score_blocks if fmt is KvFormat.Q8_0 else _score_elements
    return intrinsic_of("ppppp:v", emit)


def _mix_values(
    e: Emitter, weights: Any, n: Any, values: Any, stride: Any, acc: Any, d: Any
) -> None:
    """acc[6, d] += weights[6, n] * values[n, d], keys in order; d by 64, then 32, then 16."""
    steps, done, acc_stride = e.builder.udiv(d, e.index(LANES)), e.index(0), e.mul(d, 4)
    for count in (4, 2, 1):
        left = e.builder.sub(steps, done)
        with e.loop(e.builder.udiv(left, e.index(count))) as i:
            at = e.mul(e.add(done, e.mul(i, count)), 4 * LANES)
            out = e.rows(e.add(acc, at), acc_stride, ROWS)
            slots = [[e.variable(e.load(VF, row, 64 * j)) for j in range(count)] for row in out]
            multiply(e, slots, weights, SCORE_STRIDE, e.add(values, at), stride, n)
            for row, line in zip(out, slots, strict=True):
                for j, slot in enumerate(line):
                    e.store(e.get(slot), row, 64 * j)
        done = e.mul(e.builder.udiv(steps, e.index(count)), count)


mix_values = intrinsic_of("pppppp:v", _mix_values)  # weights, n, values, stride, acc, d
