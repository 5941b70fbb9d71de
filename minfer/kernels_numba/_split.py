"""`split`: decode attention, work cut into (query, partition of 256 keys).

Workers draw partitions from one counter. A partition's scores of all heads come sixteen keys at a
time, then its softmax, then weights times values as one fma chain over the keys; partitions join
in a fixed tree. Heads of a group share every load of K and V, up to four at a time. How many do,
and the rest of `SPLIT`, are arguments of the compiled code: no value compiles anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minfer.format import Floats, KvFormat
from minfer.kernels_numba._call import Call, Slots, bounds, n_slots, where
from minfer.kernels_numba._gather import (
    SCORE_STRIDE,
    TILE,
    Dims,
    gather_tile,
    segments,
)
from minfer.kernels_numba._heads import GROUP, scores, values
from minfer.kernels_numba._ir import address, fetch_add, zero_bytes
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._query import pack_queries, query_bytes
from minfer.kernels_numba._softmax import join_worker, softmax_row
from minfer.kernels_numba._workers import THREADS, Worker, read, run
from minfer.ops import Config, Tunable
from minfer.window import KV_MAP_MAX_SPANS, PARTITION

# Free (contract 6.4): scores, weights and fma chains are those of a head, key by key, in any case.
SPLIT = {
    "threads": THREADS,
    # tiles of 16 keys by which prefetching runs ahead
    "ahead": Tunable(4, (1, 2, 3, 4, 6, 8, 12, 16)),
    # query heads of a KV head that share its loads
    "heads": Tunable(GROUP, tuple(range(1, GROUP + 1))),
    # partitions that a worker draws at once
    "draw": Tunable(1, (1, 2, 4, 8)),
    # keys of one pass of weights times values, which holds the sums in registers
    "span": Tunable(TILE, (16, 32, 64, 128)),
}


@kernel
def _ahead(table, n, index, hi, row_bytes, base, after):
    """Address of the row of key `index`; past `hi` it is counted from `after`."""
    if index >= hi:
        return after + (index - hi) * row_bytes
    for s in range(n):
        if table[s, 0] <= index < table[s, 0] + table[s, 2]:
            return base + (table[s, 1] + index - table[s, 0]) * row_bytes
    return base


def _partition_kernel(fmt: KvFormat) -> Any:
    """One (query, partition): scores, softmax, values of all heads."""
    score_heads, add_heads = scores(fmt), values(fmt)

    @kernel(key=fmt.value)
    def score_tile(dims, most, k, stride, q, q_bytes, out, ahead):
        group, share = dims.n_head // dims.n_head_kv, TILE * dims.head_bytes
        for kv in range(dims.n_head_kv):
            row, lines = k + kv * dims.head_bytes, ahead + kv * share
            head, end = kv * group, (kv + 1) * group
            while head < end:
                heads = min(most, end - head)
                query, target = q + head * q_bytes, out + head * SCORE_STRIDE
                score_heads(heads, row, stride, query, dims.head_dim, target, lines)
                head += heads

    @kernel(key=fmt.value)
    def add_keys(dims, most, v, n, weights, acc, ahead):
        group, d, share = dims.n_head // dims.n_head_kv, dims.head_dim, n * dims.head_bytes
        for kv in range(dims.n_head_kv):
            row, lines = v + kv * dims.head_bytes, ahead + kv * share
            head, end = kv * group, (kv + 1) * group
            while head < end:
                heads = min(most, end - head)
                weight, target = weights + head * SCORE_STRIDE, acc + 4 * head * d
                add_heads(heads, row, dims.row_bytes, n, weight, target, d, lines)
                head += heads

    @kernel(key=fmt.value)
    def partition(args, q, table, n, lo, hi, stage, weights, states, acc, after):
        dims, row_bytes, start = args.dims, args.dims.row_bytes, lo // PARTITION * PARTITION
        most, further, span = min(args.heads, GROUP), TILE * args.ahead, args.span
        values_at = args.v + table[0, 1] * row_bytes
        first, last = (lo - start) // TILE, (hi - start + TILE - 1) // TILE
        for tile in range(first, last):
            index = start + tile * TILE
            row, stride = gather_tile(table, n, index, args.k, row_bytes, row_bytes, stage)
            ahead = _ahead(table, n, index + further, hi, row_bytes, args.k, values_at)
            out = weights + 4 * TILE * tile
            score_tile(dims, most, row, stride, q, args.q_bytes, out, ahead)
        for head in range(dims.n_head):
            row = weights + head * SCORE_STRIDE
            state = states + 8 * head
            softmax_row(row, first, last, lo - start, hi - start, args.factor, state)
        for s in range(n):
            index, cell, end = table[s, 0], table[s, 1], table[s, 0] + table[s, 2]
            while index < end:
                count = min(span, end - index)
                ahead = _ahead(table, n, index + further, hi, row_bytes, args.v, after)
                out = weights + 4 * (index - start)
                add_keys(dims, most, args.v + cell * row_bytes, count, out, acc, ahead)
                index, cell = index + count, cell + count

    return partition


class Args(NamedTuple):
    """What a worker gets. Stage, weights and segments hold one row a worker."""

    dims: Dims
    ahead: int  # as `SPLIT` says, and the next three
    heads: int
    draw: int
    span: int
    k: int  # address of cell 0
    v: int
    q: int  # address of the packed queries
    q_bytes: int  # of one packed head row
    factor: Any
    slots: Slots
    counter: Any  # int64 [1], next draw
    stage: Any  # uint8 [TILE * row_bytes], rows of a tile that is not in one piece
    weights: Any  # float32 [n_head, PARTITION]
    segments: Any  # int64 [n, 3]
    states: Any  # float32 [n_slots, n_head, 2]
    acc: Any  # float32 [n_slots, n_head, d]
    out: Any  # float32 [n_q, n_head, d]


@kernel
def _first_row(args, slot, table):
    """Address of the first key of a slot; of cell 0 if there is no such slot."""
    if slot >= n_slots(args.slots):
        return args.k
    query, lo, _ = bounds(args.slots, slot)
    segments(args.slots.runs, query, args.slots.positions[query], lo, lo + 1, table)
    return args.k + table[0, 1] * args.dims.row_bytes


def _split_worker(fmt: KvFormat) -> Worker:
    partition = _partition_kernel(fmt)

    @Worker
    @kernel(key=fmt.value)
    def attn_split(t, n_threads, pointer):
        args = read(pointer)
        slots, table, n_head = args.slots, args.segments[t], args.dims.n_head
        size, stage, weights = 4 * n_head * args.dims.head_dim, args.stage[t], args.weights[t]
        draw = args.draw
        done, slot = 0, draw * fetch_add(address(args.counter))
        while slot < n_slots(slots):
            upcoming = slot + 1
            if upcoming % draw == 0:  # drawn early, so that its rows can be prefetched
                upcoming = draw * fetch_add(address(args.counter))
            after = _first_row(args, upcoming, table)
            query, lo, hi = bounds(slots, slot)
            n = segments(slots.runs, query, slots.positions[query], lo, hi, table)
            q, acc = args.q + query * n_head * args.q_bytes, address(args.acc) + slot * size
            zero_bytes(acc, size)
            states = address(args.states) + 8 * n_head * slot
            partition(
                args, q, table, n, lo, hi, address(stage), address(weights), states, acc, after
            )
            done, slot = done + 1, upcoming
        return done

    return attn_split


JOIN = Worker(join_worker)  # one a variant: it is compiled for its Args
WORKERS = {fmt: _split_worker(fmt) for fmt in KvFormat}


def attend_split(call: Call, config: Config) -> Floats:
    """Run `split` on a checked call."""
    out, dims, threads = call.empty_out(), call.dims, call.workers(config["threads"])
    rows, d = call.n_slots, dims.head_dim
    if not len(out):
        return out
    queries = pack_queries(call.q, call.fmt)
    args = Args(
        dims=dims,
        ahead=config["ahead"],
        heads=config["heads"],
        draw=config["draw"],
        span=config["span"],
        k=call.k,
        v=call.v,
        q=where(queries),
        q_bytes=query_bytes(call.fmt, d),
        factor=call.factor,
        slots=call.layout.slots,
        counter=np.zeros(1, np.int64),
        stage=np.empty((threads, TILE * dims.row_bytes), np.uint8),
        weights=np.empty((threads, dims.n_head, PARTITION), np.float32),
        segments=np.empty((threads, KV_MAP_MAX_SPANS, 3), np.int64),
        states=np.empty((rows, dims.n_head, 2), np.float32),
        acc=np.empty((rows, dims.n_head, d), np.float32),
        out=out,
    )
    run(threads, WORKERS[call.fmt], JOIN, args)
    return out
