// Positional attention along one axis, backward. Scores are computed again (scores.cuh) and never leave the chip:
//
//   for each pair of a line and a head   dV += S^T dY,   dS = dY V^T (in the place of S)
//   for each attending pixel x           dQ_x = dS_x times the window of R,   dR's window += dS_x^T Q_x
//
// A warp owns the attending pixels x with x % WARPS = its number, so dR's rows move by whole groups of eight from one of
// its pixels to the next: each warp keeps all rows of dR that it meets in registers over all its lines, and the warps are
// summed once, in a fixed order.
//
// On the way in the values may be normalised (NORM_VALUES) and the gradient may be that of a batch norm's input
// (NORM_GRADIENT: a dY + b Y + c) or of a 2 x 2 mean (POOL). Of content attention the kernel of the rows, which has the
// gradient of the output, takes dQ += dY C^T (CONTENT_QUERIES), that of the columns, which has V, takes dK and dV
// (CONTENT_KEYS). ACCUMULATE adds to the dQ that is there already; STATISTICS sums dV and dV times the normalised values
// for each channel: the gradients of the batch norm's weight and bias.
#include "scores.cuh"

static_assert(LENGTH <= BAND, "all scores of 16 pixels are held at once");

constexpr int VALUE_WIDTH = padded(VALUE);
using QueryTile = Tile<QUERY_WIDTH>;
using ValueTile = Tile<VALUE_WIDTH>;

struct Arguments {
  Map queries, values, gradient;
  Map second;                // NORM_GRADIENT: the batch norm's input
  Map keys;                  // CONTENT_KEYS
  Map d_queries, d_values, d_keys;
  const T* rel;              // (2 LENGTH - 1, KEY)
  float* d_rel;              // (block, 2 LENGTH - 1, KEY)
  const float* norm;         // NORM_VALUES: (2, channels), scale and shift. NORM_GRADIENT: (3, channels), a, b and c
  const T* context;          // CONTENT_QUERIES: (image, head, QUERY_WIDTH, VALUE_WIDTH), the context vectors
                             // CONTENT_KEYS: their gradient, divided by the softmax's sums
  const T* context_turned;   // CONTENT_KEYS: the same as (image, head, VALUE_WIDTH, QUERY_WIDTH)
  const float* key_max;      // CONTENT_KEYS: (image, heads KEY), of the softmax
  const float* key_offset;   // CONTENT_KEYS: (image, heads KEY), what the softmax's gradient subtracts
  const float* moments;      // STATISTICS: (2, channels), mean and 1 / standard deviation of the values before the norm
  float* statistics;         // STATISTICS: (block, 2, channels)
  int lines_per_image;
  int total_lines;
  int heads;
};

constexpr int larger(int a, int b) { return a > b ? a : b; }

// Shared memory, in scalars. When the scores are done the keys take their place.
constexpr int VALUE_TILE = QueryTile::SIZE;
constexpr int GRADIENT_TILE = VALUE_TILE + ValueTile::SIZE;
constexpr int SCORES = GRADIENT_TILE + ValueTile::SIZE;
constexpr int TABLE = SCORES + larger(SCORES_SIZE, CONTENT_KEYS ? QueryTile::SIZE : 0);

constexpr int OWN_PAIRS = (PAIRS + WARPS - 1) / WARPS;
constexpr int LINE_TILES = TILE_ROWS / 16;
constexpr int VALUE_TILES = VALUE_WIDTH / 8, QUERY_TILES = QUERY_WIDTH / 8;
constexpr int X_DEPTH = depth_of<T>(16);  // depth of products over 16 attending pixels or 16 pairs
constexpr bool WINDOWS_IN_REGISTERS = WINDOW_REGISTERS <= 0;

using ValueSums = float[LINE_TILES][VALUE_TILES][4];
using TableSums = float[TABLE_EIGHTS + 1][QUERY_TILES][2];  // the last one takes what lies past the line

// dV += S^T dY and dS = dY V^T, for 16 attending pixels from x on of one pair.
DEVICE void differentiate_pair(ValueSums& d_values, T* scores, ValueTile values, ValueTile gradient, int pair, int x) {
#pragma unroll
  for (int step = 0; step < 16; step += X_DEPTH) {
    Right<T, X_DEPTH> right[VALUE_TILES];
    load_right_transposed(right, [&](int slot) { return gradient.of_pair(pair, x + step + slot); });
#pragma unroll
    for (int i = 0; i < LINE_TILES; ++i) {
      const auto score = load_left_transposed<T, X_DEPTH>(
          [&](int slot) { return scores_of(scores, step + slot, pair) + i * 16; });
#pragma unroll
      for (int tile = 0; tile < VALUE_TILES; ++tile) multiply(d_values[i][tile], score, right[tile]);
    }
  }
  constexpr int DEPTH = depth_of<T>(VALUE_WIDTH), STEPS = VALUE_WIDTH / DEPTH;
  Left<T, DEPTH> left[STEPS];
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    left[step] = load_left<T, DEPTH>([&](int row) { return gradient.of_pair(pair, x + row) + step * DEPTH; });
  warp_barrier();  // the scores have been read
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
  float sums[EIGHTS][4] = {};
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    Right<T, DEPTH> right[EIGHTS];
    load_right(right, [&](int pixel) { return values.of_pair(pair, pixel) + step * DEPTH; });
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) multiply(sums[i], left[step], right[i]);
  }
#pragma unroll
  for (int i = 0; i < EIGHTS; ++i) {
    store_two(scores_of(scores, row, pair) + i * 8 + column, sums[i][0], sums[i][1]);
    store_two(scores_of(scores, row + 8, pair) + i * 8 + column, sums[i][2], sums[i][3]);
  }
}

// dR += dS_x^T Q_x; EIGHT is x / 8 for the first of the warp's pixels with this x: which registers hold the window.
template <int EIGHT>
DEVICE void differentiate_table(TableSums& d_table, T* scores, int slot, QueryTile queries, int x) {
#pragma unroll
  for (int step = 0; step < 16; step += X_DEPTH) {
    Right<T, X_DEPTH> query[QUERY_TILES];
    load_right_transposed(
        query, [&](int pair) { return queries.of_pair(step + pair < PAIRS ? step + pair : PAIRS - 1, x); });
#pragma unroll
    for (int i = 0; i < LINE_TILES; ++i) {
      const auto score = load_left_transposed<T, X_DEPTH>(
          [&](int pair) { return scores_of(scores, slot, step + pair) + i * 16; });
      constexpr int LAST = TABLE_EIGHTS;
      const int upper = 2 * i < EIGHTS ? 2 * i - EIGHT + EIGHTS - 1 : LAST;
      const int lower = 2 * i + 1 < EIGHTS ? 2 * i + 1 - EIGHT + EIGHTS - 1 : LAST;
#pragma unroll
      for (int tile = 0; tile < QUERY_TILES; ++tile)
        multiply(d_table[upper][tile][0], d_table[upper][tile][1], d_table[lower][tile][0], d_table[lower][tile][1], score,
                 query[tile]);
    }
  }
}

// dQ_x = dS_x times the window, in the place of Q_x.
DEVICE void differentiate_queries(QueryTile queries, T* scores, int slot, int x, const T* table) {
  float sums[QUERY_TILES][4] = {};
  const T* window = window_of(table, x);
  Left<T, ALONG> score[SCORE_COLUMNS / ALONG];
#pragma unroll
  for (int i = 0; i < SCORE_COLUMNS / ALONG; ++i)
    score[i] = load_left<T, ALONG>([&](int pair) { return scores_of(scores, slot, pair) + i * ALONG; });
  if constexpr (QUERY_TILES == 1) {
    Right<T, ALONG> right[SCORE_COLUMNS / ALONG];
    load_right_transposed_long(right, [&](int i) { return window + i * TABLE_STRIDE; });
#pragma unroll
    for (int i = 0; i < SCORE_COLUMNS / ALONG; ++i) multiply(sums[0], score[i], right[i]);
  } else {
#pragma unroll
    for (int i = 0; i < SCORE_COLUMNS / ALONG; ++i) {
      Right<T, ALONG> right[QUERY_TILES];
      load_right_transposed(right, [&](int step) { return window + (i * ALONG + step) * TABLE_STRIDE; });
#pragma unroll
      for (int tile = 0; tile < QUERY_TILES; ++tile) multiply(sums[tile], score[i], right[tile]);
    }
  }
  warp_barrier();  // Q_x has been read
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < QUERY_TILES; ++tile) {
    if (row < PAIRS) store_two(queries.of_pair(row, x) + tile * 8 + column, sums[tile][0], sums[tile][1]);
    if (row + 8 < PAIRS) store_two(queries.of_pair(row + 8, x) + tile * 8 + column, sums[tile][2], sums[tile][3]);
  }
}

// Everything about 16 attending pixels; X0 is a constant so that dR's registers have constant numbers.
template <int X0>
DEVICE void differentiate_pixels(ValueSums (&d_values)[OWN_PAIRS], TableSums& d_table, QueryTile queries, ValueTile values,
                                 ValueTile gradient, T* scores, const T* table, const Windows& windows) {
  const int warp = warp_index();
  // Past the end of the line too: queries are zero there, and scores must be.
  if constexpr (WINDOWS_IN_REGISTERS) {
    score_pixel<X0 / 8>(scores, warp, queries, X0 + warp, windows);
    if constexpr (WARPS == 8) score_pixel<X0 / 8 + 1>(scores, warp + 8, queries, X0 + 8 + warp, windows);
  } else {
#pragma unroll
    for (int slot = 0; slot < 16; slot += WARPS)
      score_pixel(scores, slot + warp, queries, X0 + slot + warp, table, 0);
  }
  block_barrier();
#pragma unroll
  for (int own = 0; own < OWN_PAIRS; ++own)
    if (warp + own * WARPS < PAIRS)
      differentiate_pair(d_values[own], scores, values, gradient, warp + own * WARPS, X0);
  block_barrier();
  if (X0 + warp < LENGTH) {
    differentiate_table<X0 / 8>(d_table, scores, warp, queries, X0 + warp);
    differentiate_queries(queries, scores, warp, X0 + warp, table);
  }
  if constexpr (WARPS == 8 && X0 + 8 < LENGTH)
    if (X0 + 8 + warp < LENGTH) {
      differentiate_table<X0 / 8 + 1>(d_table, scores, warp + 8, queries, X0 + 8 + warp);
      differentiate_queries(queries, scores, warp + 8, X0 + 8 + warp, table);
    }
  warp_barrier();  // the warp's own scores have been read; no other warp reads or writes them before the next barrier
  if constexpr (X0 + 16 < LENGTH)
    differentiate_pixels<X0 + 16>(d_values, d_table, queries, values, gradient, scores, table, windows);
}

// dQ += dY C^T, for all pixels of a pair, in the tile of dQ.
DEVICE void add_content_to_queries(QueryTile queries, ValueTile gradient, int pair, const T* context) {
  constexpr int DEPTH = depth_of<T>(VALUE_WIDTH);
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < QUERY_TILES; ++tile) {
    Right<T, DEPTH> right[VALUE_WIDTH / DEPTH];
#pragma unroll
    for (int step = 0; step < VALUE_WIDTH / DEPTH; ++step)
      right[step] = load_right_directly<T, DEPTH>(
          [&](int channel) { return context + (tile * 8 + channel) * VALUE_WIDTH + step * DEPTH; });
#pragma unroll
    for (int i = 0; i < LINE_TILES; ++i) {
      T* upper = queries.of_pair(pair, i * 16 + row) + tile * 8 + column;
      T* lower = queries.of_pair(pair, i * 16 + row + 8) + tile * 8 + column;
      float sums[4];
      load_two(upper, sums[0], sums[1]);
      load_two(lower, sums[2], sums[3]);
#pragma unroll
      for (int step = 0; step < VALUE_WIDTH / DEPTH; ++step)
        multiply(sums, load_left<T, DEPTH>([&](int pixel) { return gradient.of_pair(pair, i * 16 + pixel) + step * DEPTH; }),
                 right[step]);
      // Rows past the line are padding, which stays zero even if the context vectors are not finite.
      if (i * 16 + row < LENGTH) store_two(upper, sums[0], sums[1]);
      if (i * 16 + row + 8 < LENGTH) store_two(lower, sums[2], sums[3]);
    }
  }
}

// dV += E dC' and dK = E (V dC'^T - offset), with E = exp(K - max) and dC' = dC / sum; dK takes E's place.
DEVICE void differentiate_content(ValueSums& d_values, QueryTile keys, ValueTile values, int pair, const T* context,
                                  const T* context_turned, const float* offset) {
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
  {
    constexpr int DEPTH = depth_of<T>(QUERY_WIDTH);
#pragma unroll
    for (int step = 0; step < QUERY_WIDTH; step += DEPTH) {
      Right<T, DEPTH> right[VALUE_TILES];
#pragma unroll
      for (int tile = 0; tile < VALUE_TILES; ++tile)
        right[tile] = load_right_directly<T, DEPTH>(
            [&](int channel) { return context_turned + (tile * 8 + channel) * QUERY_WIDTH + step; });
#pragma unroll
      for (int i = 0; i < LINE_TILES; ++i) {
        const auto weight = load_left<T, DEPTH>([&](int pixel) { return keys.of_pair(pair, i * 16 + pixel) + step; });
#pragma unroll
        for (int tile = 0; tile < VALUE_TILES; ++tile) multiply(d_values[i][tile], weight, right[tile]);
      }
    }
  }
  warp_barrier();
  constexpr int DEPTH = depth_of<T>(VALUE_WIDTH);
#pragma unroll
  for (int tile = 0; tile < QUERY_TILES; ++tile) {
    Right<T, DEPTH> right[VALUE_WIDTH / DEPTH];
#pragma unroll
    for (int step = 0; step < VALUE_WIDTH / DEPTH; ++step)
      right[step] = load_right_directly<T, DEPTH>(
          [&](int channel) { return context + (tile * 8 + channel) * VALUE_WIDTH + step * DEPTH; });
    const int channel = tile * 8 + column;
    const float first = channel < KEY ? offset[channel] : 0.f, second = channel + 1 < KEY ? offset[channel + 1] : 0.f;
#pragma unroll
    for (int i = 0; i < LINE_TILES; ++i) {
      float sums[4] = {-first, -second, -first, -second};
#pragma unroll
      for (int step = 0; step < VALUE_WIDTH / DEPTH; ++step)
        multiply(sums, load_left<T, DEPTH>([&](int pixel) { return values.of_pair(pair, i * 16 + pixel) + step * DEPTH; }),
                 right[step]);
      T* upper = keys.of_pair(pair, i * 16 + row) + channel;
      T* lower = keys.of_pair(pair, i * 16 + row + 8) + channel;
      float weights[4];
      load_two(upper, weights[0], weights[1]);
      load_two(lower, weights[2], weights[3]);
      store_two(upper, weights[0] * sums[0], weights[1] * sums[1]);
      store_two(lower, weights[2] * sums[2], weights[3] * sums[3]);
    }
  }
}

// The warps' dR, one after the other, then to this block's place.
DEVICE void write_table(const TableSums& d_table, float* shared, float* d_rel) {
  fill_with_zeros(shared, round_up(TABLE_ROWS * KEY, 4));
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
  for (int turn = 0; turn < WARPS; ++turn) {
    block_barrier();
    if (turn == warp_index())
#pragma unroll
      for (int eight = 0; eight < TABLE_EIGHTS; ++eight) {
        const int offset = (eight - (EIGHTS - 1)) * 8 + row - turn + LENGTH - 1;
        if (offset < 0 || offset >= TABLE_ROWS) continue;
#pragma unroll
        for (int tile = 0; tile < QUERY_TILES; ++tile)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (tile * 8 + column + i < KEY) shared[offset * KEY + tile * 8 + column + i] += d_table[eight][tile][i];
      }
  }
  block_barrier();
  for (int i = thread_index(); i < TABLE_ROWS * KEY; i += THREADS)
    d_rel[static_cast<long long>(block_row() * block_count() + block_index()) * TABLE_ROWS * KEY + i] = shared[i];
}

KERNEL(THREADS, BLOCKS) line_backward(const Arguments arguments) {
  SHARED_MEMORY(memory);
  T* const shared = reinterpret_cast<T*>(memory);
  const QueryTile queries{shared};
  const ValueTile values{shared + VALUE_TILE}, gradient{shared + GRADIENT_TILE};
  T* const scores = shared + SCORES;
  const QueryTile keys{scores};
  T* const table = shared + TABLE;
  const int warp = warp_index(), row = lane_index() / 4, column = lane_index() % 4 * 2;

  fill_with_zeros(shared, TABLE);
  copy_table(table, arguments.rel);
  block_barrier();
  Windows windows;
  if constexpr (WINDOWS_IN_REGISTERS) windows.load(table);

  Lines lines{arguments.total_lines, arguments.lines_per_image, block_row() * HEADS};
  const int first_channel = lines.first_head * VALUE, channels = arguments.heads * VALUE;
  const ChannelSums<VALUE> sums_of_channels{reinterpret_cast<float*>(table + TABLE_SIZE)};
  if constexpr (STATISTICS) {
    const float zeros[ACCESS] = {};
    sums_of_channels.set(zeros, zeros);
  }
  TableSums d_table = {};

  const int items = (arguments.total_lines + LINES - 1) / LINES;
  const int begin = static_cast<int>(static_cast<long long>(items) * block_index() / block_count());
  const int end = static_cast<int>(static_cast<long long>(items) * (block_index() + 1) / block_count());
  for (int item = begin; item < end; ++item) {
    lines.move_to(item * LINES);
    // Those that need no change go first: they travel while the others are waited for.
    copy_in<KEY>(queries, arguments.queries, lines);
    if constexpr (!NORM_VALUES) copy_in<VALUE>(values, arguments.values, lines);
    if constexpr (POOL) {
      copy_in_pooled<VALUE>(gradient, arguments.gradient, lines);
    } else if constexpr (NORM_GRADIENT) {
      copy_in<VALUE>(gradient, arguments.gradient, lines, [&](int head, int channel) {
        const int own = head * VALUE + channel;
        const float* coefficients = arguments.norm + first_channel + own;
        return Moves{[&, own](int slot, int pixel) { return read_access(lines.start(arguments.second, slot, pixel, VALUE) + own); },
                     [=](float(&d_out)[ACCESS], const Access& second, int, int) {
                       float input[ACCESS], a[ACCESS], b[ACCESS], c[ACCESS];
                       to_floats(input, second);
                       load_floats(a, coefficients);
                       load_floats(b, coefficients + channels);
                       load_floats(c, coefficients + 2 * channels);
#pragma unroll
                       for (int i = 0; i < ACCESS; ++i) d_out[i] = a[i] * d_out[i] + b[i] * input[i] + c[i];
                     }};
      });
    } else {
      copy_in<VALUE>(gradient, arguments.gradient, lines);
    }
    if constexpr (NORM_VALUES)
      copy_in<VALUE>(values, arguments.values, lines, scale_and_shift(arguments.norm + first_channel, channels, VALUE));
    wait_for_copies();
    block_barrier();

    ValueSums d_values[OWN_PAIRS] = {};
    differentiate_pixels<0>(d_values, d_table, queries, values, gradient, scores, table, windows);
    block_barrier();

    if constexpr (CONTENT_KEYS) {
      copy_in<KEY>(keys, arguments.keys, lines, [&](int head, int channel) {
        return Moves{[](int, int) { return Nothing{}; },
                     [&, head, channel](float(&key)[ACCESS], Nothing, int slot, int) {
                       float largest[ACCESS];
                       load_floats(largest,
                                   arguments.key_max + lines.image_head(slot * HEADS + head, arguments.heads) * KEY + channel);
#pragma unroll
                       for (int i = 0; i < ACCESS; ++i) key[i] = exponential(key[i] - largest[i]);
                     }};
      });
      clear_padding<KEY>(keys);
      block_barrier();
    }
#pragma unroll
    for (int own = 0; own < OWN_PAIRS; ++own) {
      const int pair = warp + own * WARPS;
      if (pair >= PAIRS) break;
      const long long image_head = lines.image_head(pair, arguments.heads);
      const long long context = image_head * QUERY_WIDTH * VALUE_WIDTH;
      if constexpr (CONTENT_QUERIES) {
        add_content_to_queries(queries, gradient, pair, arguments.context + context);
        warp_barrier();
      }
      if constexpr (CONTENT_KEYS)
        differentiate_content(d_values[own], keys, values, pair, arguments.context + context,
                              arguments.context_turned + context, arguments.key_offset + image_head * KEY);
      // dV takes dY's place.
#pragma unroll
      for (int i = 0; i < LINE_TILES; ++i)
#pragma unroll
        for (int tile = 0; tile < VALUE_TILES; ++tile) {
          const int pixel = i * 16 + row, channel = tile * 8 + column;
          const auto& sums = d_values[own][i][tile];
          if (pixel < LENGTH) store_two(gradient.of_pair(pair, pixel) + channel, sums[0], sums[1]);
          if (pixel + 8 < LENGTH) store_two(gradient.of_pair(pair, pixel + 8) + channel, sums[2], sums[3]);
        }
    }
    block_barrier();

    if constexpr (ACCUMULATE)
      copy_out<KEY>(arguments.d_queries, lines, queries, [](int, int) {
        return Moves{[](const T* to, int, int) { return read_access(to); },
                     [](float(&out)[ACCESS], const Access& there, int, int) {
                       float before[ACCESS];
                       to_floats(before, there);
#pragma unroll
                       for (int i = 0; i < ACCESS; ++i) out[i] += before[i];
                     }};
      });
    else
      copy_out<KEY>(arguments.d_queries, lines, queries, unchanged());
    if constexpr (STATISTICS)
      copy_out<VALUE>(arguments.d_values, lines, gradient, [&](int head, int channel) {
        const int own = head * VALUE + channel;
        const float* moments = arguments.moments + first_channel + own;
        return Moves{
            [&, own](const T*, int slot, int pixel) { return read_access(lines.start(arguments.values, slot, pixel, VALUE) + own); },
            [=, &sums_of_channels](float(&out)[ACCESS], const Access& value, int, int) {
              float input[ACCESS], mean[ACCESS], inverse_deviation[ACCESS];
              to_floats(input, value);
              load_floats(mean, moments);
              load_floats(inverse_deviation, moments + channels);
#pragma unroll
              for (int i = 0; i < ACCESS; ++i) input[i] = out[i] * (input[i] - mean[i]) * inverse_deviation[i];
              sums_of_channels.add(out, input);
            }};
      });
    else
      copy_out<VALUE>(arguments.d_values, lines, gradient, unchanged());
    if constexpr (CONTENT_KEYS) copy_out<KEY>(arguments.d_keys, lines, keys, unchanged());
    block_barrier();
    if constexpr (CONTENT_KEYS) {
      clear_score_padding(scores);  // the keys were there
      block_barrier();
    }
  }
  write_table(d_table, reinterpret_cast<float*>(shared), arguments.d_rel);
  if constexpr (STATISTICS)
    sums_of_channels.write(arguments.statistics, channels, first_channel);
}
