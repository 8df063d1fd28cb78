// Scores of positional attention, one attending pixel x at a time.
//
// S[pair, i] = sum over k of q[pair, x, k] R[i - x, k]: for one x over many pairs of a line and a head this is a plain
// product of Q_x with a window of rows of the table R, the one that starts at row LENGTH - 1 - x. So no score is ever
// moved along its row. 16 attending pixels at a time are held in shared memory, [x][pair][i], written a pixel at a time
// and read a pair at a time; both ways are free of bank conflicts.
//
// Of bundles (tiles.cuh) x and i are rows: 16 x 16 scores, those between different lines zero, as nobody ever writes there.
// One product is for two rows x, eight apart: they have the same window, which is of eight rows i whatever the length.
//
// Where outputs are averaged two and two (POOL), the scores of two neighbours are added up before they meet the values:
// S_x V + S_{x+1} V = (S_x + S_{x+1}) V. Both together are called one attending place; elsewhere, and in bundles, a place is
// a pixel.
//
// IN_REGISTERS: scores are never in shared memory, but in registers (skewed_scores.cuh), for 16-bit scalars and lines of more
// than 8 and at most BAND pixels. The table has other zeros around it then, and outputs are averaged as they are stored.
#pragma once
#include "tiles.cuh"

static_assert(LENGTH > 8 || BUNDLED, "a block has more than one short line");

static_assert(!IN_REGISTERS || (!BUNDLED && !IS_FLOAT<T> && LENGTH <= BAND), "whole lines of 16-bit scalars");

constexpr int TOGETHER = POOL && !BUNDLED && !IN_REGISTERS ? 2 : 1;  // attending pixels whose scores are added up
constexpr int PLACES = LENGTH / TOGETHER;           // attending places of a line
static_assert(PLACES * TOGETHER == LENGTH, "pixels are averaged two and two");

constexpr int QUERY_WIDTH = padded(KEY);
constexpr int ATTENDED = LENGTH < BAND ? LENGTH : BAND;  // pixels i that are held at a time: BAND of them, or all
constexpr int WINDOW_COLUMNS = !IS_FLOAT<T> && ATTENDED > 8 ? round_up(ATTENDED, 16) : round_up(ATTENDED, 8);
constexpr int SCORE_COLUMNS = BUNDLED ? 16 : WINDOW_COLUMNS;
constexpr int SCORE_TILES = (ATTENDED + 7) / 8;
constexpr int SCORE_PAIR = odd_stride(SCORE_COLUMNS);
constexpr int SCORE_PIXEL = odd_stride((BUNDLED ? 8 : 16) * SCORE_PAIR);
constexpr int SCORES_SIZE = 16 * SCORE_PIXEL + 16;
constexpr int ALONG = depth_of<T>(SCORE_COLUMNS);  // depth of products along i

constexpr int TABLE_STRIDE = odd_stride(QUERY_WIDTH);
constexpr int TABLE_ROWS = 2 * LENGTH - 1;
constexpr int MIDDLE = BUNDLED ? 7 : IN_REGISTERS ? LINE_ROWS - 1 : LENGTH - 1;  // the row of offset 0
// The window of the last band reaches past the table, and so do products of 16 pixels: zeros.
constexpr int ROWS_AFTER = IN_REGISTERS ? 1 + round_up(LENGTH, 8) : round_up(LENGTH, BAND < LENGTH ? BAND : 16);
constexpr int TABLE_SIZE = (MIDDLE + ROWS_AFTER) * TABLE_STRIDE;

DEVICE T* scores_of(T* scores, int slot, int pair) { return scores + slot * SCORE_PIXEL + pair * SCORE_PAIR; }

// (2 LENGTH - 1, KEY) from global memory, channels and windows padded with zeros.
DEVICE void copy_table(T* table, const T* rel) {
  for (int i = thread_index(); i < TABLE_SIZE; i += THREADS) {
    const int row = i / TABLE_STRIDE - (MIDDLE - (LENGTH - 1)), channel = i % TABLE_STRIDE;
    table[i] = (!(BUNDLED || IN_REGISTERS) || row >= 0) && row < TABLE_ROWS && channel < KEY ? rel[row * KEY + channel] : T{};
  }
}

// Where the window of attending pixel x begins; pixels past the line read some window, and their queries are zero.
DEVICE const T* window_of(const T* table, int x) {
  return table + (BUNDLED ? MIDDLE - x : x < LENGTH ? LENGTH - 1 - x : 0) * TABLE_STRIDE;
}

constexpr int SLOTS = BUNDLED ? 8 : 16;  // products that give the scores of 16 attending pixels
constexpr int QUERY_DEPTH = depth_of<T>(QUERY_WIDTH), QUERY_STEPS = QUERY_WIDTH / QUERY_DEPTH;
constexpr int LINE_TILES = TILE_ROWS / 16;
constexpr int EIGHTS = (LENGTH + 7) / 8;      // groups of eight pixels on a line
constexpr int TABLE_EIGHTS = 2 * EIGHTS - 1;  // groups of eight offsets that a warp meets

// A warp owns the attending places x with x % WARPS = its number, and WARPS is a multiple of 8. From one of them to the
// next the window moves by whole groups of eight rows, so a warp meets TABLE_EIGHTS such groups, of each of the pixels of a
// place, and no others: they stay in registers over all lines. Group e holds the offsets 8 (e - EIGHTS + 1) - warp and the
// seven after it; of two pixels together, 2 warp and 2 warp + 1 are in the place of warp.
struct Windows {
  Right<T, QUERY_DEPTH> right[TOGETHER][TABLE_EIGHTS][QUERY_STEPS];

  DEVICE void load(const T* table) {
#pragma unroll
    for (int part = 0; part < TOGETHER; ++part)
#pragma unroll
      for (int eight = 0; eight < TABLE_EIGHTS; ++eight)
#pragma unroll
        for (int step = 0; step < QUERY_STEPS; ++step)
          right[part][eight][step] = load_right<T, QUERY_DEPTH>([&](int row) {
            const int offset = 8 * (eight - EIGHTS + 1) + row - (TOGETHER * warp_index() + part) + LENGTH - 1;
            return table + (offset > 0 ? offset : 0) * TABLE_STRIDE + step * QUERY_DEPTH;  // below: of no pixel
          });
  }
};

constexpr int WINDOW_REGISTERS = static_cast<int>(sizeof(Windows)) / 4;

// What the 16 members of a product are: pairs, or eight pairs of bundles at one row and again eight rows further on.
DEVICE int pair_of(int member) { return BUNDLED ? member % 8 : member; }
DEVICE int rows_on(int member) { return BUNDLED ? member / 8 * 8 : 0; }

template <class QueryTile>
DEVICE T* queries_of(QueryTile queries, int member, int x) {
  const int pair = pair_of(member);
  return queries.of_pair(pair < PAIRS ? pair : PAIRS - 1, x + rows_on(member));
}

// The scores of a member with the pixels of its window.
DEVICE T* scores_in_window(T* scores, int slot, int member) {
  return scores_of(scores, slot + rows_on(member), pair_of(member)) + rows_on(member);
}

template <class QueryTile>
DEVICE void load_queries(Left<T, QUERY_DEPTH> (&query)[QUERY_STEPS], QueryTile queries, int x) {
#pragma unroll
  for (int step = 0; step < QUERY_STEPS; ++step)
    query[step] = load_left<T, QUERY_DEPTH>([&](int row) { return queries_of(queries, row, x) + step * QUERY_DEPTH; });
}

// Whether a product's upper half, or all of it, is pairs that exist, and nothing else.
constexpr bool FULL_ROWS = !BUNDLED && (PAIRS == 8 || PAIRS == 16);

DEVICE void store_scores(T* scores, int slot, const float (&sums)[SCORE_TILES][4]) {
  if constexpr (FULL_ROWS) return store_rows<PAIRS, T>(sums, [&](int pair) { return scores_of(scores, slot, pair); });
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < SCORE_TILES; ++tile) {
    if (!of_one_line(slot, tile * 8 + column)) continue;
    if (pair_of(row) < PAIRS) store_two(scores_in_window(scores, slot, row) + tile * 8 + column, sums[tile][0], sums[tile][1]);
    if (pair_of(row + 8) < PAIRS)
      store_two(scores_in_window(scores, slot, row + 8) + tile * 8 + column, sums[tile][2], sums[tile][3]);
  }
}

// The scores of place x with the ATTENDED pixels from `begin` on, for all pairs, by one warp. Past the line they are zero, as
// queries are; of two pixels together there may be no queries.
template <class QueryTile>
DEVICE void score_place(T* scores, int slot, QueryTile queries, int x, const T* table, int begin) {
  if constexpr (TOGETHER == 2)
    if (x >= PLACES) return store_scores(scores, slot, {});
  float sums[SCORE_TILES][4] = {};
#pragma unroll
  for (int part = 0; part < TOGETHER; ++part) {
    Left<T, QUERY_DEPTH> query[QUERY_STEPS];
    load_queries(query, queries, TOGETHER * x + part);
    const T* window = window_of(table, TOGETHER * x + part) + begin * TABLE_STRIDE;
#pragma unroll
    for (int step = 0; step < QUERY_STEPS; ++step) {
      Right<T, QUERY_DEPTH> right[SCORE_TILES];
      load_right(right, [&](int i) { return window + i * TABLE_STRIDE + step * QUERY_DEPTH; });
#pragma unroll
      for (int tile = 0; tile < SCORE_TILES; ++tile) multiply(sums[tile], query[step], right[tile]);
    }
  }
  store_scores(scores, slot, sums);
}

// The same for the whole line, with the windows in registers; EIGHT is the first pixel's x / 8, less the warp's own share.
template <int EIGHT, class QueryTile>
DEVICE void score_place(T* scores, int slot, QueryTile queries, int x, const Windows& windows) {
  if constexpr (TOGETHER == 2)
    if (x >= PLACES) return store_scores(scores, slot, {});
  float sums[SCORE_TILES][4] = {};
#pragma unroll
  for (int part = 0; part < TOGETHER; ++part) {
    Left<T, QUERY_DEPTH> query[QUERY_STEPS];
    load_queries(query, queries, TOGETHER * x + part);
#pragma unroll
    for (int step = 0; step < QUERY_STEPS; ++step)
#pragma unroll
      for (int tile = 0; tile < SCORE_TILES; ++tile)
        if constexpr (EIGHT < EIGHTS) multiply(sums[tile], query[step], windows.right[part][tile - EIGHT + EIGHTS - 1][step]);
  }
  store_scores(scores, slot, sums);
}
