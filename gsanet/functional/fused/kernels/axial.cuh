// Axial attention's maps and table in shared memory.
//
// The constants in capitals, beside those of softmax_lines.cuh: KEY and VALUE, the channels of a head; VECTOR, whether maps
// are moved by 16 bytes.
#pragma once
#include "softmax_lines.cuh"

constexpr int ACCESS = VECTOR ? PER_ACCESS<T> : 1;         // scalars that a thread moves at once

// Of a head with so many channels, all heads of the block beside each other.
constexpr int padded(int width) { return round_up(width, width <= 8 || IS_FLOAT<T> ? 8 : 16); }
template <int WIDTH>
using Beside = Head<padded(WIDTH), odd_stride(HEADS * padded(WIDTH))>;
using Keys = Beside<KEY>;
using Values = Beside<VALUE>;

constexpr int KEYS = ROWS * Keys::PITCH, VALUES = ROWS * Values::PITCH;  // scalars of a tile
constexpr int TABLE_PITCH = odd_stride(Keys::CHANNELS), TABLE = 2 * ROWS * TABLE_PITCH;

struct Arguments {
  Map queries, keys, values;
  Map out;                               // of the backward pass, its gradient
  Map d_queries, d_keys, d_values;
  const T* table;                        // (2 LENGTH - 1, KEY), by offset
  float* partial;                        // (blocks, 2 LENGTH - 1, KEY)
  Lines lines;
  float factor, scale;                   // of scores: to powers of two, and of their gradients
};

// Calls move(place in the tile, address in the map, whether that exists) for each access to a bundle of a map.
template <int WIDTH, class Move>
DEVICE void for_each_access(const Map& map, const Bundle& bundle, Move move) {
  constexpr int PER_HEAD = Beside<WIDTH>::CHANNELS / ACCESS, PER_ROW = HEADS * PER_HEAD;
  T* const start = bundle.start(map) + block_row() * HEADS * WIDTH;
#pragma unroll 4
  for (int i = thread_anew(THREADS); i < ROWS * PER_ROW; i += THREADS) {
    const int row = i / PER_ROW, head = i % PER_ROW / PER_HEAD, channel = i % PER_HEAD * ACCESS;
    const int line = row / LENGTH, pixel = row % LENGTH;
    const bool exists = line < bundle.count && channel < WIDTH;
    T* const address = start + static_cast<long long>(line) * map.line + static_cast<long long>(pixel) * map.pixel + head * WIDTH + channel;
    move(row * Beside<WIDTH>::PITCH + head * Beside<WIDTH>::CHANNELS + channel, exists ? address : map.data, exists);
  }
}

template <int WIDTH>
DEVICE void fetch(T* tile, const Map& map, const Bundle& bundle) {
  for_each_access<WIDTH>(map, bundle, [&](int place, const T* address, bool exists) {
    if constexpr (VECTOR)
      copy_async(tile + place, address, exists);
    else
      tile[place] = exists ? *address : T{};
  });
}

template <int WIDTH>
DEVICE void store(const T* tile, const Map& map, const Bundle& bundle) {
  for_each_access<WIDTH>(map, bundle, [&](int place, T* address, bool exists) {
    if (!exists) return;
    if constexpr (VECTOR)
      *reinterpret_cast<uint4*>(address) = *reinterpret_cast<const uint4*>(tile + place);
    else
      *address = tile[place];
  });
}

// The table in shared memory: offset d is row d + ROWS - 1, and what no two pixels of a line have is zero.
DEVICE void fetch_table(T* table, const T* from) {
  for (int i = thread_index(); i < 2 * ROWS * Keys::CHANNELS; i += THREADS) {
    const int row = i / Keys::CHANNELS, channel = i % Keys::CHANNELS, offset = row - (ROWS - LENGTH);
    const bool exists = offset >= 0 && offset < 2 * LENGTH - 1 && channel < KEY;
    table[row * TABLE_PITCH + channel] = exists ? from[offset * KEY + channel] : T{};
  }
}

// Scores of 16 attending pixels, number `step` of the line, by content and position, as exponentials about the largest, and
// the inverse of their sums.
DEVICE void attend(float (&scores)[GROUPS][4], float (&inverse)[2], const Keys::Lefts& queries, const T* keys, const T* table,
                   int step, float factor, const Skew& skew) {
#pragma unroll
  for (int i = 0; i < GROUPS; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) scores[i][j] = 0.f;
  add_products<Keys>(scores, queries, keys, Keys::PITCH);
  add_by_position<Keys>(scores, queries, table, TABLE_PITCH, step, skew);
  take_exponentials(scores, inverse, step, factor);
}
