// Faults: the message, and the signals that become one.
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "machine.h"

namespace metalsim {

const char* who() {
  static char text[160];
  if (!machine.current) return "the scheduler";
  const Place& p = machine.current->place;
  snprintf(text, sizeof text, "threadgroup (%u,%u,%u) thread %u [simdgroup %u lane %u]",
           p.group_in_grid[0], p.group_in_grid[1], p.group_in_grid[2], p.index_in_group,
           p.simdgroup, p.lane);
  return text;
}

// A fault ends the run. A faulting fiber is left where it is and never resumed.
static void keep(uintptr_t code_address, const char* format, va_list arguments) {
  vsnprintf(machine.message, sizeof machine.message, format, arguments);
  machine.fault_address = code_address;
  machine.failed = true;
}

void fault(uintptr_t code_address, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  keep(code_address, format, arguments);
  va_end(arguments);
  if (machine.current) switch_to_scheduler();
}

static void keep_from_signal(uintptr_t code_address, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  keep(code_address, format, arguments);
  va_end(arguments);
}

static pid_t runner;  // the OS thread that runs the kernel

static pid_t this_thread() { return (pid_t)syscall(SYS_gettid); }

static uintptr_t program_counter(void* context) {
#if defined(__x86_64__)
  return (uintptr_t)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
#else
  return (uintptr_t)((ucontext_t*)context)->uc_mcontext.pc;
#endif
}

static bool in_stack_guard(uintptr_t address) {
  const Fiber* fiber = machine.current;
  return fiber && address - ((uintptr_t)fiber->stack - page_bytes()) < page_bytes();
}

static void on_memory_fault(uintptr_t address, uintptr_t pc) {
  if (in_stack_guard(address)) {
    keep_from_signal(pc, "thread stack overflow (more than %zu bytes) by %s", STACK_BYTES, who());
  } else if (const Region* region = nearest_region(address, true)) {
    keep_from_signal(pc, "memory fault: '%s'[%lld] (size %llu elements) by %s", region->name,
                     index_in(*region, address),
                     (unsigned long long)(region->bytes / region->element), who());
  } else {
    keep_from_signal(pc, "memory fault at %p by %s", (void*)address, who());
  }
}

static void on_signal(int signal_number, siginfo_t* info, void* context) {
  if (!machine.running || this_thread() != runner) {
    // Not ours: let the default action follow when the instruction is tried again.
    signal(signal_number, SIG_DFL);
    return;
  }
  const uintptr_t pc = program_counter(context);
  if (signal_number == SIGVTALRM)
    keep_from_signal(pc, "timeout after %u ms of CPU time (infinite loop?) in %s",
                     machine.options.timeout_ms, who());
  else if (signal_number == SIGFPE)
    keep_from_signal(pc, "integer division by zero by %s", who());
  else if (signal_number == SIGILL || signal_number == SIGTRAP)
    keep_from_signal(pc, "trap by %s", who());
  else
    on_memory_fault((uintptr_t)info->si_addr, pc);
  siglongjmp(machine.on_signal, 1);
}

static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGVTALRM};
constexpr int SIGNAL_COUNT = sizeof SIGNALS / sizeof *SIGNALS;
static struct sigaction previous[SIGNAL_COUNT];
static stack_t previous_stack;
static int watchdog;  // the kernel's own timer number
static bool watched;

// The watchdog counts the CPU time of this OS thread and signals this OS thread only. Raw system
// calls: older C libraries keep the timer functions in a library of their own.
static void start_watchdog() {
  watched = false;
  if (!machine.options.timeout_ms) return;
  struct sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = SIGVTALRM;
  event._sigev_un._tid = runner;
  if (syscall(SYS_timer_create, CLOCK_THREAD_CPUTIME_ID, &event, &watchdog)) return;
  watched = true;
  struct itimerspec limit = {};
  limit.it_value.tv_sec = machine.options.timeout_ms / 1000;
  limit.it_value.tv_nsec = machine.options.timeout_ms % 1000 * 1000000L;
  syscall(SYS_timer_settime, watchdog, 0, &limit, nullptr);
}

void catch_signals() {
  static char alternate[64 << 10];
  runner = this_thread();
  stack_t stack = {};
  stack.ss_sp = alternate;
  stack.ss_size = sizeof alternate;
  sigaltstack(&stack, &previous_stack);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < SIGNAL_COUNT; i++) sigaction(SIGNALS[i], &action, &previous[i]);
  start_watchdog();
}

void release_signals() {
  if (watched) syscall(SYS_timer_delete, watchdog);
  for (int i = 0; i < SIGNAL_COUNT; i++) sigaction(SIGNALS[i], &previous[i], nullptr);
  sigaltstack(&previous_stack, nullptr);
}

}  // namespace metalsim
