// The gradient of content attention, Y = Q C with context vectors C = P^T V and P the softmax of the keys over pixels.
//
// With dC = Q^T dY:  dQ = dY C^T,  dV = P dC,  and dK = P * (V dC^T - z), where z[k] = sum over v of C[k, v] dC[k, v]
// is the mean of V dC^T under P, which is computed again. A unit of work is a head of an image, or several narrow ones.
#include "exponential.h"
#include "head_blocks.h"
#include "lanes.h"
#include "threads.h"

namespace {

// A map in memory, (image, pixel, head, channel); distances are in numbers.
struct Pixels {
    void* data;
    int64_t image, pixel;
};

struct ContextGradient {
    Pixels queries, keys, values, gradient, d_queries, d_keys, d_values;
    const float *context, *softmax;  // as context.cpp leaves them
    int add;  // whether d_queries and d_values hold something already, to which is added
    int element;  // what all maps are
    int images, pixels, heads, key, value, threads;
};

// What is known of one head of an image, in vectors: dC, [key][value]; C and dC turned, [value][key]; z, the largest keys
// and 1 / sums of weights, [key].
template <class T>
struct Head {
    int64_t d_context, turned, d_turned, offsets, maxima, inverse, count;

    explicit Head(const ContextGradient& of) {
        const int64_t key = vectors_of<T>(of.key);
        Layout take;
        d_context = take(of.key * vectors_of<T>(of.value));
        turned = take(of.value * key);
        d_turned = take(of.value * key);
        offsets = take(key);
        maxima = take(key);
        inverse = take(key);
        count = take.end;
    }
};

constexpr int SUMS = 8;  // vectors of sums that are made together

// out[pixel][column] = sum over `inner` of left[pixel][i] * right[i][column vector], for P pixels and V vectors of out,
// of which there are `columns` channels; or += if it is to add.
template <int P, int V, class T, class L, class O>
inline void multiply(const L* left, int64_t left_pixel, int inner, const T* right, int row, int columns, bool add,
                     O* out, int64_t out_pixel) {
    constexpr int N = Of<T>::numbers;
    T sums[P][V] = {};
    if (add)
        UNROLLED for (int p = 0; p < P; p++)
            UNROLLED for (int v = 0; v < V; v++)
                sums[p][v] = load_some<T>(out + p * out_pixel + v * N, columns - v * N);
    for (int i = 0; i < inner; i++)
        UNROLLED for (int v = 0; v < V; v++) {
            const T values = right[i * row + v];
            UNROLLED for (int p = 0; p < P; p++) sums[p][v] += values * to_float(left[p * left_pixel + i]);
        }
    UNROLLED for (int p = 0; p < P; p++)
        UNROLLED for (int v = 0; v < V; v++)
            store_some(out + p * out_pixel + v * N, sums[p][v], columns - v * N);
}

template <class T, class L, class O>
inline void multiply_all(const L* left, int64_t left_pixel, int inner, const T* right, int columns, int pixels,
                         bool add, O* out, int64_t out_pixel) {
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

// Of one head: dC is there, and what follows from it is added.
template <class T>
void prepare_head(const ContextGradient& of, const Head<T>& at, const float* context, const float* softmax, T* known) {
    const int row = vectors_of<T>(of.value) * Of<T>::numbers, turned_row = vectors_of<T>(of.key) * Of<T>::numbers;
    const float* const d_context = floats(known + at.d_context);
    float *const turned = floats(known + at.turned), *const d_turned = floats(known + at.d_turned);
    float *const maxima = floats(known + at.maxima), *const inverse = floats(known + at.inverse);
    for (int i = 0; i < of.key; i++) {
        for (int c = 0; c < of.value; c++) {
            turned[c * turned_row + i] = context[i * of.value + c];
            d_turned[c * turned_row + i] = d_context[i * row + c];
        }
        maxima[i] = softmax[i];
        inverse[i] = softmax[int64_t(of.images) * of.heads * of.key + i];
    }
    const int vectors = vectors_of<T>(of.key);
    for (int i = 0; i < vectors; i++) {
        T offsets = {};
        for (int c = 0; c < of.value; c++)
            offsets += known[at.turned + c * vectors + i] * known[at.d_turned + c * vectors + i];
        known[at.offsets + i] = offsets;
    }
}

// The gradients of one head of a piece; weights and slopes: memory for [PIECE][key].
template <class E, class T>
void differentiate_piece(const ContextGradient& of, const Head<T>& at, const T* known, int64_t image, int head,
                         int first, int count, T* weights, T* slopes) {
    constexpr int N = Of<T>::numbers;
    const int row = vectors_of<T>(of.key);
    const auto start = [&](const Pixels& map, int width) {
        return static_cast<E*>(map.data) + image * map.image + first * map.pixel + head * width;
    };
    const E* const keys = start(of.keys, of.key);
    E* const d_keys = start(of.d_keys, of.key);
    for (int pixel = 0; pixel < count; pixel++)
        for (int i = 0; i < row; i++) {
            const T above = load_some<T>(keys + pixel * of.keys.pixel + i * N, of.key - i * N) - known[at.maxima + i];
            weights[pixel * row + i] = exponential<T, typename Of<T>::Bits>(above) * known[at.inverse + i];
        }
    multiply_all(start(of.gradient, of.value), of.gradient.pixel, of.value, known + at.turned, of.key, count, of.add,
                 start(of.d_queries, of.key), of.d_queries.pixel);
    multiply_all(floats(weights), row * N, of.key, known + at.d_context, of.value, count, of.add,
                 start(of.d_values, of.value), of.d_values.pixel);
    multiply_all(start(of.values, of.value), of.values.pixel, of.value, known + at.d_turned, of.key, count, false,
                 floats(slopes), row * N);
    for (int pixel = 0; pixel < count; pixel++)
        for (int i = 0; i < row; i++) {
            const int one = pixel * row + i;
            store_some(d_keys + pixel * of.d_keys.pixel + i * N,
                       weights[one] * (slopes[one] - known[at.offsets + i]), of.key - i * N);
        }
}

// `count` heads of an image; known: memory for them, zeros where rows are filled up.
template <class E, class T>
void differentiate(const ContextGradient& of, const Head<T>& at, int64_t image, int first_head, int count, T* known,
                   T* weights, T* slopes) {
    const auto start = [&](const Pixels& map, int pixel) {
        return static_cast<const E*>(map.data) + image * map.image + pixel * map.pixel;
    };
    for (int i = 0; i < count; i++)
        for (int64_t j = at.d_context; j < at.turned; j++) known[i * at.count + j] = T{};
    for_pieces(of.pixels, [&](int first, int pixels) {
        for (int i = 0; i < count; i++)
            add_all_outer_products(start(of.queries, first) + (first_head + i) * of.key, of.queries.pixel, of.key,
                                   start(of.gradient, first) + (first_head + i) * of.value, of.gradient.pixel,
                                   of.value, pixels, known + i * at.count + at.d_context);
    });
    for (int i = 0; i < count; i++) {
        const int64_t number = image * of.heads + first_head + i;
        prepare_head(of, at, of.context + number * of.key * of.value, of.softmax + number * of.key,
                     known + i * at.count);
    }
    for_pieces(of.pixels, [&](int first, int pixels) {
        for (int i = 0; i < count; i++)
            differentiate_piece<E>(of, at, known + i * at.count, image, first_head + i, first, pixels, weights, slopes);
    });
}

// Heads whose channels are worked on together, piece by piece: those that memory gives at once, if all threads have work.
int heads_together(const ContextGradient& of) {
    int together = 1;
    while (together < of.heads && together * of.key < 2 * CACHE_LINE &&
           of.images * (of.heads / (2 * together)) >= of.threads)
        together *= 2;
    return together;
}

}  // namespace

extern "C" void differentiate_context_vectors(const ContextGradient* gradient) {
    const ContextGradient& of = *gradient;
    const int together = heads_together(of);
    const int groups = divide_up(of.heads, together);
    std::atomic<int64_t> next{0};
    with_vector(of.key, of.value, [&](auto vector) {
        typedef decltype(vector) T;
        const Head<T> at(of);
        in_threads(of.threads, [&] {
            Scratch<T> known(together * at.count);
            for (int64_t i = 0; i < together * at.count; i++) known.data[i] = T{};
            Scratch<T> weights(PIECE * vectors_of<T>(of.key)), slopes(PIECE * vectors_of<T>(of.key));
            for_units(next, int64_t(of.images) * groups, [&](int64_t unit) {
                const int first = static_cast<int>(unit % groups) * together;
                const int count = of.heads - first < together ? of.heads - first : together;
                with_element(of.element, [&](auto number) {
                    differentiate<decltype(number)>(of, at, unit / groups, first, count, known.data, weights.data,
                                                    slopes.data);
                });
            });
        });
    });
}
