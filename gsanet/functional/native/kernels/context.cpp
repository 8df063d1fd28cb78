// The context vectors of content attention: softmax of the keys over all pixels of an image, times the values.
//
// A head of an image is one unit of work. Its channels lie side by side in memory and are taken BLOCK at a time; the
// last of them may be filled up with zeros.
#include "exponential.h"
#include "threads.h"

namespace {

constexpr int PIECE = 64;             // pixels whose weights are kept in the first cache
constexpr int TOGETHER = 16 / BLOCK;  // blocks of values that are multiplied together

struct Context {
    const float *keys, *values;  // (image, pixel, head, channel)
    float* out;                  // (image, head, key, value)
    int64_t keys_image, keys_pixel, values_image, values_pixel;  // distances, in numbers
    int images, pixels, heads, key, value, threads;
};

inline int blocks(int channels) { return (channels + BLOCK - 1) / BLOCK; }

inline Block load_some(const float* from, int count) {
    if (count >= BLOCK) return load_block(from);
    Block block = {};
    for (int i = 0; i < count; i++) block[i] = from[i];
    return block;
}

// sums[i * row] += sum over pixels of weights[pixel][i] * values[pixel]: BLOCK channels of keys, B blocks of values.
template <int B>
inline void add_products(const float* weights, int weights_pixel, const float* values, int64_t values_pixel,
                         int channels, int pixels, Block* sums, int row) {
    Block products[BLOCK][B] = {};
    for (int pixel = 0; pixel < pixels; pixel++) {
        Block value[B];
        UNROLLED for (int b = 0; b < B; b++)
            value[b] = load_some(values + pixel * values_pixel + b * BLOCK, channels - b * BLOCK);
        UNROLLED for (int i = 0; i < BLOCK; i++)
            UNROLLED for (int b = 0; b < B; b++) products[i][b] += value[b] * weights[pixel * weights_pixel + i];
    }
    UNROLLED for (int i = 0; i < BLOCK; i++)
        UNROLLED for (int b = 0; b < B; b++) sums[i * row + b] += products[i][b];
}

// Of one head. maxima, totals: [key block]; weights: [PIECE][key block]; sums: [key][value block].
void attend(const Context& of, const float* keys, const float* values, float* out, Block* maxima, Block* totals,
            Block* weights, Block* sums) {
    const int key_blocks = blocks(of.key), value_blocks = blocks(of.value);
    for (int b = 0; b < key_blocks; b++) {
        const int channels = of.key - b * BLOCK;
        Block maximum = load_some(keys + b * BLOCK, channels);
        for (int pixel = 1; pixel < of.pixels; pixel++) {
            const Block key = load_some(keys + pixel * of.keys_pixel + b * BLOCK, channels);
            maximum = key > maximum ? key : maximum;
        }
        maxima[b] = maximum;
        totals[b] = Block{};
    }
    for (int i = 0; i < key_blocks * BLOCK * value_blocks; i++) sums[i] = Block{};

    for (int first = 0; first < of.pixels; first += PIECE) {
        const int count = of.pixels - first < PIECE ? of.pixels - first : PIECE;
        for (int b = 0; b < key_blocks; b++) {
            Block total = {};
            for (int pixel = 0; pixel < count; pixel++) {
                const float* const key = keys + (first + pixel) * of.keys_pixel + b * BLOCK;
                const Block weight = exponential<Block, Integers>(load_some(key, of.key - b * BLOCK) - maxima[b]);
                weights[pixel * key_blocks + b] = weight;
                total += weight;
            }
            totals[b] += total;
        }
        const float* const piece = values + first * of.values_pixel;
        for (int a = 0; a < key_blocks; a++)
            for (int b = 0; b < value_blocks; b += TOGETHER)
                with_known<TOGETHER>(value_blocks - b, [&](auto together) {
                    add_products<decltype(together)::value>(
                        reinterpret_cast<const float*>(weights + a), key_blocks * BLOCK, piece + b * BLOCK,
                        of.values_pixel, of.value - b * BLOCK, count, sums + a * BLOCK * value_blocks + b,
                        value_blocks);
                });
    }

    const float* const total = reinterpret_cast<const float*>(totals);
    const float* const sum = reinterpret_cast<const float*>(sums);
    for (int i = 0; i < of.key; i++)
        for (int c = 0; c < of.value; c++) out[i * of.value + c] = sum[i * value_blocks * BLOCK + c] / total[i];
}

}  // namespace

extern "C" void context_vectors(const Context* context) {
    const Context& of = *context;
    const int key_blocks = blocks(of.key), value_blocks = blocks(of.value);
    std::atomic<int64_t> next{0};
    in_threads(of.threads, [&] {
        Scratch<Block> maxima(key_blocks), totals(key_blocks), weights(PIECE * key_blocks);
        Scratch<Block> sums(int64_t(key_blocks) * BLOCK * value_blocks);
        for_units(next, int64_t(of.images) * of.heads, [&](int64_t unit) {
            const int64_t image = unit / of.heads, head = unit % of.heads;
            attend(of, of.keys + image * of.keys_image + head * of.key,
                   of.values + image * of.values_image + head * of.value, of.out + unit * of.key * of.value,
                   maxima.data, totals.data, weights.data, sums.data);
        });
    });
}
