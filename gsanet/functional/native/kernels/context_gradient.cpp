// The gradient of content attention, Y = Q C with context vectors C = P^T V and P the softmax of the keys over pixels.
//
// With dC = Q^T dY:  dQ = dY C^T,  dV = P dC,  and dK = P * (V dC^T - z), where z[k] = sum over v of C[k, v] dC[k, v]
// is the mean of V dC^T under P. A head of an image is one unit of work, and P is computed again.
#include "exponential.h"
#include "head_blocks.h"
#include "threads.h"

namespace {

// A map in memory, (image, pixel, head, channel); distances are in numbers.
struct Pixels {
    float* data;
    int64_t image, pixel;
};

struct ContextGradient {
    Pixels queries, keys, values, gradient, d_queries, d_keys, d_values;
    const float *context, *softmax;  // as context.cpp leaves them
    int add;  // whether d_queries and d_values hold something already, to which is added
    int images, pixels, heads, key, value, threads;
};

// The memory of one thread. d_context: [key][value]; turned, C as it is, and d_turned: [value][key]; offsets, maxima,
// inverse: [key]; weights, slopes: [PIECE][key]; the last dimension in vectors.
template <class T>
struct Memory {
    Scratch<T> d_context, turned, d_turned, offsets, maxima, inverse, weights, slopes;

    explicit Memory(const ContextGradient& of)
        : d_context(int64_t(of.key) * vectors_of<T>(of.value)),
          turned(int64_t(of.value) * vectors_of<T>(of.key)),
          d_turned(int64_t(of.value) * vectors_of<T>(of.key)),
          offsets(vectors_of<T>(of.key)),
          maxima(vectors_of<T>(of.key)),
          inverse(vectors_of<T>(of.key)),
          weights(PIECE * vectors_of<T>(of.key)),
          slopes(PIECE * vectors_of<T>(of.key)) {}
};

constexpr int SUMS = 8;  // vectors of sums that are made together

// out[pixel][column] = sum over `inner` of left[pixel][i] * right[i][column vector], for P pixels and V vectors of out,
// of which there are `columns` channels; or += if it is to add.
template <int P, int V, class T>
inline void multiply(const float* left, int64_t left_pixel, int inner, const T* right, int row, int columns,
                     bool add, float* out, int64_t out_pixel) {
    constexpr int N = Of<T>::numbers;
    T sums[P][V] = {};
    if (add)
        UNROLLED for (int p = 0; p < P; p++)
            UNROLLED for (int v = 0; v < V; v++)
                sums[p][v] = load_some<T>(out + p * out_pixel + v * N, columns - v * N);
    for (int i = 0; i < inner; i++)
        UNROLLED for (int v = 0; v < V; v++) {
            const T values = right[i * row + v];
            UNROLLED for (int p = 0; p < P; p++) sums[p][v] += values * left[p * left_pixel + i];
        }
    UNROLLED for (int p = 0; p < P; p++)
        UNROLLED for (int v = 0; v < V; v++)
            store_some(out + p * out_pixel + v * N, sums[p][v], columns - v * N);
}

template <class T>
inline void multiply_all(const float* left, int64_t left_pixel, int inner, const T* right, int columns, int pixels,
                         bool add, float* out, int64_t out_pixel) {
    constexpr int N = Of<T>::numbers;
    const int row = vectors_of<T>(columns);
    for (int v = 0; v < row; v += TOGETHER)
        with_known<TOGETHER>(row - v, [&](auto together) {
            constexpr int V = decltype(together)::value, MOST = SUMS / V;
            for (int first = 0; first < pixels; first += MOST)
                with_known<MOST>(pixels - first, [&](auto rows) {
                    multiply<decltype(rows)::value, V>(left + first * left_pixel, left_pixel, inner, right + v, row,
                                                       columns - v * N, add, out + first * out_pixel + v * N,
                                                       out_pixel);
                });
        });
}

// dC, dC and C turned, and z.
template <class T>
void differentiate_context(const ContextGradient& of, const float* queries, const float* gradient, const float* context,
                           const Memory<T>& memory) {
    constexpr int N = Of<T>::numbers;
    const int row = vectors_of<T>(of.value) * N, turned_row = vectors_of<T>(of.key) * N;
    float *const d_context = floats(memory.d_context.data), *const offsets = floats(memory.offsets.data);
    float *const turned = floats(memory.turned.data), *const d_turned = floats(memory.d_turned.data);
    for (int i = 0; i < of.key * row; i++) d_context[i] = 0;
    for (int i = 0; i < of.value * turned_row; i++) turned[i] = d_turned[i] = 0;
    for (int i = 0; i < turned_row; i++) offsets[i] = 0;
    for (int first = 0; first < of.pixels; first += PIECE) {
        const int count = of.pixels - first < PIECE ? of.pixels - first : PIECE;
        add_all_outer_products(queries + first * of.queries.pixel, of.queries.pixel, of.key,
                               gradient + first * of.gradient.pixel, of.gradient.pixel, of.value, count,
                               memory.d_context.data);
    }
    for (int i = 0; i < of.key; i++) {
        for (int c = 0; c < of.value; c++) {
            turned[c * turned_row + i] = context[i * of.value + c];
            d_turned[c * turned_row + i] = d_context[i * row + c];
            offsets[i] += context[i * of.value + c] * d_context[i * row + c];
        }
    }
}

// Of one head: where each of the maps begins.
struct Head {
    const float *queries, *keys, *values, *gradient;
    float *d_queries, *d_keys, *d_values;
};

template <class T>
void differentiate_pixels(const ContextGradient& of, const Head& at, int first, int count, const Memory<T>& memory) {
    constexpr int N = Of<T>::numbers;
    const int row = vectors_of<T>(of.key);
    T *const weights = memory.weights.data, *const slopes = memory.slopes.data;
    for (int pixel = 0; pixel < count; pixel++)
        for (int i = 0; i < row; i++) {
            const float* const key = at.keys + (first + pixel) * of.keys.pixel + i * N;
            const T above = load_some<T>(key, of.key - i * N) - memory.maxima.data[i];
            weights[pixel * row + i] = exponential<T, typename Of<T>::Bits>(above) * memory.inverse.data[i];
        }
    multiply_all(at.gradient + first * of.gradient.pixel, of.gradient.pixel, of.value, memory.turned.data, of.key,
                 count, of.add, at.d_queries + first * of.d_queries.pixel, of.d_queries.pixel);
    multiply_all(floats(weights), row * N, of.key, memory.d_context.data, of.value, count, of.add,
                 at.d_values + first * of.d_values.pixel, of.d_values.pixel);
    multiply_all(at.values + first * of.values.pixel, of.values.pixel, of.value, memory.d_turned.data, of.key, count,
                 false, floats(slopes), row * N);
    for (int pixel = 0; pixel < count; pixel++)
        for (int i = 0; i < row; i++) {
            const int one = pixel * row + i;
            store_some(at.d_keys + (first + pixel) * of.d_keys.pixel + i * N,
                       weights[one] * (slopes[one] - memory.offsets.data[i]), of.key - i * N);
        }
}

template <class T>
void differentiate(const ContextGradient& of, int64_t image, int64_t head, const Memory<T>& memory) {
    const auto start = [&](const Pixels& map, int width) { return map.data + image * map.image + head * width; };
    const Head at{start(of.queries, of.key),    start(of.keys, of.key),     start(of.values, of.value),
                  start(of.gradient, of.value), start(of.d_queries, of.key), start(of.d_keys, of.key),
                  start(of.d_values, of.value)};
    const int64_t unit = image * of.heads + head;
    differentiate_context(of, at.queries, at.gradient, of.context + unit * of.key * of.value, memory);
    const float* const maxima = of.softmax + unit * of.key;
    const float* const inverse = maxima + int64_t(of.images) * of.heads * of.key;
    constexpr int N = Of<T>::numbers;
    for (int i = 0; i < vectors_of<T>(of.key); i++) {
        memory.maxima.data[i] = load_some<T>(maxima + i * N, of.key - i * N);
        memory.inverse.data[i] = load_some<T>(inverse + i * N, of.key - i * N);
    }
    for (int first = 0; first < of.pixels; first += PIECE)
        differentiate_pixels(of, at, first, of.pixels - first < PIECE ? of.pixels - first : PIECE, memory);
}

}  // namespace

extern "C" void differentiate_context_vectors(const ContextGradient* gradient) {
    const ContextGradient& of = *gradient;
    std::atomic<int64_t> next{0};
    with_vector(of.key, of.value, [&](auto vector) {
        in_threads(of.threads, [&] {
            const Memory<decltype(vector)> memory(of);
            for_units(next, int64_t(of.images) * of.heads,
                      [&](int64_t unit) { differentiate(of, unit / of.heads, unit % of.heads, memory); });
        });
    });
}
