// Memory: regions, threadgroup variables, and the checks of each access.
//
// Two accesses to one place, one of them a write, race unless a barrier lies between them. Every
// completed barrier advances machine.clock and notes the new time, so an access at time t is
// ordered before the present one if a barrier that covers both threads and the memory's kind has
// a later time than t.
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "machine.h"

namespace metalsim {

constexpr int MAX_REGIONS = 128;
static Region regions[MAX_REGIONS];
static int region_count, last_hit;

// Threadgroup variables lie in an arena, red zones between them.
constexpr uint64_t RED_ZONE = 256, ARENA = 1 << 18;
struct Variable {
  int id;
  uint64_t bytes;
  bool fresh;  // not yet used by the running threadgroup
  Region* region;
};
static Variable variables[MAX_REGIONS];
static int variable_count;
static uint64_t arena_used, declared_bytes;
alignas(4096) static char arena[ARENA];

static uint64_t shadow_bytes(const Region& region, uint32_t granule) {
  return (region.bytes + granule - 1) / granule * sizeof(Shadow);
}

// Straight from the kernel: zeroed, paid for only where touched, and no allocator lock is held
// when a signal ends the run.
static Shadow* new_shadow(const Region& region, uint32_t granule) {
  void* shadow = mmap(nullptr, shadow_bytes(region, granule) + 1, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return shadow == MAP_FAILED ? nullptr : (Shadow*)shadow;
}

Region& add_region(const void* base, uint64_t bytes, Kind kind, const char* name,
                   uint32_t element, bool initialised) {
  if (region_count == MAX_REGIONS) fault(0, "more than %d buffers and variables", MAX_REGIONS);
  Region& region = regions[region_count++];
  region = {(uintptr_t)base, bytes, kind, name, element, 1, initialised, nullptr};
  // One entry per element, until an access to a part of an element asks for one per byte.
  if (element == 2 || element == 4 || element == 8) region.granule = element;
  if (machine.options.checked && (kind == Kind::output || kind == Kind::threadgroup))
    region.shadow = new_shadow(region, region.granule);
  return region;
}

void forget_regions() {
  for (int i = 0; i < region_count; i++)
    if (regions[i].shadow)
      munmap(regions[i].shadow, shadow_bytes(regions[i], regions[i].granule) + 1);
  region_count = last_hit = 0;
  variable_count = 0;
  arena_used = declared_bytes = 0;
}

static void split_granules(Region& region) {
  Shadow* fine = new_shadow(region, 1);
  for (uint64_t i = 0; i < region.bytes; i++) fine[i] = region.shadow[i / region.granule];
  munmap(region.shadow, shadow_bytes(region, region.granule) + 1);
  region.shadow = fine;
  region.granule = 1;
}

static Region* find_region(uintptr_t address) {
  if (address - regions[last_hit].base < regions[last_hit].bytes && last_hit < region_count)
    return &regions[last_hit];
  for (int i = 0; i < region_count; i++)
    if (address - regions[i].base < regions[i].bytes) return &regions[last_hit = i];
  return nullptr;
}

const Region* nearest_region(uintptr_t address, bool buffers_only) {
  const Region* nearest = nullptr;
  uint64_t least = ~0ull;
  for (int i = 0; i < region_count; i++) {
    const Region& r = regions[i];
    if (r.kind == Kind::image || (buffers_only && r.kind == Kind::threadgroup)) continue;
    const uint64_t distance = address < r.base ? r.base - address : address - (r.base + r.bytes);
    if (distance < least) {
      least = distance;
      nearest = &r;
    }
  }
  return nearest;
}

long long index_in(const Region& region, uintptr_t address) {
  const long long offset = (long long)(address - region.base), element = region.element;
  return offset / element - (offset < 0 && offset % element != 0);
}

uint64_t unwritten_elements(int index, uint64_t* first) {
  const Region& region = regions[index];
  if (!region.shadow || region.initialised) return 0;
  const uint64_t step = region.element / region.granule ? region.element / region.granule : 1;
  uint64_t count = 0;
  for (uint64_t i = 0; i < region.bytes / region.element; i++) {
    bool written = true;
    for (uint64_t k = 0; k < step; k++) written &= region.shadow[i * step + k].write.who != 0;
    if (!written && count++ == 0) *first = i;
  }
  return count;
}

// --- threadgroup variables

void start_threadgroup_memory() {
  for (int i = 0; i < variable_count; i++) variables[i].fresh = true;
}

static Variable& declare_variable(int id, uint64_t bytes, uint32_t element, const char* name) {
  const uint64_t room = (bytes + 15) & ~15ull;
  declared_bytes += room;
  if (declared_bytes > machine.options.threadgroup_bytes)
    fault(0, "threadgroup memory of %llu bytes is over the limit of %u bytes (at '%s')",
          (unsigned long long)declared_bytes, machine.options.threadgroup_bytes, name);
  char* base = arena + arena_used + RED_ZONE;
  arena_used += room + RED_ZONE;
  if (arena_used + RED_ZONE > ARENA) fault(0, "too many threadgroup variables (at '%s')", name);
  Region& region = add_region(base, bytes, Kind::threadgroup, name, element, false);
  return variables[variable_count++] = {id, bytes, true, &region};
}

static void* use_variable(int id, uint64_t bytes, uint32_t element, const char* name) {
  Variable* found = nullptr;
  for (int i = 0; i < variable_count && !found; i++)
    if (variables[i].id == id && variables[i].bytes == bytes) found = &variables[i];
  if (!found) found = &declare_variable(id, bytes, element, name);
  Region& region = *found->region;
  if (found->fresh) {
    found->fresh = false;
    memset((void*)region.base, 0xFF, bytes);  // NaN for every float type
    if (region.shadow) memset(region.shadow, 0, shadow_bytes(region, region.granule));
  }
  return (void*)region.base;
}

// --- the checks

constexpr uint32_t SEVERAL = 1u << 31;    // threads of one simdgroup, one of them named
constexpr uint32_t SCATTERED = 1u << 30;  // threads of several simdgroups

static uint32_t number_of(uint32_t who) { return (who & ~(SEVERAL | SCATTERED)) - 1; }
static uint32_t group_of(uint32_t who) { return number_of(who) / MAX_THREADS; }
static uint32_t thread_of(uint32_t who) { return number_of(who) % MAX_THREADS; }
static uint32_t me() {  // below SCATTERED: checked runs have fewer than 2^20 threadgroups
  return machine.group * MAX_THREADS + machine.current->place.index_in_group + 1;
}
static Memory memory_of(Kind kind) { return kind == Kind::threadgroup ? THREADGROUP : DEVICE; }

static bool ordered(const Access& before, Memory memory) {
  if (before.who == 0 || before.who == me()) return true;
  if (group_of(before.who) != machine.group) return false;
  if (before.time < machine.barrier_time[memory]) return true;
  const uint32_t simdgroup = machine.current->place.simdgroup;
  return !(before.who & SCATTERED) && thread_of(before.who) / LANES == simdgroup &&
         before.time < machine.simdgroups[simdgroup].barrier_time[memory];
}

static void note_read(Access& read, Memory memory) {
  if (ordered(read, memory)) {
    read = {me(), machine.clock};
    return;
  }
  const bool same = !(read.who & SCATTERED) && group_of(read.who) == machine.group &&
                    thread_of(read.who) / LANES == machine.current->place.simdgroup;
  read = {me() | (same ? SEVERAL : SCATTERED), machine.clock};
}

static const char* space_of(const Region& region) {
  return region.kind == Kind::threadgroup ? "threadgroup" : "device";
}

static void out_of_bounds(uintptr_t address, unsigned bytes, const char* what, uintptr_t pc) {
  const Region* region = nearest_region(address, false);
  if (!region) return fault(pc, "wild %s at %p by %s", what, (void*)address, who());
  fault(pc, "out-of-bounds %s of %u bytes: '%s'[%lld] (size %llu elements) by %s", what, bytes,
        region->name, index_in(*region, address),
        (unsigned long long)(region->bytes / region->element), who());
}

static void race(const Region& region, uintptr_t address, const char* what, const Access& before,
                 const char* before_what, uintptr_t pc) {
  char other[64];
  if (before.who & (SEVERAL | SCATTERED))
    snprintf(other, sizeof other, "several threads");
  else
    snprintf(other, sizeof other, "thread %u of threadgroup #%u", thread_of(before.who),
             group_of(before.who));
  fault(pc, "data race on '%s'[%lld] (%s memory): %s by %s is not ordered after %s by %s",
        region.name, index_in(region, address), space_of(region), what, who(), before_what, other);
}

static void check_granule(Region& region, Shadow& shadow, uintptr_t address, bool writes,
                          uintptr_t pc) {
  const Memory memory = memory_of(region.kind);
  const char* what = writes ? "write" : "read";
  if (!writes && shadow.write.who == 0 && !region.initialised)
    return fault(pc, "read of uninitialised %s memory '%s'[%lld] by %s",
                 region.kind == Kind::threadgroup ? "threadgroup" : "output", region.name,
                 index_in(region, address), who());
  if (!ordered(shadow.write, memory))
    return race(region, address, what, shadow.write, "write", pc);
  if (!writes) return note_read(shadow.read, memory);
  if (!ordered(shadow.read, memory)) return race(region, address, what, shadow.read, "read", pc);
  shadow.write = {me(), machine.clock};
}

// A fault leaves the fiber for good, so what follows a fault() here is never reached.
static void check(uintptr_t address, unsigned bytes, bool writes, bool aligned, uintptr_t pc) {
  if (!machine.running || !machine.current) return;
  if (address - (uintptr_t)machine.current->stack < STACK_BYTES) return;
  const char* what = writes ? "write" : "read";
  Region* region = find_region(address);
  if (!region || address + bytes > region->base + region->bytes)
    return out_of_bounds(address, bytes, what, pc);
  if (writes && (region->kind == Kind::image || region->kind == Kind::input))
    return fault(pc, "write to const memory '%s' by %s", region->name, who());
  const uint64_t offset = address - region->base;
  if (aligned && region->kind != Kind::image && offset % (bytes < 8 ? bytes : 8))
    return fault(pc, "misaligned %s of %u bytes: '%s' at byte %llu by %s", what, bytes,
                 region->name, (unsigned long long)offset, who());
  if (region->shadow) {
    if ((offset | bytes) % region->granule) split_granules(*region);
    const uint32_t granule = region->granule;
    for (uint64_t i = 0; i < bytes; i += granule)
      check_granule(*region, region->shadow[(offset + i) / granule], address + i, writes, pc);
  }
  const uint32_t every = machine.options.preempt_every;
  if (every && random_number() % every == 0) switch_to_scheduler();
}

}  // namespace metalsim

using namespace metalsim;

extern "C" {

void* metalsim_threadgroup_variable(int id, uint64_t bytes, uint32_t element, const char* name) {
  return use_variable(id, bytes, element, name);
}

// Atomic operations are ordered among themselves; against plain accesses they are writes.
void metalsim_atomic_access(const void* address, uint32_t bytes, int reads, int line) {
  if (!machine.options.checked) return;
  const uintptr_t a = (uintptr_t)address;
  Region* region = find_region(a);
  if (!region || a + bytes > region->base + region->bytes)
    return out_of_bounds(a, bytes, "atomic access", (uintptr_t)__builtin_return_address(0) - 1);
  if (!region->shadow) return;
  for (uint64_t i = 0; i < bytes; i += region->granule) {
    Shadow& shadow = region->shadow[(a - region->base + i) / region->granule];
    if (reads && shadow.write.who == 0 && !region->initialised)
      metalsim_fault("atomic operation on uninitialised memory", line);
    shadow.write = {me(), machine.clock};
  }
}

// clang's -fsanitize=thread calls these before each access. There is no libtsan here.
#define CODE ((uintptr_t)__builtin_return_address(0) - 1)
#define HOOKS(N)                                                                                  \
  void __tsan_read##N(void* p) { check((uintptr_t)p, N, false, true, CODE); }                     \
  void __tsan_write##N(void* p) { check((uintptr_t)p, N, true, true, CODE); }                     \
  void __tsan_unaligned_read##N(void* p) { check((uintptr_t)p, N, false, false, CODE); }          \
  void __tsan_unaligned_write##N(void* p) { check((uintptr_t)p, N, true, false, CODE); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)

void __tsan_read_range(void* p, unsigned long n) { check((uintptr_t)p, n, false, false, CODE); }
void __tsan_write_range(void* p, unsigned long n) { check((uintptr_t)p, n, true, false, CODE); }
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  check((uintptr_t)from, n, false, false, CODE);
  check((uintptr_t)to, n, true, false, CODE);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) {
  check((uintptr_t)from, n, false, false, CODE);
  check((uintptr_t)to, n, true, false, CODE);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
  check((uintptr_t)to, n, true, false, CODE);
  return memset(to, value, n);
}
void __tsan_init() {}

// clang's -fsanitize=array-bounds calls this at an index outside of an array of known length.
struct ArrayIndex {
  const char* file;
  uint32_t line, column;
  const struct ArrayType {
    uint16_t kind, info;
    char name[];
  }* array;
};
void __ubsan_handle_out_of_bounds(const ArrayIndex* place, uintptr_t index) {
  fault(0, "index %lld is outside of %s on line %u by %s", (long long)index, place->array->name,
        place->line, who());
}

}  // extern "C"
