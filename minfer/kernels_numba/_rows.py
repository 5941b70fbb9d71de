"""`rows`: attention one key at a time, for every shape and both kinds; the variant to read first.

The same partitions and the same tree as the fast variants, in scalar loops:

1. `_call.prepare` has checked the call and cut every query's window into slots, one a
   (query, partition of 256 keys).
2. `attend_rows` allocates what the workers share and one row of working memory for each.
3. Every worker takes its (slot, head) items. `segments` says in which cells the slot's keys lie.
4. `partition`: products of all keys and their maximum m, then exp2((product - m) * factor) times
   values, key by key.
5. `join_worker` joins the partitions of a row in a fixed tree and divides by the sum of weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minfer.format import Floats, KvFormat
from minfer.kernels_numba._call import Call, Slots, bounds, n_slots
from minfer.kernels_numba._cell import CHAIN, LOAD_ROW, dot_row, head_bytes, quantize_row
from minfer.kernels_numba._gather import Dims, segments
from minfer.kernels_numba._ir import address, exp2, fma, zero_bytes
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._softmax import join_worker
from minfer.kernels_numba._workers import Worker, read, run
from minfer.window import KV_MAP_MAX_SPANS, PARTITION


class Scratch(NamedTuple):
    """Working memory, one row a worker."""

    packed: Any  # uint8, a quantized query head
    row: Any  # float32 [d], a decoded key or value
    weights: Any  # float32 [PARTITION], scores and then weights
    segments: Any  # int64 [n, 3], (first key, cell, number of keys)


class Args(NamedTuple):
    """What a worker gets."""

    dims: Dims
    k: int  # address of cell 0
    v: int
    q: Any  # float32 [n_q, n_head, d]
    factor: Any
    slots: Slots
    scratch: Scratch
    states: Any  # float32 [n_slots, n_head, 2]
    acc: Any  # float32 [n_slots, n_head, d]
    out: Any  # float32 [n_q, n_head, d]


def _score_kernel(fmt: KvFormat) -> Any:
    """Product of a query head row with the key row at an address."""
    load = LOAD_ROW[fmt]

    @kernel
    def dot_blocks(query, source, mine):
        return dot_row(address(mine.packed), source, query.shape[0])

    @kernel(key=fmt.value)
    def dot_elements(query, source, mine):
        key = mine.row
        load(source, address(key), query.shape[0])
        total = np.float32(0)
        for first in range(0, query.shape[0], CHAIN):
            chain = np.float32(0)
            for j in range(first, min(first + CHAIN, query.shape[0])):
                chain = fma(query[j], key[j], chain)
            total += chain
        return total

    return dot_blocks if fmt is KvFormat.Q8_0 else dot_elements


def _partition_kernel(fmt: KvFormat) -> Any:
    """One head of one slot, whose keys lie in the first n segments: state (m, l) and acc [d]."""
    load, score, packs = LOAD_ROW[fmt], _score_kernel(fmt), fmt is KvFormat.Q8_0

    @kernel(key=fmt.value)
    def partition(args, mine, n, query, offset, state, acc):
        table, weights, value = mine.segments, mine.weights, mine.row
        row_bytes = args.dims.row_bytes
        lo, m, total = table[0, 0], np.float32(-np.inf), np.float32(0)
        if packs:
            quantize_row(address(query), address(mine.packed), query.shape[0])
        for s in range(n):
            for i in range(table[s, 2]):
                at, source = table[s, 0] + i - lo, args.k + offset + (table[s, 1] + i) * row_bytes
                weights[at] = score(query, source, mine)
                m = max(m, weights[at])
        for s in range(n):
            for i in range(table[s, 2]):
                at, source = table[s, 0] + i - lo, args.v + offset + (table[s, 1] + i) * row_bytes
                load(source, address(value), query.shape[0])
                weight = exp2((weights[at] - m) * args.factor)
                total += weight
                for j in range(acc.shape[0]):
                    acc[j] = fma(weight, value[j], acc[j])
        state[0], state[1] = m, total

    return partition


def _rows_worker(fmt: KvFormat) -> Worker:
    partition = _partition_kernel(fmt)

    @Worker
    @kernel(key=fmt.value)
    def attn_rows(t, n_threads, pointer):
        args = read(pointer)
        dims, slots, own = args.dims, args.slots, args.scratch
        mine = Scratch(own.packed[t], own.row[t], own.weights[t], own.segments[t])
        group = dims.n_head // dims.n_head_kv
        for item in range(t, n_slots(slots) * dims.n_head, n_threads):
            slot, head = item // dims.n_head, item % dims.n_head
            query, lo, hi = bounds(slots, slot)
            n = segments(slots.runs, query, slots.positions[query], lo, hi, mine.segments)
            acc, offset = args.acc[slot, head], head // group * dims.head_bytes
            zero_bytes(address(acc), 4 * dims.head_dim)
            partition(args, mine, n, args.q[query, head], offset, args.states[slot, head], acc)
        return 0

    return attn_rows


JOIN = Worker(join_worker)  # one a variant: it is compiled for its Args
WORKERS = {fmt: _rows_worker(fmt) for fmt in KvFormat}


def attend_rows(call: Call, threads: int) -> Floats:
    """Run `rows` on a checked call."""
    out, dims, threads = call.empty_out(), call.dims, call.workers(threads)
    rows, d = call.n_slots, dims.head_dim
    if not len(out):
        return out
    args = Args(
        dims=dims,
        k=call.k,
        v=call.v,
        q=call.q,
        factor=call.factor,
        slots=call.layout.slots,
        scratch=Scratch(
            packed=np.empty((threads, head_bytes(KvFormat.Q8_0, d) + 2), np.uint8),
            row=np.empty((threads, d), np.float32),
            weights=np.empty((threads, PARTITION), np.float32),
            segments=np.empty((threads, KV_MAP_MAX_SPANS, 3), np.int64),
        ),
        states=np.empty((rows, dims.n_head, 2), np.float32),
        acc=np.empty((rows, dims.n_head, d), np.float32),
        out=out,
    )
    run(threads, WORKERS[call.fmt], JOIN, args)
    return out
