"""q8_0 cells: `quantize` rows, `dequantize` cells, `dot` of two cells (contract 4.1 to 4.5).

blocks  canonical cells; equal to the numpy oracle to the bit.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from minfer.format import BLOCK, BLOCK_BYTES, KvFormat, cell_bytes, word
from minfer.kernels_mlx._arguments import floats, host, tensor
from minfer.kernels_mlx._cell import CELL, parts_of, spread
from minfer.kernels_mlx._kernel import MetalKernel
from minfer.ops import Config, cell_arguments, variant

CANONICAL = (
    f"\n#define BLOCK_BYTES {BLOCK_BYTES}\n"
    + """
// The scale of a canonical block: float16, low byte first.
METAL_FUNC float scale_of(const device uint8_t* block) {
  return float(as_type<half>(ushort(block[0] | block[1] << 8)));
}

METAL_FUNC int code_of(const device uint8_t* block, int i) {
  return as_type<int8_t>(block[2 + i]);
}
"""
)

_QUANTIZE_Q8_0_BLOCKS_SOURCE = """
// rows: float [n_rows, 32 * n_blocks]. cells: uint8 [n_rows, width], a thread for each of `parts`
// blocks of a row; a last part without a block is two bytes of padding.
const uint thread_index = thread_position_in_grid.x;
if (thread_index < uint(n_rows) * uint(parts)) {
  const size_t row = thread_index / uint(parts);
  const int block = int(thread_index % uint(parts));
  float x[32];
  int8_t codes[32];
  for (int i = 0; i < 32; i++)
    x[i] = block < n_blocks ? rows[(row * n_blocks + block) * 32 + i] : 0.0f;
  const ushort scale = quantize_block(x, codes);
  device uint8_t* cell = cells + row * width + block * BLOCK_BYTES;
  cell[0] = uint8_t(scale & 0xFF);
  cell[1] = uint8_t(scale >> 8);
  if (block < n_blocks)
    for (int i = 0; i < 32; i++) cell[2 + i] = as_type<uint8_t>(codes[i]);
}
"""

_quantize_q8_0_blocks = MetalKernel(
    name="quantize_q8_0_blocks",
    inputs=("rows", "n_rows", "n_blocks", "parts", "width"),
    outputs=("cells",),
    source=_QUANTIZE_Q8_0_BLOCKS_SOURCE,
    header=CELL + CANONICAL,
)


@variant()
def quantize_q8_0_blocks(rows: Any, *, config: Config) -> mx.array:
    """f32 [n, m] to canonical cells uint8 [n, cell_bytes]; refuses m % 32 != 0."""
    rows = floats(rows, "rows", 2)
    n, m = rows.shape
    cell_arguments.check_blocks(m)
    width, parts = cell_bytes(KvFormat.Q8_0, m), parts_of(KvFormat.Q8_0, m)
    if not n * parts:
        return mx.zeros((n, width), mx.uint8)
    (cells,) = _quantize_q8_0_blocks(
        *(rows, n, m // BLOCK, parts, width),
        outputs=[((n, width), mx.uint8)],
        **spread(n * parts),
    )
    return cells


_DEQUANTIZE_Q8_0_BLOCKS_SOURCE = """
// cells: uint8 [n_rows, width]. rows: float [n_rows, n], a thread for each.
const uint thread_index = thread_position_in_grid.x;
if (thread_index < uint(n_rows) * uint(n)) {
  const int element = int(thread_index % uint(n));
  const device uint8_t* cell = cells + size_t(thread_index / uint(n)) * width;
  const device uint8_t* block = cell + element / 32 * BLOCK_BYTES;
  rows[thread_index] = scale_of(block) * float(code_of(block, element % 32));
}
"""

_dequantize_q8_0_blocks = MetalKernel(
    name="dequantize_q8_0_blocks",
    inputs=("cells", "n_rows", "n", "width"),
    outputs=("rows",),
    source=_DEQUANTIZE_Q8_0_BLOCKS_SOURCE,
    header=CANONICAL,
)


@variant()
def dequantize_q8_0_blocks(cells: Any, *, n: int, config: Config) -> mx.array:
    """Canonical cells uint8 [rows, cell_bytes] to f32 [rows, n], exact."""
    cells = _checked_cells(cells, n)
    n_rows, width = cells.shape
    if not n_rows * n:
        return mx.zeros((n_rows, n), mx.float32)
    (rows,) = _dequantize_q8_0_blocks(
        *(cells, n_rows, n, width),
        outputs=[((n_rows, n), mx.float32)],
        **spread(n_rows * n),
    )
    return rows


_DOT_Q8_0_BLOCKS_SOURCE = """
// a, b: uint8 [n_rows, width] of n_blocks blocks. out: float [n_rows], a thread for each.
const uint row = thread_position_in_grid.x;
if (row < uint(n_rows)) {
  const device uint8_t* a_block = a + size_t(row) * width;
  const device uint8_t* b_block = b + size_t(row) * width;
  float total = 0.0f;
  for (int block = 0; block < n_blocks; block++) {
    int products = 0;
    for (int i = 0; i < 32; i++) products += code_of(a_block, i) * code_of(b_block, i);
    total += float(products) * (scale_of(a_block) * scale_of(b_block));
    a_block += BLOCK_BYTES;
    b_block += BLOCK_BYTES;
  }
  out[row] = total;
}
"""

_dot_q8_0_blocks = MetalKernel(
    name="dot_q8_0_blocks",
    inputs=("a", "b", "n_rows", "n_blocks", "width"),
    outputs=("out",),
    source=_DOT_Q8_0_BLOCKS_SOURCE,
    header=CANONICAL,
)


@variant()
def dot_q8_0_blocks(a: Any, b: Any, *, n: int, config: Config) -> mx.array:
    """Row by row product of two sets of cells [rows, cell_bytes]: f32 [rows]."""
    a, b = _checked_cells(a, n), _checked_cells(b, n)
    cell_arguments.check_pairs_of_cells(len(a), len(b))
    n_rows, width = a.shape
    if not n_rows * width:
        return mx.zeros(n_rows, mx.float32)
    (out,) = _dot_q8_0_blocks(
        *(a, b, n_rows, n // BLOCK, width),
        outputs=[((n_rows,), mx.float32)],
        **spread(n_rows),
    )
    return out


def _checked_cells(cells: Any, n: int) -> mx.array:
    """The cells, if they are wide enough for n elements."""
    given = np.asarray(cells) if host(cells) else cells
    cell_arguments.check_canonical(n, word(given.dtype), given.shape)
    return tensor(given)
