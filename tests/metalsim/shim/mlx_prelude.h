// What MLX puts before a custom kernel (its metal::utils()), as far as kernels use it.
#pragma once
#include "metal_stdlib"
using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;

template <typename T>
struct Limits {
  static constexpr T max = numeric_limits<T>::max(), min = numeric_limits<T>::min();
  static constexpr T finite_max = max, finite_min = min;
};
#define METALSIM_LIMITS(T)                                                \
  template <>                                                             \
  struct Limits<T> {                                                      \
    static constexpr T max = numeric_limits<T>::infinity(), min = -max;   \
    static constexpr T finite_max = numeric_limits<T>::max();             \
    static constexpr T finite_min = numeric_limits<T>::lowest();          \
  };
METALSIM_LIMITS(float)
METALSIM_LIMITS(half)
METALSIM_LIMITS(bfloat)

// Offset of element `index` of a strided array, in elements.
template <typename Index = int64_t>
METALSIM_INLINE Index elem_to_loc(Index index, constant int* shape, constant int64_t* strides,
                                  int ndim) {
  Index offset = 0;
  for (int i = ndim - 1; i >= 0 && index > 0; --i) {
    offset += index % shape[i] * Index(strides[i]);
    index /= shape[i];
  }
  return offset;
}
template <typename T, typename U>
inline T ceildiv(T n, U m) { return (n + m - 1) / m; }
