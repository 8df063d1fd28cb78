// Softmax attention along lines by content and relative position, `gsanet/layers/axial_attention.py` in kernels:
//
//   y[a] = sum over b of p[a, b] v[b],  p[a, b] = softmax over b of (q[a] k[b] + q[a] r[b - a]) / sqrt(KEY)
//
// A block takes bundles of lines, with HEADS heads, through two stages of shared memory; a warp has a head, and of it 16
// attending pixels at a time. Their scores with the whole line stay in registers (axial.cuh), and are computed again for
// gradients: nothing but maps and sums of the table's gradient is ever in memory. A result takes the place in shared
// memory of a map that is not needed any more.
#include "axial.cuh"

KERNEL(THREADS, BLOCKS) axial_forward(const Arguments arguments) {
  SHARED_MEMORY(memory);
  T* const table = reinterpret_cast<T*>(memory);
  T* const buffer = table + TABLE + warp_index() * BUFFER;  // for floats
  T* const stages = table + TABLE + (IS_FLOAT<T> ? WARPS * BUFFER : 0);
  constexpr int STAGE = 2 * KEYS + VALUES;
  const Skew skew;
  take_turn();
  fetch_table(table, arguments.table);
  for_each_bundle(
      arguments.lines,
      [&](const Bundle& bundle, int stage) {
        T* const tiles = stages + stage * STAGE;
        fetch<KEY>(tiles, arguments.queries, bundle);
        fetch<KEY>(tiles + KEYS, arguments.keys, bundle);
        fetch<VALUE>(tiles + 2 * KEYS, arguments.values, bundle);
      },
      [&](const Bundle& bundle, int stage) {
        T* const tiles = stages + stage * STAGE;
        const T* const queries = tiles + warp_index() * Keys::CHANNELS;
        T* const values = tiles + 2 * KEYS + warp_index() * Values::CHANNELS;
        float out[STEPS][Values::GROUPS][4];
        clear(out);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          Keys::Lefts own;
          float scores[GROUPS][4], inverse[2];
          load_lefts<Keys>(own, queries + step * 16 * Keys::PITCH);
          attend(scores, inverse, own, queries + KEYS, table, step, arguments.factor, skew);
          Rounded weights[GROUPS];
          round_all(weights, scores);
          if constexpr (IS_FLOAT<T>) put(buffer, weights);
          add_mixed(out[step], weights, buffer, values, Values::PITCH);
#pragma unroll
          for (int i = 0; i < Values::GROUPS * 4; ++i) out[step][i / 4][i % 4] *= inverse[i / 2 % 2];
        }
        store_line<Values>(values, out);
        block_barrier();
        store<VALUE>(tiles + 2 * KEYS, arguments.out, bundle);
      });
}

// The table's gradient from all warps, in their order, to the block's part. All threads call it.
DEVICE void write_table(float* shared, const float (&sums)[2 * STEPS][Keys::GROUPS][4], float* partial) {
  for (int warp = 0; warp < WARPS; ++warp) {
    block_barrier();
    if (warp != warp_index()) continue;
#pragma unroll
    for (int i = 0; i < 2 * STEPS * Keys::GROUPS * 4; ++i) {
      const int row = i / (Keys::GROUPS * 4) * 16 + i / 2 % 2 * 8 + lane_index() / 4;
      const int place = row * Keys::CHANNELS + i / 4 % Keys::GROUPS * 8 + lane_index() % 4 * 2 + i % 2;
      const float sum = sums[i / (Keys::GROUPS * 4)][i / 4 % Keys::GROUPS][i % 4];
      shared[place] = warp ? shared[place] + sum : sum;
    }
  }
  block_barrier();
  partial += (static_cast<long long>(block_row()) * block_count() + block_index()) * (2 * LENGTH - 1) * KEY;
  for (int i = thread_index(); i < (2 * LENGTH - 1) * KEY; i += THREADS)
    partial[i] = shared[(i / KEY + ROWS - LENGTH) * Keys::CHANNELS + i % KEY];
}

KERNEL(THREADS, BLOCKS) axial_backward(const Arguments arguments) {
  SHARED_MEMORY(memory);
  T* const table = reinterpret_cast<T*>(memory);
  T* const buffer = table + TABLE + warp_index() * BUFFER;
  T* const stages = table + TABLE + WARPS * BUFFER;
  constexpr int STAGE = 2 * KEYS + 2 * VALUES;
  const Skew skew;
  float d_table[2 * STEPS][Keys::GROUPS][4];
  clear(d_table);
  take_turn();
  fetch_table(table, arguments.table);
  for_each_bundle(
      arguments.lines,
      [&](const Bundle& bundle, int stage) {
        T* const tiles = stages + stage * STAGE;
        fetch<KEY>(tiles, arguments.queries, bundle);
        fetch<KEY>(tiles + KEYS, arguments.keys, bundle);
        fetch<VALUE>(tiles + 2 * KEYS, arguments.values, bundle);
        fetch<VALUE>(tiles + 2 * KEYS + VALUES, arguments.out, bundle);
      },
      [&](const Bundle& bundle, int stage) {
        T* const tiles = stages + stage * STAGE;
        T* const queries = tiles + warp_index() * Keys::CHANNELS;
        T* const keys = queries + KEYS;
        T* const values = tiles + 2 * KEYS + warp_index() * Values::CHANNELS;
        const T* const gradients = values + VALUES;
        float d_keys[STEPS][Keys::GROUPS][4], d_values[STEPS][Values::GROUPS][4];
        clear(d_keys), clear(d_values);
        // One after the other, at compile time: which rows of the table meet the pixels depends on it.
        for_each_step([&](auto number) {
          constexpr int STEP = decltype(number)::INDEX;
          T* const own_queries = queries + STEP * 16 * Keys::PITCH;
          const T* const own_gradients = gradients + STEP * 16 * Values::PITCH;
          float weights[GROUPS][4], inverse[2], slopes[GROUPS][4] = {};
          {
            Keys::Lefts own;
            load_lefts<Keys>(own, own_queries);
            attend(weights, inverse, own, keys, table, STEP, arguments.factor, skew);
          }
          {
            Values::Lefts own;
            load_lefts<Values>(own, own_gradients);
            add_products<Values>(slopes, own, values, Values::PITCH);
          }
          Rounded rounded[GROUPS];
#pragma unroll
          for (int i = 0; i < GROUPS * 4; ++i) weights[i / 4][i % 4] *= inverse[i / 2 % 2];
          round_all(rounded, weights);
          put(buffer, rounded);
          add_transposed<0, STEPS>(d_values, buffer, own_gradients, Values::PITCH);
          differentiate(weights, slopes, arguments.scale);
          round_all(rounded, weights);
          put(buffer, rounded);
          add_transposed<0, STEPS>(d_keys, buffer, own_queries, Keys::PITCH);
          float d_queries[Keys::GROUPS][4] = {};
          add_mixed(d_queries, rounded, buffer, keys, Keys::PITCH);
          Rounded offsets[GROUPS + 2];
          skew.back(offsets, weights);
          put(buffer, offsets);
          add_transposed<STEPS - 1 - STEP, STEPS + 1>(d_table, buffer, own_queries, Keys::PITCH);
          add_mixed(d_queries, offsets, buffer, table + (STEPS - 1 - STEP) * 16 * TABLE_PITCH, TABLE_PITCH);
          warp_barrier();
          store_rows<16, T>(d_queries, [&](int row) { return own_queries + row * Keys::PITCH; });
        });
        store_line<Keys>(keys, d_keys);
        store_line<Values>(values, d_values);
        block_barrier();
        store<KEY>(tiles, arguments.d_queries, bundle);
        store<KEY>(tiles + KEYS, arguments.d_keys, bundle);
        store<VALUE>(tiles + 2 * KEYS, arguments.d_values, bundle);
      });
  write_table(reinterpret_cast<float*>(stages), d_table, arguments.partial);
}
