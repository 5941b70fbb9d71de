"""`flash`: prefill attention with simdgroup matrices, tiles of queries against tiles of keys.

A threadgroup owns one query head and up to 32 consecutive queries of one sequence, eight rows a
simdgroup. It passes once over tiles of 32 keys that are aligned in logical index, in order, and
keeps a running softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022). Rows of K,
then of V, are decoded to float32 into threadgroup memory; products are of 8 x 8 float32 matrices.
A key that is masked changes nothing, so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from minfer.kernels_mlx._call import ARGUMENTS, Call, tiles_of
from minfer.kernels_mlx._gather import GATHER
from minfer.kernels_mlx._kernel import SIMD, MetalKernel
from minfer.kernels_mlx._softmax import SOFTMAX
from minfer.kernels_mlx._tile import CELLS_OF_CALL, TILE
from minfer.ops import Config

ROWS = 32  # queries of a threadgroup, 8 a simdgroup
SIMDGROUPS = 4

_FUNCTIONS = """
// The rows of 32 keys, decoded into `tile` [32, LD]; zeros where no query of the tile sees them.
template <typename T, typename S, int D, int LD>
METAL_FUNC void stage(Cells<T, S> from, int start, const threadgroup int* cells,
                      threadgroup float* tile, int thread_index, int n_threads) {
  for (int i = thread_index; i < 32 * (D / 4); i += n_threads) {
    const int key = i / (D / 4), piece = i % (D / 4) * 4;
    const float4 value = cells[key] < 0 ? float4(0.0f) : load4(from, cells[key], start + piece);
    *(threadgroup float4*)(tile + key * LD + piece) = value;
  }
}

// Largest, and sum, over the four lanes that hold one row of an 8 x 8 matrix.
METAL_FUNC float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, 1));
  return max(x, simd_shuffle_xor(x, 8));
}
METAL_FUNC float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 8);
}
"""

# Grid: query head, tile of queries from the last one on, which have most keys. A lane holds
# elements (row, column) and (row, column + 1) of every 8 x 8 matrix.
_ATTN_FLASH_SOURCE = (
    CELLS_OF_CALL
    + f"""
  constexpr int ROWS = {ROWS}, THREADS = {SIMDGROUPS * SIMD};
"""
    + """
  constexpr int LD = D + 4;  // rows begin in different banks
  threadgroup float4 pieces[8 * LD];
  threadgroup float* tile = (threadgroup float*)pieces;  // [32, LD]
  threadgroup int cells[32];
  const int lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const int thread_index = thread_index_in_threadgroup, head = threadgroup_position_in_grid.x;
  const int at = threadgroups_per_grid.y - 1 - threadgroup_position_in_grid.y;
  const int query = tiles[2 * at], count = min(tiles[2 * at + 1], ROWS);
  const int start = head / (n_head / n_head_kv) * D;
  const int row = simdgroup * 8 + (lane / 4 & 4) + lane / 2 % 4;
  const int column = (lane / 4 & 2) * 2 + lane % 2 * 2;

  if (count > 0) {  // for the whole threadgroup
    const int pos = positions[query], last = pos + count - 1;
    const int mine = min(row, count - 1), my_pos = pos + mine;  // spare rows are the last one's
    const Window w = query_window<RUNS>(window, query, pos, width, causal);
    const int my_first = query_window<RUNS>(window, query + mine, my_pos, width, causal).first;
    const size_t at_row = (size_t(query + mine) * n_head + head) * D;

    simdgroup_float8x8 q_tile[D / 8], acc[D / 8];
    for (int i = 0; i < D / 8; i++) {
      q_tile[i].thread_elements()[0] = q[at_row + 8 * i + column];
      q_tile[i].thread_elements()[1] = q[at_row + 8 * i + column + 1];
      acc[i] = simdgroup_float8x8(0.0f);
    }
    float m = -INFINITY, l = 0.0f;
    const int n_tiles = last / 32 - w.first / 32 + 1;
    for (int t = 0; t < n_tiles; t++) {
      const int index = (w.first / 32 + t) * 32;
      if (thread_index < 32) {
        // keys are counted from the index: one past the last may not fit 32 bits
        const bool seen = thread_index >= w.first - index && thread_index <= last - index;
        const int later = index - pos + thread_index;  // queries after the first
        cells[thread_index] = !seen ? -1
            : later <= 0 ? cell_of<RUNS>(w, index + thread_index)
                         : own_cell<RUNS>(window, query + later, pos + later, causal);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // all have read the last values, too
      stage<T, S, D, LD>(k, start, cells, tile, thread_index, THREADS);
      threadgroup_barrier(mem_flags::mem_threadgroup);

      simdgroup_float8x8 scores[4];
      for (int n = 0; n < 4; n++) {
        // two chains: one along a whole head would lose bits that float32 keeps
        simdgroup_float8x8 sums[2] = {simdgroup_float8x8(0.0f), simdgroup_float8x8(0.0f)};
        for (int i = 0; i < D / 8; i++) {
          simdgroup_float8x8 keys;
          simdgroup_load(keys, tile + n * 8 * LD + 8 * i, LD, ulong2(0), true);
          simdgroup_multiply_accumulate(sums[i % 2], q_tile[i], keys, sums[i % 2]);
        }
        for (int e = 0; e < 2; e++)
          scores[n].thread_elements()[e] =
              sums[0].thread_elements()[e] + sums[1].thread_elements()[e];
      }
      float largest = -INFINITY;
      for (int n = 0; n < 4; n++) {
        for (int e = 0; e < 2; e++) {
          const int key = 8 * n + column + e;
          const bool seen = key >= my_first - index && key <= my_pos - index;
          const float s = seen ? scores[n].thread_elements()[e] : -INFINITY;
          scores[n].thread_elements()[e] = s;
          largest = max(largest, s);
        }
      }
      const float top = max(m, row_max(largest)), base = top == -INFINITY ? 0.0f : top;
      const float decay = weight(m, top, factor);
      float total = 0.0f;
      for (int n = 0; n < 4; n++) {
        for (int e = 0; e < 2; e++) {
          const float p = weight(scores[n].thread_elements()[e], base, factor);
          scores[n].thread_elements()[e] = p;
          total += p;
        }
      }
      l = l * decay + row_sum(total);
      m = top;
      for (int i = 0; i < D / 8; i++) {
        acc[i].thread_elements()[0] *= decay;
        acc[i].thread_elements()[1] *= decay;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // all have read the keys
      stage<T, S, D, LD>(v, start, cells, tile, thread_index, THREADS);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int i = 0; i < D / 8; i++) {
        for (int n = 0; n < 4; n++) {
          simdgroup_float8x8 values;
          simdgroup_load(values, tile + n * 8 * LD + 8 * i, LD);
          simdgroup_multiply_accumulate(acc[i], scores[n], values, acc[i]);
        }
      }
    }
    if (row < count) {
      for (int i = 0; i < D / 8; i++) {
        // adding +0 leaves no negative zero, which masked keys could flip
        out[at_row + 8 * i + column] = acc[i].thread_elements()[0] / l + 0.0f;
        out[at_row + 8 * i + column + 1] = acc[i].thread_elements()[1] / l + 0.0f;
      }
    }
  }
"""
)

_flash = MetalKernel(
    "attn_flash",
    (*ARGUMENTS, "tiles"),
    ("out",),
    _ATTN_FLASH_SOURCE,
    "#include <metal_simdgroup_matrix>\n" + TILE + GATHER + SOFTMAX + _FUNCTIONS,
)


def attend_flash(call: Call, tiles: Any, config: Config) -> mx.array:
    """Run `flash` on a checked call; tiles int32 [n, 2] of (first query, count)."""
    table = tiles_of(call, tiles, config["block_m"])
    if not call.n_q:
        return mx.zeros_like(call.q)
    (out,) = _flash(
        *call.arguments,
        table,
        outputs=[(call.q.shape, mx.float32)],
        groups=(call.n_head, len(table), 1),
        threads=SIMDGROUPS * SIMD,
        **call.template,
    )
    return out
