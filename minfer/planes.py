"""Cells in planes, how accelerators hold them (contract 3.5), and their canonical bytes, in numpy.

f32 and f16 cells are one plane of rows, f16 ones padded to an even number of elements. q8_0 cells
are int8 codes [n_cells, n] and float16 scales [n_cells, n / 32], padded to an even number: blocks
of 34 bytes are read at a quarter of a GPU's memory speed. The bytes of a cell are as many as in the
canonical layout.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from minfer.format import BLOCK, BLOCK_BYTES, Bytes, KvFormat, cell_bytes

LAYOUT = "planes"
SCALE_BYTES = BLOCK_BYTES - BLOCK

Planes: TypeAlias = tuple[NDArray[Any], ...]


def shapes(fmt: KvFormat, n_cells: int, n: int) -> tuple[tuple[tuple[int, int], str], ...]:
    """Shape and dtype of each plane of `n_cells` cells of `n` elements."""
    if fmt is KvFormat.F32:
        return (((n_cells, n), "float32"),)
    if fmt is KvFormat.F16:
        return (((n_cells, cell_bytes(fmt, n) // 2), "float16"),)
    return ((n_cells, n), "int8"), ((n_cells, (cell_bytes(fmt, n) - n) // 2), "float16")


def of_canonical(fmt: KvFormat, rows: Bytes, n: int) -> Planes:
    """Canonical cells uint8 [n_cells, cell_bytes] of `n` elements, in planes."""
    if fmt is not KvFormat.Q8_0:
        dtype = np.float32 if fmt is KvFormat.F32 else np.float16
        return (np.ascontiguousarray(rows).view(dtype),)
    blocks, (_, (scales_shape, _)) = n // BLOCK, shapes(fmt, len(rows), n)
    packed = rows[:, : blocks * BLOCK_BYTES].reshape(len(rows), blocks, BLOCK_BYTES)
    codes = packed[..., SCALE_BYTES:].reshape(len(rows), n).view(np.int8)
    scales = np.zeros(scales_shape, np.float16)
    scales[:, :blocks] = np.ascontiguousarray(packed[..., :SCALE_BYTES]).view(np.float16)[..., 0]
    return codes, scales


def to_canonical(fmt: KvFormat, planes: Planes, n: int) -> Bytes:
    """Canonical cells uint8 [n_cells, cell_bytes] of planes, as `of_canonical` takes them."""
    if fmt is not KvFormat.Q8_0:
        return np.ascontiguousarray(planes[0]).view(np.uint8)
    (codes, scales), blocks = planes, n // BLOCK
    packed = np.empty((len(codes), blocks, BLOCK_BYTES), np.uint8)
    packed[..., :SCALE_BYTES] = scales[:, :blocks, None].copy().view(np.uint8)
    packed[..., SCALE_BYTES:] = codes.reshape(len(codes), blocks, BLOCK).view(np.uint8)
    canonical = np.zeros((len(codes), cell_bytes(fmt, n)), np.uint8)
    canonical[:, : blocks * BLOCK_BYTES] = packed.reshape(len(codes), blocks * BLOCK_BYTES)
    return canonical
