// The products that only the gradient of positional attention has, in the style of products.h.
#pragma once

#include "products.h"

// out[x][i] = left[x] . right[i], for X and I pixels: left and right [pixel][width] in words, out [x][row].
template <int EACH, int X, int I>
inline void dot(const Vector* left, const Vector* right, int width, Vector* out, int row) {
    Vector sums[X][I] = {};
    for (int c = 0; c < width; c++) {
        Vector values[I];
        UNROLLED for (int i = 0; i < I; i++) values[i] = right[i * width + c];
        UNROLLED for (int x = 0; x < X; x++)
            UNROLLED for (int i = 0; i < I; i++) multiply_add<EACH>(left[x * width + c], values[i], sums[x][i]);
    }
    UNROLLED for (int x = 0; x < X; x++)
        UNROLLED for (int i = 0; i < I; i++) out[x * row + i] = sums[x][i];
}

template <int EACH, int X>
inline void dot_pixels(const Vector* left, const Vector* right, int width, int count, Vector* out, int row) {
    for_tiles(count, [&](int i, auto tile) {
        dot<EACH, X, decltype(tile)::value>(left, right + i * width, width, out + i, row);
    });
}

// out[x][c] += sum over offsets of weights[x][x + offset] * window[offset][c], for X pixels and C channels.
//
// weights: [x][row], from the pixel of the first offset on. window: [offset][width].
template <int X, int C>
inline void mix_window(const Vector* weights, int row, const float* window, int offsets, int width, Vector* out) {
    Vector sums[X][C];
    UNROLLED for (int x = 0; x < X; x++)
        UNROLLED for (int c = 0; c < C; c++) sums[x][c] = out[x * width + c];
    for (int offset = 0; offset < offsets; offset++) {
        UNROLLED for (int c = 0; c < C; c++) {
            const float embedding = window[offset * width + c];
            UNROLLED for (int x = 0; x < X; x++) sums[x][c] += weights[x * row + x + offset] * embedding;
        }
    }
    UNROLLED for (int x = 0; x < X; x++)
        UNROLLED for (int c = 0; c < C; c++) out[x * width + c] = sums[x][c];
}

template <int X>
inline void mix_window_channels(const Vector* weights, int row, const float* window, int offsets, int width,
                                Vector* out) {
    for_tiles(width, [&](int c, auto tile) {
        mix_window<X, decltype(tile)::value>(weights, row, window + c, offsets, width, out + c);
    });
}

// The same in words of two numbers, out[x][c] += sum over words of weights[x][word] * window[2 * word - x][c].
//
// weights: [x][row], words of attended pixels. window: [offset][width], words of an offset and the next one, from the
// offset between the first of both on.
template <int X, int C>
inline void mix_pairs(const Vector* weights, int row, const float* window, int words, int width, Vector* out) {
    Vector sums[X][C];
    UNROLLED for (int x = 0; x < X; x++)
        UNROLLED for (int c = 0; c < C; c++) sums[x][c] = out[x * width + c];
    for (int word = 0; word < words; word++)
        UNROLLED for (int x = 0; x < X; x++) {
            const Vector weight = weights[x * row + word];
            const float* const embeddings = window + (2 * word - x) * width;
            UNROLLED for (int c = 0; c < C; c++) multiply_add<2>(weight, embeddings[c], sums[x][c]);
        }
    UNROLLED for (int x = 0; x < X; x++)
        UNROLLED for (int c = 0; c < C; c++) out[x * width + c] = sums[x][c];
}

template <int X>
inline void mix_pairs_channels(const Vector* weights, int row, const float* window, int words, int width, Vector* out) {
    for_tiles(width, [&](int c, auto tile) {
        mix_pairs<X, decltype(tile)::value>(weights, row, window + c, words, width, out + c);
    });
}

// out[offset][c] += sum over words of weights[word][EACH * word + offset] * queries[word][c], for O offsets and C
// channels.
//
// weights: [word][row], of an attending pixel with the attended one at that place; in words of two numbers also of the
// next one with the next.
template <int EACH, int O, int C>
inline void add_window(const Vector* weights, int row, const Vector* queries, int words, int width, Vector* out) {
    Vector sums[O][C];
    UNROLLED for (int o = 0; o < O; o++)
        UNROLLED for (int c = 0; c < C; c++) sums[o][c] = out[o * width + c];
    for (int word = 0; word < words; word++) {
        UNROLLED for (int c = 0; c < C; c++) {
            const Vector query = queries[word * width + c];
            UNROLLED for (int o = 0; o < O; o++)
                multiply_add<EACH>(weights[word * row + EACH * word + o], query, sums[o][c]);
        }
    }
    UNROLLED for (int o = 0; o < O; o++)
        UNROLLED for (int c = 0; c < C; c++) out[o * width + c] = sums[o][c];
}

template <int EACH, int O>
inline void add_window_channels(const Vector* weights, int row, const Vector* queries, int words, int width,
                                Vector* out) {
    for_tiles(width, [&](int c, auto tile) {
        add_window<EACH, O, decltype(tile)::value>(weights, row, queries + c, words, width, out + c);
    });
}
