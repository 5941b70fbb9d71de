"""One query head after the other, one sweep over key tiles: every head_dim, every format, exact.

K and V are decoded to f32 and products are sums of f32 products, so this is also what other
variants are compared with.
"""

from __future__ import annotations

import mlx.core as mx

from minfer.kernels_mlx._call import ARGUMENTS, Call
from minfer.kernels_mlx._gather import GATHER
from minfer.kernels_mlx._kernel import SIMD, MetalKernel
from minfer.kernels_mlx._softmax import SOFTMAX
from minfer.kernels_mlx._tile import CELLS_OF_CALL, TILE

# A simdgroup for one query head. A lane scores one key of 32, then holds elements of the answer.
_ATTN_ROWS_SOURCE = (
    CELLS_OF_CALL
    + """
  constexpr int HELD = (D + 31) / 32;
  threadgroup float p[32];
  const int lane = thread_index_in_simdgroup, row = threadgroup_position_in_grid.x;
  const int query = row / n_head, kv_head = row % n_head / (n_head / n_head_kv);
  const int start = kv_head * D, pos = positions[query];
  const Window w = query_window<RUNS>(window, query, pos, width, causal);
  const device float* q_row = q + size_t(row) * D;

  float m = -INFINITY, l = 0.0f, acc[HELD];
  for (int i = 0; i < HELD; i++) acc[i] = 0.0f;
  const int n_tiles = pos / 32 - w.first / 32 + 1;
  for (int tile = 0; tile < n_tiles; tile++) {
    // keys are counted back from pos: an index past it may not fit 32 bits
    const int index = (w.first / 32 + tile) * 32, ahead = pos - index, hidden = w.first - index;
    const bool seen = lane >= hidden && lane <= ahead;
    float s = -INFINITY;
    if (seen) {
      const int cell = cell_of<RUNS>(w, index + lane);
      float sums[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
      for (int d = 0; d < D; d++) sums[d % 8] += q_row[d] * load1(k, cell, start + d);
      s = ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
    }
    const float top = max(m, simd_max(s)), decay = weight(m, top, factor);
    const float mine = seen ? exp2((s - top) * factor) : 0.0f;
    p[lane] = mine;
    l = l * decay + simd_sum(mine);
    m = top;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = 0; i < HELD; i++) acc[i] *= decay;
    for (int n = max(hidden, 0); n <= min(ahead, 31); n++) {
      const int cell = cell_of<RUNS>(w, index + n);
      for (int i = 0; i < HELD; i++) {
        const int d = lane + 32 * i;
        if (d < D) acc[i] += p[n] * load1(v, cell, start + d);
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int i = 0; i < HELD; i++) {
    const int d = lane + 32 * i;
    // adding +0 leaves no negative zero, which masked keys could flip
    if (d < D) out[size_t(row) * D + d] = acc[i] / l + 0.0f;
  }
"""
)

_rows = MetalKernel("attn_rows", ARGUMENTS, ("out",), _ATTN_ROWS_SOURCE, TILE + GATHER + SOFTMAX)


def attend_rows(call: Call) -> mx.array:
    """Run `rows` on a checked call."""
    if not call.n_q:
        return mx.zeros_like(call.q)
    (out,) = _rows(
        *call.arguments,
        outputs=[(call.q.shape, mx.float32)],
        groups=(call.n_q * call.n_head, 1, 1),
        threads=SIMD,
        **call.template,
    )
    return out
