// Position-sensitive attention along lines, `gsanet/layers/position_sensitive_attention.py` in kernels:
//
//   s[x, i] = content q[x] k[i] + q[x] f[i - x] + k[i] g[x - i],  p[x, .] = softmax over i of s[x, i]
//   y[x] = sum over i of p[x, i] v[i],  z[x] = sum over i of p[x, i] h[i - x]
//
// with tables f, g, h of each head. A block takes bundles of lines, with HEADS heads, through two stages of shared memory; a
// warp has a head, and of it 16 attending pixels at a time, whose scores stay in registers. What keys add to them is the
// same with both sides in each other's place, so it is made of 16 keys at a time, and turned in shared memory; gradients
// of scores go back that way. Nothing but maps and sums of gradients of tables is ever in memory.
#include "position_sensitive.cuh"

constexpr int VALUE = 2 * KEY, WHOLE = PER_ACCESS<T>;          // channels, and those of results that a thread moves at once
using Values = Head<VALUE, Keys::PITCH>;
using Results = Head<VALUE, odd_stride(HEADS * VALUE)>;        // what is taken by position, of all heads
using Gradients = Head<VALUE, odd_stride(2 * HEADS * VALUE)>;  // of a head's results by content, then by position
constexpr int RESULTS = ROWS * Results::PITCH, GRADIENTS = ROWS * Gradients::PITCH;
constexpr int SCORE_PITCH = ROWS + 4, SCORES = ROWS * SCORE_PITCH;  // floats of a head; 4: eight columns in eight banks

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

// Where number `i` of this lane's sums belongs whose rows are 16 attending pixels, number `step` of the line; or 16 keys, turned.
DEVICE float& own_score(float* scores, int step, int i) {
  return scores[(step * 16 + i / 2 % 2 * 8 + lane_index() / 4) * SCORE_PITCH + i / 4 * 8 + lane_index() % 4 * 2 + i % 2];
}

DEVICE float& turned_score(float* scores, int step, int i) {
  return scores[(i / 4 * 8 + lane_index() % 4 * 2 + i % 2) * SCORE_PITCH + step * 16 + i / 2 % 2 * 8 + lane_index() / 4];
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
#pragma unroll
    for (int i = 0; i < GROUPS * 4; ++i) turned_score(scores, step, i) = products[i / 4][i % 4];
  }
  warp_barrier();
}

// Scores of 16 attending pixels, number `step` of the line, as exponentials about the largest, and the inverse of their sums.
DEVICE void attend(float (&scores)[GROUPS][4], float (&inverse)[2], const T* queries, const T* keys, const T* table,
                   float* by_keys, float content, int step, const Skew& skew) {
  Keys::Lefts own;
  load_lefts<Keys>(own, queries + step * 16 * Keys::PITCH);
#pragma unroll
  for (int i = 0; i < GROUPS * 4; ++i) scores[i / 4][i % 4] = 0.f;
  add_products<Keys>(scores, own, keys, Keys::PITCH);
#pragma unroll
  for (int i = 0; i < GROUPS * 4; ++i)
    scores[i / 4][i % 4] = multiply_then_add(scores[i / 4][i % 4], content, own_score(by_keys, step, i));
  add_by_position<Keys>(scores, own, table, TABLE_PITCH, step, skew);
  take_exponentials(scores, inverse, step, 1.4426950408889634f);
}

KERNEL(THREADS, BLOCKS) position_sensitive_forward(const Arguments arguments) {
  SHARED_MEMORY(memory);
  float* const scores = reinterpret_cast<float*>(memory) + warp_index() * SCORES;
  T* const tables = reinterpret_cast<T*>(reinterpret_cast<float*>(memory) + WARPS * SCORES);
  const T* const table = tables + warp_index() * TABLE;
  T* const results = tables + HEADS * TABLE;
  T* const buffer = results + RESULTS + warp_index() * BUFFER;  // for floats
  T* const stages = results + RESULTS + (IS_FLOAT<T> ? WARPS * BUFFER : 0);
  const Skew skew;
  clear_padding(stages, 2 * TILE);
  take_turn();
  fetch_tables<HEADS>(tables, arguments.tables + static_cast<long long>(block_row()) * HEADS * OFFSETS * 4 * KEY);
  const float content = arguments.content[block_row() * HEADS + warp_index()];
  for_each_bundle(
      arguments.lines,
      [&](const Bundle& bundle, int stage) { fetch_projected(stages + stage * TILE, arguments.projected, bundle); },
      [&](const Bundle& bundle, int stage) {
        T* const tile = stages + stage * TILE;
        const T* const queries = tile + warp_index() * OWN;
        const T* const keys = queries + PADDED;
        T* const values = tile + warp_index() * OWN + 2 * PADDED;
        score_by_keys(scores, keys, table + PADDED, skew);
        float by_content[STEPS][Values::GROUPS][4], by_position[STEPS][Values::GROUPS][4];
        clear(by_content), clear(by_position);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          float weights[GROUPS][4], inverse[2];
          attend(weights, inverse, queries, keys, table, scores, content, step, skew);
          Rounded rounded[GROUPS], offsets[GROUPS + 2];
          round_all(rounded, weights);
          if constexpr (IS_FLOAT<T>) put(buffer, rounded);
          add_mixed(by_content[step], rounded, buffer, values, Values::PITCH);
          skew.back(offsets, weights);
          if constexpr (IS_FLOAT<T>) put(buffer, offsets);
          add_mixed(by_position[step], offsets, buffer, table + (STEPS - 1 - step) * 16 * TABLE_PITCH + 2 * PADDED, TABLE_PITCH);
#pragma unroll
          for (int i = 0; i < Values::GROUPS * 4; ++i) {
            by_content[step][i / 4][i % 4] *= inverse[i / 2 % 2];
            by_position[step][i / 4][i % 4] *= inverse[i / 2 % 2];
          }
        }
        store_line<Values>(values, by_content);
        store_line<Results>(results + warp_index() * VALUE, by_position);
        block_barrier();
        for_each_result(arguments, bundle, [&](int row, int part, int head, int channel, T* address, bool exists) {
          const T* const found = part ? results + row * Results::PITCH + head * VALUE
                                      : tile + row * Values::PITCH + head * OWN + 2 * PADDED;
          if (exists) *reinterpret_cast<uint4*>(address) = *reinterpret_cast<const uint4*>(found + channel);
        });
      });
}

KERNEL(THREADS, BLOCKS) position_sensitive_backward(const Arguments arguments) {
  SHARED_MEMORY(memory);
  float* const scores = reinterpret_cast<float*>(memory) + warp_index() * SCORES;
  T* const tables = reinterpret_cast<T*>(reinterpret_cast<float*>(memory) + WARPS * SCORES);
  const T* const table = tables + warp_index() * TABLE;
  T* const buffer = tables + HEADS * TABLE + warp_index() * BUFFER;
  T* const stages = tables + HEADS * TABLE + WARPS * BUFFER;
  T* const all_gradients = stages + 2 * TILE;
  const Skew skew;
  float d_f[2 * STEPS][Keys::GROUPS][4], d_g[2 * STEPS][Keys::GROUPS][4], d_h[2 * STEPS][Values::GROUPS][4], d_content = 0.f;
  clear(d_f), clear(d_g), clear(d_h);
  clear_padding(stages, 2 * TILE);
  take_turn();
  fetch_tables<HEADS>(tables, arguments.tables + static_cast<long long>(block_row()) * HEADS * OFFSETS * 4 * KEY);
  const int head = block_row() * HEADS + warp_index();
  const float content = arguments.content[head];
  for_each_bundle(
      arguments.lines,
      [&](const Bundle& bundle, int stage) {
        fetch_projected(stages + stage * TILE, arguments.projected, bundle);
        for_each_result(arguments, bundle, [&](int row, int part, int head, int channel, const T* address, bool exists) {
          T* const place = all_gradients + stage * GRADIENTS + row * Gradients::PITCH + (2 * head + part) * VALUE + channel;
          copy_async(place, address, exists);
        });
      },
      [&](const Bundle& bundle, int stage) {
        T* const tile = stages + stage * TILE;
        T* const queries = tile + warp_index() * OWN;
        T* const keys = queries + PADDED;
        T* const values = queries + 2 * PADDED;
        const T* const gradients = all_gradients + stage * GRADIENTS + warp_index() * 2 * VALUE;
        score_by_keys(scores, keys, table + PADDED, skew);
        float d_keys[STEPS][Keys::GROUPS][4], d_values[STEPS][Values::GROUPS][4];
        clear(d_keys), clear(d_values);
        // One after the other, at compile time: which rows of the table meet the pixels depends on it.
        for_each_step([&](auto number) {
          constexpr int STEP = decltype(number)::INDEX, WINDOW = STEPS - 1 - STEP;
          T* const own_queries = queries + STEP * 16 * Keys::PITCH;
          const T* const by_content = gradients + STEP * 16 * Gradients::PITCH;
          const T* const by_position = by_content + VALUE;
          const T* const window = table + WINDOW * 16 * TABLE_PITCH;
          float weights[GROUPS][4], inverse[2], slopes[GROUPS][4] = {};
          attend(weights, inverse, queries, keys, table, scores, content, STEP, skew);
          {
            Gradients::Lefts own;
            load_lefts<Gradients>(own, by_content);
            add_products<Gradients>(slopes, own, values, Values::PITCH);
            load_lefts<Gradients>(own, by_position);
            add_by_position<Gradients>(slopes, own, table + 2 * PADDED, TABLE_PITCH, STEP, skew);
          }
          Rounded rounded[GROUPS], offsets[GROUPS + 2];
#pragma unroll
          for (int i = 0; i < GROUPS * 4; ++i) weights[i / 4][i % 4] *= inverse[i / 2 % 2];
          round_all(rounded, weights);
          put(buffer, rounded);
          add_transposed<0, STEPS>(d_values, buffer, by_content, Gradients::PITCH);
          skew.back(offsets, weights);
          put(buffer, offsets);
          add_transposed<WINDOW, STEPS + 1>(d_h, buffer, by_position, Gradients::PITCH);
          differentiate(weights, slopes, 1.f);
#pragma unroll
          for (int i = 0; i < GROUPS * 4; ++i) own_score(scores, STEP, i) = weights[i / 4][i % 4];
          round_all(rounded, weights);
          put(buffer, rounded);
          add_transposed<0, STEPS>(d_keys, buffer, own_queries, Keys::PITCH);
          float d_queries[Keys::GROUPS][4] = {};
          add_mixed(d_queries, rounded, buffer, keys, Keys::PITCH);
          // What the factor's gradient is made of: products of queries and keys, times the gradients of their scores.
#pragma unroll
          for (int i = 0; i < Keys::GROUPS * 2; ++i) {
            float first, second;
            load_two(own_queries + (lane_index() / 4 + i % 2 * 8) * Keys::PITCH + i / 2 * 8 + lane_index() % 4 * 2, first, second);
            d_content += d_queries[i / 2][i % 2 * 2] * first + d_queries[i / 2][i % 2 * 2 + 1] * second;
          }
#pragma unroll
          for (int i = 0; i < Keys::GROUPS * 4; ++i) d_queries[i / 4][i % 4] *= content;
          skew.back(offsets, weights);
          put(buffer, offsets);
          add_transposed<WINDOW, STEPS + 1>(d_f, buffer, own_queries, Keys::PITCH);
          add_mixed(d_queries, offsets, buffer, window, TABLE_PITCH);
          warp_barrier();
          store_keys(own_queries, d_queries);
        });
        warp_barrier();
        for_each_step([&](auto number) {
          constexpr int STEP = decltype(number)::INDEX, WINDOW = STEPS - 1 - STEP;
          T* const own_keys = keys + STEP * 16 * Keys::PITCH;
          float slopes[GROUPS][4];
#pragma unroll
          for (int i = 0; i < GROUPS * 4; ++i) slopes[i / 4][i % 4] = turned_score(scores, STEP, i);
          Rounded offsets[GROUPS + 2];
          skew.back(offsets, slopes);
          put(buffer, offsets);
          add_transposed<WINDOW, STEPS + 1>(d_g, buffer, own_keys, Keys::PITCH);
#pragma unroll
          for (int i = 0; i < Keys::GROUPS * 4; ++i) d_keys[STEP][i / 4][i % 4] *= content;
          add_mixed(d_keys[STEP], offsets, buffer, table + WINDOW * 16 * TABLE_PITCH + PADDED, TABLE_PITCH);
          warp_barrier();
          store_keys(own_keys, d_keys[STEP]);
        });
        store_line<Values>(values, d_values);
        block_barrier();
        store_projected(tile, arguments.d_projected, bundle);
      });
  const long long number = static_cast<long long>(block_index()) * arguments.heads + head;
  float* const partial = arguments.partial + number * OFFSETS * MOVED;
  write_table<KEY>(partial, d_f);
  write_table<KEY>(partial + KEY, d_g);
  write_table<VALUE>(partial + 2 * KEY, d_h);
  d_content = sum_of_warp(d_content);
  if (lane_index() == 0) arguments.d_content[number] = d_content;
}
