// Maps as rows of channels, one row a pixel: a thread moves 16 bytes of a row at once, its group of channels.
//
// The constants in capitals are given on the compiler's command line: SCALAR, WARPS and BLOCKS.
#pragma once
#include <intrinsics.cuh>

using T = SCALAR;

constexpr int THREADS = 32 * WARPS;
constexpr int WIDTH = 16 / sizeof(T);  // channels of a group
constexpr bool WHOLE_WORDS = sizeof(T) == 4;

struct alignas(16) Group {
  Word words[4];
};

DEVICE Group load_group(const void* map, long long first) {
  return *reinterpret_cast<const Group*>(static_cast<const T*>(map) + first);
}

DEVICE void store_group(void* map, long long first, const Group& group) {
  *reinterpret_cast<Group*>(static_cast<T*>(map) + first) = group;
}

template <class S = T>
DEVICE float channel(const Group& group, int i) {
  if constexpr (WHOLE_WORDS) {
    return bits_float(group.words[i]);
  } else {
    return to_float(S{static_cast<unsigned short>(group.words[i / 2] >> 16 * (i % 2))});
  }
}

template <class S = T>
DEVICE Group pack_group(const float (&values)[WIDTH]) {
  Group group;
  if constexpr (WHOLE_WORDS) {
#pragma unroll
    for (int i = 0; i < 4; ++i) group.words[i] = float_bits(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) group.words[i] = pack<S>(values[2 * i], values[2 * i + 1]);
  }
  return group;
}

// A row of a table (..., channels) of floats, at this thread's group.
DEVICE void load_floats(float (&values)[WIDTH], const float* row) {
#pragma unroll
  for (int i = 0; i < WIDTH; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(row + i);
    values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
  }
}

// A thread's place in a block that sums rows: the block takes a slice of the channels, its threads stand in rows.
struct Place {
  int slice;  // groups of the block
  int row, rows;
  int first;  // channel
  bool used;

  DEVICE Place(int groups, int channels) : slice(groups) {
    row = thread_index() / groups, rows = THREADS / groups;
    first = (block_row() * groups + thread_index() % groups) * WIDTH;
    used = row < rows && first < channels;
  }
};

// Calls add(groups) for each row of this thread, with its group of each map, in the same order each time. AT_ONCE rows
// are on their way at the same time: one alone would leave most of the memory's bandwidth unused.
template <int AT_ONCE, int MAPS, class Add>
DEVICE void for_each_row(const Place& place, const void* const (&maps)[MAPS], long long rows, int channels, Add add) {
  if (!place.used) return;
  const int step = AT_ONCE * place.rows;
  for (long long start = static_cast<long long>(block_index()) * step; start < rows;
       start += static_cast<long long>(block_count()) * step) {
    const long long first = (start + place.row) * channels + place.first;
    if (start + step <= rows) {
      Group groups[AT_ONCE][MAPS];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
        for (int map = 0; map < MAPS; ++map)
          groups[i][map] = load_group(maps[map], first + static_cast<long long>(i * place.rows) * channels);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) add(groups[i]);
    } else {
      for (int i = 0; i < AT_ONCE && start + place.row + i * place.rows < rows; ++i) {
        Group groups[MAPS];
#pragma unroll
        for (int map = 0; map < MAPS; ++map)
          groups[map] = load_group(maps[map], first + static_cast<long long>(i * place.rows) * channels);
        add(groups);
      }
    }
  }
}

// Both sums of each channel over the block's threads, in a fixed order, to `partial`, (blocks, 2, channels). All threads
// call it; `shared` has 2 * WIDTH * THREADS floats.
DEVICE void write_sums(const Place& place, float (&sums)[2 * WIDTH], float* shared, float* partial, int channels) {
  float* own = shared + thread_index();
#pragma unroll
  for (int i = 0; i < 2 * WIDTH; ++i) own[i * THREADS] = sums[i];
  block_barrier();
  for (int rows = place.rows; rows > 1;) {
    const int half = (rows + 1) / 2;
    if (place.row + half < rows) {
#pragma unroll
      for (int i = 0; i < 2 * WIDTH; ++i) own[i * THREADS] = sums[i] += own[i * THREADS + half * place.slice];
    }
    rows = half;
    block_barrier();
  }
  if (place.row != 0 || !place.used) return;
  float* to = partial + 2ll * block_index() * channels + place.first;
#pragma unroll
  for (int i = 0; i < 2 * WIDTH; i += 4)
    *reinterpret_cast<float4*>(to + i / WIDTH * channels + i % WIDTH) =
        make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
}
