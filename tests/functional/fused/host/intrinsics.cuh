// The device's intrinsics by ordinary means, for the host: the same names and types, and the layouts of the PTX manual.
//
// Beyond what a device does, it says where lanes or threads do not meet, where an address is wrong for the instruction,
// and does background copies as late as the program allows, so that a missing wait shows (in reverse order as early as it
// allows, so that a missing barrier before them shows).
#pragma once
#include "machine.h"
#include "scalars.h"

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

DEVICE int thread_index() { return host::machine.current->thread; }
DEVICE int block_index() { return host::machine.block_x; }
DEVICE int block_row() { return host::machine.block_y; }
DEVICE int block_count() { return host::machine.launch.grid_x; }
DEVICE int warp_index() { return thread_index() >> 5; }
DEVICE int lane_index() { return host::machine.current->lane; }

// Where a collective is called from: two calls on different lines are not the same one.
#define HOST_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

void assume_threads(int count);  // what a device's compiler believes is checked here
DEVICE int anew(int value) { return value; }
DEVICE int thread_anew(int count) { return assume_threads(count), thread_index(); }
DEVICE void take_turn() { ++host::machine.turns; }  // the host runs one kernel at a time
void block_barrier(HOST_SITE);
void warp_barrier(HOST_SITE);
float shuffle_xor(float value, int mask, HOST_SITE);
Word shuffle(Word word, int lane, HOST_SITE);  // that lane's word

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
DEVICE float logarithm_of_two(float value) { return __builtin_log2f(host::flush(value)); }
DEVICE float exponential(float value) { return power_of_two(value * 1.4426950408889634f); }

// Two floats rounded to T, in one word.
template <class T>
DEVICE Word pack(float, float) {
  __builtin_trap();
}

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

struct Words {
  Word first, second, third, fourth;
};

struct Sums {
  float first, second, third, fourth;
};

enum Product { BF16_8, BF16_16, F16_8, F16_16, TF32_8 };

Words load_matrices(int count, bool transposed, const void* row, const char* file, int line);
void store_matrices(int count, void* row, Words words, const char* file, int line);
Sums multiply(Product product, Sums sums, Words left, uint2 right, const char* file, int line);
void copy_async(void* shared, const void* global, int bytes, bool valid);
void wait_for_groups(size_t left);

}  // namespace host

// COUNT (1, 2 or 4) matrices of 8 x 8 16-bit scalars from shared memory: lane l gives the address of row l % 8 of matrix
// l / 8, and gets of each matrix the elements (l / 4, 2 (l % 4)) and the next one; TRANSPOSED swaps rows and columns.
template <int COUNT, bool TRANSPOSED>
DEVICE void load_matrices(Word (&words)[COUNT], const void* row, HOST_SITE) {
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "the instruction loads 1, 2 or 4 matrices");
  const host::Words loaded = host::load_matrices(COUNT, TRANSPOSED, row, file, line);
  __builtin_memcpy(words, &loaded, sizeof words);
}

// The way back of what is not transposed.
constexpr bool MATRICES_ARE_STORED = true;

template <int COUNT>
DEVICE void store_matrices(void* row, const Word (&words)[COUNT], HOST_SITE) {
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "the instruction stores 1, 2 or 4 matrices");
  host::Words stored = {};
  __builtin_memcpy(&stored, words, sizeof words);
  host::store_matrices(COUNT, row, stored, file, line);
}

// A matrix of 8 x 8 16-bit scalars in registers, lane l with the elements (l / 4, 2 (l % 4)) and the next one, with rows and
// columns swapped.
Word turn_matrix(Word word, HOST_SITE);

namespace host {

// The products of 16-bit scalars, by the depth of the sum; there are no others.
template <class T>
struct Products;
template <>
struct Products<bf16> {
  static constexpr Product OF_8 = BF16_8, OF_16 = BF16_16;
};
template <>
struct Products<f16> {
  static constexpr Product OF_8 = F16_8, OF_16 = F16_16;
};

DEVICE void multiply_words(Product product, float& d0, float& d1, float& d2, float& d3, Words left, uint2 right,
                           const char* file, int line) {
  const Sums sums = multiply(product, {d0, d1, d2, d3}, left, right, file, line);
  d0 = sums.first, d1 = sums.second, d2 = sums.third, d3 = sums.fourth;
}

}  // namespace host

// d += a b for a 16 x 16 and a 16 x 8 matrix, their fragments laid out as PTX's mma.m16n8k16 says.
template <class T>
DEVICE void multiply_add(float& d0, float& d1, float& d2, float& d3, const Word (&a)[4], const Word (&b)[2], HOST_SITE) {
  host::multiply_words(host::Products<T>::OF_16, d0, d1, d2, d3, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}, file, line);
}

// The same for 16 x 8 and 8 x 8.
template <class T>
DEVICE void multiply_add(float& d0, float& d1, float& d2, float& d3, const Word (&a)[2], const Word (&b)[1], HOST_SITE) {
  host::multiply_words(host::Products<T>::OF_8, d0, d1, d2, d3, {a[0], a[1]}, {b[0]}, file, line);
}

// The same for 16 x 8 and 8 x 8 floats of which only the bits that round_to_tf32 leaves are used.
DEVICE void multiply_add_tf32(float& d0, float& d1, float& d2, float& d3, const float (&a)[4], const float (&b)[2],
                              HOST_SITE) {
  host::multiply_words(host::TF32_8, d0, d1, d2, d3,
                       {float_bits(a[0]), float_bits(a[1]), float_bits(a[2]), float_bits(a[3])},
                       {float_bits(b[0]), float_bits(b[1])}, file, line);
}

// 16 or 8 bytes from global to shared memory in the background, or as many zero bytes if not valid.
template <int BYTES = 16>
DEVICE void copy_async(void* shared, const void* global, bool valid) {
  host::copy_async(shared, global, BYTES, valid);
}

// Nothing comes of it, but the whole stretch must be there.
void bring_near(const void* global, int bytes);

// Until this thread's copies have arrived; others see them after a barrier.
void wait_for_copies();

// The copies of this thread since the last call become a group, which may be empty.
void end_group();

// Until all of this thread's groups have arrived but the last COUNT.
template <int COUNT>
DEVICE void wait_for_groups() {
  host::wait_for_groups(COUNT);
}
