"""Dense steps by rows; a row's bits depend on that row and the weights (contract 6.5).

rms_norm, rope, silu_mul, gelu_mul, add, scale, softcap, embed
  rows  one row after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minfer.format import Floats, Int32, KvFormat
from minfer.kernels_numba._arguments import (
    first_outside,
    floats,
    int32s,
    read_only,
    stored,
)
from minfer.kernels_numba._emit import F32, LOG2E, VF, VI, Emitter
from minfer.kernels_numba._ir import address, intrinsic_of
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._rotate import check_rope, rotate
from minfer.kernels_numba._workers import THREADS, Worker, read, row_threads, run, share
from minfer.kernels_numba.cells import LOAD_KERNELS
from minfer.ops import Config, arguments, variant

LOG2E_LOW = float.fromhex("0x1.4ae0c0p-26")  # log2(e) - LOG2E
LN2 = float.fromhex("0x1.62e430p-1")
GELU = 2 * (2 / np.pi) ** 0.5  # of x, and of x**3 below
GELU_CUBE = 0.044715 * GELU
TANH = (-1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925)  # series of tanh(x) / x - 1 in x**2
NEAR_ZERO = 0.25

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


@Worker
@kernel
def _rms_norm_rows_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    x, weight, eps, out = read(pointer)
    begin, end = share(t, n_threads, x.shape[0])
    for row in range(begin, end):
        source, m = address(x[row]), x.shape[1]
        _rms_norm_row(source, address(weight), m, np.float32(m), eps, address(out[row]))
    return 0


@variant(space={"threads": THREADS})
def rms_norm_rows(x: Floats, weight: Floats, *, eps: float, config: Config) -> Floats:
    """Each row of x [n, m] over the root of its mean square plus eps, times weight [m]."""
    x, weight = floats(x, "x", 2), read_only(weight, "weight", 1)
    arguments.check_norm(weight.shape, x.shape)
    out = np.empty_like(x)
    args = (x, weight, np.float32(eps), out)
    run(row_threads(x.size, config), _rms_norm_rows_kernel, None, args)
    return out


def _split(value: float) -> tuple[float, float]:
    """A constant as the sum of two float32."""
    high = float(np.float32(value))
    return high, value - high


def _absolute(e: Emitter, x: Any) -> Any:
    return e.builder.bitcast(e.builder.and_(e.builder.bitcast(x, VI), e.const(VI, 0x7FFFFFFF)), VF)


def decay(e: Emitter, size: Any, size_low: Any = None) -> Any:
    """exp(-(size + size_low)) for size >= 0 and size_low below an ulp of it; NaN stays NaN."""
    build = e.builder
    far = build.fcmp_ordered(">", size, e.const(VF, 200.0))
    size = build.fneg(build.select(far, e.const(VF, 200.0), size))
    # -size * log2(e) in two parts: the second one, below an ulp of the first, is a factor
    high = build.fmul(size, e.const(VF, LOG2E))
    low = e.fma(size, e.const(VF, LOG2E), build.fneg(high))
    low = e.fma(size, e.const(VF, LOG2E_LOW), low)
    if size_low is not None:
        low = e.fma(size_low, e.const(VF, -LOG2E), low)
    power = e.exp2(high)
    return e.fma(power, build.fmul(low, e.const(VF, LN2)), power)


def logistic(e: Emitter, x: Any, power: Any) -> Any:
    """1 / (1 + exp(-y)) from power = exp(-|y|), so that nothing overflows; x has the sign of y."""
    positive = e.builder.fcmp_ordered(">=", x, e.const(VF, 0.0))
    one = e.const(VF, 1.0)
    return e.builder.fdiv(e.builder.select(positive, one, power), e.builder.fadd(one, power))


def sigmoid(e: Emitter, x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return logistic(e, x, decay(e, _absolute(e, x)))


def gelu_gate(e: Emitter, x: Any) -> Any:
    """(1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)) for z = sqrt(2 / pi) * (x + 0.044715 * x**3).

    2 z is computed in two parts: what one float32 loses of it would be a factor of the result.
    """
    build = e.builder
    (a, a_low), (b, b_low) = (map(e.const, (VF, VF), _split(c)) for c in (GELU, GELU_CUBE))
    size = _absolute(e, x)
    far = build.fcmp_ordered(">", size, e.const(VF, 16.0))
    size = build.select(far, e.const(VF, 16.0), size)
    square = build.fmul(size, size)
    square_low = e.fma(size, size, build.fneg(square))
    cubic = build.fmul(square, b)
    cubic_low = e.fma(square_low, b, e.fma(square, b, build.fneg(cubic)))
    cubic_low = e.fma(square, b_low, cubic_low)
    slope = build.fadd(a, cubic)
    part = build.fsub(slope, a)  # the error of a sum: Knuth, TAOCP 4.2.2, theorem B
    lost = build.fadd(build.fsub(a, build.fsub(slope, part)), build.fsub(cubic, part))
    slope_low = build.fadd(build.fadd(lost, a_low), cubic_low)
    twice = build.fmul(size, slope)
    twice_low = e.fma(size, slope_low, e.fma(size, slope, build.fneg(twice)))
    return logistic(e, x, decay(e, twice, twice_low))


def _gated(name: str, gate_of: Any) -> Any:
    """A worker for gate * gate_of(gate) * up."""

    def emit(e: Emitter, gate: Any, up: Any, n: Any, out: Any) -> None:
        for offset, load, store in e.strips(n):
            g = load(gate, offset)
            product = e.builder.fmul(e.builder.fmul(g, gate_of(e, g)), load(up, offset))
            store(product, out, offset)

    gated_row = intrinsic_of("pppp:v", emit)

    @Worker
    @kernel(key=name)
    def _gated_rows_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
        gate, up, out = read(pointer)
        begin, end = share(t, n_threads, gate.shape[0])
        for row in range(begin, end):
            gated_row(address(gate[row]), address(up[row]), gate.shape[1], address(out[row]))
        return 0

    return _gated_rows_kernel


_silu_mul_rows_kernel = _gated("silu_mul", sigmoid)
_gelu_mul_rows_kernel = _gated("gelu_mul", gelu_gate)


@variant(space={"threads": THREADS})
def silu_mul_rows(gate: Floats, up: Floats, *, config: Config) -> Floats:
    """gate * sigmoid(gate) * up, all f32 [n, m]."""
    gate, up = _same_shape("gate", gate, "up", up)
    out = np.empty_like(gate)
    run(row_threads(gate.size, config), _silu_mul_rows_kernel, None, (gate, up, out))
    return out


@variant(space={"threads": THREADS})
def gelu_mul_rows(gate: Floats, up: Floats, *, config: Config) -> Floats:
    """gelu(gate) * up, f32 [n, m]; the tanh form of Hendrycks and Gimpel, arXiv 1606.08415."""
    gate, up = _same_shape("gate", gate, "up", up)
    out = np.empty_like(gate)
    run(row_threads(gate.size, config), _gelu_mul_rows_kernel, None, (gate, up, out))
    return out


def _emit_softcap(e: Emitter, x: Any, cap: Any, n: Any, out: Any) -> None:
    """cap * tanh(x / cap): a series near zero, else (1 - p) / (1 + p), p = exp(-2 |x / cap|)."""
    build, one, cap = e.builder, e.const(VF, 1.0), e.splat(cap)
    for offset, load, store in e.strips(n):
        y = build.fdiv(load(x, offset), cap)
        size = _absolute(e, y)
        power = decay(e, build.fadd(size, size))
        far = build.fdiv(build.fsub(one, power), build.fadd(one, power))
        square, series = build.fmul(size, size), e.const(VF, TANH[-1])
        for coefficient in TANH[-2::-1]:
            series = e.fma(series, square, e.const(VF, coefficient))
        near = e.fma(size, build.fmul(series, square), size)
        close = build.fcmp_ordered("<", size, e.const(VF, NEAR_ZERO))
        sign = build.and_(build.bitcast(y, VI), e.const(VI, 0x80000000))
        tanh = build.or_(build.bitcast(build.select(close, near, far), VI), sign)
        store(build.fmul(build.bitcast(tanh, VF), cap), out, offset)


_softcap_row = intrinsic_of("pfpp:v", _emit_softcap)


@Worker
@kernel
def _softcap_rows_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    x, cap, out = read(pointer)
    begin, end = share(t, n_threads, x.shape[0])
    for row in range(begin, end):
        _softcap_row(address(x[row]), cap, x.shape[1], address(out[row]))
    return 0


@variant(space={"threads": THREADS})
def softcap_rows(x: Floats, *, cap: float, config: Config) -> Floats:
    """cap * tanh(x / cap), f32 [n, m]: all of it within (-cap, cap)."""
    x = floats(x, "x", 2)
    out = np.empty_like(x)
    run(row_threads(x.size, config), _softcap_rows_kernel, None, (x, np.float32(cap), out))
    return out


@Worker
@kernel
def _rope_rows_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    x, positions, cos, sin, interleaved, out = read(pointer)
    begin, end = share(t, n_threads, x.shape[0])
    for row in range(begin, end):
        at = positions[row]
        rotate(x[row], cos[at], sin[at], interleaved, out[row])
    return 0


@variant(space={"threads": THREADS})
def rope_rows(
    x: Floats, positions: Int32, cos: Floats, sin: Floats, *, pairing: str, config: Config
) -> Floats:
    """Rotate pair i of every head row of x [n, n_head, d] by the table row of its position.

    cos, sin: f32 [n_pos, n_rot / 2]. pairing "half" pairs dims (i, i + n_rot/2), "interleaved"
    (2i, 2i + 1); dims from n_rot on are copied.
    """
    x, cos, sin = floats(x, "x", 3), read_only(cos, "cos", 2), read_only(sin, "sin", 2)
    positions = int32s(positions, "positions")
    interleaved = check_rope(x, positions, cos, sin, pairing)
    out = np.empty_like(x)
    args = (x, positions, cos, sin, interleaved, out)
    run(row_threads(x.size, config), _rope_rows_kernel, None, args)
    return out


@variant()
def add_rows(x: Floats, y: Floats, *, config: Config) -> Floats:
    """x + y, f32 [n, m]; y may be one row [m], a bias."""
    if np.ndim(y) != 1:
        return np.add(*_same_shape("x", x, "y", y))
    x, row = floats(x, "x", 2), read_only(y, "y", 1)
    if row.shape != x.shape[1:]:
        arguments.refuse_shapes("x", x.shape, "y", row.shape)
    return np.add(x, row)


@variant()
def scale_rows(x: Floats, *, factor: float, config: Config) -> Floats:
    """x times one number, f32 [n, m]."""
    return np.multiply(floats(x, "x", 2), np.float32(factor))


@variant()
def embed_rows(weight: Any, tokens: Int32, *, fmt: KvFormat, config: Config) -> Floats:
    """Rows of a weight of `fmt` (see `stored`) for tokens int32 [n], decoded: f32 [n, m]."""
    matrix, m = stored(weight, fmt)
    tokens, n_vocab = int32s(tokens, "tokens"), len(matrix)
    bad = first_outside(tokens, n_vocab)
    if bad >= 0:
        arguments.refuse_token(tokens[bad], n_vocab)
    rows = np.empty((len(tokens), m), np.float32)
    run(1, LOAD_KERNELS[fmt], None, (matrix.ctypes.data, matrix.shape[1], tokens, rows))
    return rows


# -- checks ---------------------------------------------------------------------------------------


def _same_shape(a_name: str, a: Floats, b_name: str, b: Floats) -> tuple[Floats, Floats]:
    a, b = floats(a, a_name, 2), floats(b, b_name, 2)
    arguments.check_same_shape(a_name, a.shape, b_name, b.shape)
    return a, b
