// The scores of 16 attending pixels of a pair, from its queries and the table, in the registers of one warp (skew.cuh).
//
// In shared memory the table has zeros before and behind it (scores.cuh), so that all 16 pixels meet rows that are there. The
// products of pixels 16 further on begin 16 rows earlier, which is four groups: all pixels of a line meet TABLE_GROUPS
// groups, counted from those of the last pixels.
#pragma once
#include "scores.cuh"
#include "skew.cuh"

constexpr int TABLE_GROUPS = PRODUCT_GROUPS + 4 * (LINE_TILES - 1);
constexpr int first_group(int x) { return 4 * (LINE_TILES - 1 - x / 16); }  // of the pixels from x on

// The table as right operands, which are KEPT in registers over all lines, or else loaded each time.
template <bool KEPT>
struct TableGroups {
  const T* table;
  Right<T, QUERY_DEPTH> kept[KEPT ? TABLE_GROUPS : 1][QUERY_STEPS];

  template <int COUNT>
  DEVICE void load(Right<T, QUERY_DEPTH> (&right)[COUNT], int group, int step) const {
    load_right(right, [&](int column) {
      return table + place_in_line(group + column / 8, column % 8) * TABLE_STRIDE + step * QUERY_DEPTH;
    });
  }

  DEVICE explicit TableGroups(const T* shared) : table(shared) {
    if constexpr (KEPT) {
#pragma unroll
      for (int step = 0; step < QUERY_STEPS; ++step) {
        Right<T, QUERY_DEPTH> right[TABLE_GROUPS];
        load(right, 0, step);
#pragma unroll
        for (int group = 0; group < TABLE_GROUPS; ++group) kept[group][step] = right[group];
      }
    }
  }

  // COUNT groups from number `group` on.
  template <int COUNT>
  DEVICE void take(Right<T, QUERY_DEPTH> (&right)[COUNT], int group, int step) const {
    if constexpr (KEPT) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) right[i] = kept[group + i][step];
    } else {
      load(right, group, step);
    }
  }
};

constexpr int TABLE_REGISTERS = static_cast<int>(sizeof(Right<T, QUERY_DEPTH>)) / 4 * TABLE_GROUPS * QUERY_STEPS;

// Products of the pixels from X0 on, from GROUP on: as many groups at a time as one instruction loads.
template <int X0, int GROUP = 0, class Table>
DEVICE void multiply_table(ProductWords& upper, ProductWords& lower, const Left<T, QUERY_DEPTH> (&query)[QUERY_STEPS],
                           const Table& table) {
  constexpr int AT_ONCE = 32 / QUERY_DEPTH, REST = PRODUCT_GROUPS - GROUP, COUNT = REST < AT_ONCE ? REST : AT_ONCE;
  float sums[COUNT][4] = {};
#pragma unroll
  for (int step = 0; step < QUERY_STEPS; ++step) {
    Right<T, QUERY_DEPTH> right[COUNT];
    table.take(right, first_group(X0) + GROUP, step);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) multiply(sums[i], query[step], right[i]);
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if (GROUP + i >= 2) upper[GROUP + i - 2] = pack<T>(sums[i][0], sums[i][1]);
    if (GROUP + i < SCORE_GROUPS + 2) lower[GROUP + i] = pack<T>(sums[i][2], sums[i][3]);
  }
  if constexpr (COUNT < REST) multiply_table<X0, GROUP + COUNT>(upper, lower, query, table);
}

// Scores of the pixels from X0 on; those past the line are zero, as queries are.
template <int X0, class Table>
DEVICE void score_pixels(ScoreWords& upper, ScoreWords& lower, const Left<T, QUERY_DEPTH> (&query)[QUERY_STEPS],
                         const Table& table, const Skew& skew) {
  ProductWords upper_products, lower_products;
  multiply_table<X0>(upper_products, lower_products, query, table);
  skew.score(upper, upper_products);
  if constexpr (X0 + 8 < LENGTH)
    skew.score(lower, lower_products);
  else
#pragma unroll
    for (Word& word : lower) word = 0;
}
