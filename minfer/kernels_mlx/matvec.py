"""x @ weight.T for a few rows; a row's bits depend on it and the weight only (contract 6.5).

matvec
  lanes   f32 and f16: a simdgroup takes a few weight rows; every product is lanes of fma chains in
          k order, then one `simd_sum`. f16 is decoded in registers.
  blocks  q8_0: rows of x are quantized (contract 4.1); every product is the exact sums of blocks
          times both scales, blocks in order (4.5).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from minfer.format import BLOCK, KvFormat
from minfer.kernels_mlx._arguments import product
from minfer.kernels_mlx._kernel import SIMD, MetalKernel
from minfer.kernels_mlx.q8_0 import CANONICAL, quantize_q8_0_blocks
from minfer.ops import Config, variant

ROUNDING = {KvFormat.Q8_0: "q8_0"}  # how products round x, not at all for the others
COLUMNS = 4  # rows of x for which a weight row is read once
SIMDGROUPS = 2  # of a threadgroup, each for itself
LANES_ROWS = 4  # weight rows of a simdgroup of `lanes`
BLOCKS_ROWS = 8  # and of `blocks`

# -- lanes ----------------------------------------------------------------------------------------

_LANES = """
// Elements k to k + 3 of a row of n, 0 past its end. Read one by one: an array that is a slice may
// begin anywhere.
template <typename T>
METAL_FUNC float4 four(const device T* row, int k, int n) {
  float4 found = float4(0.0f);
  for (int i = 0; i < 4; i++) found[i] = k + i < n ? float(row[k + i]) : 0.0f;
  return found;
}
"""

# weight: float or half [n_out, n_in]. x: float [n, n_in]. out: float [n, n_out].
# Component r of the sums belongs to weight row first + r; rows past the last one are the last one.
_MATVEC_LANES_SOURCE = f"""
  const int lane = thread_index_in_simdgroup, last = n_out - 1;
  const int group = threadgroup_position_in_grid.x * {SIMDGROUPS} + simdgroup_index_in_threadgroup;
  const int first = group * {LANES_ROWS};
  const int column = threadgroup_position_in_grid.y * {COLUMNS};
  const int columns = min(n - column, {COLUMNS});
  const device float* given = x + size_t(column) * n_in;
  const device T* row_0 = weight + size_t(min(first, last)) * n_in;
  const device T* row_1 = weight + size_t(min(first + 1, last)) * n_in;
  const device T* row_2 = weight + size_t(min(first + 2, last)) * n_in;
  const device T* row_3 = weight + size_t(min(first + 3, last)) * n_in;
  float4 sums[{COLUMNS}];
  for (int c = 0; c < {COLUMNS}; c++) sums[c] = float4(0.0f);
  for (int k = 4 * lane; k < n_in; k += {4 * SIMD}) {{
    const float4 w_0 = four(row_0, k, n_in), w_1 = four(row_1, k, n_in);
    const float4 w_2 = four(row_2, k, n_in), w_3 = four(row_3, k, n_in);
    for (int c = 0; c < {COLUMNS}; c++) {{
      if (c >= columns) continue;
      const float4 xs = four(given + size_t(c) * n_in, k, n_in);
      for (int i = 0; i < 4; i++)
        sums[c] = fma(float4(w_0[i], w_1[i], w_2[i], w_3[i]), float4(xs[i]), sums[c]);
    }}
  }}
  for (int c = 0; c < {COLUMNS}; c++) {{
    if (c >= columns) continue;
    const float4 total = simd_sum(sums[c]);
    if (lane < {LANES_ROWS} && first + lane < n_out)
      out[size_t(column + c) * n_out + first + lane] = total[lane];
  }}
"""

_matvec_lanes = MetalKernel(
    "matvec_lanes", ("weight", "x", "n", "n_in", "n_out"), ("out",), _MATVEC_LANES_SOURCE, _LANES
)


@variant(formats=(KvFormat.F32, KvFormat.F16))
def matvec_lanes(weight: Any, x: Any, *, fmt: KvFormat, config: Config) -> Any:
    """x [n, n_in] @ weight.T, weight float32 or float16 [n_out, n_in]: f32 [n, n_out]."""
    weight, x = product(weight, x, fmt)
    (n, n_in), n_out = x.shape, len(weight)
    if not n * n_out:
        return mx.zeros((n, n_out))
    (out,) = _matvec_lanes(
        *(weight, x, n, n_in, n_out),
        outputs=[((n, n_out), mx.float32)],
        groups=(-(-n_out // (SIMDGROUPS * LANES_ROWS)), -(-n // COLUMNS), 1),
        threads=SIMDGROUPS * SIMD,
        T=weight.dtype,
    )
    return out


# -- blocks ---------------------------------------------------------------------------------------

_BLOCKS = """
// Codes i to i + 3 of a canonical block at an even address, for an even i.
METAL_FUNC float4 codes_of(const device uint8_t* block, int i) {
  const device char2* pairs = (const device char2*)(block + 2 + i);
  return float4(float2(pairs[0]), float2(pairs[1]));
}
"""

# weight: blocks [n_out, n_blocks]. x: blocks [n, n_blocks], rows x_width bytes apart.
# Four lanes take a block, eight of its codes each, so that neighbours read what lies together.
# Then a lane adds the terms of one product in order. Sums of products of codes are whole numbers
# below 2**24, which a float holds, in any order. Rows past the last one are the last one.
_MATVEC_BLOCKS_SOURCE = f"""
  constexpr int ROWS = {BLOCKS_ROWS}, DEPTH = {SIMD // 4}, PLACES = ROWS * COLUMNS;
  threadgroup float sums[{SIMDGROUPS}][PLACES][{SIMD} + 1];  // one of each lane
  threadgroup float scales[{SIMDGROUPS}][PLACES][DEPTH + 1];
  const int lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
  const int first = (threadgroup_position_in_grid.x * {SIMDGROUPS} + group) * ROWS;
  int column = threadgroup_position_in_grid.y * COLUMNS;
  const int depth = lane / 4, part = lane % 4;
  float total = 0.0f;
  for (int start = 0; start < n_blocks; start += DEPTH) {{
    const int block = start + depth;
    if (block < n_blocks) {{
      float4 x_0[COLUMNS], x_1[COLUMNS];
      float x_scale[COLUMNS];
      for (int c = 0; c < COLUMNS; c++) {{
        const size_t row = size_t(min(column + c, n - 1)) * x_width;
        const device uint8_t* given = x + row + block * BLOCK_BYTES;
        x_0[c] = codes_of(given, 8 * part);
        x_1[c] = codes_of(given, 8 * part + 4);
        x_scale[c] = scale_of(given);
      }}
      for (int r = 0; r < ROWS; r++) {{
        const size_t row = size_t(min(first + r, n_out - 1)) * n_blocks;
        const device uint8_t* w = weight + (row + block) * BLOCK_BYTES;
        const float4 w_0 = codes_of(w, 8 * part), w_1 = codes_of(w, 8 * part + 4);
        const float scale = scale_of(w);
        for (int c = 0; c < COLUMNS; c++) {{
          const float4 sum = fma(w_1, x_1[c], w_0 * x_0[c]);
          sums[group][c * ROWS + r][lane] = (sum.x + sum.y) + (sum.z + sum.w);
          if (part == 0) scales[group][c * ROWS + r][depth] = scale * x_scale[c];
        }}
      }}
    }}
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = 0; lane < PLACES && i < min(n_blocks - start, DEPTH); i++) {{
      const threadgroup float* four = sums[group][lane] + 4 * i;
      total += ((four[0] + four[1]) + (four[2] + four[3])) * scales[group][lane][i];
    }}
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }}
  const int row = first + lane % ROWS;
  column += lane / ROWS;
  if (lane < PLACES && row < n_out && column < n) out[size_t(column) * n_out + row] = total;
"""

_matvec_blocks = MetalKernel(
    "matvec_blocks",
    ("weight", "x", "n", "n_blocks", "n_out", "x_width"),
    ("out",),
    _MATVEC_BLOCKS_SOURCE,
    CANONICAL + _BLOCKS,
)


@variant(formats=(KvFormat.Q8_0,), query=ROUNDING)
def matvec_blocks(weight: Any, x: Any, *, fmt: KvFormat, config: Config) -> Any:
    """x [n, n_in] @ weight.T, weight q8_0 blocks uint8 [n_out, n_in / 32 * 34]: f32 [n, n_out]."""
    weight, x = product(weight, x, fmt)
    (n, n_in), n_out = x.shape, len(weight)
    if not n * n_out:
        return mx.zeros((n, n_out))
    cells = quantize_q8_0_blocks(x, config={})
    columns = 1 if n == 1 else COLUMNS  # which changes no bits
    (out,) = _matvec_blocks(
        *(weight, cells, n, n_in // BLOCK, n_out, cells.shape[1]),
        outputs=[((n, n_out), mx.float32)],
        groups=(-(-n_out // (SIMDGROUPS * BLOCKS_ROWS)), -(-n // columns), 1),
        threads=SIMDGROUPS * SIMD,
        COLUMNS=columns,
    )
    return out
