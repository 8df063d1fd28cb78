// The products of positional attention and of its gradient, for LANES pairs at a time. Each is a template for a tile
// whose sums stay in registers, and a function that covers any size with tiles; a word holds EACH numbers.
#pragma once

#include "words.h"

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

// sums[x][i] = queries[x] . window[i - x], for X attending pixels and I attended ones.
//
// queries: [x][width]. window: [offset][width], from the row of the offset between the first of both on; the offsets
// before it are used as well. Width is in words.
template <int EACH, int X, int I>
inline void score(const Vector* queries, int width, const float* window, Vector (&sums)[X][I]) {
    UNROLLED for (int x = 0; x < X; x++)
        UNROLLED for (int i = 0; i < I; i++) sums[x][i] = Vector{};
    for (int c = 0; c < width; c++) {
        UNROLLED for (int offset = 1 - X; offset < I; offset++) {
            const float embedding = window[offset * width + c];  // one for all pairs
            UNROLLED for (int x = 0; x < X; x++) {
                const int i = x + offset;
                if (0 <= i && i < I) multiply_add<EACH>(queries[x * width + c], embedding, sums[x][i]);
            }
        }
    }
}

// Of X attending pixels, all attended ones: scores [x][row], in words of attended pixels.
template <int EACH, int X>
inline void score_attended(const Vector* queries, int width, const float* window, int count, Vector* scores, int row) {
    for_tiles(count, [&](int i, auto tile) {
        constexpr int I = decltype(tile)::value;
        Vector sums[X][I];
        score<EACH>(queries, width, window + i * width, sums);
        UNROLLED for (int x = 0; x < X; x++) {
            Vector* const to = scores + x * row + i / EACH;
            if constexpr (EACH == 1)
                UNROLLED for (int j = 0; j < I; j++) to[j] = sums[x][j];
            else
                UNROLLED for (int j = 0; j < I; j += 2)
                    to[j / 2] = pair(sums[x][j], j + 1 < I ? sums[x][j + 1] : Vector{});
        }
    });
}

// Of I attended pixels, all attending ones: scores [i][row], in words of attending pixels.
template <int EACH, int I>
inline void score_attending(const Vector* queries, int width, const float* window, int count, Vector* scores, int row) {
    static_assert(PIXELS == 2);
    for_pixels(count, [&](int x, auto pixels) {
        constexpr int X = decltype(pixels)::value;
        Vector sums[X][I];
        score<EACH>(queries + x * width, width, window - x * width, sums);
        Vector* const to = scores + x / EACH;
        if constexpr (EACH == 1)
            UNROLLED for (int j = 0; j < X; j++)
                UNROLLED for (int i = 0; i < I; i++) to[i * row + j] = sums[j][i];
        else
            UNROLLED for (int i = 0; i < I; i++) to[i * row] = pair(sums[0][i], X > 1 ? sums[X - 1][i] : Vector{});
    });
}

// out[x][c] = sum over i < count of weights[x][i] * values[i][c], for X pixels and C channels; or += if it is to add.
//
// weights: weights[x][i] is at x * row + i * column. values and out: [i][width] and [x][width]. i counts words.
template <int EACH, int X, int C>
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
            UNROLLED for (int c = 0; c < C; c++) multiply_add<EACH>(weight, value[c], sums[x][c]);
        }
    }
    UNROLLED for (int x = 0; x < X; x++)
        UNROLLED for (int c = 0; c < C; c++) out[x * width + c] = sums[x][c];
}

template <int EACH, int X>
inline void mix_channels(const Vector* weights, int row, int column, const Vector* values, int count, int width,
                         bool add, Vector* out) {
    for_tiles(width, [&](int c, auto tile) {
        mix<EACH, X, decltype(tile)::value>(weights, row, column, values + c, count, width, add, out + c);
    });
}
