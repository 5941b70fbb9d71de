"""q8_0 cells: `quantize` rows, `dequantize` cells, `dot` of two cells (contract 4.1 to 4.5).

blocks  one row after the other, 32 elements at a time; equal to the numpy oracle to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minfer.format import Bytes, Floats, KvFormat, cell_bytes
from minfer.kernels_numba._arguments import floats, owned
from minfer.kernels_numba._cell import dequantize_row, dot_row, quantize_row
from minfer.kernels_numba._ir import address
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._workers import THREADS, Worker, read, run, share
from minfer.ops import Config, cell_arguments, variant


@Worker
@kernel
def _quantize_q8_0_blocks_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    rows, cells = read(pointer)
    begin, end = share(t, n_threads, rows.shape[0])
    for row in range(begin, end):
        quantize_row(address(rows[row]), address(cells[row]), rows.shape[1])
    return 0


@variant(space={"threads": THREADS})
def quantize_q8_0_blocks(rows: Floats, *, config: Config) -> Bytes:
    """f32 [n, m] to canonical cells uint8 [n, cell_bytes]; refuses m % 32 != 0."""
    rows = floats(rows, "rows", 2)
    n, m = rows.shape
    cell_arguments.check_blocks(m)
    cells = np.empty((n, cell_bytes(KvFormat.Q8_0, m)), np.uint8)
    run(config["threads"], _quantize_q8_0_blocks_kernel, None, (rows, cells))
    return cells


@Worker
@kernel
def _dequantize_q8_0_blocks_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    cells, rows = read(pointer)
    begin, end = share(t, n_threads, rows.shape[0])
    for row in range(begin, end):
        dequantize_row(address(cells[row]), address(rows[row]), rows.shape[1])
    return 0


@variant(space={"threads": THREADS})
def dequantize_q8_0_blocks(cells: Bytes, *, n: int, config: Config) -> Floats:
    """Canonical cells uint8 [rows, cell_bytes] to f32 [rows, n], exact."""
    cells = _checked_cells(cells, n)
    rows = np.empty((len(cells), n), np.float32)
    run(config["threads"], _dequantize_q8_0_blocks_kernel, None, (cells, rows))
    return rows


@Worker
@kernel
def _dot_q8_0_blocks_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    a, b, n, out = read(pointer)
    begin, end = share(t, n_threads, out.shape[0])
    for row in range(begin, end):
        out[row] = dot_row(address(a[row]), address(b[row]), n)
    return 0


@variant(space={"threads": THREADS})
def dot_q8_0_blocks(a: Bytes, b: Bytes, *, n: int, config: Config) -> Floats:
    """Row by row product of two sets of cells [rows, cell_bytes]: f32 [rows]."""
    a, b = _checked_cells(a, n), _checked_cells(b, n)
    cell_arguments.check_pairs_of_cells(len(a), len(b))
    out = np.empty(len(a), np.float32)
    run(config["threads"], _dot_q8_0_blocks_kernel, None, (a, b, n, out))
    return out


def _checked_cells(cells: Bytes, n: int) -> Bytes:
    """The cells, contiguous and writable, if they are wide enough for n elements."""
    given = np.asarray(cells)
    cell_arguments.check_canonical(n, str(given.dtype), given.shape)
    result: Bytes = owned(given)
    return result
