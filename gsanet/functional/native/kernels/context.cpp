// The context vectors of content attention: softmax of the keys over all pixels of an image, times the values.
//
// A head of an image is one unit of work.
#include "exponential.h"
#include "head_blocks.h"
#include "threads.h"

namespace {

struct Context {
    const void *keys, *values;   // (image, pixel, head, channel)
    float* out;                  // (image, head, key, value)
    float* softmax;              // (2, image, head, key): the largest keys, and 1 / sums of weights
    int64_t keys_image, keys_pixel, values_image, values_pixel;  // distances, in numbers
    int element;  // what keys and values are
    int images, pixels, heads, key, value, threads;
};

// The memory of one thread. maxima, totals: [key]; weights: [PIECE][key]; sums: [key][value]; the last dimension in
// vectors.
template <class T>
struct Memory {
    Scratch<T> maxima, totals, weights, sums;

    explicit Memory(const Context& of)
        : maxima(vectors_of<T>(of.key)),
          totals(vectors_of<T>(of.key)),
          weights(PIECE * vectors_of<T>(of.key)),
          sums(int64_t(of.key) * vectors_of<T>(of.value)) {}
};

// Of one head; softmax: where its largest keys go, and one distance on 1 / sums of weights.
template <class T, class E>
void attend(const Context& of, const E* keys, const E* values, float* out, float* softmax, int64_t distance,
            const Memory<T>& memory) {
    constexpr int N = Of<T>::numbers;
    const int keys_row = vectors_of<T>(of.key), values_row = vectors_of<T>(of.value);
    T *const maxima = memory.maxima.data, *const totals = memory.totals.data, *const weights = memory.weights.data;
    for (int i = 0; i < keys_row; i++) {
        const int channels = of.key - i * N;
        T maximum = load_some<T>(keys + i * N, channels);
        for (int pixel = 1; pixel < of.pixels; pixel++) {
            const T key = load_some<T>(keys + pixel * of.keys_pixel + i * N, channels);
            maximum = key > maximum ? key : maximum;
        }
        maxima[i] = maximum;
        totals[i] = T{};
    }
    for (int i = 0; i < of.key * values_row; i++) memory.sums.data[i] = T{};

    for_pieces(of.pixels, [&](int first, int count) {
        for (int i = 0; i < keys_row; i++) {
            T total = {};
            for (int pixel = 0; pixel < count; pixel++) {
                const E* const key = keys + (first + pixel) * of.keys_pixel + i * N;
                const T weight = exponential<T, typename Of<T>::Bits>(load_some<T>(key, of.key - i * N) - maxima[i]);
                weights[pixel * keys_row + i] = weight;
                total += weight;
            }
            totals[i] += total;
        }
        add_all_outer_products(floats(weights), keys_row * N, of.key, values + first * of.values_pixel,
                               of.values_pixel, of.value, count, memory.sums.data);
    });

    const float *const total = floats(totals), *const sum = floats(memory.sums.data);
    for (int i = 0; i < of.key; i++)
        for (int c = 0; c < of.value; c++) out[i * of.value + c] = sum[i * values_row * N + c] / total[i];
    for (int i = 0; i < of.key; i++) {
        softmax[i] = floats(maxima)[i];
        softmax[distance + i] = 1 / total[i];
    }
}

}  // namespace

extern "C" void context_vectors(const Context* context) {
    const Context& of = *context;
    const int64_t numbers = int64_t(of.images) * of.heads * of.key;
    std::atomic<int64_t> next{0};
    with_vector(of.key, of.value, [&](auto vector) {
        in_threads(of.threads, [&] {
            const Memory<decltype(vector)> memory(of);
            for_units(next, int64_t(of.images) * of.heads, [&](int64_t unit) {
                const int64_t keys = unit / of.heads * of.keys_image + unit % of.heads * of.key;
                const int64_t values = unit / of.heads * of.values_image + unit % of.heads * of.value;
                with_element(of.element, [&](auto number) {
                    typedef const decltype(number) E;
                    attend(of, static_cast<E*>(of.keys) + keys, static_cast<E*>(of.values) + values,
                           of.out + unit * of.key * of.value, of.softmax + unit * of.key, numbers, memory);
                });
            });
        });
    });
}
