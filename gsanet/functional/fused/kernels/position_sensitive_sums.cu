// What the norm of position-sensitive attention's scores needs of them: sums of each of their three parts and of its squares,
//
//   q[x] k[i],  q[x] f[i - x],  k[i] g[x - i]
//
// over all pairs of pixels of all lines, for each head; and the gradient of these sums. Tables f and g are one for all heads.
// Cut as in position_sensitive.cu; scores stay in registers here, too.
#include "position_sensitive.cuh"

// Part INDEX of the scores of 16 pixels, number `step`, with all of their line: zero for others. The third one has keys in rows.
template <int INDEX>
DEVICE void score(float (&scores)[GROUPS][4], const T* queries, const T* keys, const T* table, int step, const Skew& skew) {
  Keys::Lefts own;
  load_lefts<Keys>(own, (INDEX == 2 ? keys : queries) + step * 16 * Keys::PITCH);
#pragma unroll
  for (int i = 0; i < GROUPS * 4; ++i) scores[i / 4][i % 4] = 0.f;
  if constexpr (INDEX == 0) {
    add_products<Keys>(scores, own, keys, Keys::PITCH);
  } else {
    add_by_position<Keys>(scores, own, table + (INDEX == 2 ? PADDED : 0), TABLE_PITCH, step, skew);
  }
  set_others(scores, step, 0.f);
}

KERNEL(THREADS, BLOCKS) position_sensitive_sums(const Arguments arguments) {
  SHARED_MEMORY(memory);
  T* const table = reinterpret_cast<T*>(memory);
  T* const stages = table + TABLE;
  const Skew skew;
  float sums[2][3] = {};
  clear_padding(stages, 2 * TILE);
  take_turn();
  fetch_tables<1>(table, arguments.tables);
  for_each_bundle(
      arguments.lines,
      [&](const Bundle& bundle, int stage) { fetch_projected(stages + stage * TILE, arguments.projected, bundle); },
      [&](const Bundle& bundle, int stage) {
        const T* const queries = stages + stage * TILE + warp_index() * OWN;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          auto add = [&](auto part) {
            constexpr int INDEX = decltype(part)::INDEX;
            float scores[GROUPS][4];
            score<INDEX>(scores, queries, queries + PADDED, table, step, skew);
#pragma unroll
            for (int i = 0; i < GROUPS * 4; ++i) {
              const float one = scores[i / 4][i % 4];
              sums[0][INDEX] += one, sums[1][INDEX] = multiply_then_add(one, one, sums[1][INDEX]);
            }
          };
          add(Number<0>{}), add(Number<1>{}), add(Number<2>{});
        }
      });
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    const float sum = sum_of_warp(sums[i / 3][i % 3]);
    if (lane_index() == 0)
      arguments.partial[(block_index() * 6 + i) * arguments.heads + block_row() * HEADS + warp_index()] = sum;
  }
}

KERNEL(THREADS, BLOCKS) position_sensitive_sums_gradient(const Arguments arguments) {
  SHARED_MEMORY(memory);
  T* const table = reinterpret_cast<T*>(memory);
  T* const buffer = table + TABLE + warp_index() * BUFFER;
  T* const stages = table + TABLE + WARPS * BUFFER;
  const Skew skew;
  float d_f[2 * STEPS][Keys::GROUPS][4], d_g[2 * STEPS][Keys::GROUPS][4];
  clear(d_f), clear(d_g);
  clear_padding(stages, 2 * TILE);
  take_turn();
  fetch_tables<1>(table, arguments.tables);
  // A score's gradient is level + slope * score. Both are small, as sums are over many: 16 bits take them as parts of the largest.
  const int head = block_row() * HEADS + warp_index();
  float level[3], slope[3], size = 0.f;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    level[i] = arguments.d_sums[i * arguments.heads + head], slope[i] = 2.f * arguments.d_sums[(3 + i) * arguments.heads + head];
    size = maximum(size, maximum(maximum(level[i], -level[i]), maximum(slope[i], -slope[i])));
  }
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (size != 0.f) level[i] /= size, slope[i] /= size;
  for_each_bundle(
      arguments.lines,
      [&](const Bundle& bundle, int stage) { fetch_projected(stages + stage * TILE, arguments.projected, bundle); },
      [&](const Bundle& bundle, int stage) {
        T* const tile = stages + stage * TILE;
        T* const queries = tile + warp_index() * OWN;
        T* const keys = queries + PADDED;
        auto differentiate = [&](auto part, float (&scores)[GROUPS][4], int step) {
          constexpr int INDEX = decltype(part)::INDEX;
          score<INDEX>(scores, queries, keys, table, step, skew);
#pragma unroll
          for (int i = 0; i < GROUPS * 4; ++i)
            scores[i / 4][i % 4] = multiply_then_add(scores[i / 4][i % 4], slope[INDEX], level[INDEX]);
          set_others(scores, step, 0.f);
        };
        float d_keys[STEPS][Keys::GROUPS][4];
        clear(d_keys);
        // One after the other, at compile time: which rows of the table meet the pixels depends on it.
        for_each_step([&](auto number) {
          constexpr int STEP = decltype(number)::INDEX, WINDOW = STEPS - 1 - STEP;
          T* const own_queries = queries + STEP * 16 * Keys::PITCH;
          float d_queries[Keys::GROUPS][4] = {}, d_scores[GROUPS][4];
          differentiate(Number<0>{}, d_scores, STEP);
          Rounded rounded[GROUPS], offsets[GROUPS + 2];
          round_all(rounded, d_scores);
          put(buffer, rounded);
          add_transposed<0, STEPS>(d_keys, buffer, own_queries, Keys::PITCH);
          add_mixed(d_queries, rounded, buffer, keys, Keys::PITCH);
          differentiate(Number<1>{}, d_scores, STEP);
          skew.back(offsets, d_scores);
          put(buffer, offsets);
          add_transposed<WINDOW, STEPS + 1>(d_f, buffer, own_queries, Keys::PITCH);
          add_mixed(d_queries, offsets, buffer, table + WINDOW * 16 * TABLE_PITCH, TABLE_PITCH);
#pragma unroll
          for (int i = 0; i < Keys::GROUPS * 4; ++i) d_queries[i / 4][i % 4] *= size;
          warp_barrier();
          store_keys(own_queries, d_queries);
        });
        for_each_step([&](auto number) {
          constexpr int STEP = decltype(number)::INDEX, WINDOW = STEPS - 1 - STEP;
          T* const own_keys = keys + STEP * 16 * Keys::PITCH;
          float d_scores[GROUPS][4];
          differentiate(Number<2>{}, d_scores, STEP);
          Rounded offsets[GROUPS + 2];
          skew.back(offsets, d_scores);
          put(buffer, offsets);
          add_transposed<WINDOW, STEPS + 1>(d_g, buffer, own_keys, Keys::PITCH);
          add_mixed(d_keys[STEP], offsets, buffer, table + WINDOW * 16 * TABLE_PITCH + PADDED, TABLE_PITCH);
#pragma unroll
          for (int i = 0; i < Keys::GROUPS * 4; ++i) d_keys[STEP][i / 4][i % 4] *= size;
          warp_barrier();
          store_keys(own_keys, d_keys[STEP]);
        });
        block_barrier();
        store_projected(tile, arguments.d_projected, bundle);
      });
#pragma unroll
  for (int i = 0; i < 2 * STEPS * Keys::GROUPS * 4; ++i)
    d_f[i / (Keys::GROUPS * 4)][i / 4 % Keys::GROUPS][i % 4] *= size, d_g[i / (Keys::GROUPS * 4)][i / 4 % Keys::GROUPS][i % 4] *= size;
  float* const partial = arguments.partial + (static_cast<long long>(block_index()) * arguments.heads + head) * OFFSETS * MOVED;
  write_table<KEY>(partial, d_f);
  write_table<KEY>(partial + KEY, d_g);
}
