"""`rows`: attention one key at a time, for every shape and both kinds.

The same partitions and the same tree as the fast variants, in scalar loops that can be read: one
(query, partition, head) after another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minfer.format import KvFormat
from minfer.kernels_numba._call import Call, Floats, Plan, bounds
from minfer.kernels_numba._gather import Dims, segments, zero_bytes
from minfer.kernels_numba._ir import address, exp2, fma
from minfer.kernels_numba._jit import granted, kernel
from minfer.kernels_numba._rows import CHAIN, LOAD_ROW, dot_row, head_bytes, quantize_row
from minfer.kernels_numba._softmax import attn_join
from minfer.kernels_numba._workers import Worker, read, run
from minfer.window import KV_MAP_MAX_SPANS, PARTITION


def _score_kernel(fmt: KvFormat) -> Any:
    """Product of a query head row with the key row at an address."""
    load = LOAD_ROW[fmt]

    @kernel
    def dot_blocks(query, packed, source, row):
        return dot_row(address(packed), source, query.shape[0])

    @kernel(key=fmt.value)
    def dot_elements(query, packed, source, row):
        load(source, address(row), query.shape[0])
        total = np.float32(0)
        for first in range(0, query.shape[0], CHAIN):
            chain = np.float32(0)
            for j in range(first, min(first + CHAIN, query.shape[0])):
                chain = fma(query[j], row[j], chain)
            total += chain
        return total

    return dot_blocks if fmt is KvFormat.Q8_0 else dot_elements


def _rows_worker(fmt: KvFormat) -> Worker:
    load, score, packs = LOAD_ROW[fmt], _score_kernel(fmt), fmt is KvFormat.Q8_0

    @kernel(key=fmt.value)
    def partition(dims, k, v, query, packed, scale, table, n, row, weights, state, acc):
        if packs:
            quantize_row(address(query), address(packed), query.shape[0])
        lo, m, total = table[0, 0], np.float32(-np.inf), np.float32(0)
        for s in range(n):
            for i in range(table[s, 2]):
                at, source = table[s, 0] + i - lo, k + (table[s, 1] + i) * dims.row_bytes
                weights[at] = score(query, packed, source, row) * scale
                if weights[at] > m:
                    m = weights[at]
        for s in range(n):
            for i in range(table[s, 2]):
                load(v + (table[s, 1] + i) * dims.row_bytes, address(row), query.shape[0])
                weight = exp2(weights[table[s, 0] + i - lo] - m)
                total += weight
                for j in range(acc.shape[0]):
                    acc[j] = fma(weight, row[j], acc[j])
        state[0], state[1] = m, total

    @kernel(key=fmt.value)
    def attn_rows(t, n_threads, pointer):
        args = read(pointer)
        dims, plan, table = args.dims, args.plan, args.segments[t]
        group = dims.n_head // dims.n_head_kv
        for item in range(t, plan.owners.shape[0] * dims.n_head, n_threads):
            slot, head = item // dims.n_head, item % dims.n_head
            query, lo, hi = bounds(plan, slot)
            n = segments(plan.runs, query, plan.positions[query], lo, hi, table)
            acc, offset = args.acc[slot, head], head // group * dims.head_bytes
            zero_bytes(address(acc), 4 * dims.head_dim)
            partition(
                dims, args.k + offset, args.v + offset, args.q[query, head], args.packed[t],
                args.scale, table, n, args.row[t], args.weights[t], args.states[slot, head], acc,
            )  # fmt: skip
        return 0

    return Worker(attn_rows)


class Args(NamedTuple):
    """What a worker gets. Packed, row, weights and segments hold one row a worker."""

    dims: Dims
    k: int  # address of cell 0
    v: int
    q: Any  # float32 [n_q, n_head, d]
    scale: Any
    plan: Plan
    packed: Any  # uint8, a quantized query head
    row: Any  # float32 [d], a decoded key or value
    weights: Any  # float32 [PARTITION]
    segments: Any  # int64 [n, 3]
    states: Any  # float32 [n_slots, n_head, 2]
    acc: Any  # float32 [n_slots, n_head, d]
    out: Any  # float32 [n_q, n_head, d]


JOIN = Worker(attn_join)
WORKERS = {fmt: _rows_worker(fmt) for fmt in KvFormat}


def attend_rows(call: Call, threads: int) -> Floats:
    """Run `rows` on a checked call."""
    out, dims, n = call.empty_out(), call.dims, granted(threads)
    n_slots, d = len(call.plan.owners), dims.head_dim
    if not len(out):
        return out
    args = Args(
        dims=dims,
        k=call.k,
        v=call.v,
        q=call.q,
        scale=call.scale,
        plan=call.plan,
        packed=np.empty((n, head_bytes(KvFormat.Q8_0, d) + 2), np.uint8),
        row=np.empty((n, d), np.float32),
        weights=np.empty((n, PARTITION), np.float32),
        segments=np.empty((n, KV_MAP_MAX_SPANS, 3), np.int64),
        states=np.empty((n_slots, dims.n_head, 2), np.float32),
        acc=np.empty((n_slots, dims.n_head, d), np.float32),
        out=out,
    )
    run(threads, WORKERS[call.fmt], JOIN, args)
    return out
