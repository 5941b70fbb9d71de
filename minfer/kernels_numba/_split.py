"""`split`: decode attention, work cut into (query, partition of 256 keys).

Workers draw partitions from one counter. A partition's scores of all heads come sixteen keys at a
time, then its softmax, then weights times values as one fma chain over the keys; partitions join
in a fixed tree. Heads of a group share every load of K and V, up to four at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from minfer.format import BLOCK, BLOCK_BYTES, KvFormat
from minfer.kernels_numba._call import Call, Floats, Plan
from minfer.kernels_numba._gather import TILE, Dims, gather_tile, segments, zero_bytes
from minfer.kernels_numba._ir import (
    F32,
    I32,
    LANES,
    VF,
    VI,
    Emitter,
    address,
    fetch_add,
    intrinsic_of,
    vector,
)
from minfer.kernels_numba._jit import granted, kernel
from minfer.kernels_numba._query import (
    QUERY_BLOCK,
    QUERY_SCALE,
    QUERY_SUM,
    pack_queries,
    query_bytes,
)
from minfer.kernels_numba._rows import CODES, head_bytes, load_16, load_block, load_scales
from minfer.kernels_numba._softmax import attn_join, softmax_row
from minfer.kernels_numba._workers import Worker, read, run
from minfer.window import KV_MAP_MAX_SPANS, PARTITION

GROUP = 4  # query heads of one KV head that share its loads
SCORE_STRIDE = 4 * PARTITION  # bytes from one head's scores to the next
FLIP = -0x7F7F7F80  # 0x80808080: int8 to uint8, 128 added to each byte


# -- scores of 16 keys ----------------------------------------------------------------------------
# k, stride: the keys' rows of one KV head; q: packed queries of its heads; out: their scores.


def row_quads(e: Emitter, first: Any, stride: Any) -> list[Any]:
    """Addresses of 16 rows from four bases and three strides: few enough for registers."""
    steps = [0, stride, e.mul(stride, 2), e.mul(stride, 3)]
    bases = e.rows(first, e.mul(stride, 4), 4)
    return [e.add(base, step) for base in bases for step in steps]


def _lane_scores(
    e: Emitter, fmt: KvFormat, heads: int, k: Any, stride: Any, q: Any, d: Any, scale: Any, out: Any
) -> None:
    """f32 and f16: sixteen partial sums over d per score, then a fixed tree; four keys at once."""
    size = 4 if fmt is KvFormat.F32 else 2
    with e.loop(TILE // 4) as quarter:
        rows = e.rows(e.add(k, e.mul(quarter, e.mul(stride, 4))), stride, 4)
        sums = [[e.variable(e.const(VF, 0.0)) for _ in rows] for _ in range(heads)]
        with e.loop(e.builder.udiv(d, e.index(LANES))) as step:
            keys = [load_16(e, fmt, e.add(row, e.mul(step, LANES * size)), 0) for row in rows]
            for head in range(heads):
                query = e.load(VF, q, e.add(e.mul(step, 4 * LANES), e.mul(d, 4 * head)))
                for key, total in zip(keys, sums[head], strict=True):
                    e.set(total, e.fma(key, query, e.get(total)))
        for head in range(heads):
            four = e.sums_of_four([e.get(total) for total in sums[head]])
            scaled = e.builder.fmul(four, e.splat(scale, 4))
            e.store(scaled, out, e.add(head * SCORE_STRIDE, e.mul(quarter, 16)))


def _block_scores(
    e: Emitter, heads: int, k: Any, stride: Any, q: Any, d: Any, scale: Any, out: Any
) -> None:
    """q8_0: lane r is key r, so block sums are exact int32 and blocks add up in index order."""
    build = e.builder
    blocks = build.udiv(d, e.index(BLOCK))
    totals = [e.variable(e.const(VF, 0.0)) for _ in range(heads)]
    with e.loop(blocks) as block:
        here = row_quads(e, e.add(k, e.mul(block, BLOCK_BYTES)), stride)
        quads = e.transpose(
            lambda row, quad: e.load(vector(I32, 4), here[row], CODES + 16 * quad), BLOCK // 16
        )
        codes = [build.xor(quad, e.const(VI, FLIP)) for quad in quads]
        scales = load_scales(e, here)
        for head in range(heads):
            query = e.add(q, e.mul(e.add(e.mul(blocks, head), block), QUERY_BLOCK))
            isum = e.load_splat(I32, query, QUERY_SUM)
            for i, four in enumerate(codes):
                isum = e.dot_u8_s8(isum, four, e.load_splat(I32, query, 4 * i))
            scale_qk = build.fmul(scales, e.load_splat(F32, query, QUERY_SCALE))
            term = build.fmul(build.sitofp(isum, VF), scale_qk)
            e.set(totals[head], build.fadd(e.get(totals[head]), term))
    for head in range(heads):
        e.store(build.fmul(e.get(totals[head]), e.splat(scale)), out, head * SCORE_STRIDE)


def _scores(fmt: KvFormat) -> Any:
    """Intrinsic (heads, k, stride, q, d, scale, out) for 1 to 4 query heads of one KV head."""

    def emit(e: Emitter, heads: Any, *args: Any) -> None:
        for count in range(1, GROUP + 1):
            with e.when(e.builder.icmp_signed("==", heads, e.index(count))):
                if fmt is KvFormat.Q8_0:
                    _block_scores(e, count, *args)
                else:
                    _lane_scores(e, fmt, count, *args)

    return intrinsic_of("pppppfp:v", emit)


# -- weights times values -------------------------------------------------------------------------


def _add_values(
    e: Emitter,
    load: Callable[[Any], list[Any]],
    heads: int,
    count: int,
    args: tuple[Any, ...],
) -> None:
    """acc += weight * value over n keys in order, for 16 * count elements of `heads` heads."""
    v, stride, n, weights, acc, acc_stride = args
    slots = [
        [e.variable(e.load(VF, acc, e.add(e.mul(acc_stride, head), 64 * i))) for i in range(count)]
        for head in range(heads)
    ]
    with e.loop(n) as key:
        values = load(e.add(v, e.mul(key, stride)))
        for head in range(heads):
            weight = e.load_splat(F32, weights, e.add(head * SCORE_STRIDE, e.mul(key, 4)))
            for slot, value in zip(slots[head], values, strict=True):
                e.set(slot, e.fma(weight, value, e.get(slot)))
    for head in range(heads):
        for i, slot in enumerate(slots[head]):
            e.store(e.get(slot), acc, e.add(e.mul(acc_stride, head), 64 * i))


def _head_values(
    e: Emitter,
    fmt: KvFormat,
    heads: int,
    v: Any,
    stride: Any,
    n: Any,
    weights: Any,
    acc: Any,
    d: Any,
) -> None:
    """All d elements: q8_0 block by block, f32 and f16 by 64 and the rest by 16."""
    steps, done = e.builder.udiv(d, e.index(LANES)), e.index(0)
    bytes16 = head_bytes(fmt, BLOCK) // 2  # of sixteen elements, half a block
    for count in (2,) if fmt is KvFormat.Q8_0 else (4, 1):
        load = functools.partial(_load_values, e, fmt, count)
        with e.loop(e.builder.udiv(e.builder.sub(steps, done), e.index(count))) as i:
            step = e.add(done, e.mul(i, count))
            row, out = e.add(v, e.mul(step, bytes16)), e.add(acc, e.mul(step, 4 * LANES))
            _add_values(e, load, heads, count, (row, stride, n, weights, out, e.mul(d, 4)))
        done = e.mul(e.builder.udiv(steps, e.index(count)), count)


def _load_values(e: Emitter, fmt: KvFormat, count: int, row: Any) -> list[Any]:
    if fmt is KvFormat.Q8_0:
        return list(load_block(e, fmt, row, 0))
    return [load_16(e, fmt, row, LANES * i) for i in range(count)]


def _values(fmt: KvFormat) -> Any:
    """Intrinsic (heads, v, stride, n, weights, acc, d) for 1 to 4 query heads of one KV head."""

    def emit(e: Emitter, heads: Any, *args: Any) -> None:
        for count in range(1, GROUP + 1):
            with e.when(e.builder.icmp_signed("==", heads, e.index(count))):
                _head_values(e, fmt, count, *args)

    return intrinsic_of("ppppppp:v", emit)


# -- the kernel -----------------------------------------------------------------------------------


def _partition_kernel(fmt: KvFormat) -> Any:
    """One (query, partition): scores, softmax, values of all heads."""
    scores, values = _scores(fmt), _values(fmt)

    @kernel(key=fmt.value)
    def score_tile(dims, k, stride, q, q_bytes, scale, out):
        group = dims.n_head // dims.n_head_kv
        for head in range(dims.n_head):
            if head % group % GROUP == 0:
                heads, row = min(GROUP, group - head % group), k + head // group * dims.head_bytes
                query, target = q + head * q_bytes, out + head * SCORE_STRIDE
                scores(heads, row, stride, query, dims.head_dim, scale, target)

    @kernel(key=fmt.value)
    def add_values(dims, v, n, weights, acc):
        group, d = dims.n_head // dims.n_head_kv, dims.head_dim
        for head in range(dims.n_head):
            if head % group % GROUP == 0:
                heads, row = min(GROUP, group - head % group), v + head // group * dims.head_bytes
                weight, target = weights + head * SCORE_STRIDE, acc + 4 * head * d
                values(heads, row, dims.row_bytes, n, weight, target, d)

    @kernel(key=fmt.value)
    def partition(dims, k, v, q, q_bytes, scale, table, n, lo, hi, stage, weights, states, acc):
        start = lo // PARTITION * PARTITION
        first = (lo - start) // TILE
        last = (hi - start + TILE - 1) // TILE
        for tile in range(first, last):
            row, stride = gather_tile(
                table, n, start + tile * TILE, k, dims.row_bytes, dims.row_bytes, stage
            )
            score_tile(dims, row, stride, q, q_bytes, scale, weights + 4 * TILE * tile)
        for head in range(dims.n_head):
            softmax_row(
                weights + head * SCORE_STRIDE,
                first,
                last,
                lo - start,
                hi - start,
                states + 8 * head,
            )
        for s in range(n):
            index, cell, end = table[s, 0], table[s, 1], table[s, 0] + table[s, 2]
            while index < end:
                count = min(TILE, end - index)
                add_values(
                    dims, v + cell * dims.row_bytes, count, weights + 4 * (index - start), acc
                )
                index, cell = index + count, cell + count

    return partition


class Args(NamedTuple):
    """What a worker gets. Stage, weights and segments hold one row a worker."""

    dims: Dims
    k: int  # address of cell 0
    v: int
    q: int  # address of the packed queries
    q_bytes: int  # of one packed head row
    scale: Any
    plan: Plan
    counter: Any  # int64 [1], next slot
    stage: Any  # uint8 [TILE * row_bytes], rows of a tile that is not in one piece
    weights: Any  # float32 [n_head, PARTITION]
    segments: Any  # int64 [n, 3]
    states: Any  # float32 [n_slots, n_head, 2]
    acc: Any  # float32 [n_slots, n_head, d]
    out: Any  # float32 [n_q, n_head, d]


def _split_worker(fmt: KvFormat) -> Worker:
    partition = _partition_kernel(fmt)

    @kernel(key=fmt.value)
    def attn_split(t, n_threads, pointer):
        args = read(pointer)
        dims, plan, table = args.dims, args.plan, args.segments[t]
        done, total, size = 0, plan.owners.shape[0], 4 * dims.n_head * dims.head_dim
        slot = fetch_add(address(args.counter))
        while slot < total:
            query = plan.owners[slot]
            pos, part = plan.positions[query], plan.firsts[query] // PARTITION
            part += slot - plan.slots[query]
            lo = max(plan.firsts[query], part * PARTITION)
            hi = min(pos + 1, (part + 1) * PARTITION)
            n = segments(plan.runs, query, pos, lo, hi, table)
            acc = address(args.acc) + slot * size
            zero_bytes(acc, size)
            partition(
                dims, args.k, args.v, args.q + query * dims.n_head * args.q_bytes, args.q_bytes,
                args.scale, table, n, lo, hi, address(args.stage[t]), address(args.weights[t]),
                address(args.states) + 8 * dims.n_head * slot, acc,
            )  # fmt: skip
            done, slot = done + 1, fetch_add(address(args.counter))
        return done

    return Worker(attn_split)


JOIN = Worker(attn_join)
WORKERS = {fmt: _split_worker(fmt) for fmt in KvFormat}


def attend_split(call: Call, threads: int) -> Floats:
    """Run `split` on a checked call."""
    out, dims, n = call.empty_out(), call.dims, granted(threads)
    n_slots, d = len(call.plan.owners), dims.head_dim
    if not len(out):
        return out
    queries = pack_queries(call.q, call.fmt)
    args = Args(
        dims=dims,
        k=call.k,
        v=call.v,
        q=queries.ctypes.data,
        q_bytes=query_bytes(call.fmt, d),
        scale=call.scale,
        plan=call.plan,
        counter=np.zeros(1, np.int64),
        stage=np.empty((n, TILE * dims.row_bytes), np.uint8),
        weights=np.empty((n, dims.n_head, PARTITION), np.float32),
        segments=np.empty((n, KV_MAP_MAX_SPANS, 3), np.int64),
        states=np.empty((n_slots, dims.n_head, 2), np.float32),
        acc=np.empty((n_slots, dims.n_head, d), np.float32),
        out=out,
    )
    run(threads, WORKERS[call.fmt], JOIN, args)
    return out
