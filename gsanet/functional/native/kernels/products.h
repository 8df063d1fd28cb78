// The two products of positional attention, for a few attending pixels of LANES pairs at a time: sums stay in registers.
#pragma once

#include "vectors.h"

constexpr int PIXELS = 2;  // attending pixels that are treated together

// scores[x][i] = queries[x] . window[i - x], for X attending pixels and I attended ones.
//
// queries: [x][width]. window: [offset][width], from the row of the offset between the first of both on; the offsets
// before it are used as well. scores: [x][row].
template <int X, int I>
inline void score(const Vector* queries, int width, const float* window, Vector* scores, int row) {
    Vector sums[X][I] = {};
    for (int c = 0; c < width; c++) {
        UNROLLED for (int offset = 1 - X; offset < I; offset++) {
            const float embedding = window[offset * width + c];  // one for all pairs
            UNROLLED for (int x = 0; x < X; x++) {
                const int i = x + offset;
                if (0 <= i && i < I) sums[x][i] += queries[x * width + c] * embedding;
            }
        }
    }
    UNROLLED for (int x = 0; x < X; x++)
        UNROLLED for (int i = 0; i < I; i++) scores[x * row + i] = sums[x][i];
}

// out[x][c] += sum over i < count of weights[x][i] * values[i][c], for X pixels and C channels.
//
// weights: [x][row]. values and out: [i][width] and [x][width].
template <int X, int C>
inline void mix(const Vector* weights, int row, const Vector* values, int count, int width, Vector* out) {
    Vector sums[X][C];
    UNROLLED for (int x = 0; x < X; x++)
        UNROLLED for (int c = 0; c < C; c++) sums[x][c] = out[x * width + c];
    for (int i = 0; i < count; i++) {
        Vector value[C];
        UNROLLED for (int c = 0; c < C; c++) value[c] = values[i * width + c];
        UNROLLED for (int x = 0; x < X; x++) {
            const Vector weight = weights[x * row + i];
            UNROLLED for (int c = 0; c < C; c++) sums[x][c] += weight * value[c];
        }
    }
    UNROLLED for (int x = 0; x < X; x++)
        UNROLLED for (int c = 0; c < C; c++) out[x * width + c] = sums[x][c];
}

// The same for any number of attended pixels, and of channels.
template <int X>
inline void score_all(const Vector* queries, int width, const float* window, int count, Vector* scores, int row) {
    for (int i = 0; i < count; i += TILE)
        with_known<TILE>(count - i, [&](auto tile) {
            score<X, decltype(tile)::value>(queries, width, window + i * width, scores + i, row);
        });
}

template <int X>
inline void mix_all(const Vector* weights, int row, const Vector* values, int count, int width, Vector* out) {
    for (int c = 0; c < width; c += TILE)
        with_known<TILE>(width - c, [&](auto tile) {
            mix<X, decltype(tile)::value>(weights, row, values + c, count, width, out + c);
        });
}
