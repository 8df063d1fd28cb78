// Positional attention along all lines of a map, and what is done with its output before it leaves the cache.
#include "lanes.h"
#include "products.h"

namespace {

struct Lines {
    Map queries, values, out;
    const float* embeddings;       // (2 * length - 1, key); or null: no positional attention, and values are not read
    const float* context;          // (image, head, key, value): adds queries times this; or null
    const float* scale_and_shift;  // (2, head, value), of the output; or null
    int relu;                      // whether a ReLU comes behind that
    int images, lines, length, heads, key, value, threads;
};

// The vectors of one group: queries [x][key], values [i][value], sums [x][value], scores [PIXELS][piece], and context
// vectors [key][value] and scale and shift [2][value], which are not of a pixel.
struct Vectors {
    int piece;  // attended pixels at a time
    int64_t queries, values, sums, scores, context, affine, count;

    explicit Vectors(const Lines& of) {
        piece = cached_pixels(of.value);
        Layout take;
        queries = take(int64_t(of.length) * of.key);
        values = take(of.embeddings ? int64_t(of.length) * of.value : 0);
        sums = take(int64_t(of.length) * of.value);
        scores = take(PIXELS * piece);
        context = take(of.context ? int64_t(of.key) * of.value : 0);
        affine = take(of.scale_and_shift ? 2 * of.value : 0);
        count = take.end;
    }
};

// sums += queries times the context vectors of each head.
void add_content(const Lines& of, const Vectors& at, const Group& group, Vector* vectors) {
    const float* const context = of.context + int64_t(group.image) * of.heads * of.key * of.value;
    gather(Starts(group, context, of.key * of.value), of.value, of.key, of.value, vectors + at.context);
    for_pixels(of.length, [&](int x, auto pixels) {
        mix_channels<decltype(pixels)::value>(vectors + at.queries + x * of.key, of.key, vectors + at.context, of.key,
                                              of.value, vectors + at.sums + x * of.value);
    });
}

// sums += scores times values: all pixels attend to a piece of the line at a time.
void add_positional(const Lines& of, const Vectors& at, const Group& group, Vector* vectors) {
    Vector *const values = vectors + at.values, *const scores = vectors + at.scores;
    gather(Starts(group, of.values, of.value), of.values.pixel, of.length, of.value, values);
    for (int first = 0; first < of.length; first += at.piece) {
        const int count = of.length - first < at.piece ? of.length - first : at.piece;
        for_pixels(of.length, [&](int x, auto pixels) {
            constexpr int X = decltype(pixels)::value;
            const float* const window = of.embeddings + (of.length - 1 + first - x) * of.key;
            score_attended<X>(vectors + at.queries + x * of.key, of.key, window, count, scores, at.piece);
            mix_channels<X>(scores, at.piece, values + first * of.value, count, of.value,
                            vectors + at.sums + x * of.value);
        });
    }
}

void scale_and_shift(const Lines& of, const Vectors& at, const Group& group, Vector* vectors) {
    Vector *const scale = vectors + at.affine, *const shift = scale + of.value;
    gather(Starts(group, of.scale_and_shift, of.value), of.heads * of.value, 2, of.value, scale);
    for (int x = 0; x < of.length; x++)
        for (int c = 0; c < of.value; c++) {
            Vector& sum = vectors[at.sums + x * of.value + c];
            sum = sum * scale[c] + shift[c];
            if (of.relu) sum = sum < 0 ? Vector{} : sum;  // NaN stays NaN
        }
}

void attend(const Lines& of, const Vectors& at, const Group& group, Vector* vectors) {
    gather(Starts(group, of.queries, of.key), of.queries.pixel, of.length, of.key, vectors + at.queries);
    clear(vectors + at.sums, int64_t(of.length) * of.value);
    if (of.context) add_content(of, at, group, vectors);
    if (of.embeddings) add_positional(of, at, group, vectors);
    if (of.scale_and_shift) scale_and_shift(of, at, group, vectors);
    scatter(Starts(group, of.out, of.value), group.count, of.out.pixel, of.length, of.value, vectors + at.sums);
}

}  // namespace

extern "C" void attend_along_lines(const Lines* lines) {
    const Lines& of = *lines;
    const Vectors at(of);
    const int groups = count_groups(of.lines, of.heads);
#pragma omp parallel num_threads(of.threads)
    {
        Scratch<Vector> vectors(at.count);
#pragma omp for schedule(dynamic)
        for (int unit = 0; unit < of.images * groups; unit++)
            attend(of, at, Group(unit / groups, unit % groups, of.lines, of.heads), vectors.data);
    }
}
