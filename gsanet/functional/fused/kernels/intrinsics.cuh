// The instructions that C++ has no words for: this is the only file with PTX in it. The tests build the kernels for the
// host with a file of the same name that does the same by ordinary means.
#pragma once

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]

using Word = unsigned int;  // two 16-bit scalars, the lower one first, or one float

struct bf16 {
  unsigned short bits;
};

struct f16 {
  unsigned short bits;
};

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE int block_row() { return blockIdx.y; }
DEVICE int block_count() { return gridDim.x; }
DEVICE int warp_index() { return threadIdx.x >> 5; }
DEVICE int lane_index() { return threadIdx.x & 31; }
// The block has so many threads: conditions on a thread's number that always hold are none, and what follows from it is
// worked out once for what would be on both sides of them.
DEVICE void assume_threads(int count) { __builtin_assume(threadIdx.x < count); }
// The same number, but the compiler does not know: what follows from it is worked out here and not kept from before.
DEVICE int anew(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
// The thread's number in a block of so many, not known from before.
DEVICE int thread_anew(int count) {
  const int thread = anew(threadIdx.x);
  __builtin_assume(thread >= 0 && thread < count);
  return thread;
}
// Waits until all kernels before this one have finished and what they wrote is there, then lets the next one be set up. A
// kernel may be launched while the one before it runs (../dependent.py), so each of its threads calls this once, before it
// touches memory that is not the block's own, or returns. In this order: whoever is set up knows that all is finished but
// the one kernel before it.
DEVICE void take_turn() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void block_barrier() { __syncthreads(); }
DEVICE void warp_barrier() { __syncwarp(); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE Word shuffle(Word word, int lane) { return __shfl_sync(0xffffffffu, word, lane); }  // that lane's word
DEVICE Word float_bits(float value) { return __float_as_uint(value); }
DEVICE float bits_float(Word bits) { return __uint_as_float(bits); }
DEVICE float square_root(float value) { return sqrtf(value); }
DEVICE float multiply_then_add(float a, float b, float c) { return fmaf(a, b, c); }  // rounded once

// The larger one; not a number if one of them is not.
DEVICE float maximum(float one, float other) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(one), "f"(other));
  return result;
}

DEVICE float power_of_two(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

DEVICE float logarithm_of_two(float value) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

DEVICE float exponential(float value) { return power_of_two(value * 1.4426950408889634f); }

DEVICE float to_float(float value) { return value; }
DEVICE float to_float(bf16 value) { return __uint_as_float(static_cast<Word>(value.bits) << 16); }
DEVICE float to_float(f16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

// Two floats rounded to T, in one word. Floats themselves are not packed: what names pack<float> is never run, but what
// is not a template needs a definition even of what an `if constexpr` leaves out.
template <class T>
DEVICE Word pack(float, float) {
  __trap();
  return 0;
}

template <>
DEVICE Word pack<bf16>(float low, float high) {
  Word word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

template <>
DEVICE Word pack<f16>(float low, float high) {
  Word word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// The 10 leading bits of a float's fraction, rounded, as a float.
DEVICE float round_to_tf32(float value) {
  Word word;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(value));
  return __uint_as_float(word);
}

// COUNT (1, 2 or 4) matrices of 8 x 8 16-bit scalars from shared memory: lane l gives the address of row l % 8 of matrix
// l / 8, and gets of each matrix the elements (l / 4, 2 (l % 4)) and the next one; TRANSPOSED swaps rows and columns. The compiler may
// move ordinary accesses past these loads, but neither past a barrier: put one between a store and a load of the same place.
template <int COUNT, bool TRANSPOSED>
DEVICE void load_matrices(Word (&words)[COUNT], const void* row) {
  const Word address = static_cast<Word>(__cvta_generic_to_shared(row));
  if constexpr (COUNT == 4) {
    if constexpr (TRANSPOSED)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address));
    else
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address));
  } else if constexpr (COUNT == 2) {
    if constexpr (TRANSPOSED)
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                   : "=r"(words[0]), "=r"(words[1]) : "r"(address));
    else
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                   : "=r"(words[0]), "=r"(words[1]) : "r"(address));
  } else {
    if constexpr (TRANSPOSED)
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                   : "=r"(words[0]) : "r"(address));
    else
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(words[0]) : "r"(address));
  }
}

// The way back of what is not transposed, for machines that can: others have MATRICES_ARE_STORED false.
#if __CUDA_ARCH__ >= 900
constexpr bool MATRICES_ARE_STORED = true;
#else
constexpr bool MATRICES_ARE_STORED = false;
#endif

template <int COUNT>
DEVICE void store_matrices(void* row, const Word (&words)[COUNT]) {
#if __CUDA_ARCH__ >= 900
  const Word address = static_cast<Word>(__cvta_generic_to_shared(row));
  if constexpr (COUNT == 4)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
  else if constexpr (COUNT == 2)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
                 ::"r"(address), "r"(words[0]), "r"(words[1]) : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(address), "r"(words[0]) : "memory");
#endif
}

// A matrix of 8 x 8 16-bit scalars in registers, lane l with the elements (l / 4, 2 (l % 4)) and the next one, with rows and
// columns swapped.
DEVICE Word turn_matrix(Word word) {
  Word turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
  return turned;
}

// d += a b for a 16 x 16 and a 16 x 8 matrix, their fragments laid out as PTX's mma.m16n8k16 says.
template <class T>
DEVICE void multiply_add(float& d0, float& d1, float& d2, float& d3, const Word (&a)[4], const Word (&b)[2]);

template <>
DEVICE void multiply_add<bf16>(float& d0, float& d1, float& d2, float& d3, const Word (&a)[4], const Word (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
DEVICE void multiply_add<f16>(float& d0, float& d1, float& d2, float& d3, const Word (&a)[4], const Word (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same for 16 x 8 and 8 x 8.
template <class T>
DEVICE void multiply_add(float& d0, float& d1, float& d2, float& d3, const Word (&a)[2], const Word (&b)[1]);

template <>
DEVICE void multiply_add<bf16>(float& d0, float& d1, float& d2, float& d3, const Word (&a)[2], const Word (&b)[1]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

template <>
DEVICE void multiply_add<f16>(float& d0, float& d1, float& d2, float& d3, const Word (&a)[2], const Word (&b)[1]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

// The same for 16 x 8 and 8 x 8 floats of which only the bits that round_to_tf32 leaves are used.
DEVICE void multiply_add_tf32(float& d0, float& d1, float& d2, float& d3, const float (&a)[4], const float (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// 16 or 8 bytes from global to shared memory in the background, or as many zero bytes if not valid.
template <int BYTES = 16>
DEVICE void copy_async(void* shared, const void* global, bool valid) {
  const Word address = static_cast<Word>(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(valid ? 16 : 0) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(global), "n"(BYTES), "r"(valid ? BYTES : 0) : "memory");
}

// Have so many bytes, a multiple of 16, come to the cache that all multiprocessors share. Nothing is read: what is written
// there later is what is found there later, so that it may be called before `take_turn`, whoever writes.
DEVICE void bring_near(const void* global, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

// Until this thread's copies have arrived; others see them after a barrier.
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The copies of this thread since the last call become a group, which may be empty.
DEVICE void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all of this thread's groups have arrived but the last COUNT.
template <int COUNT>
DEVICE void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}
