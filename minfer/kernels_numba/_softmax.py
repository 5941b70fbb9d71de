"""Softmax of one partition, and how partitions join.

Scores arrive as raw products. Weights are exp2((score - m) * factor), factor being
|scale| * log2(e): near values subtract exactly, so the keys that matter lose nothing, however
large the scores are. A partition of a row is the state (m, l, acc): largest score, sum of weights,
weighted values. States join in one binary tree over aligned power-of-two groups of absolute
partition indices (contract 6.3c); an absent side is skipped, which is exactly neutral.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minfer.kernels_numba._emit import I32, LANES, VF, VI, Emitter
from minfer.kernels_numba._ir import exp2, intrinsic_of
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._workers import read, share
from minfer.window import PARTITION


def _softmax_row(
    e: Emitter, row: Any, begin: Any, end: Any, lo: Any, hi: Any, factor: Any, state: Any
) -> None:
    """Scores to weights in place, for vectors begin .. end-1; lanes outside [lo, hi) become 0.

    Writes m and l, two f32, to `state`. Sixteen partial sums run over the vectors in order and
    join by halves; a vector of zeros changes nothing.
    """
    build = e.builder
    low, high = (e.splat(build.trunc(bound, I32)) for bound in (lo, hi))
    lanes, nothing = e.const(VI, range(LANES)), e.const(VF, float("-inf"))

    def scores(vector: Any) -> tuple[Any, Any]:
        """Which lanes are seen, and their scores."""
        at = build.add(lanes, e.splat(build.trunc(e.mul(vector, LANES), I32)))
        seen = build.and_(build.icmp_signed(">=", at, low), build.icmp_signed("<", at, high))
        return seen, e.load(VF, row, e.mul(vector, 4 * LANES))

    count = build.sub(end, begin)
    peak = e.variable(nothing)
    with e.loop(count) as i:
        seen, loaded = scores(e.add(begin, i))
        e.set(peak, e.maximum(build.select(seen, loaded, nothing), e.get(peak)))
    m = e.reduce(e.get(peak), e.maximum)
    top, total = e.splat(m), e.variable(e.const(VF, 0.0))
    slope = e.splat(factor)
    with e.loop(count) as i:
        vector = e.add(begin, i)
        seen, loaded = scores(vector)
        weights = e.exp2(build.fmul(build.fsub(loaded, top), slope))
        weights = build.select(seen, weights, e.const(VF, 0.0))
        e.store(weights, row, e.mul(vector, 4 * LANES))
        e.set(total, build.fadd(e.get(total), weights))
    e.store(m, state)
    e.store(e.reduce(e.get(total), build.fadd), state, 4)


softmax_row = intrinsic_of("pppppfp:v", _softmax_row)  # row, begin, end, lo, hi, factor, state


@kernel
def join(state_a, acc_a, state_b, acc_b, factor):
    """Join state b into state a: (m, l) and the weighted values [d]; both saw keys."""
    m = max(state_a[0], state_b[0])
    weight_a, weight_b = exp2((state_a[0] - m) * factor), exp2((state_b[0] - m) * factor)
    state_a[0] = m
    state_a[1] = state_a[1] * weight_a + state_b[1] * weight_b
    for j in range(acc_a.shape[0]):
        acc_a[j] = acc_a[j] * weight_a + acc_b[j] * weight_b


@kernel
def join_partitions(states, acc, head, first, last, factor):
    """Join partitions first .. last (absolute) of one head; the result is in row 0.

    states [n, n_head, 2], acc [n, n_head, d], row 0 is partition `first`. Each group keeps its
    state in the row of the first partition that exists in it.
    """
    half = 1
    while half <= last:
        group = first // (2 * half) * (2 * half)
        while group + half <= last:
            middle = group + half
            if middle > first:
                a, b = max(group, first) - first, middle - first
                join(states[a, head], acc[a, head], states[b, head], acc[b, head], factor)
            group += 2 * half
        half *= 2


@kernel
def finish(acc, total, out):
    """out = acc / total; adding +0 leaves no negative zero, which masked keys could flip."""
    for j in range(out.shape[0]):
        out[j] = acc[j] / total + np.float32(0)


@kernel
def join_worker(t, n_threads, pointer):
    """Join the partitions of every (query, head) and write its output row."""
    args = read(pointer)
    slots, n_head = args.slots, args.out.shape[1]
    total = args.out.shape[0] * n_head
    # neighbours to one worker: their states share cache lines
    begin, end = share(t, n_threads, total)
    for item in range(begin, end):
        query, head = item // n_head, item % n_head
        base, first = slots.starts[query], slots.firsts[query] // PARTITION
        last = slots.positions[query] // PARTITION
        join_partitions(args.states[base:], args.acc[base:], head, first, last, args.factor)
        finish(args.acc[base, head], args.states[base, head, 1], args.out[query, head])
    return 0
