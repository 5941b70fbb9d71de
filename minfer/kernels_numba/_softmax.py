"""Softmax of one partition, and how partitions join.

Scores arrive multiplied by scale * log2(e), so one exp2 serves every lane. A partition of a row
is the state (m, l, acc): maximum, sum of weights, weighted values. States join in one binary tree
over aligned power-of-two groups of absolute partition indices (contract 6.3c); an absent side is
skipped, which is exactly neutral.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minfer.kernels_numba._ir import I32, LANES, VF, VI, Emitter, exp2, intrinsic_of
from minfer.kernels_numba._jit import kernel


def _softmax_row(e: Emitter, row: Any, begin: Any, end: Any, lo: Any, hi: Any, state: Any) -> None:
    """Scores to weights in place, for vectors begin .. end-1; lanes outside [lo, hi) become 0.

    Writes m and l, two f32, to `state`. Sixteen partial sums run over the vectors in order and
    join by halves; a vector of zeros changes nothing.
    """
    build = e.builder
    low, high = (e.splat(build.trunc(bound, I32)) for bound in (lo, hi))
    lanes = e.const(VI, range(LANES))

    def scores(vector: Any) -> Any:
        at = build.add(lanes, e.splat(build.trunc(e.mul(vector, LANES), I32)))
        seen = build.and_(
            build.icmp_signed(">=", at, low), build.icmp_signed("<", at, high)
        )
        loaded = e.load(VF, row, e.mul(vector, 4 * LANES))
        return build.select(seen, loaded, e.const(VF, float("-inf")))

    count = build.sub(end, begin)
    peak = e.variable(e.const(VF, float("-inf")))
    with e.loop(count) as i:
        e.set(peak, e.maximum(scores(e.add(begin, i)), e.get(peak)))
    m = e.reduce(e.get(peak), e.maximum)
    top, total = e.splat(m), e.variable(e.const(VF, 0.0))
    with e.loop(count) as i:
        vector = e.add(begin, i)
        weights = e.exp2(build.fsub(scores(vector), top))
        e.store(weights, row, e.mul(vector, 4 * LANES))
        e.set(total, build.fadd(e.get(total), weights))
    e.store(m, state)
    e.store(e.reduce(e.get(total), build.fadd), state, 4)


def _blend(e: Emitter, a: Any, b: Any, weight_a: Any, weight_b: Any, n: Any) -> None:
    """a = a * weight_a + b * weight_b over n f32, n % 16 == 0; b's product is rounded first."""
    x, y = e.splat(weight_a), e.splat(weight_b)
    with e.loop(e.builder.udiv(n, e.index(LANES))) as i:
        at = e.mul(i, 4 * LANES)
        product = e.builder.fmul(e.load(VF, b, at), y)
        e.store(e.fma(e.load(VF, a, at), x, product), a, at)


def _divide(e: Emitter, acc: Any, total: Any, out: Any, n: Any) -> None:
    """out = acc / total over n f32, n % 16 == 0; adding +0 leaves no negative zero."""
    by, zero = e.splat(total), e.const(VF, 0.0)
    with e.loop(e.builder.udiv(n, e.index(LANES))) as i:
        at = e.mul(i, 4 * LANES)
        e.store(e.builder.fadd(e.builder.fdiv(e.load(VF, acc, at), by), zero), out, at)


softmax_row = intrinsic_of("pppppp:v", _softmax_row)  # row, begin, end, lo, hi, state
blend = intrinsic_of("ppffp:v", _blend)  # a, b, weight_a, weight_b, n
divide = intrinsic_of("pfpp:v", _divide)  # acc, total, out, n


@kernel
def join_weights(state_a, state_b):
    """Factors of two states (m, l) when they join; the joined state goes to the first."""
    m = max(state_a[0], state_b[0])
    weight_a, weight_b = exp2(state_a[0] - m), exp2(state_b[0] - m)
    state_a[1] = state_a[1] * weight_a + state_b[1] * weight_b
    state_a[0] = m
    return weight_a, weight_b


@kernel
def partition_of(slots, firsts, slot):
    """Query and absolute partition index of a state slot; slots holds each query's first."""
    query = np.searchsorted(slots, slot, side="right") - 1
    return query, firsts[query] + slot - slots[query]
