"""q8_0 cells: `quantize` rows, `dequantize` cells, `dot` of two cells (contract 4.1 to 4.5).

blocks  one row after the other, 32 elements at a time; equal to the numpy oracle to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from minfer.errors import Refusal
from minfer.format import BLOCK, KvFormat, cell_words
from minfer.kernels_numba._ir import address
from minfer.kernels_numba._jit import THREADS, kernel, launch
from minfer.kernels_numba._rows import dequantize_row, dot_row, quantize_row
from minfer.ops import Config, variant

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@kernel(parallel=True)
def _quantize_q8_0_blocks_kernel(_n_threads: Any, rows: Any, cells: Any) -> None:
    n, m = rows.shape
    for row in prange(n):
        quantize_row(address(rows[row]), address(cells[row]), m)


@variant(space={"threads": THREADS})
def quantize_q8_0_blocks(rows: Floats, *, config: Config) -> Bytes:
    """f32 [n, m] to canonical cells uint8 [n, 4 * cell_words]; refuses m % 32 != 0."""
    rows = np.ascontiguousarray(rows, np.float32)
    n, m = rows.shape
    _check_blocks(m)
    cells = np.empty((n, 4 * cell_words(KvFormat.Q8_0, m)), np.uint8)
    launch(_quantize_q8_0_blocks_kernel, config["threads"], rows, cells)
    return cells


@kernel(parallel=True)
def _dequantize_q8_0_blocks_kernel(_n_threads: Any, cells: Any, rows: Any) -> None:
    n, m = rows.shape
    for row in prange(n):
        dequantize_row(address(cells[row]), address(rows[row]), m)


@variant(space={"threads": THREADS})
def dequantize_q8_0_blocks(cells: Bytes, *, n: int, config: Config) -> Floats:
    """Canonical cells uint8 [rows, 4 * cell_words] to f32 [rows, n], exact."""
    cells = _checked_cells(cells, n)
    rows = np.empty((len(cells), n), np.float32)
    launch(_dequantize_q8_0_blocks_kernel, config["threads"], cells, rows)
    return rows


@kernel(parallel=True)
def _dot_q8_0_blocks_kernel(_n_threads: Any, a: Any, b: Any, n: Any, out: Any) -> None:
    for row in prange(out.shape[0]):
        out[row] = dot_row(address(a[row]), address(b[row]), n)


@variant(space={"threads": THREADS})
def dot_q8_0_blocks(a: Bytes, b: Bytes, *, n: int, config: Config) -> Floats:
    """Row by row product of two sets of cells [rows, 4 * cell_words]: f32 [rows]."""
    a, b = _checked_cells(a, n), _checked_cells(b, n)
    if len(a) != len(b):
        raise Refusal("4.5", f"{len(a)} cells cannot be multiplied by {len(b)} row by row")
    out = np.empty(len(a), np.float32)
    launch(_dot_q8_0_blocks_kernel, config["threads"], a, b, n, out)
    return out


def _check_blocks(m: int) -> None:
    if m % BLOCK:
        raise Refusal("3.3", f"q8_0 rows of {m} elements are not whole blocks of {BLOCK}", {"m": m})


def _checked_cells(cells: Bytes, n: int) -> Bytes:
    """The cells, contiguous, if they are wide enough for n elements."""
    _check_blocks(n)
    width = 4 * cell_words(KvFormat.Q8_0, n)
    if cells.dtype != np.uint8 or cells.ndim != 2 or cells.shape[1] != width:
        raise Refusal(
            "3.4",
            f"q8_0 cells of {n} elements are uint8 [rows, {width}], not "
            f"{cells.dtype} {list(cells.shape)}",
            {"n": n, "width": width, "shape": tuple(cells.shape)},
        )
    return np.ascontiguousarray(cells)
