// What should not pass: `how` says which mistake is made, none of them at 0.
#include <fragments.cuh>

struct Arguments {
  float* values;
  int how;
};

// Mistakes that have a message.
KERNEL(64, 1) errors(Arguments arguments) {
  SHARED_MEMORY(memory);  // 64 bytes
  const int thread = thread_index(), how = arguments.how;
  float value = 1;
  Word words[4];
  int numbers[4] = {};
  if (how == 1) {
    if (thread % 2)
      warp_barrier();
    else
      value = shuffle_xor(value, 1);
  }
  if (how == 2) {
    if (thread % 2)
      value = shuffle_xor(value, 1);
    else
      value = shuffle_xor(value, 1);
  }
  if (how == 3 && thread >= 32) block_barrier();
  if (how == 4 && thread != 5) block_barrier();
  if (how == 5 && thread != 5) value = shuffle_xor(value, 1);
  if (how == 6 && thread == 0) memory[64] = 0;
  if (how == 7 && thread == 0) memory[-1] = 0;
  if (how == 8) load_matrices<4, true>(words, memory + 8);
  if (how == 9) load_matrices<4, true>(words, memory + 16 * thread);
  if (how == 10) copy_async(memory + 8, arguments.values, true);
  if (how == 11) copy_async(memory + 64, arguments.values, false);
  if (how == 12) copy_async(memory, arguments.values + 1, true);
  if (how == 13) copy_async(memory, arguments.values, true);
  if (how == 21) bring_near(arguments.values, 8);
  if (how == 22) bring_near(arguments.values, 1 << 30);
  if (how == 23) assume_threads(32);
  if (how == 24) store_matrices(memory + 8, words);
  if (how == 25) copy_async<8>(memory + 4, arguments.values, true);
  if (how == 26) copy_async<8>(memory + 64, arguments.values, false);
  if (how == 27) copy_async<8>(memory, arguments.values + 1, true);
  if (how == 14) *reinterpret_cast<Word*>(memory + 2) = 0;
  if (how == 15) arguments.values[1ll << 40] = 0;
  if (how == 16) value = numbers[how / 4];
  if (how == 17) value = how / (how - 17);
  if (how == 18) {
    if (thread < 32)
      block_barrier();
    else
      block_barrier();
  }
  if (how == 19) value = arguments.values[64];
  if (how != 20 || thread % 2) take_turn();
  arguments.values[thread] = value;
}

// Barriers that are missing.
KERNEL(64, 1) races(Arguments arguments) {
  SHARED_MEMORY(memory);  // 1024 bytes
  float* shared = reinterpret_cast<float*>(memory);
  const int thread = thread_index(), how = arguments.how;
  // Between threads.
  shared[thread] = thread;
  if (how != 1) block_barrier();
  float value = shared[(thread + 1) % 64];
  block_barrier();
  // From one warp to the next.
  if (warp_index() == 0) shared[thread] = 2 * thread;
  if (how != 2) block_barrier();
  if (warp_index() == 1) value += shared[thread - 32];
  block_barrier();
  // From the lanes to a load of the warp.
  for (int i = 0; i < 4; ++i) shared[4 * (thread ^ 1) + i] = thread;
  if (how != 3) warp_barrier();
  Word words[4];
  load_matrices<4, false>(words, shared + 4 * thread);
  value += bits_float(words[0]);
  block_barrier();
  // A copy that comes before the values it replaces are read.
  shared[thread] = thread;
  block_barrier();
  if (how != 4) value += shared[63 - thread];
  if (how != 4) block_barrier();
  if (thread < 16) copy_async(shared + 4 * thread, arguments.values + 64 + 4 * thread, true);
  if (how == 4) value += shared[63 - thread];
  if (how == 4) block_barrier();
  // A copy that is not waited for when it is read.
  if (how != 5) wait_for_copies();
  block_barrier();
  value += shared[thread];
  wait_for_copies();
  block_barrier();
  // From a load of the warp to the other warp, though nobody uses what was loaded.
  load_matrices<4, false>(words, shared + 4 * (how == 6 ? thread ^ 32 : thread));
  warp_barrier();
  shared[4 * thread] = 0;
  block_barrier();
  // From one lane to another that writes there.
  value += shared[thread ^ 1];
  if (how != 7) warp_barrier();
  shared[thread] = 0;
  block_barrier();
  // Copies in groups: the first one has arrived, the second one may still be on its way.
  for (int group = 1; group < 3; ++group) {
    if (thread < 16) copy_async(shared + 64 * group + 4 * thread, arguments.values + 4 * thread + 64, true);
    end_group();
  }
  wait_for_groups<1>();
  block_barrier();
  value += shared[(how == 9 ? 128 : 64) + thread];
  wait_for_groups<0>();
  block_barrier();
  value += shared[128 + (thread ^ 32)];
  // Between threads, in global memory.
  arguments.values[thread] = value;
  if (how != 8) block_barrier();
  value += arguments.values[thread ^ 33];
  block_barrier();
  arguments.values[thread] = value;
}
