// Barriers and simdgroup functions. Each is a true meeting of threads; see scheduler.cpp.
//
// Reductions follow one fixed tree: lanes 16 apart are combined first, then 8, 4, 2 and 1 apart,
// the lower lane on the left. Lanes that do not exist (a threadgroup at the edge) are left out.
#pragma once
// Where an operation stands: its line, and above 20 bits its column, as two may share a line.
#define METALSIM_LINE int line = __builtin_LINE() + (__builtin_COLUMN() << 20)

namespace metal {

enum class mem_flags : int { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }
inline void threadgroup_barrier(mem_flags flags, METALSIM_LINE) {
  metalsim_threadgroup_barrier((int)flags, line);
}
inline void simdgroup_barrier(mem_flags flags, METALSIM_LINE) {
  metalsim_simdgroup_barrier((int)flags, line);
}

}  // namespace metal

namespace metalsim {

template <class T>
inline Exchange* exchange(const T& value, const char* operation, int line) {
  static_assert(sizeof(T) <= sizeof(Exchange::slot[0]), "value too large for a simd operation");
  return metalsim_exchange(&value, sizeof(T), operation, line);
}
template <class T>
inline const T& lane_of(const Exchange* all, uint lane) {
  return *(const T*)all->slot[lane];
}
template <class T>
inline const T& checked_lane(const Exchange* all, uint lane, const char* operation, int line) {
  if (lane >= LANES || !(all->present >> lane & 1)) metalsim_fault(operation, line);
  return lane_of<T>(all, lane % LANES);
}

template <class T, class Combine>
inline T reduce(T value, const char* operation, int line, Combine combine) {
  static_assert(sizeof(T) / components_of<T>() <= 4, "Metal reduces no 64-bit types");
  Exchange* all = exchange(value, operation, line);
  T* result = (T*)all->result;
  if (!all->reduced) {
    T part[LANES];
    for (int i = 0; i < LANES; i++) part[i] = lane_of<T>(all, i);
    const int size = __builtin_popcount(all->present);
    for (int distance = LANES / 2; distance; distance /= 2)
      for (int i = 0; i < distance && i + distance < size; i++)
        part[i] = combine(part[i], part[i + distance]);
    *result = part[0];
    all->reduced = true;
  }
  return *result;
}

template <class T>
inline T scan(T value, bool inclusive, const char* operation, int line) {
  const Exchange* all = exchange(value, operation, line);
  T sum = 0;
  for (uint i = 0; i < metalsim_lane() + inclusive; i++) sum += lane_of<T>(all, i);
  return sum;
}

template <class T>
inline T from_lane(T value, uint lane, const char* operation, int line) {
  return checked_lane<T>(exchange(value, operation, line), lane,
                         "simd shuffle or broadcast from an absent lane", line);
}

}  // namespace metalsim

namespace metal {

#define METALSIM_REDUCTION(name, expression)                                    \
  template <class T>                                                            \
  inline T name(T value, METALSIM_LINE) {                                       \
    return metalsim::reduce(value, #name, line,                                 \
                            [](T a, T b) { return (T)(expression); });          \
  }
METALSIM_REDUCTION(simd_sum, a + b)
METALSIM_REDUCTION(simd_product, a * b)
METALSIM_REDUCTION(simd_max, max(a, b))
METALSIM_REDUCTION(simd_min, min(a, b))
METALSIM_REDUCTION(simd_or, a | b)
METALSIM_REDUCTION(simd_and, a & b)
METALSIM_REDUCTION(simd_xor, a ^ b)
inline bool simd_any(bool x, METALSIM_LINE) {
  return metalsim::reduce((int)x, "simd_any", line, [](int a, int b) { return a | b; });
}
inline bool simd_all(bool x, METALSIM_LINE) {
  return metalsim::reduce((int)x, "simd_all", line, [](int a, int b) { return a & b; });
}

template <class T>
inline T simd_prefix_inclusive_sum(T value, METALSIM_LINE) {
  return metalsim::scan(value, true, "simd_prefix_inclusive_sum", line);
}
template <class T>
inline T simd_prefix_exclusive_sum(T value, METALSIM_LINE) {
  return metalsim::scan(value, false, "simd_prefix_exclusive_sum", line);
}

template <class T>
inline T simd_broadcast(T value, ushort lane, METALSIM_LINE) {
  return metalsim::from_lane(value, lane, "simd_broadcast", line);
}
template <class T>
inline T simd_broadcast_first(T value, METALSIM_LINE) {
  return metalsim::from_lane(value, 0, "simd_broadcast_first", line);
}
template <class T>
inline T simd_shuffle(T value, ushort lane, METALSIM_LINE) {
  return metalsim::from_lane(value, lane, "simd_shuffle", line);
}
template <class T>
inline T simd_shuffle_xor(T value, ushort mask, METALSIM_LINE) {
  return metalsim::from_lane(value, metalsim_lane() ^ mask, "simd_shuffle_xor", line);
}
// Lanes without a partner keep their value.
template <class T>
inline T simd_shuffle_down(T value, ushort delta, METALSIM_LINE) {
  const uint lane = metalsim_lane(), below = lane + delta;
  const uint from = below < metalsim::LANES ? below : lane;
  return metalsim::from_lane(value, from, "simd_shuffle_down", line);
}
template <class T>
inline T simd_shuffle_up(T value, ushort delta, METALSIM_LINE) {
  const uint lane = metalsim_lane(), from = lane >= delta ? lane - delta : lane;
  return metalsim::from_lane(value, from, "simd_shuffle_up", line);
}
// Lanes without a partner take from `filling`, as if it lay before (up) or after (down) the data.
template <class T>
struct metalsim_filled {
  T value, filling;
};
template <class T>
inline T simd_shuffle_and_fill_down(T value, T filling, ushort delta, METALSIM_LINE) {
  const uint from = metalsim_lane() + delta;
  const auto got = metalsim::from_lane(metalsim_filled<T>{value, filling},
                                       from % metalsim::LANES, "simd_shuffle_and_fill_down", line);
  return from < metalsim::LANES ? got.value : got.filling;
}
template <class T>
inline T simd_shuffle_and_fill_up(T value, T filling, ushort delta, METALSIM_LINE) {
  const uint from = metalsim_lane() + metalsim::LANES - delta;
  const auto got = metalsim::from_lane(metalsim_filled<T>{value, filling},
                                       from % metalsim::LANES, "simd_shuffle_and_fill_up", line);
  return from >= metalsim::LANES ? got.value : got.filling;
}

}  // namespace metal
