"""Dense steps by rows; a row's bits depend on that row and the weights (contract 6.5).

rms_norm, rope, silu_mul, add, embed
  rows  one row after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minfer.errors import Refusal
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
from minfer.ops import Config, variant

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
    if weight.shape != x.shape[1:]:
        raise Refusal(
            "10",
            f"a weight of {list(weight.shape)} cannot scale {list(x.shape)}",
            {"weight": weight.shape, "x": x.shape},
        )
    out = np.empty_like(x)
    args = (x, weight, np.float32(eps), out)
    run(row_threads(x, config), _rms_norm_rows_kernel, None, args)
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


@Worker
@kernel
def _silu_mul_rows_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    gate, up, out = read(pointer)
    begin, end = share(t, n_threads, gate.shape[0])
    for row in range(begin, end):
        _silu_mul_row(address(gate[row]), address(up[row]), gate.shape[1], address(out[row]))
    return 0


@variant(space={"threads": THREADS})
def silu_mul_rows(gate: Floats, up: Floats, *, config: Config) -> Floats:
    """gate * sigmoid(gate) * up, all f32 [n, m]."""
    gate, up = _same_shape("gate", gate, "up", up)
    out = np.empty_like(gate)
    run(row_threads(gate, config), _silu_mul_rows_kernel, None, (gate, up, out))
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
    run(row_threads(x, config), _rope_rows_kernel, None, args)
    return out


@variant()
def add_rows(x: Floats, y: Floats, *, config: Config) -> Floats:
    """x + y, f32 [n, m]."""
    return np.add(*_same_shape("x", x, "y", y))


@variant()
def embed_rows(weight: Any, tokens: Int32, *, fmt: KvFormat, config: Config) -> Floats:
    """Rows of a weight of `fmt` (see `stored`) for tokens int32 [n], decoded: f32 [n, m]."""
    matrix, m = stored(weight, fmt)
    tokens, n_vocab = int32s(tokens, "tokens"), len(matrix)
    bad = first_outside(tokens, n_vocab)
    if bad >= 0:
        raise Refusal(
            "7.5",
            f"token {tokens[bad]} is not in the vocabulary of {n_vocab}",
            {"token": int(tokens[bad]), "n_vocab": n_vocab},
        )
    rows = np.empty((len(tokens), m), np.float32)
    run(1, LOAD_KERNELS[fmt], None, (matrix.ctypes.data, matrix.shape[1], tokens, rows))
    return rows


# -- checks ---------------------------------------------------------------------------------------


def _same_shape(a_name: str, a: Floats, b_name: str, b: Floats) -> tuple[Floats, Floats]:
    a, b = floats(a, a_name, 2), floats(b, b_name, 2)
    if a.shape != b.shape:
        raise Refusal(
            "10",
            f"shapes {list(a.shape)} of {a_name} and {list(b.shape)} of {b_name} differ",
            {a_name: a.shape, b_name: b.shape},
        )
    return a, b
