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
// What comes before and after, content attention too, is in gradient_parts.cuh.
#pragma once
#include "gradient_parts.cuh"

static_assert(LENGTH <= BAND, "all scores of 16 pixels are held at once");

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

// Two groups of eight offsets beside each other, as a product has them, and groups of eight channels: a lane's rows are offsets
// and its columns are channels. Of bundles it is the other way round, and two groups of channels are beside each other.
using TableSums = float[BUNDLED ? 1 : EIGHTS][BUNDLED ? (QUERY_TILES + 1) / 2 : QUERY_TILES][4];

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
  if constexpr (!BUNDLED) return store_rows<16, T>(sums, [&](int slot) { return scores_of(scores, slot, pair); });
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
      multiply(d_table[0][tile / 2], query, score);
    }
  }
}

// dR += dS_x^T Q_x; EIGHT is x / 8 for the first of the warp's pixels with this x: which registers hold the window. If its groups
// of offsets begin with an odd one, a product is for the second of two that are beside each other and the first of the next two;
// or, if there is an odd number of groups, the first product is for the group before them too, with zeros, and none is so.
template <int EIGHT>
DEVICE void differentiate_table(TableSums& d_table, T* scores, int slot, QueryTile queries, int x) {
  if constexpr (BUNDLED) return differentiate_turned_table(d_table, scores, slot, queries, x);
  constexpr int FIRST = EIGHTS - 1 - EIGHT, ZEROS = FIRST % 2 && EIGHTS % 2 ? 1 : 0;
#pragma unroll
  for (int step = 0; step < 16; step += X_DEPTH) {
    Right<T, X_DEPTH> query[QUERY_TILES];
    load_right_transposed(query, [&](int pair) { return queries_of(queries, step + pair, x); });
#pragma unroll
    for (int i = -ZEROS; i < EIGHTS; i += 2) {
      const bool upper = i >= 0, lower = i + 1 < EIGHTS;  // what there is
      auto score = load_left_transposed<T, X_DEPTH>(
          [&](int pair) { return scores_of(scores, slot, step + pair) + (upper ? i : 0) * 8; }, upper && lower ? 8 : 0);
#pragma unroll
      for (int word = 0; word < static_cast<int>(sizeof(score.words) / 4); ++word)
        if (!(word % 2 ? lower : upper)) score.words[word] = 0;
      const int first = FIRST + i;
#pragma unroll
      for (int tile = 0; tile < QUERY_TILES; ++tile) {
        auto &sums = d_table[first / 2][tile], &next = d_table[(first + 1) / 2][tile];
        multiply(sums[first % 2 * 2], sums[first % 2 * 2 + 1], next[(first + 1) % 2 * 2], next[(first + 1) % 2 * 2 + 1], score,
                 query[tile]);
      }
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
  if constexpr (FULL_ROWS) return store_rows<PAIRS, T>(sums, [&](int pair) { return queries_of(queries, pair, x); });
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
              if (turned >= 0 && turned < TABLE_ROWS && channel < KEY) shared[turned * KEY + channel] += d_table[0][tile / 2][tile % 2 * 2 + i];
            } else if (tile * 8 + column + i < KEY) {
              shared[offset * KEY + tile * 8 + column + i] += d_table[eight / 2][tile][eight % 2 * 2 + i];
            }
          }
      }
  }
  block_barrier();
}
