// Sums over the rows of a matrix, which are what the blocks of another kernel left behind: in a fixed order, so that two
// runs give the same bits. A block takes 32 columns, a warp every WARPS-th row of them.
#pragma once
#include "fragments.cuh"

constexpr int THREADS = 32 * WARPS;

// Adds COUNT numbers of each row: `numbers` points to this lane's first one in row 0, the others lie `apart` floats from
// each other. The sums are those of warp 0's lanes; true for these. Shared memory: COUNT THREADS floats.
template <int COUNT>
DEVICE bool add_rows(float (&sums)[COUNT], const float* numbers, long long apart, int rows, long long stride, bool exists,
                     float* shared) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) sums[i] = 0.f;
  if (exists) {
#pragma unroll 8
    for (int row = warp_index(); row < rows; row += WARPS)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) sums[i] += numbers[row * stride + i * apart];
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) shared[i * THREADS + thread_index()] = sums[i];
  block_barrier();
  if (warp_index() != 0) return false;
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) sums[i] += shared[i * THREADS + warp * 32 + lane_index()];
  return exists;
}
