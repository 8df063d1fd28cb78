// A fiber per thread, warps whose lanes meet, blocks of them: see machine.h.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <utility>
#include <vector>

#include "machine.h"

#if defined(__x86_64__) && defined(__linux__)
#define HOST_OWN_SWITCH
#else
#include <ucontext.h>
#endif

namespace host {

constexpr int LANES = 32;
constexpr int MOST_THREADS = 1024;
constexpr size_t STACK = 128 * 1024;
// Stacks at a multiple of a power of two would all compete for the same lines of the cache.
constexpr size_t STACK_STRIDE = STACK + 17 * 64;
constexpr uint16_t GUARD_PATTERN = 0xffa5;  // NaN as float, bf16 and f16, and not the 0xffff of the poisoned memory
constexpr uint64_t CANARY = 0x5afec0de5afec0deull;

enum Order { FORWARD, REVERSE, RANDOM };

// Where a thread waits for others: what it called, from which line.
struct Site {
  const char* what;
  const char* file;
  int line;
};

inline bool same(const Site& one, const Site& other) {
  return one.line == other.line && (one.what == other.what || !strcmp(one.what, other.what)) &&
         (one.file == other.file || !strcmp(one.file, other.file));
}

struct Copy {
  void* to;
  const void* from;  // null: zeros
  int bytes;
  bool done;
};

struct Thread : Fiber {
#ifdef HOST_OWN_SWITCH
  void* stack_pointer;
#else
  ucontext_t context;
#endif
  std::vector<Copy> copies;    // issued and not yet done
  std::vector<size_t> groups;  // how many of these there were when each group was closed
};

struct Warp {
  enum { RUNNABLE, AT_BARRIER, FINISHED } state;
  int arrived, next;            // lanes that wait at `site`; the place in the order of the lane that runs now
  int stride, offset;           // lane `i` of the order is lane (stride * i + offset) % 32
  uint32_t phase;               // barriers passed: what lies in different ones is ordered among its lanes
  Site site, met;               // where its lanes wait, and where they met before
  Thread lanes[LANES];
  alignas(64) uint32_t words[LANES][8];  // what a lane brings to a collective
  alignas(64) uint32_t results[LANES][4];
  alignas(16) unsigned char rows[LANES][16];
};

// What the machine is besides what kernels see of it.
struct Inside {
  uint32_t phase;  // barriers of blocks passed, of all blocks and launches
  Warp* warps;
  unsigned char* stacks;
  Thread scheduler;
  void (*body)(const void*);
  const void* arguments;
  uint64_t random;
  sigjmp_buf failure;
  char message[1024];
};

static Inside inside;

inline Thread& current() { return static_cast<Thread&>(*machine.current); }

inline uint64_t draw() {  // xorshift64*
  uint64_t& x = inside.random;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  return (x * 0x2545f4914f6cdd1dull) >> 32;
}

// Ends the launch with this message; what runs is left where it stands.
[[noreturn]] __attribute__((format(printf, 1, 2), noinline)) inline void fail(const char* format, ...) {
  char what[768], where[128] = "";
  va_list values;
  va_start(values, format);
  vsnprintf(what, sizeof what, format, values);
  va_end(values);
  if (machine.current != &inside.scheduler)
    snprintf(where, sizeof where, " thread %d,", machine.current->thread);
  snprintf(inside.message, sizeof inside.message, "%s (%s block %d, %d)", what, where[0] ? where + 1 : "in",
           machine.block_x, machine.block_y);
  siglongjmp(inside.failure, 1);
}

inline const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

struct Text {
  char characters[256];
};

inline Text text(const Site& site) {
  Text result;
  if (site.line)
    snprintf(result.characters, sizeof result, "%s at %s:%d", site.what, base_name(site.file), site.line);
  else
    snprintf(result.characters, sizeof result, "%s", site.what);
  return result;
}

// ---------------------------------------------------------------------------------------------------- fibers

#ifdef HOST_OWN_SWITCH
// swapcontext saves the signal mask by a system call, which would take most of the time; this saves what a function must.
extern "C" void host_switch(void** save, void* load);
__asm__(
    ".text\n"
    ".p2align 4\n"
    ".type host_switch, @function\n"
    "host_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    ".size host_switch, .-host_switch\n");
#endif

inline void switch_to(Thread& fiber) {
  Thread& from = current();
  machine.current = &fiber;
#ifdef HOST_OWN_SWITCH
  host_switch(&from.stack_pointer, fiber.stack_pointer);
#else
  swapcontext(&from.context, &fiber.context);
#endif
}

inline void leave();

inline void begin() {
  inside.body(inside.arguments);
  leave();
}

inline unsigned char* stack_of(int thread) { return inside.stacks + thread * STACK_STRIDE; }

inline void prepare(Thread& fiber) {
  unsigned char* bottom = stack_of(fiber.thread);
  memcpy(bottom, &CANARY, sizeof CANARY);
#ifdef HOST_OWN_SWITCH
  void** top = reinterpret_cast<void**>(bottom + STACK);
  *--top = nullptr;  // begin's own return address: it never returns
  *--top = reinterpret_cast<void*>(&begin);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = bottom;
  fiber.context.uc_stack.ss_size = STACK;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, begin, 0);
#endif
}

// ---------------------------------------------------------------------------------------------------- warps

inline Thread& in_order(Warp& warp, int i) { return warp.lanes[(warp.stride * i + warp.offset) % LANES]; }

// All lanes run again, in the launch's order of lanes.
inline void release(Warp& warp) {
  warp.arrived = warp.next = 0;
  warp.met = warp.site;
  if (machine.launch.order == RANDOM) {
    warp.stride = draw() % LANES | 1;  // odd: every lane has its turn
    warp.offset = draw() % LANES;
  }
}

__attribute__((noinline, cold)) inline void diverged(Warp& warp, const Site& site) {
  fail("warp %d diverged: lane %d is at %s, lane %d is at %s", machine.current->thread / LANES, in_order(warp, 0).lane,
       text(warp.site).characters, machine.current->lane, text(site).characters);
}

// Notes that this lane has arrived; the last one's call returns true at once, with the warp ready to be released, all
// others' when the warp goes on.
inline bool arrive(Warp& warp, const Site& site) {
  if (warp.arrived == 0)
    warp.site = site;
  else if (__builtin_expect(!same(warp.site, site), 0))
    diverged(warp, site);
  if (++warp.arrived == LANES) return true;
  switch_to(in_order(warp, ++warp.next));
  return false;
}

// A collective of the warp: the last lane to arrive does `work` for all.
__attribute__((noinline)) inline void meet(const Site& site, void (*work)(Warp&)) {
  Fiber& self = *machine.current;
  Warp& warp = *self.warp;
  if (!arrive(warp, site)) return;
  work(warp);
  release(warp);
  // In random order another warp may come first, at any of its collectives.
  if (machine.launch.order == RANDOM && draw() % 4 == 0) {
    switch_to(inside.scheduler);
    return;
  }
  Thread& first = in_order(warp, 0);
  if (&first != &self) switch_to(first);
}

__attribute__((noinline)) inline void wait_for_block(const Site& site) {
  Warp& warp = *machine.current->warp;
  if (!arrive(warp, site)) return;
  warp.state = Warp::AT_BARRIER;
  switch_to(inside.scheduler);
}

inline void leave() {
  if (!current().copies.empty()) fail("the kernel ends before wait_for_copies");
  Warp& warp = *machine.current->warp;
  arrive(warp, {"the end of the kernel", "", 0});
  warp.state = Warp::FINISHED;
  switch_to(inside.scheduler);
}

// ---------------------------------------------------------------------------------------------------- memory

inline void check_shared(const void* address, const char* what, int bytes = 16) {
  const ptrdiff_t offset = static_cast<const unsigned char*>(address) - shared_memory;
  if (__builtin_expect(offset < 0 || offset + bytes > static_cast<ptrdiff_t>(machine.launch.shared_bytes), 0))
    fail("%s: byte %td is outside of the block's %zu bytes of shared memory", what, offset,
         static_cast<size_t>(machine.launch.shared_bytes));
  if (__builtin_expect(offset % bytes != 0, 0))
    fail("%s: byte %td of shared memory is not a multiple of %d", what, offset, bytes);
}

inline void do_copy(Copy& copy) {
  if (copy.done) return;
  copy.done = true;
  if (copy.from)
    memcpy(copy.to, copy.from, copy.bytes);
  else
    memset(copy.to, 0, copy.bytes);
}

inline unsigned char guard_byte(const unsigned char* at) {
  return (at - shared_memory) % 2 ? GUARD_PATTERN >> 8 : GUARD_PATTERN & 0xff;
}

inline void fill_guard(unsigned char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) from[i] = guard_byte(from + i);
}

inline void check_guard(const unsigned char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i)
    if (from[i] != guard_byte(from + i))
      fail("byte %td was written, outside of the block's %zu bytes of shared memory", from + i - shared_memory,
           static_cast<size_t>(machine.launch.shared_bytes));
}

// ---------------------------------------------------------------------------------------------------- blocks

template <class Value>
void put_in_order(std::vector<Value>& values) {
  if (machine.launch.order == REVERSE)
    for (size_t i = 0; i < values.size() / 2; ++i) std::swap(values[i], values[values.size() - 1 - i]);
  if (machine.launch.order == RANDOM)
    for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[draw() % i]);
}

inline std::vector<int> count_to(int count) {
  std::vector<int> numbers(count);
  for (int i = 0; i < count; ++i) numbers[i] = i;
  return numbers;
}

// The next warp to run, or -1 where all wait at the barrier or have finished.
inline int choose(const std::vector<int>& order) {
  const size_t count = order.size(), start = machine.launch.order == RANDOM ? draw() % count : 0;
  for (size_t i = 0; i < count; ++i) {
    const int warp = order[(start + i) % count];
    if (inside.warps[warp].state == Warp::RUNNABLE) return warp;
  }
  return -1;
}

inline void run_block() {
  const int warps = machine.launch.threads / LANES;
  const size_t shared_bytes = machine.launch.shared_bytes;
  fill_guard(memory_and_guards, GUARD);
  memset(shared_memory, 0xff, shared_bytes);
  fill_guard(shared_memory + shared_bytes, GUARD);
  for (int w = 0; w < warps; ++w) {
    Warp& warp = inside.warps[w];
    warp.state = Warp::RUNNABLE;
    warp.site = {};
    warp.stride = machine.launch.order == REVERSE ? LANES - 1 : 1;
    warp.offset = machine.launch.order == REVERSE ? LANES - 1 : 0;
    release(warp);
    for (int l = 0; l < LANES; ++l) {
      Thread& lane = warp.lanes[l];
      lane.thread = w * LANES + l, lane.lane = l, lane.warp = &warp;
      lane.copies.clear(), lane.groups.clear();
      prepare(lane);
    }
  }
  ++inside.phase;
  machine.turns = 0;
  std::vector<int> order = count_to(warps);
  put_in_order(order);
  while (true) {
    const int chosen = choose(order);
    if (chosen >= 0) {
      switch_to(in_order(inside.warps[chosen], 0));
      continue;
    }
    int waiting = -1, finished = -1;
    for (int w = 0; w < warps; ++w) (inside.warps[w].state == Warp::AT_BARRIER ? waiting : finished) = w;
    if (waiting < 0) break;
    const Site& site = inside.warps[waiting].site;
    if (finished >= 0)
      fail("warp %d waits at %s, but warp %d has finished", waiting, text(site).characters, finished);
    for (int w = 0; w < warps; ++w)
      if (!same(inside.warps[w].site, site))
        fail("warp %d waits at %s, but warp %d at %s", w, text(inside.warps[w].site).characters, waiting,
             text(site).characters);
    ++inside.phase;
    for (int w = 0; w < warps; ++w) release(inside.warps[w]), inside.warps[w].state = Warp::RUNNABLE;
    if (machine.launch.order == RANDOM) put_in_order(order);
  }
  if (machine.turns != 0 && machine.turns != machine.launch.threads)
    fail("take_turn is called %d times by %d threads", machine.turns, machine.launch.threads);
  check_guard(memory_and_guards, GUARD);
  check_guard(shared_memory + shared_bytes, GUARD);
  for (int t = 0; t < machine.launch.threads; ++t)
    if (memcmp(stack_of(t), &CANARY, sizeof CANARY)) fail("thread %d needs more than %zu bytes of stack", t, STACK);
}

inline void on_signal(int number, siginfo_t* information, void*) {
  fail(number == SIGFPE ? "division by zero at instruction %p" : "access to address %p, where there is no memory",
       information->si_addr);
}

inline void run_all() {
  const Launch& launch = machine.launch;
  if (launch.threads <= 0 || launch.threads > MOST_THREADS || launch.threads % LANES)
    fail("%d threads: not a multiple of 32 from 32 to 1024", launch.threads);
  if (launch.shared_bytes > MOST_SHARED)
    fail("%zu bytes of shared memory: no device has more than %zu", static_cast<size_t>(launch.shared_bytes), MOST_SHARED);
  if (!inside.stacks) {
    void* stacks = mmap(nullptr, STACK_STRIDE * MOST_THREADS, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) fail("no memory for the stacks");
    inside.stacks = static_cast<unsigned char*>(stacks);
    inside.warps = new Warp[MOST_THREADS / LANES]();
  }
  std::vector<std::pair<int, int>> blocks;
  for (int y = 0; y < launch.grid_y; ++y)
    for (int x = 0; x < launch.grid_x; ++x) blocks.push_back({x, y});
  put_in_order(blocks);
  for (auto [x, y] : blocks) {
    machine.block_x = x, machine.block_y = y;
    run_block();
  }
}

const char* run_blocks(void (*body)(const void*), const void* arguments, size_t size, size_t bytes, const Launch& launch) {
  machine.launch = launch;
  machine.block_x = machine.block_y = 0;
  machine.current = &inside.scheduler;
  inside.random = launch.seed * 0x9e3779b97f4a7c15ull + 0x106689d45497fdb5ull;
  inside.body = body;
  inside.arguments = arguments;
  // Memory errors become messages too: a signal's handler needs a stack of its own.
  static unsigned char signal_stack[65536];
  stack_t stack = {}, stack_before;
  stack.ss_sp = signal_stack, stack.ss_size = sizeof signal_stack;
  struct sigaction action = {}, before[3];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  const int signals[3] = {SIGSEGV, SIGBUS, SIGFPE};
  sigaltstack(&stack, &stack_before);
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &action, &before[i]);
  const bool failed = sigsetjmp(inside.failure, 1);
  if (!failed) {
    if (bytes != size) fail("the kernel's arguments have %zu bytes, not %zu", size, bytes);
    run_all();
  }
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
  return failed ? inside.message : nullptr;
}

}  // namespace host

// What -fsanitize=alignment,bounds,null calls: devices stop at an address that is no multiple of the value's size, hosts do
// not.
struct HostCheck {
  const char* file;
  uint32_t line, column;
};

extern "C" {
[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(HostCheck* check, uintptr_t address) {
  host::fail("%s:%u: address %p is not aligned as its type needs", host::base_name(check->file), check->line,
             reinterpret_cast<void*>(address));
}
[[noreturn]] void __ubsan_handle_out_of_bounds_abort(HostCheck* check, uintptr_t index) {
  host::fail("%s:%u: index %td is outside of the array", host::base_name(check->file), check->line,
             static_cast<ptrdiff_t>(index));
}
}
