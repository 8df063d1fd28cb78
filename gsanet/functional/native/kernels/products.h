// The products of positional attention and of its gradient, for LANES pairs at a time. Each is a template for a tile
// whose sums stay in registers, and a function that covers any size with tiles.
#pragma once

#include "vectors.h"

constexpr int PIXELS = 2;  // pixels of a line whose sums are made together

// Calls f with each PIXELS pixels of a line: where they begin, and how many they are.
template <class F>
inline void for_pixels(int length, F&& f) {
    for (int x = 0; x < length; x += PIXELS) with_known<PIXELS>(length - x, [&](auto pixels) { f(x, pixels); });
}

// Calls f with each TILE of `count`: where it begins, and how much it holds.
template <class F>
inline void for_tiles(int count, F&& f) {
    for (int i = 0; i < count; i += TILE) with_known<TILE>(count - i, [&](auto tile) { f(i, tile); });
}

// scores[x * row + i * column] = queries[x] . window[i - x], for X attending pixels and I attended ones.
//
// queries: [x][width]. window: [offset][width], from the row of the offset between the first of both on; the offsets
// before it are used as well.
template <int X, int I>
inline void score(const Vector* queries, int width, const float* window, Vector* scores, int row, int column) {
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
        UNROLLED for (int i = 0; i < I; i++) scores[x * row + i * column] = sums[x][i];
}

// Of X attending pixels, all attended ones: scores [x][row].
template <int X>
inline void score_attended(const Vector* queries, int width, const float* window, int count, Vector* scores, int row) {
    for_tiles(count, [&](int i, auto tile) {
        score<X, decltype(tile)::value>(queries, width, window + i * width, scores + i, row, 1);
    });
}

// Of I attended pixels, all attending ones: scores [i][row].
template <int I>
inline void score_attending(const Vector* queries, int width, const float* window, int count, Vector* scores, int row) {
    for_pixels(count, [&](int x, auto pixels) {
        score<decltype(pixels)::value, I>(queries + x * width, width, window - x * width, scores + x, 1, row);
    });
}

// out[x][c] = sum over i < count of weights[x][i] * values[i][c], for X pixels and C channels; or += if it is to add.
//
// weights: weights[x][i] is at x * row + i * column. values and out: [i][width] and [x][width].
template <int X, int C>
inline void mix(const Vector* weights, int row, int column, const Vector* values, int count, int width, bool add,
                Vector* out) {
    Vector sums[X][C] = {};
    if (add)
        UNROLLED for (int x = 0; x < X; x++)
            UNROLLED for (int c = 0; c < C; c++) sums[x][c] = out[x * width + c];
    for (int i = 0; i < count; i++) {
        Vector value[C];
        UNROLLED for (int c = 0; c < C; c++) value[c] = values[i * width + c];
        UNROLLED for (int x = 0; x < X; x++) {
            const Vector weight = weights[x * row + i * column];
            UNROLLED for (int c = 0; c < C; c++) sums[x][c] += weight * value[c];
        }
    }
    UNROLLED for (int x = 0; x < X; x++)
        UNROLLED for (int c = 0; c < C; c++) out[x * width + c] = sums[x][c];
}

template <int X>
inline void mix_channels(const Vector* weights, int row, int column, const Vector* values, int count, int width,
                         bool add, Vector* out) {
    for_tiles(width, [&](int c, auto tile) {
        mix<X, decltype(tile)::value>(weights, row, column, values + c, count, width, add, out + c);
    });
}
