// What the kernels' builds call (machine.h, intrinsics.cuh, and the sanitizers' calls), built once for all of them.
#include "intrinsics.cuh"

#include "collectives.h"

namespace host {

Machine machine;
alignas(4096) unsigned char memory_and_guards[GUARD + MOST_SHARED + GUARD];

// The first `count` copies of this thread that are under way.
static void finish_copies(size_t count) {
  std::vector<Copy>& copies = current().copies;
  for (size_t i = 0; i < count; ++i) {
    note(copies[i].to, copies[i].bytes, true);
    do_copy(copies[i]);
  }
  copies.erase(copies.begin(), copies.begin() + count);
}

void copy_async(void* shared, const void* global, int bytes, bool valid) {
  check_shared(shared, "copy_async", bytes);
  if (reinterpret_cast<uintptr_t>(global) % bytes) fail("copy_async: address %p is not a multiple of %d", global, bytes);
  note(shared, bytes, true);
  Copy copy = {shared, valid ? global : nullptr, bytes, false};
  const int order = machine.launch.order;
  if (order == REVERSE || (order == RANDOM && draw() % 2)) do_copy(copy);
  current().copies.push_back(copy);
}

void wait_for_groups(size_t left) {
  std::vector<size_t>& groups = current().groups;
  if (groups.size() <= left) return;
  const size_t arrived = groups.size() - left, copies = groups[arrived - 1];
  finish_copies(copies);
  groups.erase(groups.begin(), groups.begin() + arrived);
  for (size_t& end : groups) end -= copies;
}

Words load_matrices(int count, bool transposed, const void* row, const char* file, int line) {
  Thread& lane = current();
  Warp& warp = *lane.warp;
  if (lane.lane < 8 * count) {  // others' addresses are not used
    check_shared(row, "load_matrices");
    note(row, 16, false);
    // Read as the lane arrives: what others write without a barrier may come later.
    memcpy(warp.rows[lane.lane], row, 16);
  }
  constexpr const char* names[2][3] = {{"load_matrices<1, false>", "load_matrices<2, false>", "load_matrices<4, false>"},
                                       {"load_matrices<1, true>", "load_matrices<2, true>", "load_matrices<4, true>"}};
  constexpr void (*works[2][3])(Warp&) = {{share_matrices<1, false>, share_matrices<2, false>, share_matrices<4, false>},
                                          {share_matrices<1, true>, share_matrices<2, true>, share_matrices<4, true>}};
  meet({names[transposed][count / 2], file, line}, works[transposed][count / 2]);
  Words words;
  memcpy(&words, warp.results[lane.lane], sizeof words);
  return words;
}

void store_matrices(int count, void* row, Words words, const char* file, int line) {
  Thread& lane = current();
  Warp& warp = *lane.warp;
  memcpy(warp.words[lane.lane], &words, sizeof words);
  constexpr const char* names[3] = {"store_matrices<1>", "store_matrices<2>", "store_matrices<4>"};
  constexpr void (*works[3])(Warp&) = {gather_rows<1>, gather_rows<2>, gather_rows<4>};
  meet({names[count / 2], file, line}, works[count / 2]);
  if (lane.lane >= 8 * count) return;  // others' addresses are not used
  check_shared(row, "store_matrices");
  note(row, 16, true);
  memcpy(row, warp.rows[lane.lane], 16);
}

Sums multiply(Product product, Sums sums, Words left, uint2 right, const char* file, int line) {
  constexpr const char* names[5] = {"multiply_add<bf16>", "multiply_add<bf16>", "multiply_add<f16>", "multiply_add<f16>",
                                    "multiply_add_tf32"};
  constexpr void (*works[5])(Warp&) = {multiply_scalars<bf16, 8>, multiply_scalars<bf16, 16>, multiply_scalars<f16, 8>,
                                       multiply_scalars<f16, 16>, multiply_floats};
  Thread& lane = current();
  Warp& warp = *lane.warp;
  memcpy(warp.words[lane.lane], &left, 16);
  memcpy(warp.words[lane.lane] + 4, &right, 8);
  memcpy(warp.results[lane.lane], &sums, 16);
  meet({names[product], file, line}, works[product]);
  memcpy(&sums, warp.results[lane.lane], 16);
  return sums;
}

}  // namespace host

void block_barrier(const char* file, int line) { host::wait_for_block({"block_barrier", file, line}); }

void warp_barrier(const char* file, int line) {
  host::meet({"warp_barrier", file, line}, [](host::Warp& warp) { ++warp.phase; });
}

static Word shuffle_words(const char* name, Word word, int from, const char* file, int line) {
  host::Thread& lane = host::current();
  host::Warp& warp = *lane.warp;
  warp.words[lane.lane][0] = word;
  warp.words[lane.lane][1] = from;
  host::meet({name, file, line}, host::shuffle);
  return warp.results[lane.lane][0];
}

Word shuffle(Word word, int lane, const char* file, int line) { return shuffle_words("shuffle", word, lane, file, line); }

float shuffle_xor(float value, int mask, const char* file, int line) {
  return bits_float(shuffle_words("shuffle_xor", float_bits(value), lane_index() ^ mask, file, line));
}

void assume_threads(int count) {
  if (host::machine.launch.threads != count)
    host::fail("assume_threads: %d threads where there are %d", count, host::machine.launch.threads);
}

Word turn_matrix(Word word, const char* file, int line) {
  host::Thread& lane = host::current();
  host::Warp& warp = *lane.warp;
  warp.words[lane.lane][0] = word;
  host::meet({"turn_matrix", file, line}, host::turn);
  return warp.results[lane.lane][0];
}

void wait_for_copies() {
  host::finish_copies(host::current().copies.size());
  host::current().groups.clear();
}

void end_group() { host::current().groups.push_back(host::current().copies.size()); }

void bring_near(const void* global, int bytes) {
  if (reinterpret_cast<uintptr_t>(global) % 16 || bytes % 16 || bytes <= 0)
    host::fail("bring_near: %d bytes at address %p are not in pieces of 16", bytes, global);
  [[maybe_unused]] volatile char read = static_cast<const char*>(global)[0];
  read = static_cast<const char*>(global)[bytes - 1];
}
