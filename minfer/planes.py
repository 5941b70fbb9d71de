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
PACKED = np.dtype([("scale", f"V{BLOCK_BYTES - BLOCK}"), ("codes", f"V{BLOCK}")])  # a block

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
    packed = _blocks(rows, n)
    _, (scales_shape, _) = shapes(fmt, len(rows), n)
    scales = np.zeros(scales_shape, np.float16)
    scales[:, : n // BLOCK] = np.ascontiguousarray(packed["scale"]).view(np.float16)
    return np.ascontiguousarray(packed["codes"]).view(np.int8), scales


def to_canonical(fmt: KvFormat, planes: Planes, n: int) -> Bytes:
    """Canonical cells uint8 [n_cells, cell_bytes] of planes, as `of_canonical` takes them."""
    if fmt is not KvFormat.Q8_0:
        return np.ascontiguousarray(planes[0]).view(np.uint8)
    codes, scales = planes
    canonical = np.empty((len(codes), cell_bytes(fmt, n)), np.uint8)
    canonical[:, n // BLOCK * BLOCK_BYTES :] = 0
    packed = _blocks(canonical, n)
    packed["scale"] = np.ascontiguousarray(scales[:, : n // BLOCK]).view(packed["scale"].dtype)
    packed["codes"] = np.ascontiguousarray(codes).view(packed["codes"].dtype)
    return canonical


def _blocks(rows: Bytes, n: int) -> NDArray[Any]:
    """Canonical q8_0 cells as blocks [n_cells, n / 32], a view: copied a block at a time."""
    used = n // BLOCK * BLOCK_BYTES
    return rows[:, :used].reshape(len(rows), used).view(PACKED)
