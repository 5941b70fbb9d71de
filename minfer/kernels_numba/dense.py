"""Dense steps by rows; a row's bits depend on that row and the weights (contract 6.5).

rms_norm, rope, silu_mul, add, embed
  rows  one row after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from minfer.errors import Refusal
from minfer.kernels_numba._ir import (
    F32,
    LOG2E,
    VF,
    VI,
    Emitter,
    address,
    intrinsic_of,
)
from minfer.kernels_numba._jit import THREADS, constant, kernel, launch, row_threads
from minfer.kernels_numba._rotate import check_rope, rotate
from minfer.ops import Config, variant

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

LOG2E_LOW = float.fromhex("0x1.4ae0c0p-26")  # log2(e) - LOG2E
LN2 = float.fromhex("0x1.62e430p-1")
# -- rows -----------------------------------------------------------------------------------------


def _emit_rms_norm(e: Emitter, x: Any, weight: Any, n: Any, count: Any, eps: Any, out: Any) -> None:
    """One row: squares summed in 16 lanes in order, halves added, then scaled."""
    total = e.variable(e.const(VF, 0.0))
    for offset, load, _store in e.strips(n):
        value = load(x, offset)
        e.set(total, e.fma(value, value, e.get(total)))
    build = e.builder
    mean = build.fdiv(e.reduce(e.get(total), build.fadd), count)
    root = e.call("llvm.sqrt.f32", F32, build.fadd(mean, eps))
    scale = e.splat(build.fdiv(e.const(F32, 1.0), root))
    for offset, load, store in e.strips(n):
        store(build.fmul(build.fmul(load(x, offset), scale), load(weight, offset)), out, offset)


_rms_norm_row = intrinsic_of("pppffp:v", _emit_rms_norm)


@kernel(parallel=True, serial=True)
def _rms_norm_rows_kernel(_n_threads: Any, x: Any, weight: Any, eps: Any, out: Any) -> None:
    n, m = x.shape
    for row in prange(n):
        _rms_norm_row(address(x[row]), address(weight), m, np.float32(m), eps, address(out[row]))


@variant(space={"threads": THREADS})
def rms_norm_rows(x: Floats, weight: Floats, *, eps: float, config: Config) -> Floats:
    """Each row of x [n, m] over the root of its mean square plus eps, times weight [m]."""
    x, weight = _floats(x), constant(weight)
    if weight.shape != x.shape[1:]:
        raise Refusal("7.5", f"a weight of {list(weight.shape)} cannot scale {list(x.shape)}")
    out = np.empty_like(x)
    launch(_rms_norm_rows_kernel, row_threads(x, config), x, weight, np.float32(eps), out)
    return out


def _emit_silu_mul(e: Emitter, gate: Any, up: Any, n: Any, out: Any) -> None:
    for offset, load, store in e.strips(n):
        g = load(gate, offset)
        product = e.builder.fmul(e.builder.fmul(g, sigmoid(e, g)), load(up, offset))
        store(product, out, offset)


def sigmoid(e: Emitter, x: Any) -> Any:
    """1 / (1 + exp(-x)) from exp(-|x|), so that nothing overflows; NaN stays NaN."""
    build = e.builder
    size = build.bitcast(build.and_(build.bitcast(x, VI), e.const(VI, 0x7FFFFFFF)), VF)
    far = build.fcmp_ordered(">", size, e.const(VF, 200.0))
    size = build.fneg(build.select(far, e.const(VF, 200.0), size))
    # -|x| * log2(e) in two parts: the second one, below an ulp of the first, is a factor
    high = build.fmul(size, e.const(VF, LOG2E))
    low = e.fma(size, e.const(VF, LOG2E), build.fneg(high))
    low = e.fma(size, e.const(VF, LOG2E_LOW), low)
    power = e.exp2(high)
    power = e.fma(power, build.fmul(low, e.const(VF, LN2)), power)
    positive = build.fcmp_ordered(">=", x, e.const(VF, 0.0))
    one = e.const(VF, 1.0)
    return build.fdiv(build.select(positive, one, power), build.fadd(one, power))


_silu_mul_row = intrinsic_of("pppp:v", _emit_silu_mul)


@kernel(parallel=True, serial=True)
def _silu_mul_rows_kernel(_n_threads: Any, gate: Any, up: Any, out: Any) -> None:
    n, m = gate.shape
    for row in prange(n):
        _silu_mul_row(address(gate[row]), address(up[row]), m, address(out[row]))


@variant(space={"threads": THREADS})
def silu_mul_rows(gate: Floats, up: Floats, *, config: Config) -> Floats:
    """gate * sigmoid(gate) * up, all f32 [n, m]."""
    gate, up = _same_shape(gate, up)
    out = np.empty_like(gate)
    launch(_silu_mul_rows_kernel, row_threads(gate, config), gate, up, out)
    return out


@kernel(parallel=True, serial=True)
def _rope_rows_kernel(
    _n_threads: Any, x: Any, positions: Any, cos: Any, sin: Any, interleaved: Any, out: Any
) -> None:
    for row in prange(x.shape[0]):
        at = positions[row]
        rotate(x[row], cos[at], sin[at], interleaved, out[row])


@variant(space={"threads": THREADS})
def rope_rows(
    x: Floats, positions: Ints, cos: Floats, sin: Floats, *, pairing: str, config: Config
) -> Floats:
    """Rotate pair i of every head row of x [n, n_head, d] by the table row of its position.

    cos, sin: f32 [n_pos, n_rot / 2]. pairing "half" pairs dims (i, i + n_rot/2), "interleaved"
    (2i, 2i + 1); dims from n_rot on are copied.
    """
    x, cos, sin = _floats(x), constant(cos), constant(sin)
    positions = np.ascontiguousarray(positions, np.int32)
    interleaved = check_rope(x, positions, cos, sin, pairing)
    out = np.empty_like(x)
    threads = row_threads(x, config)
    launch(_rope_rows_kernel, threads, x, positions, cos, sin, interleaved, out)
    return out


@variant()
def add_rows(x: Floats, y: Floats, *, config: Config) -> Floats:
    """x + y."""
    return np.add(*_same_shape(x, y))


@variant()
def embed_rows(weight: Floats, tokens: Ints, *, config: Config) -> Floats:
    """Rows of weight [n_vocab, m] for tokens int32 [n]: f32 [n, m]."""
    n_vocab = len(weight)
    outside = np.flatnonzero((tokens < 0) | (tokens >= n_vocab))
    if outside.size:
        token = int(tokens[outside[0]])
        raise Refusal("7.5", f"token {token} is not in the vocabulary of {n_vocab}")
    return np.ascontiguousarray(weight[tokens], np.float32)


# -- checks ---------------------------------------------------------------------------------------


def _floats(array: Floats) -> Floats:
    return np.ascontiguousarray(array, np.float32)


def _same_shape(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    if a.shape != b.shape:
        raise Refusal("7.5", f"shapes {list(a.shape)} and {list(b.shape)} differ")
    return _floats(a), _floats(b)
