"""Elements of cells as float32, decoded exactly: the type of a plane tells its format.

`load1` and `load4` read from element `at` on of a cell's row. A q8_0 value is code * scale; of
other formats `scales` is not read.
"""

from minfer.format import BLOCK

TILE = f"""
// Rows of a plane lie `width` elements apart, those of its scales `n_scales`.
template <typename T, typename S>
struct Cells {{ const device T* rows; const device S* scales; int width; int n_scales; }};

template <typename T, typename S>
METAL_FUNC float load1(Cells<T, S> cells, int cell, int at) {{
  return float(cells.rows[size_t(cell) * cells.width + at]);
}}

template <typename S>
METAL_FUNC float load1(Cells<int8_t, S> cells, int cell, int at) {{
  float scale = float(cells.scales[size_t(cell) * cells.n_scales + at / {BLOCK}]);
  return float(cells.rows[size_t(cell) * cells.width + at]) * scale;
}}

// `at` and the width of rows are multiples of 4.
template <typename S>
METAL_FUNC float4 load4(Cells<float, S> cells, int cell, int at) {{
  return *(const device float4*)(cells.rows + size_t(cell) * cells.width + at);
}}

template <typename S>
METAL_FUNC float4 load4(Cells<half, S> cells, int cell, int at) {{
  return float4(*(const device half4*)(cells.rows + size_t(cell) * cells.width + at));
}}

template <typename S>
METAL_FUNC float4 load4(Cells<int8_t, S> cells, int cell, int at) {{
  float scale = float(cells.scales[size_t(cell) * cells.n_scales + at / {BLOCK}]);
  char4 codes = *(const device char4*)(cells.rows + size_t(cell) * cells.width + at);
  return float4(codes) * scale;
}}
"""

# What an attention source begins with: K and V as `Cells`.
CELLS_OF_CALL = """
  Cells<T, S> k = {k_rows, k_scales, row_width, n_scales};
  Cells<T, S> v = {v_rows, v_scales, row_width, n_scales};
"""
