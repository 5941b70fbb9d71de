"""The bytes of a cell, as kernels write them (contract 3.5, 4.1).

Cells lie in planes (`minfer.planes`). A thread writes what belongs to one column of the last plane:
an element, or a scale and its codes.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from minfer import planes
from minfer.format import BLOCK, KvFormat
from minfer.kernels_mlx._kernel import THREADS, Output

CELL = """
// Bits of the float16 nearest to x, to even; overflow is inf, NaN keeps its sign and payload.
METAL_FUNC ushort f16_bits(float x) {
  const uint bits = as_type<uint>(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return ushort(sign | 0x7E00u | (size >> 13 & 0x1FFu));
  if (size >= 0x477FF000u) return ushort(sign | 0x7C00u);  // from 65520 on
  if (size < 0x33000000u) return ushort(sign);  // below 2^-25
  if (size >= 0x38800000u)  // from 2^-14 on: the exponent is rebiased, a carry may raise it
    return ushort(sign | ((size - 0x38000000u + 0xFFFu + (size >> 13 & 1u)) >> 13));
  const uint shift = 126u - (size >> 23);  // a subnormal counts units of 2^-24
  const uint digits = (size & 0x7FFFFFu) | 0x800000u, whole = digits >> shift;
  const uint rest = digits & ((1u << shift) - 1u), middle = 1u << (shift - 1u);
  return ushort(sign | (whole + uint(rest > middle || (rest == middle && (whole & 1u) != 0u))));
}

// x [32] by contract 4.1 and 4.2: codes [32]; the bits of their scale.
METAL_FUNC ushort quantize_block(const thread float* x, thread int8_t* codes) {
  uint amax = 0u;
  for (int i = 0; i < 32; i++) amax = max(amax, as_type<uint>(x[i]) & 0x7FFFFFFFu);
  const float d = as_type<float>(amax) / 127.0f;
  const ushort scale = f16_bits(d);
  const bool poisoned = amax >= 0x7F800000u || scale == 0x7C00u;
  for (int i = 0; i < 32; i++) codes[i] = 0;
  if (poisoned) return 0x7E00u;
  if (scale == 0u) return 0u;
  const float inverse = 1.0f / d;
  for (int i = 0; i < 32; i++) codes[i] = int8_t(rint(x[i] * inverse));
  return scale;
}
"""

_ELEMENTS = """
#define PLANES(name) name##_rows

// Column `part` of `parts` of a row of n elements.
METAL_FUNC void store_part(
    const thread float* x, size_t row, int part, int parts, int n, device float* rows) {
  rows[row * parts + part] = x[0];
}

METAL_FUNC void store_part(
    const thread float* x, size_t row, int part, int parts, int n, device half* rows) {
  rows[row * parts + part] = as_type<half>(f16_bits(x[0]));
}
"""

_BLOCKS = """
#define PLANES(name) name##_rows, name##_scales

// Block `part` of a row of n elements; past them is the padding of `parts` scales, no codes.
METAL_FUNC void store_part(
    const thread float* x, size_t row, int part, int parts, int n,
    device int8_t* rows, device half* scales) {
  int8_t codes[32];
  scales[row * parts + part] = as_type<half>(quantize_block(x, codes));
  if (part * 32 >= n) return;
  for (int i = 0; i < 32; i++) rows[row * n + part * 32 + i] = codes[i];
}
"""

PART = {fmt: BLOCK if fmt is KvFormat.Q8_0 else 1 for fmt in KvFormat}  # elements of a thread

# Text by format. A thread stores x [PART], zeros past the n elements of a row, by
# store_part(x, row, part, parts, n, PLANES(name)) to the outputs `stored_names(name)`.
STORE = {
    fmt: f"#define PART {part}\n{CELL}{_ELEMENTS if part == 1 else _BLOCKS}"
    for fmt, part in PART.items()
}


def stored_names(name: str, fmt: KvFormat) -> tuple[str, ...]:
    """What PLANES(name) stands for: the outputs that hold stored rows, plane by plane."""
    return (f"{name}_rows", f"{name}_scales") if fmt is KvFormat.Q8_0 else (f"{name}_rows",)


def stored_outputs(fmt: KvFormat, n_rows: int, n: int) -> list[Output]:
    """Shapes and types of stored rows of n elements, plane by plane."""
    return [(shape, getattr(mx, dtype)) for shape, dtype in planes.shapes(fmt, n_rows, n)]


def parts_of(fmt: KvFormat, n: int) -> int:
    """Threads that store a row of n elements, see STORE."""
    (_, parts), _ = planes.shapes(fmt, 1, n)[-1]
    return parts


def spread(n_threads: int) -> dict[str, Any]:
    """Groups for so many threads that work each for itself; the last group may have some more."""
    threads = min(THREADS, n_threads)
    return {"groups": (-(-n_threads // threads), 1, 1), "threads": threads}
