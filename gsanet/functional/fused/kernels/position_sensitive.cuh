// Position-sensitive attention's maps, tables and scores in shared memory.
//
// The constants in capitals, beside those of softmax_lines.cuh: KEY, the channels of a head's queries and of its keys, a
// multiple of four; its values have twice as many.
//
// In memory a head of a pixel, or of an offset, is q | k | v; in shared memory q and k may have zeros behind them.
#pragma once
#include "softmax_lines.cuh"

constexpr int VALUE = 2 * KEY, OFFSETS = 2 * LENGTH - 1;
constexpr int PADDED = round_up(KEY, 8), OWN = 2 * PADDED + VALUE;           // of q or k, and of a head, in shared memory
constexpr int ACCESS = KEY % PER_ACCESS<T> == 0 ? PER_ACCESS<T> : 4;         // scalars of q, k and v that a thread moves at once
constexpr int WHOLE = PER_ACCESS<T>;                                         // the same of values alone

using Keys = Head<PADDED, odd_stride(HEADS * OWN)>;  // q and k
using Values = Head<VALUE, Keys::PITCH>;
using Results = Head<VALUE, odd_stride(HEADS * VALUE)>;        // what is taken by position, of all heads
using Gradients = Head<VALUE, odd_stride(2 * HEADS * VALUE)>;  // of a head's results by content, then by position

constexpr int TILE = ROWS * Keys::PITCH, RESULTS = ROWS * Results::PITCH, GRADIENTS = ROWS * Gradients::PITCH;
constexpr int TABLE_PITCH = odd_stride(OWN), TABLE = 2 * ROWS * TABLE_PITCH;  // of a head
constexpr int SCORE_PITCH = ROWS + 4, SCORES = ROWS * SCORE_PITCH;            // floats of a head; 4: eight columns in eight banks

struct Arguments {
  Map projected;         // (head, q | k | v)
  Map out;               // (content or position, head, value); of the backward pass, its gradient
  Map d_projected;
  const T* tables;       // (head, 2 LENGTH - 1, q | k | v), by offset; for keys, as they see those who attend
  const float* content;  // (head): factors of the products of queries and keys
  float* partial;        // (blocks, head, 2 LENGTH - 1, q | k | v)
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

// Calls move(place in the tile, address, whether that exists) for q, k and v of the block's heads.
template <class Move>
DEVICE void for_each_projected(const Map& map, const Bundle& bundle, Move move) {
  constexpr int PER_HEAD = 4 * KEY / ACCESS;
  for_each_access<HEADS * PER_HEAD>(map, bundle, [&](int row, int number, T* pixel, bool exists) {
    const int head = number / PER_HEAD, channel = number % PER_HEAD * ACCESS;
    move(row * Keys::PITCH + head * OWN + place_of(channel), pixel + (block_row() * HEADS + head) * 4 * KEY + channel, exists);
  });
}

// Calls move(row, 0 by content or 1 by position, head, channel, address, whether that exists) for the results of the block's heads.
template <class Move>
DEVICE void for_each_result(const Arguments& arguments, const Bundle& bundle, Move move) {
  constexpr int PER_HEAD = VALUE / WHOLE;
  for_each_access<2 * HEADS * PER_HEAD>(arguments.out, bundle, [&](int row, int number, T* pixel, bool exists) {
    const int part = number / (HEADS * PER_HEAD), head = number / PER_HEAD % HEADS, channel = number % PER_HEAD * WHOLE;
    const int place = (part * arguments.heads + block_row() * HEADS + head) * VALUE + channel;
    move(row, part, head, channel, pixel + place, exists);
  });
}

DEVICE void fetch_projected(T* tile, const Map& map, const Bundle& bundle) {
  for_each_projected(map, bundle, [&](int place, const T* address, bool exists) {
    copy_async<ACCESS * sizeof(T)>(tile + place, address, exists);
  });
}

DEVICE void store_projected(const T* tile, const Map& map, const Bundle& bundle) {
  for_each_projected(map, bundle, [&](int place, T* address, bool exists) {
    if (!exists) return;
    if constexpr (ACCESS == PER_ACCESS<T>)
      *reinterpret_cast<uint4*>(address) = *reinterpret_cast<const uint4*>(tile + place);
    else
      *reinterpret_cast<uint2*>(address) = *reinterpret_cast<const uint2*>(tile + place);
  });
}

// The block's tables: offset d is row d + ROWS - 1, and what no two pixels of a line have is zero.
DEVICE void fetch_tables(T* tables, const T* from) {
  from += static_cast<long long>(block_row()) * HEADS * OFFSETS * 4 * KEY;
  for (int i = thread_index(); i < HEADS * TABLE; i += THREADS) tables[i] = T{};
  block_barrier();
  for (int i = thread_index(); i < HEADS * OFFSETS * 4 * KEY; i += THREADS) {
    const int channel = i % (4 * KEY), row = i / (4 * KEY) % OFFSETS + ROWS - LENGTH, head = i / (4 * KEY * OFFSETS);
    tables[head * TABLE + row * TABLE_PITCH + place_of(channel)] = from[i];
  }
}

// Zeros behind q and k stay what they are: nothing else is written there. A barrier must follow.
DEVICE void clear_padding(T* tiles, int count) {
  if constexpr (PADDED != KEY)
    for (int i = thread_index(); i < count; i += THREADS) tiles[i] = T{};
}

// What keys add to the scores of those who attend, in row x and column i of `scores`. A warp is alone with them.
DEVICE void score_by_keys(float* scores, const T* keys, const T* table, const Skew& skew) {
  warp_barrier();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    Keys::Lefts own;
    float products[GROUPS][4] = {};
    load_lefts<Keys>(own, keys + step * 16 * Keys::PITCH);
    add_by_position<Keys>(products, own, table, TABLE_PITCH, step, skew);
    float* const corner = scores + lane_index() % 4 * 2 * SCORE_PITCH + step * 16 + lane_index() / 4;
#pragma unroll
    for (int i = 0; i < GROUPS * 4; ++i) corner[(i / 4 * 8 + i % 2) * SCORE_PITCH + i / 2 % 2 * 8] = products[i / 4][i % 4];
  }
  warp_barrier();
}

// Where this lane's scores of 16 attending pixels begin: with rows 8 further on, and columns 8 further on for each group.
DEVICE float* own_scores(float* scores, int step) {
  return scores + (step * 16 + lane_index() / 4) * SCORE_PITCH + lane_index() % 4 * 2;
}

// Scores of 16 attending pixels, number `step` of the line, as exponentials about the largest, and the inverse of their sums.
DEVICE void attend(float (&scores)[GROUPS][4], float (&inverse)[2], const T* queries, const T* keys, const T* table,
                   float* by_keys, float content, int step, const Skew& skew) {
  Keys::Lefts own;
  load_lefts<Keys>(own, queries + step * 16 * Keys::PITCH);
#pragma unroll
  for (int i = 0; i < GROUPS * 4; ++i) scores[i / 4][i % 4] = 0.f;
  add_products<Keys>(scores, own, keys, Keys::PITCH);
  const float* const corner = own_scores(by_keys, step);
#pragma unroll
  for (int i = 0; i < GROUPS * 4; ++i)
    scores[i / 4][i % 4] = multiply_then_add(scores[i / 4][i % 4], content, corner[i / 2 % 2 * 8 * SCORE_PITCH + i / 4 * 8 + i % 2]);
  add_by_position<Keys>(scores, own, table, TABLE_PITCH, step, skew);
  take_exponentials(scores, inverse, step, 1.4426950408889634f);
}
