"""Dense steps by rows; a row's bits depend on that row and the weights (contract 6.5).

rms_norm, rope, silu_mul, gelu_mul, add, scale, softcap, embed
  rows  a threadgroup takes a row, or a strip of one where elements do not meet.

Kernels lean neither on contraction nor on the functions of a GPU: a Mac and the simulator give the
same bits but for the order of `simd_sum`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from minfer.format import BLOCK, BLOCK_BYTES, KvFormat
from minfer.kernels_mlx import _arguments
from minfer.kernels_mlx._arguments import floats, host, int32s, stored, tensor
from minfer.kernels_mlx._kernel import SIMD, MetalKernel
from minfer.kernels_mlx._rotate import ROTATE, interleaved
from minfer.ops import Config, arguments, arrays, variant

STRIP = 1024  # elements of a row that a threadgroup takes
WORK = 4  # of them a thread
ROW_WORK = 16  # elements of a thread where a threadgroup takes a whole row
ROW_SIMDGROUPS = 8  # at most

# -- functions ------------------------------------------------------------------------------------

_GATES = """
// exp(-x) = 2**-n * exp(n * ln 2 - x): ln 2 in two parts, the first so short that n times it is
// exact; then the polynomial of Cephes' expf, highest power first
constant float LOG2E = 1.44269504f;
constant float LN2_HIGH = 0.693359375f;
constant float LN2_LOW = -2.12194440e-4f;
constant float EXP_5 = 1.9875691500e-4f;
constant float EXP_4 = 1.3981999507e-3f;
constant float EXP_3 = 8.3334519073e-3f;
constant float EXP_2 = 4.1665795894e-2f;
constant float EXP_1 = 1.6666665459e-1f;
constant float EXP_0 = 5.0000001201e-1f;
constant float GONE = 110.0f;  // exp(-110) rounds to 0
constant float ROUND = 12582912.0f;  // 1.5 * 2**23: adding it leaves the nearest whole number
constant int ROUND_BITS = 0x4B400000;
// 2 * sqrt(2 / pi), of x, and 0.044715 of it, of x**3; each the sum of two float
constant float GELU = 1.59576917f;
constant float GELU_LOW = -4.53406803e-8f;
constant float CUBE = 0.0713548139f;
constant float CUBE_LOW = 2.39883240e-9f;
constant float GELU_FAR = 16.0f;  // from here on gelu(x) is x or 0
constant float NEAR_ZERO = 0.25f;
// series of tanh(x) / x - 1 in x**2
constant float TANH_1 = -0.333333333f;
constant float TANH_2 = 0.133333333f;
constant float TANH_3 = -0.0539682540f;
constant float TANH_4 = 0.0218694885f;
constant float TANH_5 = -0.00886323553f;

// exp(-(size + size_low)) for size >= 0 and size_low below an ulp of it; NaN stays NaN.
METAL_FUNC float decay(float size, float size_low) {
  size = size > GONE ? GONE : size;
  const float shifted = size * LOG2E + ROUND, n = shifted - ROUND;
  const float r = ((n * LN2_HIGH - size) + n * LN2_LOW) - size_low;
  const float p = ((((r * EXP_5 + EXP_4) * r + EXP_3) * r + EXP_2) * r + EXP_1) * r + EXP_0;
  const float power = (p * (r * r) + r) + 1.0f;
  // 2**-n in two factors: one alone is no float where the result is subnormal
  const int whole = as_type<int>(shifted) - ROUND_BITS, part = whole / 2;
  const float first = as_type<float>(uint(127 - part) << 23);
  const float second = as_type<float>(uint(127 - (whole - part)) << 23);
  return power * first * second;
}

// 1 / (1 + exp(-y)) from power = exp(-|y|), so that nothing overflows; x has the sign of y.
METAL_FUNC float logistic(float x, float power) {
  return (x >= 0.0f ? 1.0f : power) / (1.0f + power);
}

// 1 / (1 + exp(-x)).
METAL_FUNC float silu_gate(float x) { return logistic(x, decay(abs(x), 0.0f)); }

// (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)) for z = sqrt(2 / pi) * (x + 0.044715 * x**3).
//
// 2 z is computed in two parts: what one float loses of it would be a factor of the result.
METAL_FUNC float gelu_gate(float x) {
  float size = abs(x);
  size = size > GELU_FAR ? GELU_FAR : size;
  const float square = size * size, square_low = fma(size, size, -square);
  const float cubic = square * CUBE;
  const float cubic_low =
      fma(square, CUBE_LOW, fma(square_low, CUBE, fma(square, CUBE, -cubic)));
  const float slope = GELU + cubic;
  const float part = slope - GELU;  // the error of a sum: Knuth, TAOCP 4.2.2, theorem B
  const float lost = (GELU - (slope - part)) + (cubic - part);
  const float slope_low = (lost + GELU_LOW) + cubic_low;
  const float twice = size * slope;
  const float twice_low = fma(size, slope_low, fma(size, slope, -twice));
  return logistic(x, decay(twice, twice_low));
}

// cap * tanh(x / cap): a series near zero, else (1 - p) / (1 + p), p = exp(-2 |x / cap|).
METAL_FUNC float softcapped(float x, float cap) {
  const float y = x / cap, size = abs(y);
  const float power = decay(size + size, 0.0f);
  const float far = (1.0f - power) / (1.0f + power);
  const float square = size * size;
  const float series =
      (((square * TANH_5 + TANH_4) * square + TANH_3) * square + TANH_2) * square + TANH_1;
  const float near = size + size * (series * square);
  const uint bits = as_type<uint>(size < NEAR_ZERO ? near : far);
  return as_type<float>(bits | (as_type<uint>(y) & 0x80000000u)) * cap;
}
"""

# -- one row by itself ----------------------------------------------------------------------------

# A threadgroup for a row x [m]. Threads sum every so manieth square, simdgroups are added in order.
_RMS_NORM_ROWS_SOURCE = f"""
  threadgroup float parts[{ROW_SIMDGROUPS}];
  const int t = thread_index_in_threadgroup, threads = threads_per_threadgroup.x;
  const device float* row = x + size_t(threadgroup_position_in_grid.x) * m;
  device float* made = out + size_t(threadgroup_position_in_grid.x) * m;
  float sum = 0.0f;
  for (int i = t; i < m; i += threads) sum += row[i] * row[i];
  sum = simd_sum(sum);
  if (thread_index_in_simdgroup == 0) parts[simdgroup_index_in_threadgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = parts[0];
  for (int i = 1; i < threads / {SIMD}; i++) total += parts[i];
  const float factor = 1.0f / sqrt(total / float(m) + eps);
  for (int i = t; i < m; i += threads) made[i] = row[i] * factor * weight[i];
"""

_rms_norm_rows = MetalKernel(
    "rms_norm_rows", ("x", "weight", "m", "eps"), ("out",), _RMS_NORM_ROWS_SOURCE
)


@variant()
def rms_norm_rows(x: Any, weight: Any, *, eps: float, config: Config) -> Any:
    """Each row of x [n, m] over the root of its mean square plus eps, times weight [m]."""
    x, weight = floats(x, "x", 2), floats(weight, "weight", 1)
    arguments.check_norm(weight.shape, x.shape)
    if not x.size:
        return x
    n, m = x.shape
    simdgroups = min(max(m // (SIMD * ROW_WORK), 1), ROW_SIMDGROUPS)  # whatever n is
    (out,) = _rms_norm_rows(
        *(x, weight, m, float(eps)),
        outputs=[(x.shape, mx.float32)],
        groups=(n, 1, 1),
        threads=SIMD * simdgroups,
    )
    return out


# A threadgroup for a strip of a row [n_head, d].
_ROPE_ROWS_SOURCE = f"""
  const int row = threadgroup_position_in_grid.y, threads = threads_per_threadgroup.x;
  const int n = n_head * d, start = threadgroup_position_in_grid.x * {STRIP};
  const size_t table = size_t(positions[row]) * n_pairs;
  const device float* given = x + size_t(row) * n;
  for (int i = thread_index_in_threadgroup; i < {STRIP} && start + i < n; i += threads) {{
    const int dim = (start + i) % d;
    const device float* head = given + (start + i - dim);
    const float partner = head[partner_of(dim, n_pairs, interleaved)];
    out[size_t(row) * n + start + i] =
        turned(head[dim], partner, dim, cos + table, sin + table, n_pairs, interleaved);
  }}
"""

_rope_rows = MetalKernel(
    "rope_rows",
    ("x", "positions", "cos", "sin", "n_head", "d", "n_pairs", "interleaved"),
    ("out",),
    _ROPE_ROWS_SOURCE,
    ROTATE,
)


@variant()
def rope_rows(x: Any, positions: Any, cos: Any, sin: Any, *, pairing: str, config: Config) -> Any:
    """Rotate pair i of every head row of x [n, n_head, d] by the table row of its position.

    cos, sin: f32 [n_pos, n_rot / 2]. pairing "half" pairs dims (i, i + n_rot/2), "interleaved"
    (2i, 2i + 1); dims from n_rot on are copied.
    """
    x = floats(x, "x", 3)
    at, cos, sin = arrays.checked_rope(_arguments, x, positions, cos, sin, pairing)
    if not x.size:
        return x
    n, n_head, d = x.shape
    (out,) = _rope_rows(
        *(x, at, cos, sin, n_head, d, cos.shape[1], int(interleaved(pairing))),
        outputs=[(x.shape, mx.float32)],
        **_strips(n, n_head * d),
    )
    return out


def _strips(n: int, m: int) -> dict[str, Any]:
    """Threadgroups and threads for n rows of m elements, in strips of `STRIP`."""
    threads = -(-min(m, STRIP) // (SIMD * WORK)) * SIMD
    return {"groups": (-(-m // STRIP), n, 1), "threads": threads}


# -- element by element ---------------------------------------------------------------------------

SILU_MUL, GELU_MUL, SOFTCAP = range(3)

# A threadgroup for a strip of a row [m] of x, and of y where OP takes two.
_ELEMENTS_ROWS_SOURCE = f"""
  const int start = threadgroup_position_in_grid.x * {STRIP}, threads = threads_per_threadgroup.x;
  const size_t row = size_t(threadgroup_position_in_grid.y) * m;
  for (int i = thread_index_in_threadgroup; i < {STRIP} && start + i < m; i += threads) {{
    const size_t at = row + start + i;
    const float a = x[at];
    if (OP == {SOFTCAP}) {{
      out[at] = softcapped(a, cap);
    }} else {{
      const float gate = OP == {SILU_MUL} ? silu_gate(a) : gelu_gate(a);
      out[at] = a * gate * y[at];
    }}
  }}
"""

_elements_rows = MetalKernel(
    "elements_rows", ("x", "y", "cap", "m"), ("out",), _ELEMENTS_ROWS_SOURCE, _GATES
)


def _elements(op: int, x: mx.array, y: mx.array, cap: float = 0.0) -> Any:
    """The kernel over rows x [n, m] and y [n, m]."""
    if not x.size:
        return x
    n, m = x.shape
    (out,) = _elements_rows(
        *(x, y, cap, m), outputs=[(x.shape, mx.float32)], **_strips(n, m), OP=op
    )
    return out


@variant()
def silu_mul_rows(gate: Any, up: Any, *, config: Config) -> Any:
    """gate * sigmoid(gate) * up, all f32 [n, m]."""
    return _elements(SILU_MUL, *_same_shape("gate", gate, "up", up))


@variant()
def gelu_mul_rows(gate: Any, up: Any, *, config: Config) -> Any:
    """gelu(gate) * up, f32 [n, m]; the tanh form of Hendrycks and Gimpel, arXiv 1606.08415."""
    return _elements(GELU_MUL, *_same_shape("gate", gate, "up", up))


@variant()
def softcap_rows(x: Any, *, cap: float, config: Config) -> Any:
    """cap * tanh(x / cap), f32 [n, m]: all of it within (-cap, cap)."""
    x = floats(x, "x", 2)
    return _elements(SOFTCAP, x, x, float(cap))


@variant()
def add_rows(x: Any, y: Any, *, config: Config) -> Any:
    """x + y, f32 [n, m]; y may be one row [m], a bias."""
    if np.ndim(y) != 1:
        return mx.add(*_same_shape("x", x, "y", y))
    x, row = floats(x, "x", 2), floats(y, "y", 1)
    if row.shape != x.shape[1:]:
        arguments.refuse_shapes("x", x.shape, "y", row.shape)
    return x + row


@variant()
def scale_rows(x: Any, *, factor: float, config: Config) -> Any:
    """x times one number, f32 [n, m]."""
    return floats(x, "x", 2) * float(factor)


# -- rows of a weight -----------------------------------------------------------------------------


@variant()
def embed_rows(weight: Any, tokens: Any, *, fmt: KvFormat, config: Config) -> Any:
    """Rows of a weight of `fmt` (see `stored`) for tokens int32 [n], decoded: f32 [n, m]."""
    matrix, m = stored(weight, fmt)
    rows = matrix[_checked_tokens(tokens, len(matrix))]
    if fmt is not KvFormat.Q8_0:
        return rows.astype(mx.float32)
    blocks = rows.reshape(len(rows), m // BLOCK, BLOCK_BYTES)
    start = BLOCK_BYTES - BLOCK  # of the codes
    scales = blocks[..., :start].view(mx.float16).astype(mx.float32)
    codes = blocks[..., start:].view(mx.int8).astype(mx.float32)
    return (scales * codes).reshape(len(rows), m)


# -- checks ---------------------------------------------------------------------------------------


def _checked_tokens(tokens: Any, n_vocab: int) -> mx.array:
    """Tokens as int32 [n]; a host array is refused if one is no row."""
    if not host(tokens):
        return int32s(tokens, "tokens")
    return tensor(arguments.host_tokens(tokens, n_vocab))


def _same_shape(a_name: str, a: Any, b_name: str, b: Any) -> tuple[mx.array, mx.array]:
    a, b = floats(a, a_name, 2), floats(b, b_name, 2)
    arguments.check_same_shape(a_name, a.shape, b_name, b.shape)
    return a, b
