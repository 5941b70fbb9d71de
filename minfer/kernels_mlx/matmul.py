"""x @ weight.T for many rows; a row's bits depend on it and the weight only (contract 6.5).

matmul
  tiles   f32 and f16: one tile of rows by columns a threadgroup; every product is one fma chain in
          k order. f16 is decoded on the way into threadgroup memory.
  blocks  q8_0: rows of x are quantized (contract 4.1); products are those of `matvec_blocks` to
          the bit.

Tiles are the same for any number of rows, those past the last one are copies of it: no row's sums
can tell how many others there are. MLX's own product chooses its kernel by that number.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from minfer.format import BLOCK, KvFormat
from minfer.kernels_mlx._arguments import product
from minfer.kernels_mlx._kernel import SIMD, MetalKernel
from minfer.kernels_mlx.matvec import ROUNDING, matvec_blocks
from minfer.kernels_mlx.q8_0 import CANONICAL, quantize_q8_0_blocks
from minfer.ops import Config, variant

SIDE = 32  # rows and columns of a tile
HELD = 4  # rows and columns of it that a thread sums
THREADS = (SIDE // HELD) ** 2
PITCH = SIDE + HELD  # floats from one k to the next, so that banks of memory differ
FEW = 8  # rows that are left to `matvec_blocks`

_ELEMENTS = f"""
// Element k of a row and its scale, which may be a factor of many: of q8_0 a code, and its block's.
template <typename T>
METAL_FUNC float element(const device T* row, int k) {{ return float(row[k]); }}

METAL_FUNC float element(const device uint8_t* row, int k) {{
  return float(code_of(row + k / {BLOCK} * BLOCK_BYTES, k % {BLOCK}));
}}

template <typename T>
METAL_FUNC float scale_at(const device T*, int) {{ return 1.0f; }}

METAL_FUNC float scale_at(const device uint8_t* row, int k) {{
  return scale_of(row + k / {BLOCK} * BLOCK_BYTES);
}}
"""

# weight: float or half [n_out, n_in], x: float [n, n_in]; or both canonical blocks (BLOCKS). Rows
# lie w_width and x_width elements or bytes apart. out: float [n, n_out].
# Both tiles lie by k in threadgroup memory. Sums of products of codes are exact, see `matvec`.
_MATMUL_SOURCE = f"""
  threadgroup float4 w_tile[{BLOCK * PITCH // 4}], x_tile[{BLOCK * PITCH // 4}];
  threadgroup float4 w_scales[{SIDE // 4}], x_scales[{SIDE // 4}];
  const int lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
  const int tile_column = threadgroup_position_in_grid.x * {SIDE};
  const int tile_row = threadgroup_position_in_grid.y * {SIDE};
  const int own_column = thread_index_in_threadgroup % {SIDE // HELD};  // in units of HELD
  const int own_row = thread_index_in_threadgroup / {SIDE // HELD};
  float4 sums[{HELD}], totals[{HELD}];
  for (int i = 0; i < {HELD}; i++) sums[i] = totals[i] = float4(0.0f);
  for (int start = 0; start < n_in; start += {BLOCK}) {{
    for (int r = group; r < {SIDE}; r += {THREADS // SIMD}) {{
      const device T* w = weight + size_t(min(tile_column + r, n_out - 1)) * w_width;
      const device X* given = x + size_t(min(tile_row + r, n - 1)) * x_width;
      const int k = start + lane, place = lane * {PITCH} + r;
      ((threadgroup float*)w_tile)[place] = k < n_in ? element(w, k) : 0.0f;
      ((threadgroup float*)x_tile)[place] = k < n_in ? element(given, k) : 0.0f;
      if (BLOCKS && lane == 0) {{
        ((threadgroup float*)w_scales)[r] = scale_at(w, start);
        ((threadgroup float*)x_scales)[r] = scale_at(given, start);
      }}
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int k = 0; k < {BLOCK}; k++) {{
      const float4 w = w_tile[k * {PITCH // 4} + own_column];
      const float4 xs = x_tile[k * {PITCH // 4} + own_row];
      for (int i = 0; i < {HELD}; i++) sums[i] = fma(w, float4(xs[i]), sums[i]);
    }}
    if (BLOCKS) {{
      for (int i = 0; i < {HELD}; i++) {{
        totals[i] += sums[i] * (w_scales[own_column] * x_scales[own_row][i]);
        sums[i] = float4(0.0f);
      }}
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }}
  for (int i = 0; i < {HELD}; i++) {{
    const float4 found = BLOCKS ? totals[i] : sums[i];
    const int row = tile_row + {HELD} * own_row + i;
    for (int j = 0; j < {HELD}; j++) {{
      const int column = tile_column + {HELD} * own_column + j;
      if (row < n && column < n_out) out[size_t(row) * n_out + column] = found[j];
    }}
  }}
"""

_matmul = MetalKernel(
    "matmul",
    ("weight", "x", "n", "n_in", "n_out", "w_width", "x_width"),
    ("out",),
    _MATMUL_SOURCE,
    CANONICAL + _ELEMENTS,
)


def _tiled(weight: mx.array, x: mx.array, n_in: int) -> mx.array:
    """The kernel over a checked weight and rows, both floats or both blocks: f32 [n, n_out]."""
    n, n_out = len(x), len(weight)
    if not n * n_out:
        return mx.zeros((n, n_out))
    (out,) = _matmul(
        *(weight, x, n, n_in, n_out, weight.shape[1], x.shape[1]),
        outputs=[((n, n_out), mx.float32)],
        groups=(-(-n_out // SIDE), -(-n // SIDE), 1),
        threads=THREADS,
        T=weight.dtype,
        X=x.dtype,
        BLOCKS=x.dtype == mx.uint8,
    )
    return out


@variant(formats=(KvFormat.F32, KvFormat.F16))
def matmul_tiles(weight: Any, x: Any, *, fmt: KvFormat, config: Config) -> Any:
    """x [n, n_in] @ weight.T, weight float32 or float16 [n_out, n_in]: f32 [n, n_out]."""
    weight, x = product(weight, x, fmt)
    return _tiled(weight, x, x.shape[1])


@variant(formats=(KvFormat.Q8_0,), query=ROUNDING)
def matmul_blocks(weight: Any, x: Any, *, fmt: KvFormat, config: Config) -> Any:
    """x [n, n_in] @ weight.T, weight q8_0 blocks uint8 [n_out, n_in / 32 * 34]: f32 [n, n_out].

    A few rows go the way of `matvec_blocks`: the same bits, and no tile is mostly copies.
    """
    weight, x = product(weight, x, fmt)
    if len(x) <= FEW:
        return matvec_blocks(weight, x, fmt=fmt, config=config)
    return _tiled(weight, quantize_q8_0_blocks(x, config={}), x.shape[1])
