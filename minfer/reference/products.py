"""Weights as files store them, and products: float64 over what is decoded, q8_0 to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from minfer.format import BLOCK, BLOCK_BYTES, Floats, Int32, KvFormat
from minfer.ops import Config
from minfer.reference.codec import dequantize_q8_0, dot_q8_0, quantize_q8_0

Products = NDArray[np.float64] | Floats


def encode_weight(weight: Floats, fmt: KvFormat) -> NDArray[Any]:
    """f32 [n_out, n_in] as a file stores it: float32, float16, or uint8 [n_out, n_in / 32 * 34]."""
    if fmt is KvFormat.Q8_0:
        width = weight.shape[1] // BLOCK * BLOCK_BYTES
        return np.ascontiguousarray(quantize_q8_0(weight)[:, :width])
    return weight.astype(np.float32 if fmt is KvFormat.F32 else np.float16)


def decode_weight(weight: Any, fmt: KvFormat) -> Floats:
    """What `encode_weight` gave as f32 [n_out, n_in], exact."""
    if fmt is KvFormat.Q8_0:
        return dequantize_q8_0(weight, n=weight.shape[1] // BLOCK_BYTES * BLOCK)
    out: Floats = weight.astype(np.float32)
    return out


def matvec(weight: Any, x: Floats, *, fmt: KvFormat, config: Config | None = None) -> Products:
    """x [n, n_in] @ weight.T, weight [n_out, n_in].

    q8_0: uint8 blocks [n_out, n_in / 32 * 34]; rows of x are quantized too and the products are
    those of `dot_q8_0`, f32 (contract 4.5).
    """
    if fmt is not KvFormat.Q8_0:
        out: Products = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
        return out
    out = np.empty((len(x), len(weight)), np.float32)
    for row, cell in zip(out, quantize_q8_0(x), strict=True):
        row[:] = dot_q8_0(weight, np.broadcast_to(cell, (len(weight), len(cell))), n=x.shape[1])
    return out


matmul = matvec


def embed(
    weight: Any, tokens: Int32, *, fmt: KvFormat, config: Config | None = None
) -> NDArray[np.float64]:
    """Rows of weight [n_vocab, m], decoded; q8_0: blocks [n_vocab, m / 32 * 34]."""
    return decode_weight(np.asarray(weight)[tokens], fmt).astype(np.float64)
