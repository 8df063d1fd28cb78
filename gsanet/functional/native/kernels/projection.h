// Products of pixels and weights: a tile of pixels times a panel of weights, both packed first.
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

// `count` pixels, cut into tiles of about the same size.
struct PixelTiles {
    int count, tiles;

    explicit PixelTiles(int count) : count(count), tiles(divide_up(count, TALL)) {}
    // Calls f with a tile: where it begins, and how many pixels it has.
    template <class F>
    void with_tile(int tile, F&& f) const {
        const int first = count * tile / tiles;
        f(first, count * (tile + 1) / tiles - first);
    }
};

template <class F>
inline void for_pixel_tiles(int count, F&& f) {
    const PixelTiles all(count);
    for (int tile = 0; tile < all.tiles; tile++) all.with_tile(tile, f);
}

// sums = P pixels times WIDE vectors of weights. pixels: [channel][P]. weights: [channel][WIDE].
template <int P>
inline void multiply_tile(const float* pixels, const Vector* weights, int channels, Vector (&sums)[P][WIDE]) {
    UNROLLED for (int p = 0; p < P; p++)
        UNROLLED for (int i = 0; i < WIDE; i++) sums[p][i] = Vector{};
    for (int c = 0; c < channels; c++) {
        Vector weight[WIDE];
        UNROLLED for (int i = 0; i < WIDE; i++) weight[i] = weights[c * WIDE + i];
        UNROLLED for (int p = 0; p < P; p++) {
            const float pixel = pixels[c * P + p];
            UNROLLED for (int i = 0; i < WIDE; i++) sums[p][i] += weight[i] * pixel;
        }
    }
}
