// Position-sensitive attention's maps and tables in shared memory.
//
// The constants in capitals, beside those of softmax_lines.cuh: KEY, the channels of a head's queries and of its keys, a
// multiple of four; its values have twice as many. MOVED: those of q | k | v that are moved, all 4 KEY, or q and k alone.
//
// In memory a head of a pixel, or of an offset, is q | k | v; in shared memory q and k may have zeros behind them.
#pragma once
#include "softmax_lines.cuh"

constexpr int OFFSETS = 2 * LENGTH - 1;
constexpr int PADDED = round_up(KEY, 8), OWN = 2 * PADDED + MOVED - 2 * KEY;  // of q or k, and of a head, in shared memory
constexpr int ACCESS = KEY % PER_ACCESS<T> == 0 ? PER_ACCESS<T> : 4;          // scalars of q, k and v that a thread moves at once

using Keys = Head<PADDED, odd_stride(HEADS * OWN)>;  // q and k
constexpr int TILE = ROWS * Keys::PITCH;
constexpr int TABLE_PITCH = odd_stride(OWN), TABLE = 2 * ROWS * TABLE_PITCH;

struct Arguments {
  Map projected;         // (head, q | k | v)
  Map out;               // (content or position, head, value); of the backward pass, its gradient
  Map d_projected;       // (head, MOVED)
  const T* tables;       // (head, 2 LENGTH - 1, q | k | v), by offset, for keys as they see those who attend; of sums, one for all
  const float* content;  // (head): factors of the products of queries and keys
  const float* d_sums;   // (sum or sum of squares, part, head)
  float* partial;        // (blocks, head, 2 LENGTH - 1, MOVED), or what each block has of the sums
  float* d_content;      // (blocks, head)
  Lines lines;
  int heads;             // of the map
};

// Where channel `c` of a head is in shared memory.
DEVICE int place_of(int c) { return c < KEY ? c : c < 2 * KEY ? c - KEY + PADDED : c - 2 * KEY + 2 * PADDED; }

// Calls move(row of a tile, number of the access, where its pixel begins, whether that exists) for ACCESSES of each pixel.
template <int ACCESSES, class Move>
DEVICE void for_each_access(const Map& map, const Bundle& bundle, Move move) {
  T* const start = bundle.start(map);
#pragma unroll 4
  for (int i = thread_anew(THREADS); i < ROWS * ACCESSES; i += THREADS) {
    const int row = i / ACCESSES, line = row / LENGTH, pixel = row % LENGTH;
    const bool exists = line < bundle.count;
    T* const address = start + static_cast<long long>(line) * map.line + static_cast<long long>(pixel) * map.pixel;
    move(row, i % ACCESSES, exists ? address : map.data, exists);
  }
}

// Calls move(place in the tile, address, whether that exists) for what is moved of the block's heads; each has WIDTH channels
// in memory.
template <int WIDTH, class Move>
DEVICE void for_each_projected(const Map& map, const Bundle& bundle, Move move) {
  constexpr int PER_HEAD = MOVED / ACCESS;
  for_each_access<HEADS * PER_HEAD>(map, bundle, [&](int row, int number, T* pixel, bool exists) {
    const int head = number / PER_HEAD, channel = number % PER_HEAD * ACCESS;
    move(row * Keys::PITCH + head * OWN + place_of(channel), pixel + (block_row() * HEADS + head) * WIDTH + channel, exists);
  });
}

DEVICE void fetch_projected(T* tile, const Map& map, const Bundle& bundle) {
  for_each_projected<4 * KEY>(map, bundle, [&](int place, const T* address, bool exists) {
    copy_async<ACCESS * sizeof(T)>(tile + place, address, exists);
  });
}

DEVICE void store_projected(const T* tile, const Map& map, const Bundle& bundle) {
  for_each_projected<MOVED>(map, bundle, [&](int place, T* address, bool exists) {
    if (!exists) return;
    if constexpr (ACCESS == PER_ACCESS<T>)
      *reinterpret_cast<uint4*>(address) = *reinterpret_cast<const uint4*>(tile + place);
    else
      *reinterpret_cast<uint2*>(address) = *reinterpret_cast<const uint2*>(tile + place);
  });
}

// COUNT tables: offset d is row d + ROWS - 1, and what no two pixels of a line have is zero.
template <int COUNT>
DEVICE void fetch_tables(T* tables, const T* from) {
  for (int i = thread_index(); i < COUNT * TABLE; i += THREADS) tables[i] = T{};
  block_barrier();
  for (int i = thread_index(); i < COUNT * OFFSETS * MOVED; i += THREADS) {
    const int channel = i % MOVED, offset = i / MOVED, head = offset / OFFSETS, row = offset % OFFSETS + ROWS - LENGTH;
    tables[head * TABLE + row * TABLE_PITCH + place_of(channel)] = from[offset * 4 * KEY + channel];
  }
}

// Zeros behind q and k stay what they are: nothing else is written there. A barrier must follow.
DEVICE void clear_padding(T* tiles, int count) {
  if constexpr (PADDED != KEY)
    for (int i = thread_index(); i < count; i += THREADS) tiles[i] = T{};
}

// Sums for KEY of q or k, of 16 rows, as scalars; zeros behind them stay.
DEVICE void store_keys(T* tile, const float (&sums)[Keys::GROUPS][4]) {
  if constexpr (PADDED == KEY) {
    store_rows<16, T>(sums, [&](int row) { return tile + row * Keys::PITCH; });
  } else {
#pragma unroll
    for (int i = 0; i < Keys::GROUPS * 2; ++i) {
      const int channel = i / 2 * 8 + lane_index() % 4 * 2;
      T* const where = tile + (lane_index() / 4 + i % 2 * 8) * Keys::PITCH + channel;
      if (channel < KEY) store_two(where, sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
    }
  }
}

// The same for all lanes.
DEVICE float sum_of_warp(float value) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) value += shuffle_xor(value, distance);
  return value;
}

// A part of the gradient of a head's table, WIDTH channels, from `partial` on.
template <int WIDTH, int COUNT>
DEVICE void write_table(float* partial, const float (&sums)[2 * STEPS][COUNT][4]) {
#pragma unroll
  for (int i = 0; i < 2 * STEPS * COUNT * 4; ++i) {
    const int row = i / (COUNT * 4) * 16 + i / 2 % 2 * 8 + lane_index() / 4 - (ROWS - LENGTH);
    const int channel = i / 4 % COUNT * 8 + lane_index() % 4 * 2 + i % 2;
    if (row >= 0 && row < OFFSETS && channel < WIDTH) partial[row * MOVED + channel] = sums[i / (COUNT * 4)][i / 4 % COUNT][i % 4];
  }
}
