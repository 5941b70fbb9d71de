"""`rows`: attention one key at a time, for every shape and both kinds.

The same partitions and the same tree as the fast variants, in scalar loops that can be read: one
(query, partition, head) after another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from minfer.format import KvFormat
from minfer.kernels_numba._gather import segments
from minfer.kernels_numba._ir import address, exp2
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._rows import LOAD_ROW, dot_row, quantize_row
from minfer.kernels_numba._softmax import finish, join_partitions
from minfer.window import PARTITION


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
        for j in range(query.shape[0]):
            total += query[j] * row[j]
        return total

    return dot_blocks if fmt is KvFormat.Q8_0 else dot_elements


def _rows_kernel(fmt: KvFormat) -> Any:
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
                    acc[j] += weight * row[j]
        state[0], state[1] = m, total

    @kernel(key=fmt.value)
    def work(t, threads, dims, k, v, q, scale, plan, scratch, states, acc):
        group = dims.n_head // dims.n_head_kv
        for item in range(t, plan.owners.shape[0] * dims.n_head, threads):
            slot, head = item // dims.n_head, item % dims.n_head
            query = plan.owners[slot]
            part = plan.firsts[query] // PARTITION + slot - plan.slots[query]
            lo = max(plan.firsts[query], part * PARTITION)
            hi = min(plan.positions[query] + 1, (part + 1) * PARTITION)
            table, offset = scratch.segments[t], head // group * dims.head_bytes
            n = segments(plan.runs, query, plan.positions[query], lo, hi, table)
            acc[slot, head] = 0
            partition(
                dims, k + offset, v + offset, q[query, head], scratch.packed[t], scale, table, n,
                scratch.row[t], scratch.weights[t], states[slot, head], acc[slot, head],
            )  # fmt: skip
        return t

    @kernel
    def join_heads(t, threads, plan, states, acc, out):
        n_q, n_head, _ = out.shape
        for item in range(t, n_q * n_head, threads):
            query, head = item // n_head, item % n_head
            base, first = plan.slots[query], plan.firsts[query] // PARTITION
            last = plan.positions[query] // PARTITION
            join_partitions(states[base:], acc[base:], head, first, last)
            finish(acc[base, head], states[base, head, 1], out[query, head])
        return t

    @kernel(parallel=True, key=fmt.value)
    def attn_rows(threads, dims, k, v, q, scale, plan, scratch, states, acc, out):
        done = np.zeros(threads, np.int64)
        for t in prange(threads):
            done[t] = work(
                t, threads, dims, address(k), address(v), q, scale, plan, scratch, states, acc
            )
        for t in prange(threads):
            done[t] += join_heads(t, threads, plan, states, acc, out)
        return done

    return attn_rows


KERNELS = {fmt: _rows_kernel(fmt) for fmt in KvFormat}
