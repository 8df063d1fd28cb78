// The channels of one head of one image, pixel by pixel as they lie in memory: a vector of them at a time, the last one
// filled up with zeros. T is the vector: Block for narrow heads, of which a Vector would be half empty.
#pragma once

#include "numbers.h"

constexpr int PIECE = 64;                    // pixels whose weights are kept in the first cache
constexpr int TOGETHER = BLOCK < 8 ? 4 : 2;  // vectors of channels that are multiplied together
constexpr int ROWS = BLOCK;                  // channels whose products with these are summed together

template <class T>
inline int vectors_of(int channels) {
    return divide_up(channels, Of<T>::numbers);
}

// Calls f with each PIECE of so many pixels: the first, and how many they are.
template <class F>
inline void for_pieces(int pixels, F&& f) {
    for (int first = 0; first < pixels; first += PIECE) f(first, pixels - first < PIECE ? pixels - first : PIECE);
}

// Calls f with a vector of the kind that heads of these widths are taken by.
template <class F>
inline void with_vector(int key, int value, F&& f) {
    if (key >= LANES && value >= LANES)
        f(Vector{});
    else
        f(Block{});
}

// sums[i * row] += sum over pixels of left[pixel][i] * right[pixel]: R channels of left, and V vectors of right, of
// which there are `columns` channels.
template <int R, int V, class T, class L, class E>
inline void add_outer_products(const L* left, int64_t left_pixel, const E* right, int64_t right_pixel, int columns,
                               int pixels, T* sums, int row) {
    constexpr int N = Of<T>::numbers;
    T products[R][V] = {};
    for (int pixel = 0; pixel < pixels; pixel++) {
        T values[V];
        UNROLLED for (int v = 0; v < V; v++)
            values[v] = load_some<T>(right + pixel * right_pixel + v * N, columns - v * N);
        UNROLLED for (int i = 0; i < R; i++)
            UNROLLED for (int v = 0; v < V; v++) products[i][v] += values[v] * to_float(left[pixel * left_pixel + i]);
    }
    UNROLLED for (int i = 0; i < R; i++)
        UNROLLED for (int v = 0; v < V; v++) sums[i * row + v] += products[i][v];
}

// sums[key][value vector] += sum over pixels of left[pixel][key] * right[pixel][value].
template <class T, class L, class E>
inline void add_all_outer_products(const L* left, int64_t left_pixel, int key, const E* right, int64_t right_pixel,
                                   int value, int pixels, T* sums) {
    constexpr int N = Of<T>::numbers;
    const int row = vectors_of<T>(value);
    for (int first = 0; first < key; first += ROWS)
        for (int v = 0; v < row; v += TOGETHER)
            with_known<ROWS>(key - first, [&](auto rows) {
                with_known<TOGETHER>(row - v, [&](auto together) {
                    add_outer_products<decltype(rows)::value, decltype(together)::value>(
                        left + first, left_pixel, right + v * N, right_pixel, value - v * N, pixels,
                        sums + first * row + v, row);
                });
            });
}
