"""What a declared rounding makes of values, and what rounded weights may do (contract 4.6)."""

from __future__ import annotations

from typing import Any

import numpy as np

from minfer.format import Floats
from minfer.reference.codec import dequantize_q8_0, quantize_q8_0

F32 = np.float32
# Unit roundoff and half of the smallest subnormal: the error of x is at most the larger one,
# u * x or t, and at most x itself.
ROUNDOFF = {"f32": (0.0, 0.0), "f16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-134)}
I16_CODES = 127 * 256 + 127  # the largest 256 * hi + lo of two signed bytes


def rounded(x: Floats, how: str) -> Any:
    """x f32 [..., d] as a variant that rounds to `how` sees it: f32, of i16 float64.

    f16, bf16: nearest even. i16: whole numbers of amax / 32639, a head row at a time. q8_0: blocks
    of 32 by contract 4.1.
    """
    if how == "f32":
        return x
    if how == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(F32)
    if how == "bf16":
        return _bf16(x)
    if how == "i16":
        return _fixed_point(x)
    if how != "q8_0":
        raise ValueError(f"no oracle rounds to {how}")
    d = x.shape[-1]
    return dequantize_q8_0(quantize_q8_0(x.reshape(-1, d)), n=d).reshape(x.shape)


def _bf16(x: Floats) -> Floats:
    bits = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    nearest: Floats = np.where(np.isnan(x), x, kept.astype(np.uint32).view(F32))
    return nearest


def _fixed_point(x: Floats) -> Any:
    """In f32 d = amax / 32639 and code = rint(x * (1 / d)); d * code exactly, a float64."""
    d = np.abs(x).max(axis=-1, keepdims=True) / F32(I16_CODES)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(d > 0, np.rint(x * (F32(1) / d)), F32(0))
    return codes.astype(np.float64) * d


def weight_error(weights: Any, how: str) -> Any:
    """How far each weight p <= 1 may move when it is rounded to `how`, at most.

    A kernel rounds p relative to the largest score so far, which is p times a factor of at least
    1, and multiplies by the inverse of the factor later. So both parts of the error shrink with it.
    """
    unit, smallest = ROUNDOFF[how]
    return np.maximum(unit * weights, np.minimum(smallest, weights))
