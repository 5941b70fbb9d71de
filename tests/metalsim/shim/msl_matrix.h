// simdgroup_matrix: 8x8, two elements per lane in the lane layout of Apple's GPUs as MLX uses it.
//
// A product is accumulated in float, one fused multiply-add per term in order of the inner index,
// and rounded to the element type at the end.
#pragma once
namespace metalsim {

struct MatrixPlace {
  uint row, column;  // of the lane's first element; the second is to the right of it
};
inline MatrixPlace matrix_place(uint lane) {
  const uint quad = lane / 4;
  return {(quad & 4) + lane / 2 % 4, (quad & 2) * 2 + lane % 2 * 2};
}

}  // namespace metalsim

namespace metal {

template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix is 8x8");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T value) {  // on the diagonal, as in Metal
    const metalsim::MatrixPlace at = metalsim::matrix_place(metalsim_lane());
    for (uint k = 0; k < 2; k++) elements[k] = at.row == at.column + k ? value : T(0);
  }
  thread vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Columns, int Rows>
inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> filled;
  filled.elements = vec<T, 2>(value);
  return filled;
}

// Inlined, so that the accesses are checked and bear the line of the kernel.
#define METALSIM_MATRIX_MEMORY(space)                                                         \
  template <class T>                                                                          \
  METALSIM_INLINE void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& matrix,               \
                                      const space T* from, ulong row_stride = 8,              \
                                      vec<ulong, 2> origin = 0, bool transposed = false) {    \
    const metalsim::MatrixPlace at = metalsim::matrix_place(metalsim_lane());                 \
    for (uint k = 0; k < 2; k++) {                                                            \
      const ulong x = origin.x + (transposed ? at.row : at.column + k);                       \
      const ulong y = origin.y + (transposed ? at.column + k : at.row);                       \
      matrix.elements[k] = from[y * row_stride + x];                                          \
    }                                                                                         \
  }                                                                                           \
  template <class T>                                                                          \
  METALSIM_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> matrix, space T* to,         \
                                       ulong row_stride = 8, vec<ulong, 2> origin = 0,        \
                                       bool transposed = false) {                             \
    const metalsim::MatrixPlace at = metalsim::matrix_place(metalsim_lane());                 \
    for (uint k = 0; k < 2; k++) {                                                            \
      const ulong x = origin.x + (transposed ? at.row : at.column + k);                       \
      const ulong y = origin.y + (transposed ? at.column + k : at.row);                       \
      to[y * row_stride + x] = matrix.elements[k];                                            \
    }                                                                                         \
  }
METALSIM_MATRIX_MEMORY(device)
#ifdef METALSIM_LINT  // the same types otherwise
METALSIM_MATRIX_MEMORY(threadgroup)
#endif

}  // namespace metal

namespace metalsim {

using Row = metal::vec<float, 8>;

template <class A, class B, class C>
struct MatrixLane {
  metal::vec<A, 2> a;
  metal::vec<B, 2> b;
  metal::vec<C, 2> c;
};

// The whole product, once per simdgroup.
template <class A, class B, class C>
__attribute__((no_sanitize("thread"), noinline)) void multiply(Exchange* all) {
  float a[8][8];
  Row b[8], *d = (Row*)all->result;
  for (uint lane = 0; lane < LANES; lane++) {
    const auto& brought = *(const MatrixLane<A, B, C>*)all->slot[lane];
    const MatrixPlace at = matrix_place(lane);
    for (uint k = 0; k < 2; k++) {
      a[at.row][at.column + k] = (float)brought.a[k];
      b[at.row][at.column + k] = (float)brought.b[k];
      d[at.row][at.column + k] = (float)brought.c[k];
    }
  }
  for (int row = 0; row < 8; row++)
    for (int inner = 0; inner < 8; inner++)
      d[row] = __builtin_elementwise_fma(Row(a[row][inner]), b[inner], d[row]);
  all->reduced = true;
}

}  // namespace metalsim

namespace metal {

template <class T, class A, class B, class C>
__attribute__((no_sanitize("thread"))) inline void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<T, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
    simdgroup_matrix<C, 8, 8> c, METALSIM_LINE) {
  const metalsim::MatrixLane<A, B, C> mine = {a.elements, b.elements, c.elements};
  metalsim::Exchange* all = metalsim::exchange(mine, "simdgroup_multiply_accumulate", line);
  if (all->present != ~0u) metalsim_fault("simdgroup_matrix operation with absent lanes", line);
  if (!all->reduced) metalsim::multiply<A, B, C>(all);
  const metalsim::MatrixPlace at = metalsim::matrix_place(metalsim_lane());
  const metalsim::Row& row = ((const metalsim::Row*)all->result)[at.row];
  d.elements = vec<T, 2>{(T)row[at.column], (T)row[at.column + 1]};
}
template <class T, class A, class B>
inline void simdgroup_multiply(thread simdgroup_matrix<T, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                               simdgroup_matrix<B, 8, 8> b, METALSIM_LINE) {
  simdgroup_multiply_accumulate(d, a, b, simdgroup_matrix<float, 8, 8>(0.0f), line);
}

}  // namespace metal
