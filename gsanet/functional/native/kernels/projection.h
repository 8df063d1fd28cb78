// The product that makes q, k and v of pixels, with weights in the order in which attention wants its lanes.
#pragma once

#include "vectors.h"

constexpr int BLOCKS = LANES / BLOCK;  // of a vector
#if defined(__AVX512F__)
constexpr int TALL = 14;  // pixels whose sums are made together
constexpr int WIDE = 2;   // vectors of outputs of each
#elif defined(__AVX__) || defined(__x86_64__)
constexpr int TALL = 6;
constexpr int WIDE = 2;
#else
constexpr int TALL = 6;
constexpr int WIDE = 4;
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
            const int first = p + BLOCK <= count ? p : count - BLOCK;  // the last may begin inside of the one before
            Block block[BLOCK];
            UNROLLED for (int i = 0; i < BLOCK; i++) block[i] = load_block(pixels[first + i] + c);
            transpose(block);
            UNROLLED for (int i = 0; i < BLOCK; i++) store_block(to + (c + i) * count + first, block[i]);
        }
    }
    for (; c < channels; c++)
        for (int p = 0; p < count; p++) to[c * count + p] = pixels[p][c * step];
}

// Where the outputs of a tile go: block b of pixel p to at[b] + x[p] * step[b] + lane[p].
struct Places {
    float* at[WIDE * BLOCKS];
    int64_t step[WIDE * BLOCKS];
    int64_t x[TALL], lane[TALL];
};

// P pixels times WIDE vectors of weights. pixels: [channel][P]. weights: [channel][WIDE].
template <int P>
inline void project(const float* pixels, const Vector* weights, int channels, const Places& to) {
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
        UNROLLED for (int i = 0; i < WIDE; i++) {
            Block blocks[BLOCKS];
            __builtin_memcpy(blocks, &sums[p][i], sizeof blocks);
            UNROLLED for (int b = 0; b < BLOCKS; b++) {
                const int block = i * BLOCKS + b;
                store_block(to.at[block] + to.x[p] * to.step[block] + to.lane[p], blocks[b]);
            }
        }
}
