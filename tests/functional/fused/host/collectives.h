// What the lanes of a warp do together: the last to arrive does it for all.
#pragma once
#include "fibers.h"
#include "races.h"
#include "scalars.h"

namespace host {

template <int COUNT, bool TRANSPOSED>
void share_matrices(Warp& warp) {
  for (int m = 0; m < COUNT; ++m) {
    unsigned short matrix[8][8];
    memcpy(matrix, warp.rows[8 * m], sizeof matrix);
    for (int l = 0; l < LANES; ++l) {
      const int i = l / 4, j = l % 4 * 2;
      warp.results[l][m] = TRANSPOSED ? matrix[j][i] | static_cast<Word>(matrix[j + 1][i]) << 16
                                      : matrix[i][j] | static_cast<Word>(matrix[i][j + 1]) << 16;
    }
  }
}

// Into the rows that lanes then write themselves.
template <int COUNT>
void gather_rows(Warp& warp) {
  for (int l = 0; l < LANES; ++l)
    for (int m = 0; m < COUNT; ++m) memcpy(warp.rows[8 * m + l / 4] + l % 4 * 4, &warp.words[l][m], 4);
}

inline void turn(Warp& warp) {
  const auto element = [&](int row, int column) { return warp.words[row * 4 + column / 2][0] >> 16 * (column % 2) & 0xffff; };
  for (int l = 0; l < LANES; ++l)
    warp.results[l][0] = element(l % 4 * 2, l / 4) | element(l % 4 * 2 + 1, l / 4) << 16;
}

// Each lane's second word is the lane whose first word it gets; its own if there is no such lane.
inline void shuffle(Warp& warp) {
  for (int l = 0; l < LANES; ++l) {
    const Word other = warp.words[l][1];
    warp.results[l][0] = warp.words[other < LANES ? other : l][0];
  }
}

typedef double Doubles __attribute__((vector_size(64)));

inline float tf32_float(Word word) { return bits_float(word & 0xffffe000); }

// d (16 x 8) += a (16 x DEPTH) b (DEPTH x 8): exact products, summed in double precision and rounded once.
template <int DEPTH>
void multiply_matrices(Warp& warp, const double (&a)[16][DEPTH], const Doubles (&b)[DEPTH]) {
  for (int i = 0; i < 16; ++i) {
    Doubles sum;
    for (int j = 0; j < 8; ++j) sum[j] = bits_float(warp.results[i % 8 * 4 + j / 2][i / 8 * 2 + j % 2]);
    for (int k = 0; k < DEPTH; ++k) sum += a[i][k] * b[k];
    for (int j = 0; j < 8; ++j)
      warp.results[i % 8 * 4 + j / 2][i / 8 * 2 + j % 2] = float_bits(static_cast<float>(sum[j]));
  }
}

// mma.m16n8k16 and mma.m16n8k8: lane l holds of a the rows l / 4 (even words) and l / 4 + 8 (odd ones) and of b the column
// l / 4, each word two elements along the sum from 2 (l % 4) on, words for the second half of 16 after the others.
template <class T, int DEPTH>
void multiply_scalars(Warp& warp) {
  double a[16][DEPTH];
  Doubles b[DEPTH];
  for (int l = 0; l < LANES; ++l) {
    for (int w = 0; w < DEPTH / 4; ++w)
      for (int e = 0; e < 2; ++e)
        a[l / 4 + w % 2 * 8][l % 4 * 2 + e + w / 2 * 8] =
            to_float(T{static_cast<unsigned short>(warp.words[l][w] >> 16 * e)});
    for (int w = 0; w < DEPTH / 8; ++w)
      for (int e = 0; e < 2; ++e)
        b[l % 4 * 2 + e + w * 8][l / 4] = to_float(T{static_cast<unsigned short>(warp.words[l][4 + w] >> 16 * e)});
  }
  multiply_matrices(warp, a, b);
}

// mma.m16n8k8 for tf32: one element in a word, the step of the sum l % 4, and l % 4 + 4 in the later words.
inline void multiply_floats(Warp& warp) {
  double a[16][8];
  Doubles b[8];
  for (int l = 0; l < LANES; ++l) {
    for (int w = 0; w < 4; ++w) a[l / 4 + w % 2 * 8][l % 4 + w / 2 * 4] = tf32_float(warp.words[l][w]);
    for (int w = 0; w < 2; ++w) b[l % 4 + w * 4][l / 4] = tf32_float(warp.words[l][4 + w]);
  }
  multiply_matrices(warp, a, b);
}

}  // namespace host
