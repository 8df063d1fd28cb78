// The product that makes q, k and v of pixels, with weights in the order in which attention wants its lanes.
#pragma once

#include "vectors.h"

constexpr int WIDE = 2;  // vectors of outputs whose sums are made together
#if defined(__AVX512F__)
constexpr int TALL = 14;  // pixels whose sums are made together
#else
constexpr int TALL = 6;
#endif

inline int divide_up(int a, int b) { return (a + b - 1) / b; }

// Rows of weights as [channel][WIDE vectors]; a null row is one of zeros.
inline void pack_weights(const float* const* rows, int channels, Vector* to) {
    constexpr int ROWS = WIDE * LANES;
    float* const out = reinterpret_cast<float*>(to);
    for (int first = 0; first < ROWS; first += BLOCK) {
        bool whole = true;
        for (int i = 0; i < BLOCK; i++) whole = whole && rows[first + i];
        int c = 0;
        for (; whole && c + BLOCK <= channels; c += BLOCK) {
            Block block[BLOCK];
            UNROLLED for (int i = 0; i < BLOCK; i++) block[i] = load_block(rows[first + i] + c);
            transpose(block);
            UNROLLED for (int i = 0; i < BLOCK; i++) store_block(out + (c + i) * ROWS + first, block[i]);
        }
        for (; c < channels; c++)
            for (int i = first; i < first + BLOCK; i++) out[c * ROWS + i] = rows[i] ? rows[i][c] : 0;
    }
}

// Channels of `count` pixels, `step` apart in memory, as [channel][pixel].
inline void pack_pixels(const float* const* pixels, int count, int channels, int64_t step, float* to) {
    int c = 0;
    for (; step == 1 && count >= BLOCK && c + BLOCK <= channels; c += BLOCK) {
        for (int p = 0; p < count; p += BLOCK) {
            const int first = p + BLOCK <= count ? p : count - BLOCK;  // the last block may begin inside of the one before
            Block block[BLOCK];
            UNROLLED for (int i = 0; i < BLOCK; i++) block[i] = load_block(pixels[first + i] + c);
            transpose(block);
            UNROLLED for (int i = 0; i < BLOCK; i++) store_block(to + (c + i) * count + first, block[i]);
        }
    }
    for (; c < channels; c++)
        for (int p = 0; p < count; p++) to[c * count + p] = pixels[p][c * step];
}

// out[p] = pixel p times WIDE vectors of weights, for P pixels. pixels: [channel][P]. weights: [channel][WIDE].
template <int P>
inline void project(const float* pixels, const Vector* weights, int channels, Vector (*out)[WIDE]) {
    Vector sums[P][WIDE] = {};
    for (int c = 0; c < channels; c++) {
        Vector weight[WIDE];
        UNROLLED for (int i = 0; i < WIDE; i++) weight[i] = weights[c * WIDE + i];
        UNROLLED for (int p = 0; p < P; p++) {
            const float pixel = pixels[c * P + p];
            UNROLLED for (int i = 0; i < WIDE; i++) sums[p][i] += weight[i] * pixel;
        }
    }
    UNROLLED for (int p = 0; p < P; p++)
        UNROLLED for (int i = 0; i < WIDE; i++) out[p][i] = sums[p][i];
}
