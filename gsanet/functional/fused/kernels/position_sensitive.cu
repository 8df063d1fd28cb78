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
  fetch_tables(tables, arguments.tables);
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
#pragma unroll
          for (int i = 0; i < GROUPS; ++i) rounded[i] = Rounded(weights[i]);
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

// A part of the gradient of the warp's tables, WIDTH channels, from `partial` on.
template <int WIDTH, int COUNT>
DEVICE void write_table(float* partial, const float (&sums)[2 * STEPS][COUNT][4]) {
#pragma unroll
  for (int i = 0; i < 2 * STEPS * COUNT * 4; ++i) {
    const int row = i / (COUNT * 4) * 16 + i / 2 % 2 * 8 + lane_index() / 4 - (ROWS - LENGTH);
    const int channel = i / 4 % COUNT * 8 + lane_index() % 4 * 2 + i % 2;
    if (row >= 0 && row < OFFSETS && channel < WIDTH) partial[row * 4 * KEY + channel] = sums[i / (COUNT * 4)][i / 4 % COUNT][i % 4];
  }
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
  fetch_tables(tables, arguments.tables);
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
#pragma unroll
          for (int i = 0; i < GROUPS; ++i) rounded[i] = Rounded(weights[i]);
          put(buffer, rounded);
          add_transposed<0, STEPS>(d_values, buffer, by_content, Gradients::PITCH);
          skew.back(offsets, weights);
          put(buffer, offsets);
          add_transposed<WINDOW, STEPS + 1>(d_h, buffer, by_position, Gradients::PITCH);
          differentiate(weights, slopes, 1.f);
          float* const corner = own_scores(scores, STEP);
#pragma unroll
          for (int i = 0; i < GROUPS * 4; ++i) corner[i / 2 % 2 * 8 * SCORE_PITCH + i / 4 * 8 + i % 2] = weights[i / 4][i % 4];
#pragma unroll
          for (int i = 0; i < GROUPS; ++i) rounded[i] = Rounded(weights[i]);
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
          const float* const corner = scores + lane_index() % 4 * 2 * SCORE_PITCH + STEP * 16 + lane_index() / 4;
#pragma unroll
          for (int i = 0; i < GROUPS * 4; ++i) slopes[i / 4][i % 4] = corner[(i / 4 * 8 + i % 2) * SCORE_PITCH + i / 2 % 2 * 8];
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
  float* const partial = arguments.partial + number * OFFSETS * 4 * KEY;
  write_table<KEY>(partial, d_f);
  write_table<KEY>(partial + KEY, d_g);
  write_table<VALUE>(partial + 2 * KEY, d_h);
#pragma unroll
  for (int distance = 16; distance; distance /= 2) d_content += shuffle_xor(d_content, distance);
  if (lane_index() == 0) arguments.d_content[number] = d_content;
}
