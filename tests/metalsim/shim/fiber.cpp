// Fibers: stacks with a guard page, and the switch between them.
#include <sys/mman.h>
#include <unistd.h>

#include "machine.h"

// Saves the callee-saved registers and the stack pointer, then continues on another stack.
extern "C" void metalsim_switch(void** save, void* load) __attribute__((visibility("hidden")));

#if defined(__x86_64__)
asm(R"(
.text
.globl metalsim_switch
.hidden metalsim_switch
.type metalsim_switch,@function
metalsim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size metalsim_switch,.-metalsim_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl metalsim_switch
.hidden metalsim_switch
.type metalsim_switch,@function
metalsim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size metalsim_switch,.-metalsim_switch
)");
#else
#error "metalsim switches fibers on x86-64 and AArch64 only"
#endif

namespace metalsim {

static char* stacks;
static int stacks_ready;

size_t page_bytes() {
  static const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
  return bytes;
}

void prepare_stacks(int count) {
  const size_t stride = STACK_BYTES + page_bytes();
  if (!stacks)
    stacks = (char*)mmap(nullptr, stride * MAX_THREADS, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (; stacks_ready < count; stacks_ready++)
    mprotect(stacks + stacks_ready * stride + page_bytes(), STACK_BYTES, PROT_READ | PROT_WRITE);
}

void start_fiber(Fiber& fiber, int index, void (*body)()) {
  const size_t stride = STACK_BYTES + page_bytes();
  fiber.stack = stacks + index * stride + page_bytes();
  // Stacks a whole number of pages apart would share their cache sets: stagger the tops.
  void** top = (void**)(fiber.stack + STACK_BYTES - (index % LANES) * 128);
#if defined(__x86_64__)
  *--top = nullptr;  // return address of `body`: it never returns
  *--top = (void*)body;
  for (int i = 0; i < 6; i++) *--top = nullptr;
#else
  for (int i = 0; i < 20; i++) *--top = nullptr;
  top[11] = (void*)body;  // x30
#endif
  fiber.stack_pointer = top;
}

void switch_to_fiber(Fiber& fiber) {
  machine.current = &fiber;
  metalsim_switch(&machine.scheduler, fiber.stack_pointer);
  machine.current = nullptr;
}

void switch_to_scheduler() { metalsim_switch(&machine.current->stack_pointer, machine.scheduler); }

}  // namespace metalsim
