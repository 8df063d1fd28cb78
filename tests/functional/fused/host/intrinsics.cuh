// The device's intrinsics by ordinary means, for the host: the same names and types, and the layouts of the PTX manual.
//
// Beyond what a device does, it says where lanes or threads do not meet, where an address is wrong for the instruction,
// and does background copies as late as the program allows, so that a missing wait shows (in reverse order as early as it
// allows, so that a missing barrier before them shows).
#pragma once
#include "machine.h"
#include "races.h"

#define DEVICE inline
#define KERNEL(threads, blocks) extern "C" __attribute__((used, noinline)) void
#define SHARED_MEMORY(name) [[maybe_unused]] static unsigned char* const name = host::shared_memory

// What the device's compiler knows without a header.
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned int x, y;
};
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }
constexpr int min(int one, int other) { return other < one ? other : one; }
constexpr int max(int one, int other) { return one < other ? other : one; }

using Word = unsigned int;  // two 16-bit scalars, the lower one first, or one float

struct bf16 {
  unsigned short bits;
};

struct f16 {
  unsigned short bits;
};

DEVICE int thread_index() { return host::machine.current->thread; }
DEVICE int block_index() { return host::machine.block_x; }
DEVICE int block_row() { return host::machine.block_y; }
DEVICE int block_count() { return host::machine.launch.grid_x; }
DEVICE int warp_index() { return thread_index() >> 5; }
DEVICE int lane_index() { return host::machine.current->lane; }

DEVICE Word float_bits(float value) {
  Word bits;
  memcpy(&bits, &value, 4);
  return bits;
}

DEVICE float bits_float(Word bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Where a collective is called from: two calls on different lines are not the same one.
#define HOST_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

DEVICE int anew(int value) { return value; }
DEVICE void take_turn() { ++host::machine.turns; }  // the host runs one kernel at a time
DEVICE void block_barrier(HOST_SITE) { host::wait_for_block({"block_barrier", file, line}); }

DEVICE void warp_barrier(HOST_SITE) {
  host::meet({"warp_barrier", file, line}, [](host::Warp& warp) { ++warp.phase; });
}

DEVICE float shuffle_xor(float value, int mask, HOST_SITE) {
  host::Fiber& lane = *host::machine.current;
  host::Warp& warp = *lane.warp;
  warp.words[lane.lane][0] = float_bits(value);
  warp.words[lane.lane][1] = mask;
  host::meet({"shuffle_xor", file, line}, [](host::Warp& all) {
    for (int l = 0; l < host::LANES; ++l) {
      const Word other = l ^ all.words[l][1];
      all.results[l][0] = all.words[other < host::LANES ? other : l][0];
    }
  });
  return bits_float(warp.results[lane.lane][0]);
}

DEVICE float square_root(float value) { return __builtin_sqrtf(value); }
DEVICE float multiply_then_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }  // rounded once

// The larger one, of zeros the positive one; not a number if one of them is not.
DEVICE float maximum(float one, float other) {
  if (one != one || other != other) return bits_float(0x7fffffff);
  return one == other ? (__builtin_signbit(one) ? other : one) : one > other ? one : other;
}

namespace host {
inline float flush(float value) { return __builtin_fabsf(value) < 0x1p-126f ? __builtin_copysignf(0.f, value) : value; }
}  // namespace host

DEVICE float power_of_two(float value) { return host::flush(__builtin_exp2f(host::flush(value))); }
DEVICE float exponential(float value) { return power_of_two(value * 1.4426950408889634f); }

DEVICE float to_float(float value) { return value; }
DEVICE float to_float(bf16 value) { return bits_float(static_cast<Word>(value.bits) << 16); }
DEVICE float to_float(f16 value) {
  const Word sign = static_cast<Word>(value.bits & 0x8000) << 16;
  const Word shifted = static_cast<Word>(value.bits & 0x7fff) << 13;
  // A power of two moves the exponent to its place, of subnormal values too.
  const Word finite = float_bits(bits_float(shifted) * 0x1p112f);
  return bits_float(sign | (shifted >= 0x0f800000 ? shifted | 0x7f800000 : finite));
}

namespace host {

inline Word round_to_bf16(float value) {
  const Word bits = float_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline Word round_to_f16(float value) {
  const Word bits = float_bits(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return 0x7fff;
  if (size >= 0x477ff000) return sign | 0x7c00;  // from 65520 on the nearest is infinite
  // Below 2^-14 a result's last place is 2^-24, which is that of floats from 0.5 to 1: the addition rounds.
  if (size < 0x38800000) return sign | (float_bits(bits_float(size) + 0.5f) - 0x3f000000);
  return sign | ((size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13);
}

}  // namespace host

// Two floats rounded to T, in one word.
template <class T>
DEVICE Word pack(float low, float high);

template <>
DEVICE Word pack<bf16>(float low, float high) {
  return host::round_to_bf16(low) | host::round_to_bf16(high) << 16;
}

template <>
DEVICE Word pack<f16>(float low, float high) {
  return host::round_to_f16(low) | host::round_to_f16(high) << 16;
}

// The 10 leading bits of a float's fraction, rounded (ties away from zero), as a float: as devices do it, with the lower
// bits zero.
DEVICE float round_to_tf32(float value) {
  const Word bits = float_bits(value);
  return bits_float(((bits & 0x7fffffff) < 0x7f800000 ? bits + 0x1000 : bits) & 0xffffe000);
}

namespace host {

template <int COUNT, bool TRANSPOSED>
void share_matrices(Warp& warp) {
  for (int m = 0; m < COUNT; ++m) {
    unsigned short matrix[8][8];
    memcpy(matrix, warp.rows[8 * m], sizeof matrix);
    for (int l = 0; l < LANES; ++l) {
      const int i = l / 4, j = l % 4 * 2;
      warp.results[l][m] = TRANSPOSED ? matrix[j][i] | static_cast<Word>(matrix[j + 1][i]) << 16
                                      : matrix[i][j] | static_cast<Word>(matrix[i][j + 1]) << 16;
    }
  }
}

}  // namespace host

// COUNT (1, 2 or 4) matrices of 8 x 8 16-bit scalars from shared memory: lane l gives the address of row l % 8 of matrix
// l / 8, and gets of each matrix the elements (l / 4, 2 (l % 4)) and the next one; TRANSPOSED swaps rows and columns.
template <int COUNT, bool TRANSPOSED>
DEVICE void load_matrices(Word (&words)[COUNT], const void* row, HOST_SITE) {
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "the instruction loads 1, 2 or 4 matrices");
  host::Fiber& lane = *host::machine.current;
  host::Warp& warp = *lane.warp;
  if (lane.lane < 8 * COUNT) {  // others' addresses are not used
    host::check_shared(row, "load_matrices");
    host::note(row, 16, false);
    // Read as the lane arrives: what others write without a barrier may come later.
    memcpy(warp.rows[lane.lane], row, 16);
  }
  constexpr const char* names[2][3] = {{"load_matrices<1, false>", "load_matrices<2, false>", "load_matrices<4, false>"},
                                       {"load_matrices<1, true>", "load_matrices<2, true>", "load_matrices<4, true>"}};
  host::meet({names[TRANSPOSED][COUNT / 2], file, line}, host::share_matrices<COUNT, TRANSPOSED>);
  for (int i = 0; i < COUNT; ++i) words[i] = warp.results[lane.lane][i];
}

// A matrix of 8 x 8 16-bit scalars in registers, lane l with the elements (l / 4, 2 (l % 4)) and the next one, with rows and
// columns swapped.
DEVICE Word turn_matrix(Word word, HOST_SITE) {
  host::Fiber& lane = *host::machine.current;
  host::Warp& warp = *lane.warp;
  warp.words[lane.lane][0] = word;
  host::meet({"turn_matrix", file, line}, [](host::Warp& all) {
    const auto element = [&](int row, int column) { return all.words[row * 4 + column / 2][0] >> 16 * (column % 2) & 0xffff; };
    for (int l = 0; l < host::LANES; ++l)
      all.results[l][0] = element(l % 4 * 2, l / 4) | element(l % 4 * 2 + 1, l / 4) << 16;
  });
  return warp.results[lane.lane][0];
}

namespace host {

typedef double Doubles __attribute__((vector_size(64)));

inline float tf32_float(Word word) { return bits_float(word & 0xffffe000); }

// d (16 x 8) += a (16 x DEPTH) b (DEPTH x 8): exact products, summed in double precision and rounded once.
template <int DEPTH>
void multiply_matrices(Warp& warp, const double (&a)[16][DEPTH], const Doubles (&b)[DEPTH]) {
  for (int i = 0; i < 16; ++i) {
    Doubles sum;
    for (int j = 0; j < 8; ++j) sum[j] = bits_float(warp.results[i % 8 * 4 + j / 2][i / 8 * 2 + j % 2]);
    for (int k = 0; k < DEPTH; ++k) sum += a[i][k] * b[k];
    for (int j = 0; j < 8; ++j)
      warp.results[i % 8 * 4 + j / 2][i / 8 * 2 + j % 2] = float_bits(static_cast<float>(sum[j]));
  }
}

// mma.m16n8k16 and mma.m16n8k8: lane l holds of a the rows l / 4 (even words) and l / 4 + 8 (odd ones) and of b the column
// l / 4, each word two elements along the sum from 2 (l % 4) on, words for the second half of 16 after the others.
template <class T, int DEPTH>
void multiply_scalars(Warp& warp) {
  double a[16][DEPTH];
  Doubles b[DEPTH];
  for (int l = 0; l < LANES; ++l) {
    for (int w = 0; w < DEPTH / 4; ++w)
      for (int e = 0; e < 2; ++e)
        a[l / 4 + w % 2 * 8][l % 4 * 2 + e + w / 2 * 8] =
            to_float(T{static_cast<unsigned short>(warp.words[l][w] >> 16 * e)});
    for (int w = 0; w < DEPTH / 8; ++w)
      for (int e = 0; e < 2; ++e)
        b[l % 4 * 2 + e + w * 8][l / 4] = to_float(T{static_cast<unsigned short>(warp.words[l][4 + w] >> 16 * e)});
  }
  multiply_matrices(warp, a, b);
}

// mma.m16n8k8 for tf32: one element in a word, the step of the sum l % 4, and l % 4 + 4 in the later words.
inline void multiply_floats(Warp& warp) {
  double a[16][8];
  Doubles b[8];
  for (int l = 0; l < LANES; ++l) {
    for (int w = 0; w < 4; ++w) a[l / 4 + w % 2 * 8][l % 4 + w / 2 * 4] = tf32_float(warp.words[l][w]);
    for (int w = 0; w < 2; ++w) b[l % 4 + w * 4][l / 4] = tf32_float(warp.words[l][4 + w]);
  }
  multiply_matrices(warp, a, b);
}

template <int LEFT, int RIGHT>
void multiply_words(float& d0, float& d1, float& d2, float& d3, const Word (&a)[LEFT], const Word (&b)[RIGHT],
                    const Site& site, void (*work)(Warp&)) {
  Fiber& lane = *machine.current;
  Warp& warp = *lane.warp;
  for (int i = 0; i < LEFT; ++i) warp.words[lane.lane][i] = a[i];
  for (int i = 0; i < RIGHT; ++i) warp.words[lane.lane][4 + i] = b[i];
  Word(&d)[4] = warp.results[lane.lane];
  d[0] = float_bits(d0), d[1] = float_bits(d1), d[2] = float_bits(d2), d[3] = float_bits(d3);
  meet(site, work);
  d0 = bits_float(d[0]), d1 = bits_float(d[1]), d2 = bits_float(d[2]), d3 = bits_float(d[3]);
}

template <class T>
constexpr const char* NAME = nullptr;
template <>
inline constexpr const char* NAME<bf16> = "multiply_add<bf16>";
template <>
inline constexpr const char* NAME<f16> = "multiply_add<f16>";

}  // namespace host

// d += a b for a 16 x 16 and a 16 x 8 matrix, their fragments laid out as PTX's mma.m16n8k16 says.
template <class T>
DEVICE void multiply_add(float& d0, float& d1, float& d2, float& d3, const Word (&a)[4], const Word (&b)[2], HOST_SITE) {
  host::multiply_words(d0, d1, d2, d3, a, b, {host::NAME<T>, file, line}, host::multiply_scalars<T, 16>);
}

// The same for 16 x 8 and 8 x 8.
template <class T>
DEVICE void multiply_add(float& d0, float& d1, float& d2, float& d3, const Word (&a)[2], const Word (&b)[1], HOST_SITE) {
  host::multiply_words(d0, d1, d2, d3, a, b, {host::NAME<T>, file, line}, host::multiply_scalars<T, 8>);
}

// The same for 16 x 8 and 8 x 8 floats of which only the bits that round_to_tf32 leaves are used.
DEVICE void multiply_add_tf32(float& d0, float& d1, float& d2, float& d3, const float (&a)[4], const float (&b)[2],
                              HOST_SITE) {
  const Word a_words[4] = {float_bits(a[0]), float_bits(a[1]), float_bits(a[2]), float_bits(a[3])};
  const Word b_words[2] = {float_bits(b[0]), float_bits(b[1])};
  host::multiply_words(d0, d1, d2, d3, a_words, b_words, {"multiply_add_tf32", file, line}, host::multiply_floats);
}

namespace host {

// The first `count` copies of this thread that are under way.
inline void finish_copies(size_t count) {
  std::vector<Copy>& copies = machine.current->copies;
  for (size_t i = 0; i < count; ++i) {
    note(copies[i].to, 16, true);
    do_copy(copies[i]);
  }
  copies.erase(copies.begin(), copies.begin() + count);
}

}  // namespace host

// 16 bytes from global to shared memory in the background, or 16 zero bytes if not valid.
DEVICE void copy_async(void* shared, const void* global, bool valid) {
  host::check_shared(shared, "copy_async");
  if (reinterpret_cast<uintptr_t>(global) % 16) host::fail("copy_async: address %p is not a multiple of 16", global);
  host::note(shared, 16, true);
  host::Copy copy = {shared, valid ? global : nullptr, false};
  const int order = host::machine.launch.order;
  if (order == host::REVERSE || (order == host::RANDOM && host::draw() % 2)) host::do_copy(copy);
  host::machine.current->copies.push_back(copy);
}

// Nothing comes of it, but the whole stretch must be there.
DEVICE void bring_near(const void* global, int bytes) {
  if (reinterpret_cast<uintptr_t>(global) % 16 || bytes % 16 || bytes <= 0)
    host::fail("bring_near: %d bytes at address %p are not in pieces of 16", bytes, global);
  [[maybe_unused]] volatile char read = static_cast<const char*>(global)[0];
  read = static_cast<const char*>(global)[bytes - 1];
}

// Until this thread's copies have arrived; others see them after a barrier.
DEVICE void wait_for_copies() { host::finish_copies(host::machine.current->copies.size()), host::machine.current->groups.clear(); }

// The copies of this thread since the last call become a group, which may be empty.
DEVICE void end_group() { host::machine.current->groups.push_back(host::machine.current->copies.size()); }

// Until all of this thread's groups have arrived but the last COUNT.
template <int COUNT>
DEVICE void wait_for_groups() {
  std::vector<size_t>& groups = host::machine.current->groups;
  if (groups.size() <= COUNT) return;
  const size_t arrived = groups.size() - COUNT, copies = groups[arrived - 1];
  host::finish_copies(copies);
  groups.erase(groups.begin(), groups.begin() + arrived);
  for (size_t& end : groups) end -= copies;
}
