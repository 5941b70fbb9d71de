// Constants, scalar and vector mathematics, type traits.
#pragma once
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX 6.5504e+4h
#define HALF_MIN 6.103515625e-5h
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_SQRT2_F 1.41421356237309504880f
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u

namespace metal {

template <class T, class U>
inline T as_type(U value) {
  static_assert(sizeof(T) == sizeof(U), "as_type: sizes differ");
  return __builtin_bit_cast(T, value);
}

// --- float functions; half and bfloat go through float and round once

#define METALSIM_UNARY(name, function)                                \
  inline float name(float x) { return function(x); }                  \
  inline half name(half x) { return (half)function((float)x); }       \
  inline bfloat name(bfloat x) { return (bfloat)function((float)x); } \
  template <class T, int N>                                           \
  inline vec<T, N> name(vec<T, N> x) {                                \
    vec<T, N> result;                                                 \
    for (int i = 0; i < N; i++) result[i] = name((T)x[i]);            \
    return result;                                                    \
  }
#define METALSIM_BINARY(name, function)                                                   \
  inline float name(float x, float y) { return function(x, y); }                          \
  inline half name(half x, half y) { return (half)function((float)x, (float)y); }         \
  inline bfloat name(bfloat x, bfloat y) { return (bfloat)function((float)x, (float)y); } \
  template <class T, int N>                                                               \
  inline vec<T, N> name(vec<T, N> x, vec<T, N> y) {                                       \
    vec<T, N> result;                                                                     \
    for (int i = 0; i < N; i++) result[i] = name((T)x[i], (T)y[i]);                       \
    return result;                                                                        \
  }

inline float metalsim_rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float metalsim_exp10(float x) { return __builtin_powf(10.0f, x); }
inline float metalsim_saturate(float x) { return __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f); }
inline float metalsim_fract(float x) {
  return __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f);
}
inline float metalsim_sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x != x ? 0.0f : x; }
inline float metalsim_divide(float x, float y) { return x / y; }

METALSIM_UNARY(exp, __builtin_expf)
METALSIM_UNARY(exp2, __builtin_exp2f)
METALSIM_UNARY(exp10, metalsim_exp10)
METALSIM_UNARY(log, __builtin_logf)
METALSIM_UNARY(log2, __builtin_log2f)
METALSIM_UNARY(log10, __builtin_log10f)
METALSIM_UNARY(sqrt, __builtin_sqrtf)
METALSIM_UNARY(rsqrt, metalsim_rsqrt)
METALSIM_UNARY(sin, __builtin_sinf)
METALSIM_UNARY(cos, __builtin_cosf)
METALSIM_UNARY(tan, __builtin_tanf)
METALSIM_UNARY(sinh, __builtin_sinhf)
METALSIM_UNARY(cosh, __builtin_coshf)
METALSIM_UNARY(tanh, __builtin_tanhf)
METALSIM_UNARY(asin, __builtin_asinf)
METALSIM_UNARY(acos, __builtin_acosf)
METALSIM_UNARY(atan, __builtin_atanf)
METALSIM_UNARY(floor, __builtin_floorf)
METALSIM_UNARY(ceil, __builtin_ceilf)
METALSIM_UNARY(rint, __builtin_rintf)
METALSIM_UNARY(round, __builtin_roundf)
METALSIM_UNARY(trunc, __builtin_truncf)
METALSIM_UNARY(fabs, __builtin_fabsf)
METALSIM_UNARY(fract, metalsim_fract)
METALSIM_UNARY(saturate, metalsim_saturate)
METALSIM_UNARY(sign, metalsim_sign)
METALSIM_BINARY(pow, __builtin_powf)
METALSIM_BINARY(powr, __builtin_powf)
METALSIM_BINARY(fmod, __builtin_fmodf)
METALSIM_BINARY(atan2, __builtin_atan2f)
METALSIM_BINARY(fmin, __builtin_fminf)
METALSIM_BINARY(fmax, __builtin_fmaxf)
METALSIM_BINARY(copysign, __builtin_copysignf)
METALSIM_BINARY(divide, metalsim_divide)

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// The double result is made odd when inexact, so that the last rounding is the only one.
inline half fma(half a, half b, half c) {
  const auto exact = __builtin_fma(a, b, c);
  const float near = (float)exact;
  const uint32_t bits = as_type<uint32_t>(near);
  const bool inexact = near != exact && !(bits & 1);
  const bool away = (near > exact) == (near > 0);
  return (half)as_type<float>(inexact ? (away ? bits - 1 : bits + 1) : bits);
}
template <class T, int N>
inline vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> result;
  for (int i = 0; i < N; i++) result[i] = fma((T)a[i], (T)b[i], (T)c[i]);
  return result;
}
inline float ldexp(float x, int exponent) { return __builtin_ldexpf(x, exponent); }

// --- min, max, clamp, abs; arguments of mixed scalar types are ambiguous, as in Metal

#define METALSIM_ORDER(T)                             \
  inline T min(T a, T b) { return b < a ? b : a; }    \
  inline T max(T a, T b) { return a < b ? b : a; }    \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
METALSIM_ORDER(char)
METALSIM_ORDER(int8_t)
METALSIM_ORDER(uchar)
METALSIM_ORDER(short)
METALSIM_ORDER(ushort)
METALSIM_ORDER(int)
METALSIM_ORDER(uint)
METALSIM_ORDER(long)
METALSIM_ORDER(ulong)
#define METALSIM_FLOAT_ORDER(T)                                                      \
  inline T min(T a, T b) { return fmin(a, b); }                                      \
  inline T max(T a, T b) { return fmax(a, b); }                                      \
  inline T clamp(T x, T low, T high) { return fmin(fmax(x, low), high); }            \
  inline T abs(T x) { return fabs(x); }                                              \
  inline bool isnan(T x) { return x != x; }                                          \
  inline bool isinf(T x) { return __builtin_isinf((float)x); }                       \
  inline bool isfinite(T x) { return __builtin_isfinite((float)x); }                 \
  inline bool signbit(T x) { return __builtin_signbit((float)x); }
METALSIM_FLOAT_ORDER(float)
METALSIM_FLOAT_ORDER(half)
METALSIM_FLOAT_ORDER(bfloat)
inline short abs(short x) { return x < 0 ? (short)-x : x; }
inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }

template <class T, int N>
inline vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  vec<T, N> result;
  for (int i = 0; i < N; i++) result[i] = min((T)a[i], (T)b[i]);
  return result;
}
template <class T, int N>
inline vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  vec<T, N> result;
  for (int i = 0; i < N; i++) result[i] = max((T)a[i], (T)b[i]);
  return result;
}
template <class T, int N>
inline vec<T, N> min(vec<T, N> a, T b) { return min(a, vec<T, N>(b)); }
template <class T, int N>
inline vec<T, N> max(vec<T, N> a, T b) { return max(a, vec<T, N>(b)); }
template <class T, int N>
inline vec<T, N> clamp(vec<T, N> x, T low, T high) { return min(max(x, low), high); }
template <class T, int N>
inline vec<T, N> clamp(vec<T, N> x, vec<T, N> low, vec<T, N> high) {
  return min(max(x, low), high);
}
template <class T, int N>
inline vec<T, N> abs(vec<T, N> a) {
  vec<T, N> result;
  for (int i = 0; i < N; i++) result[i] = abs((T)a[i]);
  return result;
}
template <class T>
inline T max3(T a, T b, T c) { return max(max(a, b), c); }
template <class T>
inline T min3(T a, T b, T c) { return min(min(a, b), c); }

// --- geometry and selection

template <class T, int N>
inline T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}
template <class T, int N>
inline T length_squared(vec<T, N> a) { return dot(a, a); }
template <class T, int N>
inline T length(vec<T, N> a) { return sqrt(dot(a, a)); }
template <class T>
inline T mix(T a, T b, T t) { return a + (b - a) * t; }
template <class T>
inline T select(T a, T b, bool second) { return second ? b : a; }
// Comparisons of vectors give lanes of 0 and -1 here, of false and true in Metal.
template <class T, class C, int N>
inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<C, N> second) {
  vec<T, N> result;
  for (int i = 0; i < N; i++) result[i] = second[i] != 0 ? b[i] : a[i];
  return result;
}
template <class C, int N>
inline bool any(vec<C, N> x) {
  bool found = false;
  for (int i = 0; i < N; i++) found |= x[i] != 0;
  return found;
}
template <class C, int N>
inline bool all(vec<C, N> x) {
  bool holds = true;
  for (int i = 0; i < N; i++) holds &= x[i] != 0;
  return holds;
}

// --- integers

inline uint popcount(uint x) { return (uint)__builtin_popcount(x); }
inline ulong popcount(ulong x) { return (ulong)__builtin_popcountl(x); }
inline uint clz(uint x) { return x ? (uint)__builtin_clz(x) : 32; }
inline uint ctz(uint x) { return x ? (uint)__builtin_ctz(x) : 32; }
inline uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
inline int mulhi(int a, int b) { return (int)(((long)a * b) >> 32); }
inline uint extract_bits(uint x, uint offset, uint bits) {
  return bits == 0 ? 0 : x << (32 - bits - offset) >> (32 - bits);
}
inline int extract_bits(int x, uint offset, uint bits) {
  return bits == 0 ? 0 : (int)((uint)x << (32 - bits - offset)) >> (32 - bits);
}

// --- numeric_limits and the traits that Metal has

template <class T>
struct numeric_limits;
#define METALSIM_FLOAT_LIMITS(T, largest, smallest, step)                  \
  template <>                                                              \
  struct numeric_limits<T> {                                               \
    static constexpr T max() { return (T)largest; }                        \
    static constexpr T lowest() { return (T) - largest; }                  \
    static constexpr T min() { return (T)smallest; }                       \
    static constexpr T epsilon() { return (T)step; }                       \
    static constexpr T infinity() { return (T)__builtin_inff(); }          \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); }       \
  };
METALSIM_FLOAT_LIMITS(float, FLT_MAX, FLT_MIN, FLT_EPSILON)
METALSIM_FLOAT_LIMITS(half, 65504.0f, 6.103515625e-5f, 9.765625e-4f)
METALSIM_FLOAT_LIMITS(bfloat, 3.38953139e38f, FLT_MIN, 7.8125e-3f)
#define METALSIM_INTEGER_LIMITS(T, least, largest)       \
  template <>                                            \
  struct numeric_limits<T> {                             \
    static constexpr T max() { return (T)largest; }      \
    static constexpr T min() { return (T)least; }        \
    static constexpr T lowest() { return (T)least; }     \
  };
METALSIM_INTEGER_LIMITS(int8_t, -128, 127)
METALSIM_INTEGER_LIMITS(uchar, 0, 255)
METALSIM_INTEGER_LIMITS(short, -32768, 32767)
METALSIM_INTEGER_LIMITS(ushort, 0, 65535)
METALSIM_INTEGER_LIMITS(int, INT_MIN, INT_MAX)
METALSIM_INTEGER_LIMITS(uint, 0, UINT_MAX)
METALSIM_INTEGER_LIMITS(long, -9223372036854775807 - 1, 9223372036854775807)
METALSIM_INTEGER_LIMITS(ulong, 0, 18446744073709551615ul)

template <class A, class B>
constexpr bool is_convertible_v = __is_convertible(A, B);
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <class A, class B>
struct is_same {
  static constexpr bool value = __is_same(A, B);
};
template <class A, class B>
constexpr bool is_same_v = __is_same(A, B);
template <bool B, class X, class Y>
struct conditional {
  using type = X;
};
template <class X, class Y>
struct conditional<false, X, Y> {
  using type = Y;
};
template <bool B, class X, class Y>
using conditional_t = typename conditional<B, X, Y>::type;

// Both variants are the C library's functions here; a GPU's fast:: ones are less exact.
#define METALSIM_VARIANTS                                                                     \
  using metal::exp; using metal::exp2; using metal::exp10; using metal::log;                  \
  using metal::log2; using metal::log10; using metal::sqrt; using metal::rsqrt;               \
  using metal::sin; using metal::cos; using metal::tan; using metal::sinh; using metal::cosh; \
  using metal::tanh; using metal::asin; using metal::acos; using metal::atan;                 \
  using metal::floor; using metal::ceil; using metal::rint; using metal::round;               \
  using metal::trunc; using metal::fabs; using metal::fract; using metal::saturate;           \
  using metal::sign; using metal::pow; using metal::powr; using metal::fmod;                  \
  using metal::atan2; using metal::fmin; using metal::fmax; using metal::min;                 \
  using metal::max; using metal::clamp; using metal::divide; using metal::fma;
namespace fast {
METALSIM_VARIANTS
}
namespace precise {
METALSIM_VARIANTS
}

}  // namespace metal
using metal::as_type;  // a keyword in Metal
