// The scheduler: threadgroups in sequence, fibers within one, barriers and simdgroup operations.
#include <string.h>

#include "machine.h"

namespace metalsim {

Machine machine;

static uint32_t random_state;
uint32_t random_number() {  // xorshift32 (Marsaglia 2003)
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state;
}

static State& my_state() { return machine.states[machine.current - machine.fibers]; }

static void note_barrier(uint32_t times[2], int flags) {
  machine.clock++;
  for (int memory = DEVICE; memory <= THREADGROUP; memory++)
    if (flags >> memory & 1) times[memory] = machine.clock;
}

static void wait_as(State state, int line) {
  machine.current->line = line;
  my_state() = state;
}

// --- threadgroup barrier

static void threadgroup_barrier(int flags, int line) {
  if (machine.live != machine.threads)
    fault(0, "divergent threadgroup_barrier: %s is at line %d but %d threads have returned", who(),
          shown(line), machine.threads - machine.live);
  if (machine.waiting && machine.barrier_line != line)
    fault(0, "divergent threadgroup_barrier: %s is at line %d while others wait at line %d", who(),
          shown(line), shown(machine.barrier_line));
  machine.barrier_line = line;
  wait_as(State::at_threadgroup_barrier, line);
  if (++machine.waiting == machine.threads) {
    machine.waiting = 0;
    note_barrier(machine.barrier_time, flags);
    memset(machine.states, (int)State::ready, machine.threads);
  }
  switch_to_scheduler();
}

// --- simdgroup operations

// Notes that the running lane has arrived; true if it is the last.
static bool arrive(Simdgroup& group, const char* operation, int line) {
  if (group.returned)
    fault(0, "divergent simd operation: %s is at %s on line %d but %d lanes have returned", who(),
          operation, shown(line), group.returned);
  if (group.arrived && (group.line != line || strcmp(group.operation, operation)))
    fault(0, "divergent simd operation: %s is at %s on line %d while other lanes wait at %s on "
             "line %d", who(), operation, shown(line), group.operation, shown(group.line));
  group.operation = operation;
  group.line = line;
  wait_as(State::at_simdgroup, line);
  return ++group.arrived == group.size;
}

static void release(Simdgroup& group) {
  const int first = (int)(&group - machine.simdgroups) * LANES;
  group.arrived = 0;
  memset(machine.states + first, (int)State::ready, group.size);
}

static Simdgroup& my_simdgroup() { return machine.simdgroups[machine.current->place.simdgroup]; }

static void simdgroup_barrier(int flags, int line) {
  Simdgroup& group = my_simdgroup();
  if (arrive(group, "simdgroup_barrier", line)) {
    note_barrier(group.barrier_time, flags);
    release(group);
  }
  switch_to_scheduler();
}

static Exchange* exchange(const void* value, uint32_t bytes, const char* operation, int line) {
  Simdgroup& group = my_simdgroup();
  Exchange& mine = group.exchange[group.current];
  const uint32_t lane = machine.current->place.lane;
  const bool last = arrive(group, operation, line);
  memcpy(mine.slot[lane], value, bytes);
  if (last) {
    mine.present = group.size == LANES ? ~0u : (1u << group.size) - 1;
    mine.reduced = false;
    group.current ^= 1;
    release(group);
  }
  switch_to_scheduler();
  return &mine;
}

// --- one threadgroup

static metalsim_entry entry;
static void* buffers[64];

static void fiber_body() {
  entry(buffers, &machine.current->place);
  my_state() = State::done;
  machine.live--;
  my_simdgroup().returned++;
  if (machine.waiting)
    fault(0, "divergent threadgroup_barrier: %s returned while %d threads wait at the barrier on "
             "line %d", who(), machine.waiting, shown(machine.barrier_line));
  if (my_simdgroup().arrived)
    fault(0, "divergent simd operation: %s returned while %d lanes wait at %s on line %d", who(),
          my_simdgroup().arrived, my_simdgroup().operation, shown(my_simdgroup().line));
  switch_to_scheduler();
}

struct Grid {
  uint32_t threads[3], group[3], groups[3];  // the whole grid, a full threadgroup, their number
  uint32_t full_threads() const { return group[0] * group[1] * group[2]; }
  uint64_t count() const { return (uint64_t)groups[0] * groups[1] * groups[2]; }
};

static void split(uint32_t index, const uint32_t size[3], uint32_t position[3]) {
  position[0] = index % size[0];
  position[1] = index / size[0] % size[1];
  position[2] = index / size[0] / size[1];
}

static void start_threadgroup(const Grid& grid, uint32_t index) {
  uint32_t group[3], size[3];
  split(index, grid.groups, group);
  for (int d = 0; d < 3; d++) {  // groups at the edge of the grid are smaller
    const uint32_t rest = grid.threads[d] - group[d] * grid.group[d];
    size[d] = rest < grid.group[d] ? rest : grid.group[d];
  }
  machine.group = index;
  machine.threads = machine.live = (int)(size[0] * size[1] * size[2]);
  machine.waiting = 0;
  memset(machine.barrier_time, 0, sizeof machine.barrier_time);
  start_threadgroup_memory();
  const uint32_t simdgroups = (machine.threads + LANES - 1) / LANES;
  for (uint32_t s = 0; s < simdgroups; s++) {
    Simdgroup& simdgroup = machine.simdgroups[s];
    const int rest = machine.threads - (int)s * LANES;
    simdgroup.size = rest < LANES ? rest : LANES;
    simdgroup.arrived = simdgroup.returned = 0;
    memset(simdgroup.barrier_time, 0, sizeof simdgroup.barrier_time);
  }
  for (int i = 0; i < machine.threads; i++) {
    Place& place = machine.fibers[i].place;
    split(i, size, place.position_in_group);
    for (int d = 0; d < 3; d++) {
      place.group_in_grid[d] = group[d];
      place.position_in_grid[d] = group[d] * grid.group[d] + place.position_in_group[d];
      place.group_size[d] = size[d];
      place.full_group_size[d] = grid.group[d];
      place.grid_size[d] = grid.threads[d];
      place.groups[d] = grid.groups[d];
    }
    place.index_in_group = i;
    place.simdgroup = i / LANES;
    place.lane = i % LANES;
    place.simdgroups = simdgroups;
    place.full_simdgroups = (grid.full_threads() + LANES - 1) / LANES;
    machine.states[i] = State::ready;
    start_fiber(machine.fibers[i], i, fiber_body);
  }
}

static bool resume(int i) {
  if (machine.states[i] != State::ready) return false;
  switch_to_fiber(machine.fibers[i]);
  return true;
}

// One simdgroup for as long as it can go on: its stacks stay in the cache.
static bool pass_in_order() {
  bool progress = false;
  for (int first = 0; first < machine.threads; first += LANES) {
    const int end = first + LANES < machine.threads ? first + LANES : machine.threads;
    for (bool again = true; again && !machine.failed;) {
      again = false;
      for (int i = first; i < end && !machine.failed; i++) again |= resume(i);
      progress |= again;
    }
  }
  return progress;
}

static bool pass_at_random() {
  static uint16_t order[MAX_THREADS];
  for (int i = 0; i < machine.threads; i++) {  // inside-out shuffle
    const int j = (int)(random_number() % (uint32_t)(i + 1));
    order[i] = order[j];
    order[j] = (uint16_t)i;
  }
  bool progress = false;
  for (int i = 0; i < machine.threads && !machine.failed; i++) progress |= resume(order[i]);
  return progress;
}

static void report_deadlock() {
  int count[4] = {}, line[4] = {};
  for (int i = 0; i < machine.threads; i++) {
    count[(int)machine.states[i]]++;
    line[(int)machine.states[i]] = machine.fibers[i].line;
  }
  fault(0, "deadlock in threadgroup #%u: %d threads wait at threadgroup_barrier (line %d), %d in "
           "simd operations (line %d), %d returned: divergent barrier", machine.group,
        count[1], shown(line[1]), count[2], shown(line[2]), count[3]);
}

static void run_threadgroup(const Grid& grid, uint32_t index) {
  start_threadgroup(grid, index);
  while (machine.live && !machine.failed) {
    const bool progress = machine.options.random_order ? pass_at_random() : pass_in_order();
    if (!progress && !machine.failed) report_deadlock();
  }
}

static void run_grid(const Grid& grid) {
  catch_signals();
  if (sigsetjmp(machine.on_signal, 1) == 0) {
    machine.running = true;
    const uint32_t count = (uint32_t)grid.count();
    for (uint32_t i = 0; i < count && !machine.failed; i++) run_threadgroup(grid, i);
  }
  machine.running = false;
  machine.current = nullptr;
  release_signals();
}

// One argument of the kernel, as Python describes it. `pointer` is what the kernel is given; the
// memory it may touch is [base, base + bytes).
struct Argument {
  void *pointer, *base;
  uint64_t bytes;
  const char* name;
  uint32_t element;
  Kind kind;
  int32_t initialised;
  uint64_t unwritten, first_unwritten;  // results, in elements
};

}  // namespace metalsim

using namespace metalsim;

extern "C" {

void metalsim_threadgroup_barrier(int flags, int line) { threadgroup_barrier(flags, line); }
void metalsim_simdgroup_barrier(int flags, int line) { simdgroup_barrier(flags, line); }
Exchange* metalsim_exchange(const void* value, uint32_t bytes, const char* operation, int line) {
  return exchange(value, bytes, operation, line);
}
void metalsim_fault(const char* what, int line) {
  fault(0, "%s on line %d by %s", what, shown(line), who());
}
uint32_t metalsim_lane() { return machine.current->place.lane; }

// Runs a kernel over a grid. Returns the message of the first fault, or null. `image` is the
// memory of the kernel's shared object; `code` is the code address of the fault, 0 if unknown.
const char* metalsim_run(metalsim_entry kernel, Argument* arguments, int count,
                         const uint32_t* threads, const uint32_t* group, const Options* options,
                         void* const image[2], uint64_t* code) {
  machine.options = *options;
  machine.failed = false;
  machine.fault_address = 0;
  machine.current = nullptr;
  machine.clock = 1;
  random_state = options->seed * 2654435761u | 1;
  entry = kernel;
  Grid grid;
  for (int d = 0; d < 3; d++) {
    grid.threads[d] = threads[d];
    grid.group[d] = group[d];
    grid.groups[d] = (threads[d] + group[d] - 1) / group[d];
  }
  for (int i = 0; i < count; i++) {
    Argument& a = arguments[i];
    buffers[i] = a.pointer;
    add_region(a.base, a.bytes, a.kind, a.name, a.element, a.initialised);
  }
  add_region(image[0], (char*)image[1] - (char*)image[0], Kind::image, "constants", 1, true);
  prepare_stacks((int)grid.full_threads());
  run_grid(grid);
  for (int i = 0; i < count; i++)
    if (arguments[i].kind == Kind::output)
      arguments[i].unwritten = unwritten_elements(i, &arguments[i].first_unwritten);
  forget_regions();
  *code = machine.fault_address;
  return machine.failed ? machine.message : nullptr;
}

}  // extern "C"
