// Scores of positional attention in registers: of one pair of a line and a head, by one warp, 16 attending pixels at a time.
//
// S[x, i] = q[x] R[i - x]. For the 16 pixels from X0 on, P = Q R^T with all rows of the table that they meet is a plain
// product, and S is P with each row moved along by one column less than the row before it. Scores never leave the registers:
// what is 16 bits wide after a product is, in the layout of sums, also a left operand of the next one.
//
// A word of sums holds two neighbouring columns. So that a row moves by whole words, these two are not neighbours on the
// line, but half a line apart: column c of group n (eight columns of a product) stands at place 4 n + c / 2, for pixel or
// offset `place + HALF (c % 2)`. Operands are loaded row by row, in any order, so that this costs nothing. Lane l has place
// 4 n + l % 4 of rows l / 4 and l / 4 + 8.
//
// Row r of S has at place p what P has at place p + 15 - r: of the upper eight rows two groups further on than of the lower
// ones, and in both 7 - r % 8 places on, which is a move between four lanes and at most two groups.
#pragma once
#include "tiles.cuh"

constexpr int HALF = round_up(LENGTH, 8) / 2;
constexpr int SCORE_GROUPS = HALF / 4;
constexpr int PRODUCT_GROUPS = SCORE_GROUPS + 4;  // upper rows have the last SCORE_GROUPS + 2 of them, lower rows the first

// Which pixel, or which row of the table after the first one, is in a column of a group.
DEVICE int place_in_line(int group, int column) { return 4 * group + column / 2 + HALF * (column % 2); }

using ScoreWords = Word[SCORE_GROUPS];
using ProductWords = Word[SCORE_GROUPS + 2];  // of upper or of lower rows

// How a lane's words move from products to scores.
struct Skew {
  bool four;   // by four places or more
  bool carry;  // by one group more than that
  int from;    // the lane that has what is to come

  DEVICE Skew() {
    const int lane = lane_index(), move = 7 - lane / 4;
    four = move >= 4, carry = lane % 4 < move % 4;
    from = lane / 4 * 4 + (lane + move) % 4;
  }

  DEVICE void score(ScoreWords& scores, const ProductWords& products) const {
    Word moved[SCORE_GROUPS + 1];
#pragma unroll
    for (int i = 0; i <= SCORE_GROUPS; ++i) moved[i] = four ? products[i + 1] : products[i];
#pragma unroll
    for (int i = 0; i < SCORE_GROUPS; ++i) scores[i] = shuffle(carry ? moved[i + 1] : moved[i], from);
  }
};
