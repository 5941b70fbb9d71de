"""Rows into cells, and cells from where they lie (contract 4.1, 4.7, 5.6, 7.2).

store_cells, qkv_rope_store
  rows  a thread for an element of a row, or a q8_0 block; one launch makes the rows, padded with
        zeros, and MLX puts them into the planes.
move_cells
  rows  batches of rows, taken out and put, cut where a row meets one that its batch wrote.
map_q8_0_cells
  rows  a thread for a block of a cell taken out: dequantize, rotate all cells by the same angles,
        quantize.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from minfer.format import KvFormat, Region, refuse_odd_blocks
from minfer.kernels_mlx import _arguments
from minfer.kernels_mlx._arguments import (
    check_region,
    checked_cells,
    checked_moves,
    put,
    tensor,
)
from minfer.kernels_mlx._cell import PART, STORE, parts_of, spread, stored_names, stored_outputs
from minfer.kernels_mlx._kernel import MetalKernel
from minfer.kernels_mlx._move import batch_rows, batches, taken
from minfer.kernels_mlx._rotate import ROTATE, interleaved
from minfer.ops import Config, arrays, check_pairing, variant

_STORE_CELLS_ROWS_SOURCE = """
// given: float [n_rows, n]. out: n_rows stored rows of `parts` parts.
const uint thread_index = thread_position_in_grid.x;
if (thread_index < uint(n_rows) * uint(parts)) {
  const size_t row = thread_index / uint(parts);
  const int part = int(thread_index % uint(parts));
  float x[PART];
  for (int i = 0; i < PART; i++) {
    const int element = part * PART + i;
    x[i] = element < n ? given[row * n + element] : 0.0f;
  }
  store_part(x, row, part, parts, n, PLANES(out));
}
"""

_store_cells_rows = {
    fmt: MetalKernel(
        name=f"store_cells_rows_{fmt}",
        inputs=("given", "n_rows", "n", "parts"),
        outputs=stored_names("out", fmt),
        source=_STORE_CELLS_ROWS_SOURCE,
        header=STORE[fmt],
    )
    for fmt in KvFormat
}


@variant()
def store_cells_rows(
    region: Region, rows: Any, cells: Any, *, fmt: KvFormat, config: Config
) -> Region:
    """Rows f32 [n, n_head_kv, d] into cells int32 [n] of a region, in place.

    Refuses another format, another row type or shape, and a cell outside the region.
    """
    check_region(region, fmt)
    cells = checked_cells(region, cells)
    n_rows, n = len(cells), region.row_elems
    given = arrays.checked_rows(_arguments, region, rows, "rows", n_rows)
    if n_rows:
        parts = parts_of(fmt, n)
        stored = _store_cells_rows[fmt](
            *(given, n_rows, n, parts),
            outputs=stored_outputs(fmt, n_rows, n),
            **spread(n_rows * parts),
        )
        put(region, cells, stored)
    return region


_QKV_ROPE_STORE_ROWS_SOURCE = """
// q: float [n_rows, n_q], k, v: float [n_rows, n], in heads of d. positions: int [n_rows].
// cos, sin: float [n_pos, n_pairs]. turned_q: as q. new_k, new_v: n_rows stored rows of `parts`.
const int q_parts = n_q / PART, all_parts = q_parts + 2 * parts;
const uint thread_index = thread_position_in_grid.x;
if (thread_index < uint(n_rows) * uint(all_parts)) {
  const size_t row = thread_index / uint(all_parts);
  const int part = int(thread_index % uint(all_parts));
  const device float* c = cos + size_t(positions[row]) * n_pairs;
  const device float* s = sin + size_t(positions[row]) * n_pairs;
  const bool of_q = part < q_parts, of_v = part >= q_parts + parts;
  const int own_part = of_q ? part : of_v ? part - q_parts - parts : part - q_parts;
  const int width = of_q ? n_q : n;
  const device float* given = (of_q ? q : of_v ? v : k) + row * width;
  float x[PART];
  for (int i = 0; i < PART; i++) {
    const int element = own_part * PART + i;
    x[i] = element < width ? given[element] : 0.0f;
    if (element < width && !of_v) {
      const int dim = element % d;
      const float partner = given[element - dim + partner_of(dim, n_pairs, interleaved)];
      x[i] = turned(x[i], partner, dim, c, s, n_pairs, interleaved);
    }
  }
  if (of_q) {
    for (int i = 0; i < PART; i++) turned_q[row * n_q + own_part * PART + i] = x[i];
  } else if (of_v) {
    store_part(x, row, own_part, parts, n, PLANES(new_v));
  } else {
    store_part(x, row, own_part, parts, n, PLANES(new_k));
  }
}
"""

_qkv_rope_store_rows = {
    fmt: MetalKernel(
        name=f"qkv_rope_store_rows_{fmt}",
        inputs=(
            *("q", "k", "v", "positions", "cos", "sin"),
            *("n_rows", "n_q", "n", "d", "n_pairs", "interleaved", "parts"),
        ),
        outputs=("turned_q", *stored_names("new_k", fmt), *stored_names("new_v", fmt)),
        source=_QKV_ROPE_STORE_ROWS_SOURCE,
        header=STORE[fmt] + ROTATE,
    )
    for fmt in KvFormat
}


@variant()
def qkv_rope_store_rows(
    q: Any,
    k: Any,
    v: Any,
    k_region: Region,
    v_region: Region,
    positions: Any,
    cells: Any,
    cos: Any,
    sin: Any,
    *,
    fmt: KvFormat,
    pairing: str,
    config: Config,
) -> tuple[mx.array, Region, Region]:
    """Rotate q and k [n, heads, d] by position, store k and v by cell, in one launch.

    Returns the rotated q and both regions, which are the ones given.
    """
    q, k, v, cells = arrays.checked_store(_arguments, q, k, v, k_region, v_region, cells, fmt)
    n, d = k_region.row_elems, k_region.head_dim
    at, cos, sin = arrays.checked_rope(_arguments, q, positions, cos, sin, pairing)
    arrays.checked_rope(_arguments, k, at, cos, sin, pairing)
    n_rows, n_q, parts = len(cells), q.shape[1] * d, parts_of(fmt, n)
    if not n_rows:
        return q, k_region, v_region
    rows = stored_outputs(fmt, n_rows, n)
    out, *stored = _qkv_rope_store_rows[fmt](
        *(q, k, v, at, cos, sin),
        *(n_rows, n_q, n, d, cos.shape[1], int(interleaved(pairing)), parts),
        outputs=[(q.shape, mx.float32), *rows, *rows],
        **spread(n_rows * (n_q // PART[fmt] + 2 * parts)),
    )
    put(k_region, cells, stored[: len(rows)])
    put(v_region, cells, stored[len(rows) :])
    return out, k_region, v_region


@variant()
def move_cells_rows(region: Region, moves: Any, *, config: Config) -> Region:
    """Copy cells by int32 [n, 3] of (src, dst, rows), in order, each like memmove, in place.

    Cells of any format move verbatim, padding included. Refuses a move that leaves the region,
    before the first one.
    """
    check_region(region, region.fmt)
    table = checked_moves(region, moves)
    for src, dst in batches(table, region.n_cells, batch_rows(region)):
        put(region, tensor(dst), taken(region, tensor(src)))
    return region


_MAP_Q8_0_CELLS_ROWS_SOURCE = """
// codes: int8 [n_rows, n], scales: half [n_rows, parts], in heads of d. cos, sin: float [n_pairs].
// out: the rows turned.
const uint thread_index = thread_position_in_grid.x;
if (thread_index < uint(n_rows) * uint(parts)) {
  const size_t row = thread_index / uint(parts);
  const int part = int(thread_index % uint(parts));
  const device int8_t* code = codes + row * n;
  const device half* scale = scales + row * parts;
  float x[PART];
  for (int i = 0; i < PART; i++) {
    const int element = part * PART + i, dim = element % d;
    x[i] = 0.0f;
    if (element < n) {
      const int other = element - dim + partner_of(dim, n_pairs, interleaved);
      const float own = float(code[element]) * float(scale[element / PART]);
      const float partner = float(code[other]) * float(scale[other / PART]);
      x[i] = turned(own, partner, dim, cos, sin, n_pairs, interleaved);
    }
  }
  store_part(x, row, part, parts, n, PLANES(out));
}
"""

_map_q8_0_cells_rows = MetalKernel(
    name="map_q8_0_cells_rows",
    inputs=(
        *("codes", "scales", "cos", "sin"),
        *("n_rows", "n", "d", "n_pairs", "interleaved", "parts"),
    ),
    outputs=stored_names("out", KvFormat.Q8_0),
    source=_MAP_Q8_0_CELLS_ROWS_SOURCE,
    header=STORE[KvFormat.Q8_0] + ROTATE,
)


@variant()
def map_q8_0_cells_rows(
    region: Region, cells: Any, cos: Any, sin: Any, *, pairing: str, config: Config
) -> Region:
    """Rotate every head of the cells int32 [n] by cos, sin f32 [1, n_rot / 2], in place.

    Refuses another format than q8_0, a cell outside the region or named twice, and tables of more
    than one row or more pairs than a head has.
    """
    check_region(region, KvFormat.Q8_0)
    cells, cos, sin = arrays.checked_turn(_arguments, region, cells, cos, sin)
    check_pairing(pairing)
    n, d, most = region.row_elems, region.head_dim, batch_rows(region)
    refuse_odd_blocks(region.fmt, d, n)
    parts = parts_of(region.fmt, n)
    sizes = (n, d, cos.shape[1], int(interleaved(pairing)), parts)
    for first in range(0, len(cells), most):
        batch = cells[first : first + most]
        turned = _map_q8_0_cells_rows(
            *(*taken(region, batch), cos, sin, len(batch), *sizes),
            outputs=stored_outputs(region.fmt, len(batch), n),
            **spread(len(batch) * parts),
        )
        put(region, batch, turned)
    return region
