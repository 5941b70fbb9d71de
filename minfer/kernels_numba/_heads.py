"""Inner loops of decode: one to four query heads of a KV head against keys that lie in rows.

`ahead` is where as many rows begin whose turn comes later; each loop asks for their lines on its
way.
"""

from __future__ import annotations

from typing import Any

from minfer.format import BLOCK, BLOCK_BYTES, KvFormat
from minfer.kernels_numba._cell import head_bytes, load_16, load_16_blocks, load_block
from minfer.kernels_numba._emit import F32, I32, LANES, VF, Emitter
from minfer.kernels_numba._gather import SCORE_STRIDE, TILE
from minfer.kernels_numba._ir import intrinsic_of
from minfer.kernels_numba._query import QUERY_BLOCK, QUERY_SCALE, QUERY_SUM

GROUP = 4  # query heads of one KV head that can share its loads
LINE = 64  # bytes of a cache line


def _prefetch(e: Emitter, address: Any, size: int) -> None:
    for offset in range(0, size, LINE):
        e.prefetch(address, offset)


# -- scores of 16 keys ----------------------------------------------------------------------------
# k, stride: the keys' rows of one KV head; q: packed queries of its heads; out: their scores.


def _lane_scores(e: Emitter, fmt: KvFormat, heads: int, *args: Any) -> None:
    """f32 and f16: sixteen partial sums over d per score, then a fixed tree; four keys at once."""
    k, stride, q, d, out, ahead = args
    size, steps = head_bytes(fmt, LANES), e.builder.udiv(d, e.index(LANES))
    with e.loop(TILE // 4) as quarter:
        rows = e.rows(e.add(k, e.mul(quarter, e.mul(stride, 4))), stride, 4)
        sums = [[e.variable(e.const(VF, 0.0)) for _ in rows] for _ in range(heads)]
        with e.loop(steps) as step:
            _prefetch(
                e, e.add(ahead, e.mul(e.add(e.mul(quarter, steps), step), 4 * size)), 4 * size
            )
            keys = [load_16(e, fmt, e.add(row, e.mul(step, size))) for row in rows]
            for head in range(heads):
                query = e.load(VF, q, e.add(e.mul(step, 4 * LANES), e.mul(d, 4 * head)))
                for key, total in zip(keys, sums[head], strict=True):
                    e.set(total, e.fma(key, query, e.get(total)))
        for head in range(heads):
            four = e.sums_of_four([e.get(total) for total in sums[head]])
            e.store(four, out, e.add(head * SCORE_STRIDE, e.mul(quarter, 16)))


def _block_scores(e: Emitter, heads: int, *args: Any) -> None:
    """q8_0: lane r is key r, so block sums are exact int32 and blocks add up in index order."""
    k, stride, q, d, out, ahead = args
    build, blocks = e.builder, e.builder.udiv(d, e.index(BLOCK))
    totals = [e.variable(e.const(VF, 0.0)) for _ in range(heads)]
    with e.loop(blocks) as block:
        _prefetch(e, e.add(ahead, e.mul(block, TILE * BLOCK_BYTES)), TILE * BLOCK_BYTES)
        codes, scales = load_16_blocks(e, e.add(k, e.mul(block, BLOCK_BYTES)), stride)
        for head in range(heads):
            query = e.add(q, e.mul(e.add(e.mul(blocks, head), block), QUERY_BLOCK))
            isum = e.load_splat(I32, query, QUERY_SUM)
            for i, four in enumerate(codes):
                isum = e.dot_u8_s8(isum, four, e.load_splat(I32, query, 4 * i))
            scale_qk = build.fmul(scales, e.load_splat(F32, query, QUERY_SCALE))
            term = build.fmul(build.sitofp(isum, VF), scale_qk)
            e.set(totals[head], build.fadd(e.get(totals[head]), term))
    for head in range(heads):
        e.store(e.get(totals[head]), out, head * SCORE_STRIDE)


def scores(fmt: KvFormat) -> Any:
    """Intrinsic (heads, k, stride, q, d, out, ahead): scores of 16 keys, 1 to 4 heads."""

    def emit(e: Emitter, heads: Any, *args: Any) -> None:
        for count in range(1, GROUP + 1):
            with e.when(e.builder.icmp_signed("==", heads, e.index(count))):
                if fmt is KvFormat.Q8_0:
                    _block_scores(e, count, *args)
                else:
                    _lane_scores(e, fmt, count, *args)

    return intrinsic_of("ppppppp:v", emit)


# -- weights times values -------------------------------------------------------------------------


def _load_values(e: Emitter, fmt: KvFormat, count: int, row: Any) -> list[Any]:
    if fmt is KvFormat.Q8_0:
        return list(load_block(e, row))
    size = head_bytes(fmt, LANES)
    return [load_16(e, fmt, e.add(row, size * i)) for i in range(count)]


def _accumulate(e: Emitter, fmt: KvFormat, heads: int, count: int, *args: Any) -> None:
    """acc += weight * value over n keys in order, for 16 * count elements of `heads` heads."""
    v, stride, n, weights, acc, acc_stride, ahead = args
    size = count * head_bytes(fmt, BLOCK) // 2  # of these elements of a key
    slots = [
        [e.variable(e.load(VF, acc, e.add(e.mul(acc_stride, head), 64 * i))) for i in range(count)]
        for head in range(heads)
    ]
    with e.loop(n) as key:
        _prefetch(e, e.add(ahead, e.mul(key, size)), size)
        values = _load_values(e, fmt, count, e.add(v, e.mul(key, stride)))
        for head in range(heads):
            weight = e.load_splat(F32, weights, e.add(head * SCORE_STRIDE, e.mul(key, 4)))
            for slot, value in zip(slots[head], values, strict=True):
                e.set(slot, e.fma(weight, value, e.get(slot)))
    for head in range(heads):
        for i, slot in enumerate(slots[head]):
            e.store(e.get(slot), acc, e.add(e.mul(acc_stride, head), 64 * i))


def _head_values(e: Emitter, fmt: KvFormat, heads: int, *args: Any) -> None:
    """All d elements: q8_0 block by block, f32 and f16 by 64 and the rest by 16."""
    v, stride, n, weights, acc, d, ahead = args
    steps, done = e.builder.udiv(d, e.index(LANES)), e.index(0)
    size = head_bytes(fmt, BLOCK) // 2  # of sixteen elements, half a block
    for count in (2,) if fmt is KvFormat.Q8_0 else (4, 1):
        with e.loop(e.builder.udiv(e.builder.sub(steps, done), e.index(count))) as i:
            step = e.add(done, e.mul(i, count))
            row, out = e.add(v, e.mul(step, size)), e.add(acc, e.mul(step, 4 * LANES))
            lines = e.add(ahead, e.mul(e.mul(step, n), size))
            _accumulate(e, fmt, heads, count, row, stride, n, weights, out, e.mul(d, 4), lines)
        done = e.mul(e.builder.udiv(steps, e.index(count)), count)


def values(fmt: KvFormat) -> Any:
    """Intrinsic (heads, v, stride, n, weights, acc, d, ahead): n keys, 1 to 4 heads."""

    def emit(e: Emitter, heads: Any, *args: Any) -> None:
        for count in range(1, GROUP + 1):
            with e.when(e.builder.icmp_signed("==", heads, e.index(count))):
                _head_values(e, fmt, count, *args)

    return intrinsic_of("pppppppp:v", emit)
