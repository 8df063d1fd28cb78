// Attention of one line of LANES pairs, from products.h.
#pragma once

#include "lanes.h"
#include "products.h"

// sums[x] = sum over i of (queries[x] . embeddings[i - x]) values[i], or += if it is to add: all pixels attend to a
// piece of the line at a time.
//
// queries: [x][key]. values: [i][value]. sums: [x][value]. embeddings: (2 * length - 1, key). Keys are in words of
// channels, values in words of pixels. scores: memory for PIXELS * cached_pixels(value).
template <int EACH>
inline void attend_by_position(const Vector* queries, const Vector* values, const float* embeddings, int length,
                               int key, int value, bool add, Vector* scores, Vector* sums) {
    const int piece = cached_pixels(value), row = words_of<EACH>(piece);
    for (int first = 0; first < length; first += piece) {
        const int count = length - first < piece ? length - first : piece;
        for_pixels(length, [&](int x, auto pixels) {
            constexpr int X = decltype(pixels)::value;
            const float* const window = embeddings + (length - 1 + first - x) * key;
            score_attended<EACH, X>(queries + x * key, key, window, count, scores, row);
            mix_channels<EACH, X>(scores, row, 1, values + first / EACH * value, words_of<EACH>(count), value,
                                  add || first > 0, sums + x * value);
        });
    }
}

// sums[x] = queries[x] times the context vectors of each lane, [key][value]; keys are in words.
template <int EACH>
inline void attend_by_content(const Vector* queries, const Vector* context, int length, int key, int value,
                              Vector* sums) {
    for_pixels(length, [&](int x, auto pixels) {
        mix_channels<EACH, decltype(pixels)::value>(queries + x * key, key, 1, context, key, value, false,
                                                    sums + x * value);
    });
}
