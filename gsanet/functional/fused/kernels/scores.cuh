// Scores of positional attention, one attending pixel x at a time.
//
// S[pair, i] = sum over k of q[pair, x, k] R[i - x, k]: for one x over many pairs of a line and a head this is a plain
// product of Q_x with a window of rows of the table R, the one that starts at row LENGTH - 1 - x. So no score is ever
// moved along its row. 16 attending pixels at a time are held in shared memory, [x][pair][i], written a pixel at a time
// and read a pair at a time; both ways are free of bank conflicts.
#pragma once
#include "tiles.cuh"

constexpr int QUERY_WIDTH = padded(KEY);
constexpr int ATTENDED = LENGTH < BAND ? LENGTH : BAND;  // pixels i that are held at a time: BAND of them, or all
constexpr int SCORE_COLUMNS = !IS_FLOAT<T> && ATTENDED > 8 ? round_up(ATTENDED, 16) : round_up(ATTENDED, 8);
constexpr int SCORE_TILES = (ATTENDED + 7) / 8;
constexpr int SCORE_PAIR = odd_stride(SCORE_COLUMNS);
constexpr int SCORE_PIXEL = odd_stride(16 * SCORE_PAIR);
constexpr int SCORES_SIZE = 16 * SCORE_PIXEL + 16;
constexpr int ALONG = depth_of<T>(SCORE_COLUMNS);  // depth of products along i

constexpr int TABLE_STRIDE = odd_stride(QUERY_WIDTH);
constexpr int TABLE_ROWS = 2 * LENGTH - 1;
// The window of the last band reaches past the table: zeros.
constexpr int TABLE_SIZE = (LENGTH - 1 + round_up(LENGTH, BAND < LENGTH ? BAND : 16)) * TABLE_STRIDE;

DEVICE T* scores_of(T* scores, int slot, int pair) { return scores + slot * SCORE_PIXEL + pair * SCORE_PAIR; }

// Zeros where no score is ever written but products read.
DEVICE void clear_score_padding(T* scores) {
  for (int i = thread_index(); i < 256; i += THREADS) {
    T* row = scores_of(scores, i / 16, i % 16);
    for (int column = i % 16 < PAIRS ? SCORE_TILES * 8 : 0; column < SCORE_COLUMNS; ++column) row[column] = T{};
  }
}

// (2 LENGTH - 1, KEY) from global memory, channels and windows padded with zeros.
DEVICE void copy_table(T* table, const T* rel) {
  for (int i = thread_index(); i < TABLE_SIZE; i += THREADS) {
    const int row = i / TABLE_STRIDE, channel = i % TABLE_STRIDE;
    table[i] = row < TABLE_ROWS && channel < KEY ? rel[row * KEY + channel] : T{};
  }
}

// Where the window of attending pixel x begins; pixels past the line read some window, and their queries are zero.
DEVICE const T* window_of(const T* table, int x) { return table + (x < LENGTH ? LENGTH - 1 - x : 0) * TABLE_STRIDE; }

// The scores of pixel x with the ATTENDED pixels from `begin` on, for all pairs, by one warp.
template <class QueryTile>
DEVICE void score_pixel(T* scores, int slot, QueryTile queries, int x, const T* table, int begin) {
  constexpr int DEPTH = depth_of<T>(QUERY_WIDTH), STEPS = QUERY_WIDTH / DEPTH;
  Left<T, DEPTH> query[STEPS];
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    query[step] = load_left<T, DEPTH>(
        [&](int row) { return queries.of_pair(row < PAIRS ? row : PAIRS - 1, x) + step * DEPTH; });
  const T* window = window_of(table, x) + begin * TABLE_STRIDE;
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < SCORE_TILES; tile += 2) {
    float sums[2][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      auto embedding = [&](int i) { return window + (tile * 8 + i) * TABLE_STRIDE + step * DEPTH; };
      if (tile + 1 < SCORE_TILES) {
        Right<T, DEPTH> right[2];
        load_right_pair<T, DEPTH>(right[0], right[1], embedding);
        multiply(sums[0], query[step], right[0]);
        multiply(sums[1], query[step], right[1]);
      } else {
        multiply(sums[0], query[step], load_right<T, DEPTH>(embedding));
      }
    }
#pragma unroll
    for (int part = 0; part < 2 && tile + part < SCORE_TILES; ++part) {
      const int i = (tile + part) * 8 + column;
      if (row < PAIRS) store_two(scores_of(scores, slot, row) + i, sums[part][0], sums[part][1]);
      if (row + 8 < PAIRS) store_two(scores_of(scores, slot, row + 8) + i, sums[part][2], sums[part][3]);
    }
  }
}
