"""The bytes of cells: q8_0 to the bit (contract 4.1 to 4.5, every operation in f32), f32, f16."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minfer.errors import Refusal
from minfer.format import BLOCK, BLOCK_BYTES, Bytes, Floats, KvFormat, cell_bytes
from minfer.ops import Config

F32 = np.float32
F16_NAN = 0x7E00  # the scale of a poisoned block


def quantize_q8_0(rows: Floats, *, config: Config | None = None) -> Bytes:
    """f32 [n, m] to canonical cells uint8 [n, cell_bytes] (contract 4.1, 4.2).

    Refuses m that is no multiple of 32.
    """
    n, m = rows.shape
    if m % BLOCK:
        raise Refusal("3.3", f"rows of {m} are not whole blocks of {BLOCK}", {"m": m})
    blocks = np.ascontiguousarray(rows, F32).reshape(n, m // BLOCK, BLOCK)
    magnitude = (blocks.view(np.uint32) & 0x7FFFFFFF).max(axis=2)
    with np.errstate(all="ignore"):
        d = magnitude.view(F32) / F32(127)
        scale = d.astype(np.float16)
        codes = np.rint(blocks * (F32(1) / d)[..., None])
    poisoned = (magnitude >= 0x7F800000) | np.isinf(scale)
    empty = poisoned | (scale.view(np.uint16) == 0)
    packed = np.zeros((n, m // BLOCK, BLOCK_BYTES), np.uint8)
    bits = np.where(poisoned, np.uint16(F16_NAN), scale.view(np.uint16))
    packed[..., :2] = bits.astype("<u2")[..., None].view(np.uint8)
    packed[..., 2:] = np.where(empty[..., None], 0, codes).astype(np.int8).view(np.uint8)
    cells = np.zeros((n, cell_bytes(KvFormat.Q8_0, m)), np.uint8)
    cells[:, : m // BLOCK * BLOCK_BYTES] = packed.reshape(n, m // BLOCK * BLOCK_BYTES)
    return cells


def split_q8_0(cells: Bytes, n: int) -> tuple[Floats, NDArray[np.int8]]:
    """Scales f32 [rows, n / 32] and codes int8 [rows, n / 32, 32] of canonical cells."""
    blocks = n // BLOCK
    packed = cells[:, : blocks * BLOCK_BYTES].reshape(len(cells), blocks, BLOCK_BYTES)
    scales = np.ascontiguousarray(packed[..., :2]).view("<u2").view(np.float16)[..., 0]
    return scales.astype(F32), np.ascontiguousarray(packed[..., 2:]).view(np.int8)


def dequantize_q8_0(cells: Bytes, *, n: int, config: Config | None = None) -> Floats:
    """Canonical cells to f32 [rows, n]: `float(s) * code`, exact (contract 4.4)."""
    scales, codes = split_q8_0(cells, n)
    return (scales[..., None] * codes.astype(F32)).reshape(len(cells), n)


def dot_q8_0(a: Bytes, b: Bytes, *, n: int, config: Config | None = None) -> Floats:
    """f32 [rows]: exact int32 per block, terms added in block order (contract 4.5)."""
    (scale_a, codes_a), (scale_b, codes_b) = split_q8_0(a, n), split_q8_0(b, n)
    sums = (codes_a.astype(np.int32) * codes_b.astype(np.int32)).sum(axis=2, dtype=np.int32)
    total = np.zeros(len(a), F32)
    for block in range(n // BLOCK):
        term = sums[:, block].astype(F32) * (scale_a[:, block] * scale_b[:, block])
        total = total + term
    return total


def encode_rows(rows: Floats, fmt: KvFormat) -> Bytes:
    """f32 [n, m] to canonical cells of `fmt`."""
    if fmt is KvFormat.Q8_0:
        return quantize_q8_0(rows)
    cells = np.zeros((len(rows), cell_bytes(fmt, rows.shape[1])), np.uint8)
    with np.errstate(over="ignore"):
        stored = rows.astype("<f4" if fmt is KvFormat.F32 else "<f2")
    cells[:, : stored.itemsize * rows.shape[1]] = stored.view(np.uint8)
    return cells


def decode_rows(cells: Bytes, fmt: KvFormat, n: int) -> Floats:
    """Canonical cells of `fmt` to f32 [rows, n], exact."""
    if fmt is KvFormat.Q8_0:
        return dequantize_q8_0(cells, n=n)
    stored = "<f4" if fmt is KvFormat.F32 else "<f2"
    width = np.dtype(stored).itemsize * n
    return np.ascontiguousarray(cells[:, :width]).view(stored).astype(F32)
