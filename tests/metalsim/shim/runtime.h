// What a compiled kernel and the runtime know of each other.
#pragma once
#ifndef METALSIM_KERNEL  // kernels have the types without the header
#include <stdint.h>
#endif

namespace metalsim {

constexpr int LANES = 32;

// Where one GPU thread stands: the values of MSL's thread attributes.
struct Place {
  uint32_t position_in_grid[3], group_in_grid[3], position_in_group[3];
  uint32_t group_size[3], full_group_size[3], grid_size[3], groups[3];
  uint32_t index_in_group, simdgroup, lane, simdgroups, full_simdgroups;
};

// The meeting of one simdgroup at one operation: what each lane brought.
struct Exchange {
  uint32_t present;  // bit i: lane i took part
  bool reduced;      // `result` is filled in by the first lane that looks
  alignas(16) unsigned char slot[LANES][64];
  alignas(16) unsigned char result[256];
};

}  // namespace metalsim

extern "C" {
typedef void (*metalsim_entry)(void** buffers, const metalsim::Place* place);

// Address of threadgroup variable number `id` of the running threadgroup, made on first use.
void* metalsim_threadgroup_variable(int id, uint64_t bytes, uint32_t element, const char* name);

// Barriers; `flags` are the bits of metal::mem_flags, `line` the line of the call.
void metalsim_threadgroup_barrier(int flags, int line);
void metalsim_simdgroup_barrier(int flags, int line);

// Waits until all lanes of the simdgroup have brought a value to the same operation and line.
metalsim::Exchange* metalsim_exchange(const void* value, uint32_t bytes, const char* operation,
                                      int line);

// `reads` is 0 for a plain atomic store.
void metalsim_atomic_access(const void* address, uint32_t bytes, int reads, int line);
void metalsim_fault(const char* what, int line);
uint32_t metalsim_lane();
}
