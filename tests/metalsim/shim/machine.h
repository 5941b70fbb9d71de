// The state of the simulated machine, shared by the parts of the runtime.
//
// One OS thread runs everything: threadgroups one after the other, the GPU threads of a
// threadgroup as fibers that switch at barriers, simdgroup operations and (if asked) accesses.
#pragma once
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime.h"

namespace metalsim {

constexpr int MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = 128 << 10;

// The line of an operation's place (METALSIM_LINE).
inline int shown(int place) { return place & ((1 << 20) - 1); }

enum class State : uint8_t { ready, at_threadgroup_barrier, at_simdgroup, done };

struct Fiber {
  void* stack_pointer;
  char* stack;  // lowest byte; the page below it is a guard
  int line;     // where it waits
  Place place;
};

struct Simdgroup {
  int size, arrived, line;
  int returned;  // lanes that have left the kernel
  const char* operation;
  uint32_t barrier_time[2];  // clock of the last simdgroup_barrier, by memory kind
  int current;               // which of the two exchanges is being filled
  Exchange exchange[2];      // two, since a slow lane may still read the previous one
};

// Bits of metal::mem_flags, and the index of each in barrier_time.
enum Memory { DEVICE = 0, THREADGROUP = 1 };

struct Options {
  int32_t checked, random_order;
  uint32_t seed, preempt_every, timeout_ms;
  uint32_t threadgroup_bytes;  // limit of threadgroup memory
};

struct Machine {
  Options options;
  Fiber fibers[MAX_THREADS];
  State states[MAX_THREADS];  // apart from the fibers: the scheduler looks at all of them often
  Simdgroup simdgroups[MAX_THREADS / LANES];
  Fiber* current;  // null while the scheduler itself runs
  void* scheduler;
  int threads, live, waiting, barrier_line;
  uint32_t group;            // linear index of the running threadgroup
  uint32_t clock;            // advances at each barrier that completes
  uint32_t barrier_time[2];  // clock of the last threadgroup_barrier, by memory kind
  volatile bool running, failed;
  char message[1024];
  uintptr_t fault_address;  // code address of the fault, 0 if the message says the line
  sigjmp_buf on_signal;
};

extern Machine machine;

uint32_t random_number();

// fiber.cpp
void prepare_stacks(int count);
size_t page_bytes();
void start_fiber(Fiber& fiber, int index, void (*body)());
void switch_to_fiber(Fiber& fiber);
void switch_to_scheduler();

// fault.cpp
const char* who();  // the running GPU thread in words
[[gnu::format(printf, 2, 3)]] void fault(uintptr_t code_address, const char* format, ...);
void catch_signals();
void release_signals();

// memory.cpp
enum class Kind : int32_t { input, output, threadgroup, image };

struct Access {  // who did it last, and when by machine.clock; who == 0: nobody yet
  uint32_t who, time;
};
struct Shadow {
  Access write, read;
};
struct Region {
  uintptr_t base;
  uint64_t bytes;
  Kind kind;
  const char* name;
  uint32_t element;  // bytes
  uint32_t granule;  // bytes that one shadow entry stands for
  bool initialised;  // was filled before the launch
  Shadow* shadow;    // null: only bounds and kind are checked
};

Region& add_region(const void* base, uint64_t bytes, Kind kind, const char* name,
                   uint32_t element, bool initialised);
void forget_regions();
void start_threadgroup_memory();
uint64_t unwritten_elements(int region, uint64_t* first);  // regions count in order of adding
const Region* nearest_region(uintptr_t address, bool buffers_only);
long long index_in(const Region& region, uintptr_t address);

}  // namespace metalsim
