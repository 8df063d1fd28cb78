// Runs a kernel's blocks on the host: a fiber per thread, which goes on to the next lane where the warp meets.
//
// Lanes of a warp run one after the other, each as far as the next place where the warp meets (a collective, the block's
// barrier, the end of the kernel); the last to arrive does the work of all. So only what really waits for others is
// ordered, and a different order of lanes, warps and blocks shows where a barrier is missing; in shared memory races.h
// finds it in any order.
//
// This is what a kernel's build sees of it, which is little: the rest is built once for all kernels.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace host {

constexpr size_t MOST_SHARED = 232448;  // what a block can have on sm_90; sm_80 has 166912
constexpr size_t GUARD = 4096;

struct Launch {
  int grid_x, grid_y, threads, order;
  uint64_t shared_bytes, seed;
};

struct Warp;

struct Fiber {
  int thread, lane;
  Warp* warp;
};

struct Machine {
  Launch launch;
  int block_x, block_y;
  int turns;  // calls of take_turn in this block
  Fiber* current;
};

extern Machine machine;
alignas(4096) extern unsigned char memory_and_guards[GUARD + MOST_SHARED + GUARD];
constexpr unsigned char* shared_memory = memory_and_guards + GUARD;

// Runs all blocks, each thread through `body`; null, or what went wrong. `bytes` are given where `size` are needed.
const char* run_blocks(void (*body)(const void*), const void* arguments, size_t size, size_t bytes, const Launch& launch);

// Runs a kernel's blocks; null, or what went wrong.
template <class Arguments>
const char* run(void (*kernel)(Arguments), const void* arguments, size_t bytes, const Launch& launch) {
  static_assert(__is_trivially_copyable(Arguments), "a kernel's arguments are copied as bytes");
  static void (*entry)(Arguments);
  entry = kernel;
  const auto body = [](const void* from) {
    Arguments copy;
    __builtin_memcpy(&copy, from, sizeof copy);
    entry(copy);
  };
  return run_blocks(body, arguments, sizeof(Arguments), bytes, launch);
}

}  // namespace host
