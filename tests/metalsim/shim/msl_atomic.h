// Atomics. One OS thread runs all GPU threads, so plain operations are atomic already.
#pragma once
namespace metal {

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;

#define METALSIM_FETCH(space, name, expression)                                             \
  template <class T, class U>                                                               \
  inline T name(volatile space atomic<T>* object, U operand, memory_order, METALSIM_LINE) { \
    metalsim_atomic_access((const void*)object, sizeof(T), 1, line);                        \
    const T old = object->value, given = (T)operand;                                        \
    object->value = (T)(expression);                                                        \
    return old;                                                                             \
  }
#define METALSIM_ATOMICS(space)                                                              \
  METALSIM_FETCH(space, atomic_fetch_add_explicit, old + given)                              \
  METALSIM_FETCH(space, atomic_fetch_sub_explicit, old - given)                              \
  METALSIM_FETCH(space, atomic_fetch_max_explicit, old < given ? given : old)                \
  METALSIM_FETCH(space, atomic_fetch_min_explicit, given < old ? given : old)                \
  METALSIM_FETCH(space, atomic_fetch_or_explicit, old | given)                               \
  METALSIM_FETCH(space, atomic_fetch_and_explicit, old & given)                              \
  METALSIM_FETCH(space, atomic_fetch_xor_explicit, old ^ given)                              \
  METALSIM_FETCH(space, atomic_exchange_explicit, given)                                     \
  template <class T>                                                                         \
  inline T atomic_load_explicit(const volatile space atomic<T>* object, memory_order,        \
                                METALSIM_LINE) {                                             \
    metalsim_atomic_access((const void*)object, sizeof(T), 1, line);                         \
    return object->value;                                                                    \
  }                                                                                          \
  template <class T, class U>                                                                \
  inline void atomic_store_explicit(volatile space atomic<T>* object, U value, memory_order, \
                                    METALSIM_LINE) {                                         \
    metalsim_atomic_access((const void*)object, sizeof(T), 0, line);                         \
    object->value = (T)value;                                                                \
  }
METALSIM_ATOMICS(device)
#ifdef METALSIM_LINT  // the same types otherwise
METALSIM_ATOMICS(threadgroup)
#endif

}  // namespace metal
