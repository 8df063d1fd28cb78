// What the kernels of the gradient of positional attention are made of. Scores are computed again (scores.cuh) and never
// leave the chip:
//
//   for each pair of a line and a head   dV += S^T dY,   dS = dY V^T (in the place of S)
//   for each attending pixel x           dQ_x = dS_x times the window of R,   dR's window += dS_x^T Q_x
//
// Where the scores of two pixels are added up, S_x + S_{x+1} in the place of S, these two have one dS. Two lines that are averaged
// have the same dY besides: there is one for four pixels.
//
// A warp owns the attending pixels x with x % WARPS = its number, so dR's rows move by whole groups of eight from one of
// its pixels to the next: each warp keeps all rows of dR that it meets in registers, and the warps are summed in a fixed
// order, once for all lines (line_backward.cu) or after each pair of pieces of them (line_backward_pieces.cu).
//
// On the way in the values may be normalised (NORM_VALUES) and the gradient may be that of a batch norm's input
// (NORM_GRADIENT: a dY + b Y + c) or of a 2 x 2 mean (POOL). Of content attention the kernel of the rows, which has the
// gradient of the output, takes dQ += dY C^T (CONTENT_QUERIES), that of the columns, which has V, takes dK and dV
// (CONTENT_KEYS); the only kernel of a module with one axis takes both. ACCUMULATE adds to the dQ that is there already;
// STATISTICS sums dV and dV times the normalised values for each channel: the gradients of the batch norm's weight and bias.
#pragma once
#include "scores.cuh"

static_assert(LENGTH <= BAND, "all scores of 16 pixels are held at once");

constexpr int VALUE_WIDTH = padded(VALUE);
using QueryTile = Tile<QUERY_WIDTH>;
using ValueTile = Tile<VALUE_WIDTH>;
using GradientTile = Tile<VALUE_WIDTH, TOGETHER == 1 ? LINE_ROWS : round_up(PLACES, 16), TOGETHER>;

struct Arguments {
  Map queries, values, gradient;
  Map second;                // NORM_GRADIENT: the batch norm's input
  Map keys;                  // CONTENT_KEYS
  Map d_queries, d_values, d_keys;
  const T* rel;              // (offsets, KEY): 2 length - 1 of them
  float* d_rel;              // (block, offsets, KEY)
  const float* norm;         // NORM_VALUES: (2, channels), scale and shift. NORM_GRADIENT: (3, channels), a, b and c
  const T* d_context;        // CONTENT_KEYS: (image, head), gradient of the context vectors, divided by the softmax's sums,
                             // packed with keys as columns
  const T* d_context_turned; // CONTENT_KEYS: the same packed with values as columns
  const float* key_max;      // CONTENT_KEYS: (image, heads KEY), of the softmax
  const float* key_offset;   // CONTENT_KEYS: (image, heads KEY), what the softmax's gradient subtracts
  const float* moments;      // STATISTICS: (2, channels), mean and 1 / standard deviation of the values before the norm
  float* statistics;         // STATISTICS: (block, 2, channels)
  int lines_per_image;
  int total_lines;
  int heads;
  int length;                // pixels of a whole line
  const T* context;          // CONTENT_QUERIES: (image, head), context vectors, packed with keys as columns
};

// The lines that a block works on.
struct Tiles {
  QueryTile queries;
  ValueTile values;
  GradientTile gradient;
  QueryTile keys;  // CONTENT_KEYS

  // dV takes dY's place, or that of V if there is more of it.
  DEVICE ValueTile d_values() const { return {TOGETHER == 1 ? gradient.data : values.data}; }
};

constexpr int OWN_PAIRS = (PAIRS + WARPS - 1) / WARPS;
constexpr int VALUE_TILES = VALUE_WIDTH / 8, QUERY_TILES = QUERY_WIDTH / 8;
constexpr int X_DEPTH = depth_of<T>(16);  // depth of products over 16 attending pixels or 16 pairs
constexpr int SCORE_EIGHTS = BUNDLED ? 2 : EIGHTS;  // groups of eight columns of scores
constexpr int WINDOW_ALONG = depth_of<T>(WINDOW_COLUMNS);  // depth of products along a window
// Whether the compiler may work on the scores of two pixels at once. That mostly costs more registers than there are.
constexpr bool MIXED_PIXELS = CONTENT_KEYS && VALUE_TILES == 2 && SLOTS == 16;

// What a warp keeps in registers over all lines, as far as that leaves about 60 for the rest: its sums, the windows of the
// table that its pixels meet, and the same transposed.
constexpr int SUM_REGISTERS = 2 * TABLE_EIGHTS * QUERY_TILES + 4 * OWN_PAIRS * LINE_TILES * VALUE_TILES;
constexpr bool WINDOWS_IN_REGISTERS = !BUNDLED && SUM_REGISTERS + WINDOW_REGISTERS <= (TOGETHER == 1 ? 56 : 64);
constexpr bool TURNED_IN_REGISTERS = !IS_FLOAT<T> && WINDOW_ALONG == 16 && WINDOWS_IN_REGISTERS &&
                                     SUM_REGISTERS + WINDOW_REGISTERS + TABLE_EIGHTS * QUERY_TILES <= 68;

// The table's groups of eight rows as the lower or the upper half of a right operand whose sums run across rows.
struct TurnedWindows {
  Word words[TABLE_EIGHTS][QUERY_TILES];

  DEVICE void load(const T* table) {
#pragma unroll
    for (int eight = 0; eight < TABLE_EIGHTS; ++eight)
#pragma unroll
      for (int tile = 0; tile < QUERY_TILES; ++tile)
        words[eight][tile] = load_right_transposed<T, 8>([&](int row) {
          const int offset = 8 * (eight - EIGHTS + 1) + row - warp_index() + LENGTH - 1;
          return table + (offset > 0 ? offset : 0) * TABLE_STRIDE + tile * 8;
        }).words[0];
  }
};

using ValueSums = float[LINE_TILES][VALUE_TILES][4];
// Groups of eight offsets, and of eight channels; the last one takes what lies past the line, or past the channels. A lane's
// row is an offset and its columns are channels; of bundles it is the other way round.
using TableSums = float[TABLE_EIGHTS + 1][QUERY_TILES][2];

// 16 rows of S^T from 16 i on, `scores(slot)` being where a row of S begins. If S has only eight more columns they are read
// twice, and no sum of the second eight is used: behind them lies the next pair's row, which another warp may be writing.
template <class Row>
DEVICE Left<T, X_DEPTH> load_scores_transposed(Row scores, int i) {
  return load_left_transposed<T, X_DEPTH>([&](int slot) { return scores(slot) + i * 16; }, i * 16 + 8 < SCORE_COLUMNS ? 8 : 0);
}

// dV += S^T dY and dS = dY V^T, for 16 attending places from x on of one pair.
DEVICE void differentiate_pair(ValueSums& d_values, T* scores, ValueTile values, GradientTile gradient, int pair, int x) {
#pragma unroll
  for (int step = 0; step < 16; step += X_DEPTH) {
    Right<T, X_DEPTH> right[VALUE_TILES];
    load_right_transposed(right, [&](int slot) { return gradient.of_pair(pair, x + step + slot); });
#pragma unroll
    for (int i = 0; i < LINE_TILES; ++i) {
      const auto score = load_scores_transposed([&](int slot) { return scores_of(scores, step + slot, pair); }, i);
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
  float sums[SCORE_EIGHTS][4] = {};
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    Right<T, DEPTH> right[SCORE_EIGHTS];
    load_right(right, [&](int pixel) { return values.of_pair(pair, pixel) + step * DEPTH; });
#pragma unroll
    for (int i = 0; i < SCORE_EIGHTS; ++i) multiply(sums[i], left[step], right[i]);
  }
#pragma unroll
  for (int i = 0; i < SCORE_EIGHTS; ++i) {
    const int other = i * 8 + column;
    if (of_one_line(row, other)) store_two(scores_of(scores, row, pair) + other, sums[i][0], sums[i][1]);
    if (of_one_line(row + 8, other)) store_two(scores_of(scores, row + 8, pair) + other, sums[i][2], sums[i][3]);
  }
}

// dR^T += Q_x^T dS_x, of bundles: with eight offsets, half of the products of the other way round would be empty.
DEVICE void differentiate_turned_table(TableSums& d_table, T* scores, int slot, QueryTile queries, int x) {
#pragma unroll
  for (int step = 0; step < 16; step += X_DEPTH) {
    const auto score =
        load_right_transposed<T, X_DEPTH>([&](int member) { return scores_in_window(scores, slot, step + member); });
#pragma unroll
    for (int tile = 0; tile < QUERY_TILES; tile += 2) {
      const bool both = tile + 1 < QUERY_TILES;
      const auto query = load_left_transposed<T, X_DEPTH>(
          [&](int member) { return queries_of(queries, step + member, x) + tile * 8; }, both ? 8 : 0);
      auto &upper = d_table[0][tile], &lower = both ? d_table[0][tile + 1] : d_table[1][0];
      multiply(upper[0], upper[1], lower[0], lower[1], query, score);
    }
  }
}

// dR += dS_x^T Q_x; EIGHT is x / 8 for the first of the warp's pixels with this x: which registers hold the window.
template <int EIGHT>
DEVICE void differentiate_table(TableSums& d_table, T* scores, int slot, QueryTile queries, int x) {
  if constexpr (BUNDLED) return differentiate_turned_table(d_table, scores, slot, queries, x);
#pragma unroll
  for (int step = 0; step < 16; step += X_DEPTH) {
    Right<T, X_DEPTH> query[QUERY_TILES];
    load_right_transposed(query, [&](int pair) { return queries_of(queries, step + pair, x); });
#pragma unroll
    for (int i = 0; i < LINE_TILES; ++i) {
      const auto score = load_scores_transposed([&](int pair) { return scores_of(scores, slot, step + pair); }, i);
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
template <int EIGHT>
DEVICE void differentiate_queries(QueryTile queries, T* scores, int slot, int x, const T* table, const TurnedWindows& turned) {
  float sums[QUERY_TILES][4] = {};
  constexpr int STEPS = WINDOW_COLUMNS / WINDOW_ALONG;
  Left<T, WINDOW_ALONG> score[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; ++i)
    score[i] =
        load_left<T, WINDOW_ALONG>([&](int member) { return scores_in_window(scores, slot, member) + i * WINDOW_ALONG; });
  if constexpr (TURNED_IN_REGISTERS) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
      for (int tile = 0; tile < QUERY_TILES; ++tile) {
        Right<T, WINDOW_ALONG> right;
#pragma unroll
        for (int half = 0; half < WINDOW_ALONG / 8; ++half)
          right.words[half] = 2 * i + half < EIGHTS ? turned.words[2 * i + half - EIGHT + EIGHTS - 1][tile] : 0u;
        multiply(sums[tile], score[i], right);
      }
  } else if constexpr (QUERY_TILES == 1) {
    const T* window = window_of(table, x);
    Right<T, WINDOW_ALONG> right[STEPS];
    load_right_transposed_long(right, [&](int i) { return window + i * TABLE_STRIDE; });
#pragma unroll
    for (int i = 0; i < STEPS; ++i) multiply(sums[0], score[i], right[i]);
  } else {
    const T* window = window_of(table, x);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      Right<T, WINDOW_ALONG> right[QUERY_TILES];
      load_right_transposed(right, [&](int step) { return window + (i * WINDOW_ALONG + step) * TABLE_STRIDE; });
#pragma unroll
      for (int tile = 0; tile < QUERY_TILES; ++tile) multiply(sums[tile], score[i], right[tile]);
    }
  }
  warp_barrier();  // Q_x has been read
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < QUERY_TILES; ++tile) {
    if (pair_of(row) < PAIRS) store_two(queries_of(queries, row, x) + tile * 8 + column, sums[tile][0], sums[tile][1]);
    if (pair_of(row + 8) < PAIRS)
      store_two(queries_of(queries, row + 8, x) + tile * 8 + column, sums[tile][2], sums[tile][3]);
  }
}

// dR and dQ of the warp's pixels among those of 16 places from X0 on; FIRST is the first warp's.
template <int X0, int FIRST>
DEVICE void differentiate_own(TableSums& d_table, const Tiles& tiles, T* scores, const T* table, const TurnedWindows& turned) {
  const int x = FIRST + warp_index(), slot = TOGETHER == 1 ? x - X0 : x / 2 - X0;
  if (x < (BUNDLED ? SLOTS : LENGTH) && is_pixel(x)) {
    differentiate_table<FIRST / 8>(d_table, scores, slot, tiles.queries, x);
    differentiate_queries<FIRST / 8>(tiles.queries, scores, slot, x, table, turned);
  }
  if constexpr (FIRST + WARPS < LENGTH && FIRST + WARPS < TOGETHER * (X0 + 16))
    differentiate_own<X0, FIRST + WARPS>(d_table, tiles, scores, table, turned);
}

// Everything about 16 attending places; X0 is a constant so that registers have constant numbers.
template <int X0>
DEVICE void differentiate_pixels(ValueSums (&d_values)[OWN_PAIRS], TableSums& d_table, const Tiles& tiles, T* scores,
                                 const T* table, const Windows& windows, const TurnedWindows& turned) {
  const int warp = warp_index();
  // Past the end of the line too: scores must be zero there.
  if constexpr (WINDOWS_IN_REGISTERS) {
    constexpr int EIGHT = X0 * TOGETHER / 8;
    if (warp < SLOTS) score_place<EIGHT>(scores, warp, tiles.queries, X0 + warp, windows);
    if constexpr (WARPS == 8 && SLOTS > 8)
      score_place<EIGHT + TOGETHER>(scores, warp + 8, tiles.queries, X0 + 8 + warp, windows);
  } else {
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot += WARPS)
      if (MIXED_PIXELS || slot + warp < SLOTS) score_place(scores, slot + warp, tiles.queries, X0 + slot + warp, table, 0);
  }
  block_barrier();
#pragma unroll
  for (int own = 0; own < OWN_PAIRS; ++own)
    if (warp + own * WARPS < PAIRS)
      differentiate_pair(d_values[own], scores, tiles.values, tiles.gradient, warp + own * WARPS, X0);
  block_barrier();
  differentiate_own<X0, X0 * TOGETHER>(d_table, tiles, scores, table, turned);
  if constexpr (TOGETHER == 1)
    warp_barrier();  // the warp's own scores have been read; no other warp reads or writes them before the next barrier
  else if constexpr (X0 + 16 < PLACES)
    block_barrier();  // two warps read the scores of a place
  if constexpr (X0 + 16 < PLACES)
    differentiate_pixels<X0 + 16>(d_values, d_table, tiles, scores, table, windows, turned);
}

constexpr int VALUE_DEPTH = depth_of<T>(VALUE_WIDTH), VALUE_STEPS = VALUE_WIDTH / VALUE_DEPTH;
constexpr int CONTEXT_SIZE = QUERY_WIDTH * VALUE_WIDTH;  // scalars of the context vectors of an image and head

// Context vectors, or their gradient, of a head for eight keys: right operands whose sums run along the values.
struct KeyColumns {
  Right<T, VALUE_DEPTH> right[VALUE_STEPS];

  DEVICE KeyColumns(const T* context, int tile) {
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; ++step)
      right[step] = load_right_packed<T, VALUE_DEPTH>(context, tile * VALUE_STEPS + step);
  }

  // Adds the products of 16 pixels of a pair, from `pixel` on.
  template <class TileType>
  DEVICE void add_products(float (&sums)[4], TileType left, int pair, int pixel) const {
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; ++step)
      multiply(sums, load_left<T, VALUE_DEPTH>([&](int row) { return left.of_pair(pair, pixel + row) + step * VALUE_DEPTH; }),
               right[step]);
  }
};

// dQ += dY C^T for both pixels of each place. Which of them comes first changes after four places, so that eight rows do not
// meet in one bank.
DEVICE void add_content_to_both(QueryTile queries, GradientTile gradient, int pair, const T* context) {
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < QUERY_TILES; ++tile) {
    const KeyColumns columns(context, tile);
#pragma unroll
    for (int place = 0; place < PLACES; place += 16) {
      float sums[4] = {};
      columns.add_products(sums, gradient, pair, place);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (place + half * 8 + row >= PLACES) continue;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const int pixel = 2 * (place + half * 8 + row) + (part ^ (row / 4));
          T* where = queries.of_pair(pair, pixel) + tile * 8 + column;
          float first, second;
          load_two(where, first, second);
          store_two(where, first + sums[2 * half], second + sums[2 * half + 1]);
        }
      }
    }
  }
}

// dQ += dY C^T, for all pixels of a pair, in the tile of dQ.
DEVICE void add_content_to_queries(QueryTile queries, GradientTile gradient, int pair, const T* context) {
  if constexpr (TOGETHER == 2) return add_content_to_both(queries, gradient, pair, context);
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < QUERY_TILES; ++tile) {
    const KeyColumns columns(context, tile);
#pragma unroll
    for (int i = 0; i < LINE_TILES; ++i) {
      T* upper = queries.of_pair(pair, i * 16 + row) + tile * 8 + column;
      T* lower = queries.of_pair(pair, i * 16 + row + 8) + tile * 8 + column;
      float sums[4];
      load_two(upper, sums[0], sums[1]);
      load_two(lower, sums[2], sums[3]);
      columns.add_products(sums, gradient, pair, i * 16);
      // Rows past the line are padding, which stays zero even if the context vectors are not finite.
      if (i * 16 + row < END && is_pixel(i * 16 + row)) store_two(upper, sums[0], sums[1]);
      if (i * 16 + row + 8 < END && is_pixel(i * 16 + row + 8)) store_two(lower, sums[2], sums[3]);
    }
  }
}

// exp(K - max) of a channel; zero in the padding.
DEVICE float weight_of(float key, const float* largest, int channel) {
  return channel < KEY ? exponential(key - largest[channel]) : 0.f;
}

// The same of a left operand whose sums run along the channels, from `first` on.
template <class S = T>
DEVICE Left<S, QUERY_DEPTH> weights_of(Left<S, QUERY_DEPTH> keys, const float* largest, int first) {
  const int lane = lane_index();
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(keys) / 4); ++i) {
    if constexpr (IS_FLOAT<S>) {
      keys.words[i] = float_bits(weight_of(bits_float(keys.words[i]), largest, first + lane % 4 + i / 2 * 4));
    } else {
      const int channel = first + lane % 4 * 2 + i / 2 * 8;
      float low, high;
      unpack<S>(keys.words[i], low, high);
      keys.words[i] = pack<S>(weight_of(low, largest, channel), weight_of(high, largest, channel + 1));
    }
  }
  return keys;
}

// dV += E dC' and dK = E (V dC'^T - offset), with E = exp(K - max) and dC' = dC / sum; dK takes K's place.
DEVICE void differentiate_content(ValueSums& d_values, QueryTile keys, ValueTile values, int pair, const T* d_context,
                                  const T* d_context_turned, const float* largest, const float* offset) {
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
  for (int step = 0; step < QUERY_STEPS; ++step) {
    Right<T, QUERY_DEPTH> right[VALUE_TILES];
#pragma unroll
    for (int tile = 0; tile < VALUE_TILES; ++tile)
      right[tile] = load_right_packed<T, QUERY_DEPTH>(d_context_turned, tile * QUERY_STEPS + step);
#pragma unroll
    for (int i = 0; i < LINE_TILES; ++i) {
      const auto weights = weights_of(
          load_left<T, QUERY_DEPTH>([&](int pixel) { return keys.of_pair(pair, i * 16 + pixel) + step * QUERY_DEPTH; }), largest,
          step * QUERY_DEPTH);
#pragma unroll
      for (int tile = 0; tile < VALUE_TILES; ++tile) multiply(d_values[i][tile], weights, right[tile]);
    }
  }
  warp_barrier();  // the keys have been read
#pragma unroll
  for (int tile = 0; tile < QUERY_TILES; ++tile) {
    const KeyColumns columns(d_context, tile);
    const int channel = tile * 8 + column;
    const float first = channel < KEY ? offset[channel] : 0.f, second = channel + 1 < KEY ? offset[channel + 1] : 0.f;
#pragma unroll
    for (int i = 0; i < LINE_TILES; ++i) {
      float sums[4] = {-first, -second, -first, -second};
      columns.add_products(sums, values, pair, i * 16);
      T* upper = keys.of_pair(pair, i * 16 + row) + channel;
      T* lower = keys.of_pair(pair, i * 16 + row + 8) + channel;
      float weights[4];
      load_two(upper, weights[0], weights[1]);
      load_two(lower, weights[2], weights[3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) weights[j] = weight_of(weights[j], largest, channel + j % 2);
      store_two(upper, weights[0] * sums[0], weights[1] * sums[1]);
      store_two(lower, weights[2] * sums[2], weights[3] * sums[3]);
    }
  }
}

// dV of a pair goes to its tile; (row, column) is where the lane's sums begin, as the kernel has it in registers.
DEVICE void store_values(ValueTile to, const ValueSums& d_values, int pair, int row, int column) {
  if constexpr (TOGETHER == 2 && CONTENT_KEYS) warp_barrier();  // the values have been read
#pragma unroll
  for (int i = 0; i < LINE_TILES; ++i)
#pragma unroll
    for (int tile = 0; tile < VALUE_TILES; ++tile) {
      const int pixel = i * 16 + row, channel = tile * 8 + column;
      const auto& sums = d_values[i][tile];
      if (pixel < END && is_pixel(pixel)) store_two(to.of_pair(pair, pixel) + channel, sums[0], sums[1]);
      if (pixel + 8 < END && is_pixel(pixel + 8)) store_two(to.of_pair(pair, pixel + 8) + channel, sums[2], sums[3]);
    }
}

// Adds the warps' dR to (TABLE_ROWS, KEY) floats in shared memory, one warp after the other.
DEVICE void add_warps(float* shared, const TableSums& d_table) {
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
  for (int turn = 0; turn < WARPS; ++turn) {
    block_barrier();
    if (turn == warp_index())
#pragma unroll
      for (int eight = 0; eight < TABLE_EIGHTS; ++eight) {
        const int offset = (eight - (EIGHTS - 1)) * 8 + row - turn + LENGTH - 1;
        if (!BUNDLED && (offset < 0 || offset >= TABLE_ROWS)) continue;
#pragma unroll
        for (int tile = 0; tile < QUERY_TILES; ++tile)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if constexpr (BUNDLED) {
              const int turned = column + i - turn + LENGTH - 1, channel = tile * 8 + row;
              if (turned >= 0 && turned < TABLE_ROWS && channel < KEY) shared[turned * KEY + channel] += d_table[0][tile][i];
            } else if (tile * 8 + column + i < KEY) {
              shared[offset * KEY + tile * 8 + column + i] += d_table[eight][tile][i];
            }
          }
      }
  }
  block_barrier();
}

// What a block brings into shared memory at a time: all of lines, or what belongs to their pixels as attending or as attended
// ones.
enum class Part { ALL, ATTENDING, ATTENDED };

// Those that need no change on the way go first: they travel while others are waited for.
template <Part PART, class LinesType>
DEVICE void load_lines(const Tiles& tiles, const LinesType& lines, const Arguments& arguments) {
  const int first_channel = lines.first_head * VALUE, channels = arguments.heads * VALUE;
  if constexpr (PART != Part::ATTENDED) copy_in<KEY>(tiles.queries, arguments.queries, lines);
  if constexpr (PART == Part::ALL && CONTENT_KEYS) copy_in<KEY>(tiles.keys, arguments.keys, lines);
  if constexpr (PART != Part::ATTENDING && !NORM_VALUES) copy_in<VALUE>(tiles.values, arguments.values, lines);
  if constexpr (PART == Part::ATTENDED) {
  } else if constexpr (POOL)
    copy_in_pooled<VALUE, TOGETHER == 1>(tiles.gradient, arguments.gradient, lines);
  else if constexpr (NORM_GRADIENT)
    copy_in<VALUE>(tiles.gradient, arguments.gradient, lines, [&](int head, int channel) {
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
  else
    copy_in<VALUE>(tiles.gradient, arguments.gradient, lines);
  if constexpr (PART != Part::ATTENDING && NORM_VALUES)
    copy_in<VALUE>(tiles.values, arguments.values, lines, scale_and_shift(arguments.norm + first_channel, channels, VALUE));
}

// Takes dQ to global memory; ADD: adds it to what is there.
template <bool ADD, class LinesType>
DEVICE void store_queries(const Tiles& tiles, const LinesType& lines, const Arguments& arguments) {
  if constexpr (ADD)
    copy_out<KEY>(arguments.d_queries, lines, tiles.queries, [](int, int) {
      return Moves{[](const T* to, int, int) { return read_access(to); },
                   [](float(&out)[ACCESS], const Access& there, int, int) {
                     float before[ACCESS];
                     to_floats(before, there);
#pragma unroll
                     for (int i = 0; i < ACCESS; ++i) out[i] += before[i];
                   }};
    });
  else
    copy_out<KEY>(arguments.d_queries, lines, tiles.queries, unchanged());
}

// Takes dV and dK to global memory; of all of lines dQ too.
template <Part PART, class LinesType>
DEVICE void store_lines(const Tiles& tiles, const LinesType& lines, const Arguments& arguments, const ChannelSums<VALUE>& sums) {
  const int first_channel = lines.first_head * VALUE, channels = arguments.heads * VALUE;
  if constexpr (PART == Part::ALL) store_queries<ACCUMULATE>(tiles, lines, arguments);
  if constexpr (STATISTICS) {
    float sum[ACCESS] = {}, sum_of_products[ACCESS] = {};
    copy_out<VALUE>(arguments.d_values, lines, tiles.d_values(), [&](int head, int channel) {
      const int own = head * VALUE + channel;
      const float* moments = arguments.moments + first_channel + own;
      return Moves{
          [&, own](const T*, int slot, int pixel) { return read_access(lines.start(arguments.values, slot, pixel, VALUE) + own); },
          [=, &sum, &sum_of_products](float(&out)[ACCESS], const Access& value, int, int) {
            float input[ACCESS], mean[ACCESS], inverse_deviation[ACCESS];
            to_floats(input, value);
            load_floats(mean, moments);
            load_floats(inverse_deviation, moments + channels);
#pragma unroll
            for (int i = 0; i < ACCESS; ++i) {
              sum[i] += out[i];
              sum_of_products[i] += out[i] * (input[i] - mean[i]) * inverse_deviation[i];
            }
          }};
    });
    sums.add(sum, sum_of_products);
  } else {
    copy_out<VALUE>(arguments.d_values, lines, tiles.d_values(), unchanged());
  }
  if constexpr (CONTENT_KEYS) copy_out<KEY>(arguments.d_keys, lines, tiles.keys, unchanged());
}
