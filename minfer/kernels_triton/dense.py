"""Dense steps by rows; a row's bits depend on that row and the weights (contract 6.5).

rms_norm, rope, silu_mul, gelu_mul, add, scale, softcap, embed
  rows  a program takes a row, or a strip of one where elements do not meet.

Nothing here leans on fused multiply-adds or on approximate functions, so that a GPU and Triton's
interpreter give the same bits but for the order of a sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from minfer.format import KvFormat
from minfer.kernels_triton import _arguments
from minfer.kernels_triton._arguments import floats, host, int32s, rows, stored, tensor
from minfer.kernels_triton._cell import BLOCK_BYTES, CODES, ROUND, ROUND_BITS
from minfer.kernels_triton._rotate import interleaved, load_turned
from minfer.kernels_triton._tile import BLOCK, FORMATS, Q8_0
from minfer.ops import Config, arguments, arrays, variant

STRIP = 1024  # elements of a row that a program takes
# exp(-x) = 2**-n * exp(n * ln 2 - x): ln 2 in two parts, the first so short that n times it is
# exact; then the polynomial of Cephes' expf, highest power first
LOG2E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.12194440054690583e-4)
EXP_5 = tl.constexpr(1.9875691500e-4)
EXP_4 = tl.constexpr(1.3981999507e-3)
EXP_3 = tl.constexpr(8.3334519073e-3)
EXP_2 = tl.constexpr(4.1665795894e-2)
EXP_1 = tl.constexpr(1.6666665459e-1)
EXP_0 = tl.constexpr(5.0000001201e-1)
GONE = tl.constexpr(110.0)  # exp(-110) rounds to 0
EXPONENT_BIAS = tl.constexpr(127)
GELU = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi), of x
GELU_CUBE = tl.constexpr(0.07135481627260025)  # 0.044715 of it, of x**3
GELU_FAR = tl.constexpr(16.0)  # from here on gelu(x) is x or 0
NEAR_ZERO = tl.constexpr(0.25)
# series of tanh(x) / x - 1 in x**2
TANH_1 = tl.constexpr(-1 / 3)
TANH_2 = tl.constexpr(2 / 15)
TANH_3 = tl.constexpr(-17 / 315)
TANH_4 = tl.constexpr(62 / 2835)
TANH_5 = tl.constexpr(-1382 / 155925)


# -- functions ------------------------------------------------------------------------------------


@triton.jit
def _decay(size, size_low):
    """exp(-(size + size_low)) for size >= 0 and size_low below an ulp of it; NaN stays NaN."""
    size = tl.where(size > GONE, GONE, size)
    shifted = size * LOG2E + ROUND
    n = shifted - ROUND
    r = ((n * LN2_HIGH - size) + n * LN2_LOW) - size_low
    p = ((((r * EXP_5 + EXP_4) * r + EXP_3) * r + EXP_2) * r + EXP_1) * r + EXP_0
    power = (p * (r * r) + r) + 1.0
    # 2**-n in two factors: one alone is no float32 where the result is subnormal
    whole = shifted.to(tl.int32, bitcast=True) - ROUND_BITS
    half = whole // 2
    first = ((-half + EXPONENT_BIAS) << 23).to(tl.float32, bitcast=True)
    second = ((half - whole + EXPONENT_BIAS) << 23).to(tl.float32, bitcast=True)
    return power * first * second


@triton.jit
def _logistic(x, power):
    """1 / (1 + exp(-y)) from power = exp(-|y|), so that nothing overflows; x has the sign of y."""
    return tl.div_rn(tl.where(x >= 0, 1.0, power), 1.0 + power)


@triton.jit
def _silu_gate(x):
    """1 / (1 + exp(-x))."""
    return _logistic(x, _decay(tl.abs(x), 0.0))


@triton.jit
def _gelu_gate(x):
    """(1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)) for z = sqrt(2 / pi) * (x + 0.044715 * x**3).

    2 z is computed in float64: what one float32 loses of it would be a factor of the result.
    """
    size = tl.abs(x)
    size = tl.where(size > GELU_FAR, GELU_FAR, size).to(tl.float64)
    # a bare constant would be rounded to float32 first
    slope, cube = tl.full([], GELU, tl.float64), tl.full([], GELU_CUBE, tl.float64)
    twice = size * (size * size * cube + slope)
    high = twice.to(tl.float32)
    low = (twice - high.to(tl.float64)).to(tl.float32)
    return _logistic(x, _decay(high, low))


@triton.jit
def _softcap(x, cap):
    """cap * tanh(x / cap): a series near zero, else (1 - p) / (1 + p), p = exp(-2 |x / cap|)."""
    y = tl.div_rn(x, cap)
    size = tl.abs(y)
    power = _decay(size + size, 0.0)
    far = tl.div_rn(1.0 - power, 1.0 + power)
    square = size * size
    series = (((square * TANH_5 + TANH_4) * square + TANH_3) * square + TANH_2) * square + TANH_1
    near = size + size * (series * square)
    tanh = tl.where(size < NEAR_ZERO, near, far).to(tl.int32, bitcast=True)
    sign = y.to(tl.int32, bitcast=True) & -0x80000000
    return (tanh | sign).to(tl.float32, bitcast=True) * cap


# -- one row by itself ----------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["x_stride"],
    do_not_specialize_on_alignment=["x", "weight", "out"],
)
def _rms_norm_rows_kernel(x, weight, out, x_stride, eps, M: tl.constexpr, BLOCK_M: tl.constexpr):
    """One row. It compiles once for all alignments: they would choose the order of the sum."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_M)
    mask = at < M
    value = tl.load(x + row * x_stride + at, mask=mask, other=0.0)
    scale = tl.load(weight + at, mask=mask, other=0.0)
    mean = tl.div_rn(tl.sum(value * value, axis=0), M)
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(out + row * M + at, value * factor * scale, mask=mask)


@variant()
def rms_norm_rows(x: Any, weight: Any, *, eps: float, config: Config) -> Any:
    """Each row of x [n, m] over the root of its mean square plus eps, times weight [m]."""
    x, weight = rows(x, "x", 2), floats(weight, "weight", 1)
    arguments.check_norm(weight.shape, x.shape)
    n, m = x.shape
    out = torch.empty((n, m), dtype=torch.float32, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(m)
        warps = min(max(block // 256, 1), 16)  # eight elements a thread, whatever n is
        _rms_norm_rows_kernel[(n,)](
            x,
            weight,
            out,
            x.stride(0),
            eps,
            M=m,
            BLOCK_M=block,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _rope_rows_kernel(
    x,  # float32 [n, n_head, D], rows x_stride apart
    positions,
    cos,
    sin,
    out,
    x_stride,
    n_head,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, BLOCK_D)
    mask = (head < n_head)[:, None] & (dim < D)[None, :]
    position = tl.load(positions + row)
    heads = load_turned(
        x + row * x_stride, head, mask, position, cos, sin, D, BLOCK_D, HALF, INTERLEAVED
    )
    tl.store(out + (row * n_head + head)[:, None] * D + dim[None, :], heads, mask=mask)


@variant()
def rope_rows(x: Any, positions: Any, cos: Any, sin: Any, *, pairing: str, config: Config) -> Any:
    """Rotate pair i of every head row of x [n, n_head, d] by the table row of its position.

    cos, sin: f32 [n_pos, n_rot / 2]. pairing "half" pairs dims (i, i + n_rot/2), "interleaved"
    (2i, 2i + 1); dims from n_rot on are copied.
    """
    x = rows(x, "x", 3)
    at, cos, sin = arrays.checked_rope(_arguments, x, positions, cos, sin, pairing)
    n, n_head, d = x.shape
    out = torch.empty((n, n_head, d), dtype=torch.float32, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(d)
        heads = max(STRIP // block, 1)
        _rope_rows_kernel[(n, triton.cdiv(n_head, heads))](
            x,
            at,
            cos,
            sin,
            out,
            x.stride(0),
            n_head,
            D=d,
            BLOCK_D=block,
            HALF=cos.shape[1],
            INTERLEAVED=interleaved(pairing),
            HEADS=heads,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


# -- element by element ---------------------------------------------------------------------------

ADD, SILU_MUL, GELU_MUL, SCALE, SOFTCAP = (tl.constexpr(i) for i in range(5))


@triton.jit
def _elements_kernel(
    x, y, out, x_stride, y_stride, number, m, OP: tl.constexpr, WIDTH: tl.constexpr
):
    """One strip of a row of x, and of y where `OP` takes two; y_stride 0 for one row of y."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = at < m
    a = tl.load(x + row * x_stride + at, mask=mask, other=0.0)
    if OP == SCALE:
        value = a * number
    elif OP == SOFTCAP:
        value = _softcap(a, number)
    else:
        b = tl.load(y + row * y_stride + at, mask=mask, other=0.0)
        if OP == ADD:
            value = a + b
        elif OP == SILU_MUL:
            value = a * _silu_gate(a) * b
        else:
            value = a * _gelu_gate(a) * b
    tl.store(out + row * m + at, value, mask=mask)


def _elements(op: tl.constexpr, x: torch.Tensor, y: torch.Tensor, number: float = 0.0) -> Any:
    """The kernel over rows x [n, m], and y [n, m] or one row [m]."""
    n, m = x.shape
    out = torch.empty((n, m), dtype=torch.float32, device=x.device)
    if out.numel():
        width = min(triton.next_power_of_2(m), STRIP)
        y_stride = y.stride(0) if y.ndim == 2 else 0
        _elements_kernel[(n, triton.cdiv(m, width))](
            x,
            y,
            out,
            x.stride(0),
            y_stride,
            number,
            m,
            OP=op,
            WIDTH=width,
            num_warps=4,
            enable_fp_fusion=False,
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
    x = rows(x, "x", 2)
    return _elements(SOFTCAP, x, x, float(cap))


@variant()
def add_rows(x: Any, y: Any, *, config: Config) -> Any:
    """x + y, f32 [n, m]; y may be one row [m], a bias."""
    if np.ndim(y) != 1:
        return _elements(ADD, *_same_shape("x", x, "y", y))
    x, row = rows(x, "x", 2), floats(y, "y", 1)
    if row.shape != x.shape[1:]:
        arguments.refuse_shapes("x", x.shape, "y", row.shape)
    return _elements(ADD, x, row)


@variant()
def scale_rows(x: Any, *, factor: float, config: Config) -> Any:
    """x times one number, f32 [n, m]."""
    x = rows(x, "x", 2)
    return _elements(SCALE, x, x, float(factor))


# -- rows of a weight -----------------------------------------------------------------------------


@triton.jit
def _embed_rows_kernel(weight, tokens, out, row_stride, m, FMT: tl.constexpr, WIDTH: tl.constexpr):
    """One strip of the row of one token. row_stride in elements of `weight`, bytes for q8_0."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = at < m
    source = weight + tl.load(tokens + row).to(tl.int64) * row_stride
    if FMT == Q8_0:
        block = source + at // BLOCK * BLOCK_BYTES
        code = tl.load(block + CODES + at % BLOCK, mask=mask, other=0).to(tl.int8, bitcast=True)
        scale = tl.load(block.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0)
        value = scale.to(tl.float32) * code.to(tl.float32)
    else:
        value = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * m + at, value, mask=mask)


@variant()
def embed_rows(weight: Any, tokens: Any, *, fmt: KvFormat, config: Config) -> Any:
    """Rows of a weight of `fmt` (see `stored`) for tokens int32 [n], decoded: f32 [n, m]."""
    matrix, m = stored(weight, fmt)
    at = _checked_tokens(tokens, len(matrix))
    out = torch.empty((len(at), m), dtype=torch.float32, device=matrix.device)
    if out.numel():
        width = min(triton.next_power_of_2(m), STRIP)
        _embed_rows_kernel[(len(at), triton.cdiv(m, width))](
            matrix,
            at,
            out,
            matrix.shape[1],
            m,
            FMT=FORMATS[fmt],
            WIDTH=width,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


# -- checks ---------------------------------------------------------------------------------------


def _checked_tokens(tokens: Any, n_vocab: int) -> torch.Tensor:
    """Tokens as int32 where kernels run; a host array is refused if one is no row."""
    if not host(tokens):
        return int32s(tokens, "tokens")
    return tensor(arguments.host_tokens(tokens, n_vocab), "tokens")


def _same_shape(a_name: str, a: Any, b_name: str, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = rows(a, a_name, 2), rows(b, b_name, 2)
    arguments.check_same_shape(a_name, a.shape, b_name, b.shape)
    return a, b
