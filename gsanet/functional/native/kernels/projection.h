// Products of pixels and weights: a tile of pixels times a panel of weights, both packed first.
#pragma once

#include "words.h"

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

// How channels in memory become words.
template <class E>
struct Words {
    static constexpr int each = 1;
    static Block block(const E* from) { return load<Block>(from); }
    static float one(const E* from, int64_t, int) { return to_float(*from); }
};

#if defined(__AVX512BF16__)
template <>
struct Words<Bfloat16> {
    static constexpr int each = 2;
    static Block block(const Bfloat16* from) {
        Block words;
        __builtin_memcpy(&words, from, sizeof words);
        return words;
    }
    // Of channels that are `step` apart, and of which so many are left.
    static float one(const Bfloat16* from, int64_t step, int left) {
        const Bfloat16 both[2] = {from[0], left > 1 ? from[step] : Bfloat16{0}};
        float word;
        __builtin_memcpy(&word, both, sizeof word);
        return word;
    }
};
#endif

// Rows of weights as [word][WIDE vectors]; a null row is one of zeros.
template <class E>
inline void pack_weights(const E* const* rows, int channels, Vector* to) {
    constexpr int ROWS = WIDE * LANES, EACH = Words<E>::each;
    float* const out = reinterpret_cast<float*>(to);
    for (int first = 0; first < ROWS; first += BLOCK) {
        bool whole = true;
        for (int i = 0; i < BLOCK; i++) whole = whole && rows[first + i];
        int word = 0;
        for (; whole && (word + BLOCK) * EACH <= channels; word += BLOCK) {
            Block block[BLOCK];
            UNROLLED for (int i = 0; i < BLOCK; i++) block[i] = Words<E>::block(rows[first + i] + word * EACH);
            transpose(block);
            UNROLLED for (int i = 0; i < BLOCK; i++) store(out + (word + i) * ROWS + first, block[i]);
        }
        for (; word * EACH < channels; word++)
            for (int i = first; i < first + BLOCK; i++) {
                const int c = word * EACH;
                out[word * ROWS + i] = rows[i] ? Words<E>::one(rows[i] + c, 1, channels - c) : 0;
            }
    }
}

// Channels of `count` pixels, `step` apart in memory, as [word][pixel].
template <class E>
inline void pack_pixels(const E* const* pixels, int count, int channels, int64_t step, float* to) {
    constexpr int EACH = Words<E>::each;
    int word = 0;
    for (; step == 1 && count >= BLOCK && (word + BLOCK) * EACH <= channels; word += BLOCK) {
        for (int p = 0; p < count; p += BLOCK) {
            const int first = p + BLOCK <= count ? p : count - BLOCK;  // the last may begin inside of the one before
            Block block[BLOCK];
            UNROLLED for (int i = 0; i < BLOCK; i++) block[i] = Words<E>::block(pixels[first + i] + word * EACH);
            transpose(block);
            UNROLLED for (int i = 0; i < BLOCK; i++) store(to + (word + i) * count + first, block[i]);
        }
    }
    for (; word * EACH < channels; word++)
        for (int p = 0; p < count; p++) {
            const int c = word * EACH;
            to[word * count + p] = Words<E>::one(pixels[p] + c * step, step, channels - c);
        }
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

// sums = P pixels times WIDE vectors of weights. pixels: [word][P]. weights: [word][WIDE].
template <int P, int EACH>
inline void multiply_tile(const float* pixels, const Vector* weights, int words, Vector (&sums)[P][WIDE]) {
    UNROLLED for (int p = 0; p < P; p++)
        UNROLLED for (int i = 0; i < WIDE; i++) sums[p][i] = Vector{};
    for (int word = 0; word < words; word++) {
        Vector weight[WIDE];
        UNROLLED for (int i = 0; i < WIDE; i++) weight[i] = weights[word * WIDE + i];
        UNROLLED for (int p = 0; p < P; p++) {
            const float pixel = pixels[word * P + p];
            UNROLLED for (int i = 0; i < WIDE; i++) multiply_add<EACH>(weight[i], pixel, sums[p][i]);
        }
    }
}
