// A 1x1 convolution with what comes behind it, a bias, a sum and a ReLU: a product for each pixel.
//
// Some pixels at a time are packed and shared by all threads, and each panel of weights is packed where it is used, by one
// thread, for all of these pixels.
#include "lanes.h"
#include "projection.h"
#include "threads.h"

namespace {

struct Pointwise {
    const void* x;
    int64_t x_image, x_row, x_pixel, x_channel;  // distances, in numbers; those of rows and pixels are the stride's
    const void* weight;                          // (output, channel)
    const void *bias, *residual;                 // (output), and as out; or null
    void* out;                                   // (image, row, pixel, output)
    int element;                                 // what all of these are
    int relu, images, rows, length, channels, outputs, threads;
};

constexpr int PANEL = WIDE * LANES;  // outputs whose weights are packed together
constexpr int TOGETHER = 1 << 10;    // pixels at a time, at most: so many that packing weights again costs next to nothing

// One tile of pixels, as pack_pixels leaves them.
template <class E>
void pack_tile(const Pointwise& of, int64_t first, int count, float* to) {
    const E* pixels[TALL];
    for (int p = 0; p < count; p++) {
        const int64_t row = (first + p) / of.length;
        pixels[p] = static_cast<const E*>(of.x) + row / of.rows * of.x_image + row % of.rows * of.x_row +
                    (first + p) % of.length * of.x_pixel;
    }
    pack_pixels(pixels, count, of.channels, of.x_channel, to);
}

// What comes behind one vector of sums, whose outputs begin at one of `place`; so many of them are there.
template <class E>
inline void finish(const Pointwise& of, Vector sum, int output, int64_t place, int count) {
    if (of.bias) sum += load_some<Vector>(static_cast<const E*>(of.bias) + output, count);
    if (of.residual) sum += load_some<Vector>(static_cast<const E*>(of.residual) + place, count);
    if (of.relu) sum = sum < 0 ? Vector{} : sum;  // NaN stays NaN
    store_some(static_cast<E*>(of.out) + place, sum, count);
}

// P pixels times a panel that begins at an output, and of whose outputs `present` are there.
template <class E, int P>
inline void convolve_tile(const Pointwise& of, const float* pixels, const Vector* weights, int64_t first, int output,
                          int present) {
    Vector sums[P][WIDE];
    multiply_tile<P, Words<E>::each>(pixels, weights, words_of<Words<E>::each>(of.channels), sums);
    const int64_t place = first * of.outputs + output;
    if (present >= PANEL) {
        UNROLLED for (int i = 0; i < WIDE; i++)
            UNROLLED for (int p = 0; p < P; p++)
                finish<E>(of, sums[p][i], output + i * LANES, place + int64_t(p) * of.outputs + i * LANES, LANES);
        return;
    }
    Vector tile[P * WIDE];
    __builtin_memcpy(tile, sums, sizeof tile);
    for (int one = 0; one < P * WIDE; one++) {  // not unrolled: code for the last panel only
        const int p = one / WIDE, i = one % WIDE * LANES;
        if (i < present) finish<E>(of, tile[one], output + i, place + int64_t(p) * of.outputs + i, present - i);
    }
}

// The packed pixels from `start` on times a panel.
template <class E>
void convolve_panel(const Pointwise& of, int panel, int64_t start, int pixels, const float* packed, Vector* weights) {
    const E *rows[PANEL], *const weight = static_cast<const E*>(of.weight);
    const int output = panel * PANEL, present = of.outputs - output;
    for (int i = 0; i < PANEL; i++) rows[i] = i < present ? weight + int64_t(output + i) * of.channels : nullptr;
    pack_weights(rows, of.channels, weights);
    const int words = words_of<Words<E>::each>(of.channels);
    for_pixel_tiles(pixels, [&](int first, int count) {
        with_known<TALL>(count, [&](auto known) {
            convolve_tile<E, decltype(known)::value>(of, packed + int64_t(first) * words, weights, start + first,
                                                     output, present);
        });
    });
}

template <class E>
void convolve_pixels(const Pointwise& of, int64_t start, int pixels, float* packed) {
    const PixelTiles tiles(pixels);
    const int words = words_of<Words<E>::each>(of.channels);
    std::atomic<int64_t> next_tile{0}, next_panel{0};
    std::atomic<int> done{0};
    in_threads(of.threads, [&] {
        Scratch<Vector> weights(int64_t(words) * WIDE);
        for_units(next_tile, tiles.tiles, [&](int64_t tile) {
            tiles.with_tile(static_cast<int>(tile), [&](int first, int count) {
                pack_tile<E>(of, start + first, count, packed + int64_t(first) * words);
            });
            done.fetch_add(1, std::memory_order_release);
        });
        wait_for(done, tiles.tiles);
        for_units(next_panel, divide_up(of.outputs, PANEL), [&](int64_t panel) {
            convolve_panel<E>(of, static_cast<int>(panel), start, pixels, packed, weights.data);
        });
    });
}

}  // namespace

extern "C" void convolve_pointwise(const Pointwise* pointwise) {
    const Pointwise& of = *pointwise;
    const int64_t pixels = int64_t(of.images) * of.rows * of.length, pieces = (pixels + TOGETHER - 1) / TOGETHER;
    Scratch<float> packed((pixels < TOGETHER ? pixels : TOGETHER) * words_of(of.element, of.channels));
    for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t start = pixels * piece / pieces, end = pixels * (piece + 1) / pieces;
        with_element(of.element, [&](auto number) {
            convolve_pixels<decltype(number)>(of, start, static_cast<int>(end - start), packed.data);
        });
    }
}
