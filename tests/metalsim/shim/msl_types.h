// Address spaces, scalar and vector types, threadgroup variables.
#pragma once
typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __UINTPTR_TYPE__ uintptr_t;
#define METALSIM_KERNEL
#include "runtime.h"

// Only the lint pass has address spaces in the types, as Metal has: the compiler pass that puts in
// the access checks skips memory that is not in the default space.
#ifdef METALSIM_LINT
#define METALSIM_SPACE(n) __attribute__((address_space(n)))
#else
#define METALSIM_SPACE(n)
#endif
#define device METALSIM_SPACE(1)
#define constant const METALSIM_SPACE(2)
#define threadgroup METALSIM_SPACE(3)
#define thread
#define kernel

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;
constexpr half operator""h(long double x) { return (half)x; }
constexpr half operator""h(unsigned long long x) { return (half)x; }

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}

namespace metalsim {

template <class T>
struct vector_traits {
  static constexpr int components = 0;
};
template <class T, int N>
struct vector_traits<metal::vec<T, N>> {
  static constexpr int components = N;
};
template <class T>
constexpr int components_of() {
  return vector_traits<T>::components ? vector_traits<T>::components : 1;
}

template <class T, int N, class A>
inline void append(metal::vec<T, N>& to, int& at, A value) {
  if constexpr (vector_traits<A>::components != 0)
    for (int i = 0; i < components_of<A>(); i++) to[at++] = (T)value[i];
  else
    to[at++] = (T)value;
}

// A vector constructor of Metal: one scalar for all components, a vector of another component
// type, or scalars and vectors put together.
template <class T, int N, class... A>
inline metal::vec<T, N> make_vector(A... values) {
  metal::vec<T, N> result = {};
  if constexpr (sizeof...(A) == 1 && (components_of<A>() + ... + 0) == 1) {
    ((result = metal::vec<T, N>((T)values)), ...);
  } else if constexpr (sizeof...(A) > 0) {
    static_assert((components_of<A>() + ... + 0) == N, "wrong number of vector components");
    int at = 0;
    (append(result, at, values), ...);
  }
  return result;
}

template <class T>
struct element_of {
  static constexpr unsigned bytes = sizeof(T);
};
template <class T, size_t N>
struct element_of<T[N]> : element_of<T> {};

}  // namespace metalsim

#define METALSIM_VECTORS(T)      \
  typedef metal::vec<T, 2> T##2; \
  typedef metal::vec<T, 3> T##3; \
  typedef metal::vec<T, 4> T##4;
METALSIM_VECTORS(float)
METALSIM_VECTORS(half)
METALSIM_VECTORS(bfloat)
METALSIM_VECTORS(char)
METALSIM_VECTORS(uchar)
METALSIM_VECTORS(short)
METALSIM_VECTORS(ushort)
METALSIM_VECTORS(int)
METALSIM_VECTORS(uint)
METALSIM_VECTORS(long)
METALSIM_VECTORS(ulong)

// `float4(a, b)` is no C++ for these types; a macro that takes arguments leaves `float4 v` alone.
#define float2(...) metalsim::make_vector<float, 2>(__VA_ARGS__)
#define float3(...) metalsim::make_vector<float, 3>(__VA_ARGS__)
#define float4(...) metalsim::make_vector<float, 4>(__VA_ARGS__)
#define half2(...) metalsim::make_vector<half, 2>(__VA_ARGS__)
#define half3(...) metalsim::make_vector<half, 3>(__VA_ARGS__)
#define half4(...) metalsim::make_vector<half, 4>(__VA_ARGS__)
#define bfloat2(...) metalsim::make_vector<bfloat, 2>(__VA_ARGS__)
#define bfloat3(...) metalsim::make_vector<bfloat, 3>(__VA_ARGS__)
#define bfloat4(...) metalsim::make_vector<bfloat, 4>(__VA_ARGS__)
#define char2(...) metalsim::make_vector<char, 2>(__VA_ARGS__)
#define char3(...) metalsim::make_vector<char, 3>(__VA_ARGS__)
#define char4(...) metalsim::make_vector<char, 4>(__VA_ARGS__)
#define uchar2(...) metalsim::make_vector<uchar, 2>(__VA_ARGS__)
#define uchar3(...) metalsim::make_vector<uchar, 3>(__VA_ARGS__)
#define uchar4(...) metalsim::make_vector<uchar, 4>(__VA_ARGS__)
#define short2(...) metalsim::make_vector<short, 2>(__VA_ARGS__)
#define short3(...) metalsim::make_vector<short, 3>(__VA_ARGS__)
#define short4(...) metalsim::make_vector<short, 4>(__VA_ARGS__)
#define ushort2(...) metalsim::make_vector<ushort, 2>(__VA_ARGS__)
#define ushort3(...) metalsim::make_vector<ushort, 3>(__VA_ARGS__)
#define ushort4(...) metalsim::make_vector<ushort, 4>(__VA_ARGS__)
#define int2(...) metalsim::make_vector<int, 2>(__VA_ARGS__)
#define int3(...) metalsim::make_vector<int, 3>(__VA_ARGS__)
#define int4(...) metalsim::make_vector<int, 4>(__VA_ARGS__)
#define uint2(...) metalsim::make_vector<uint, 2>(__VA_ARGS__)
#define uint3(...) metalsim::make_vector<uint, 3>(__VA_ARGS__)
#define uint4(...) metalsim::make_vector<uint, 4>(__VA_ARGS__)
#define long2(...) metalsim::make_vector<long, 2>(__VA_ARGS__)
#define long3(...) metalsim::make_vector<long, 3>(__VA_ARGS__)
#define long4(...) metalsim::make_vector<long, 4>(__VA_ARGS__)
#define ulong2(...) metalsim::make_vector<ulong, 2>(__VA_ARGS__)
#define ulong3(...) metalsim::make_vector<ulong, 3>(__VA_ARGS__)
#define ulong4(...) metalsim::make_vector<ulong, 4>(__VA_ARGS__)

// Vectors without alignment of their own. The three-component ones, 3 elements wide, are absent.
#define METALSIM_PACKED(T)                                                       \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
METALSIM_PACKED(float)
METALSIM_PACKED(half)
METALSIM_PACKED(char)
METALSIM_PACKED(uchar)
METALSIM_PACKED(short)
METALSIM_PACKED(ushort)
METALSIM_PACKED(int)
METALSIM_PACKED(uint)

// `threadgroup T name[N];` arrives as `typedef T name_type[N]; METALSIM_THREADGROUP(...)`.
#define METALSIM_THREADGROUP(name, id)                                                       \
  threadgroup name##__type& name = *(threadgroup name##__type*)(name##__type*)               \
      ::metalsim_threadgroup_variable(id, sizeof(name##__type),                              \
                                      ::metalsim::element_of<name##__type>::bytes, #name)
