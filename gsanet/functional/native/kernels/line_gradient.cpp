// The gradient of positional attention along all lines of a map. Scores are computed again.
//
// With S[x, i] = q[x] . R[i - x]:  dV = S^T dY,  dS = dY V^T,  dQ[x] = sum over i of dS[x, i] R[i - x], and
// dR[r] = sum over x, and over all pairs, of dS[x, x + r] q[x].
//
// A norm of the values or of the output is part of it. That of the values needs two sums for each channel; that of the
// output gives its gradient from that of what it made.
#include "gradient_products.h"
#include "moments.h"
#include "threads.h"

namespace {

constexpr int KEPT = 1 << 11;  // vectors of dS, for a strip of attending pixels
constexpr int OFFSETS = 2;     // of dR, whose sums are made together
constexpr int AROUND = 2;      // zeros at both ends of a line, for PIXELS and OFFSETS of which some are no pixels

struct LineGradient {
    Map queries, values, gradient, output, d_queries, d_values;
    const float* embeddings;  // (2 * length - 1, key)
    float* d_embeddings;      // (share, 2 * length - 1, key): the shares are to be summed
    const float* norm;  // of the values, (4, head, value): scale, shift, mean, 1 / standard deviation; or null
    double* d_norm;     // (share, 2, head, value): sums of the gradient of what was normalised, and of their product
    // Of a norm of the output, (4, head, value): its gradient is a * gradient + b * (output - c) + d; or null, and the
    // output is not read. There is no norm of the values then.
    const float* coefficients;
    int add;  // whether d_queries holds something already, to which is added
    int images, lines, length, heads, key, value, shares, threads;
};

// The vectors of one group: queries and d_queries [x][key], values, gradient and d_values [i][value], scores
// [TILE][piece], dS as d_scores [strip][row], with zeros at both ends: what lies there is no pixel; dR as
// d_embeddings [offset][key], of all groups of a share together; channels [4][value], what is known of a norm; and
// others [i][value], what was normalised, without scale and shift, or the output.
//
// With words of two numbers, queries, values and gradient become words of channels; query_rows [word][key] and
// gradient_rows [word][value] are words of pixels. Of dS there are two pixels at a time, as d_scores [PIXELS][row] and,
// in words of attended pixels, as d_score_words [PIXELS][row]; and all of a strip in words of attending pixels, as
// d_score_pairs [word][row], each of a pixel with one attended pixel, and of the next pixel with the next one.
struct Vectors {
    int key, value;  // in words
    int piece, row, strip;
    int64_t queries, query_rows, d_queries, values, gradient, gradient_rows, d_values, scores, d_scores, d_score_words;
    int64_t d_score_pairs, d_embeddings, channels, others, count;

    explicit Vectors(const LineGradient& of) {
        const int64_t length = of.length;
        key = words_of(of.queries.element, of.key);
        value = words_of(of.queries.element, of.value);
        const bool paired = are_pairs(of.queries.element);
        piece = cached_pixels(of.value);
        row = of.length + 2 * AROUND;
        const int kept = KEPT / row / PIXELS * PIXELS;
        strip = kept < TILE ? TILE : kept < of.length ? kept : of.length;
        Layout take;
        queries = take(length * of.key);
        query_rows = paired ? take(words_of<2>(of.length) * int64_t(of.key)) : queries;
        d_queries = take(length * of.key);
        values = take(length * of.value);
        gradient = take(length * of.value);
        gradient_rows = paired ? take(words_of<2>(of.length) * int64_t(of.value)) : gradient;
        d_values = take(length * of.value);
        scores = take(TILE * piece);
        d_scores = take(int64_t(paired ? PIXELS : strip) * row);
        d_score_words = take(paired ? PIXELS * row : 0);
        d_score_pairs = take(paired ? int64_t(words_of<2>(strip)) * row : 0);
        d_embeddings = take((2 * length - 1) * of.key);
        channels = take(of.norm || of.coefficients ? 4 * of.value : 0);
        others = take(of.norm || of.coefficients ? length * of.value : 0);
        count = take.end;
    }
};

// The embeddings, in words of channels and of offsets.
struct Tables {
    Table channels, offsets;

    explicit Tables(const LineGradient& of)
        : channels(of.queries.element, of.embeddings, 2 * int64_t(of.length) - 1, of.key),
          offsets(of.queries.element, of.embeddings, 2 * int64_t(of.length) - 1, of.key, Table::DOWN) {}
};

// d_values, from all attending pixels, a piece of them at a time.
template <int EACH>
void differentiate_values(const LineGradient& of, const Vectors& at, const Tables& tables, Vector* vectors) {
    Vector* const scores = vectors + at.scores;
    const int row = words_of<EACH>(at.piece);
    for (int first = 0; first < of.length; first += at.piece) {
        const int count = of.length - first < at.piece ? of.length - first : at.piece;
        for_tiles(of.length, [&](int i, auto tile) {
            constexpr int I = decltype(tile)::value;
            const float* const window = tables.channels.words + int64_t(of.length - 1 + i - first) * at.key;
            score_attending<EACH, I>(vectors + at.queries + first * at.key, at.key, window, count, scores, row);
            for_pixels(I, [&](int j, auto pixels) {
                mix_channels<EACH, decltype(pixels)::value>(
                    scores + j * row, row, 1, vectors + at.gradient_rows + first / EACH * of.value,
                    words_of<EACH>(count), of.value, first > 0, vectors + at.d_values + (i + j) * of.value);
            });
        });
    }
}

// Calls f with OFFSETS offsets at a time, of those between a strip of attending pixels and the line: the first, how many
// they are, and which pixels of the strip, from one on and before another, attend to one of the line at any of them.
template <class F>
inline void for_offsets(const LineGradient& of, int first, int count, F&& f) {
    const int lowest = -(first + count - 1), highest = of.length - 1 - first;
    for (int o = lowest; o <= highest; o += OFFSETS)
        with_known<OFFSETS>(highest + 1 - o, [&](auto together) {
            const int before = first + o + decltype(together)::value;
            const int begin = before > 0 ? 0 : 1 - before, left = of.length - first - o;
            f(o, together, begin, left < count ? left : count);
        });
}

// d_queries of a strip of pixels, and what they add to d_embeddings.
void differentiate_strip(const LineGradient& of, const Vectors& at, int first, int count, Vector* vectors) {
    const Vector* const gradient = vectors + at.gradient + first * of.value;
    Vector* const d_scores = vectors + at.d_scores + AROUND;  // at the first pixel of the line
    for_pixels(count, [&](int x, auto pixels) {
        constexpr int X = decltype(pixels)::value;
        dot_pixels<1, X>(gradient + x * of.value, vectors + at.values, of.value, of.length, d_scores + x * at.row,
                         at.row);
        const int lowest = -(first + x + X - 1);  // the offset of the last of these pixels to the first of the line
        mix_window_channels<X>(d_scores + x * at.row + first + x + lowest, at.row,
                               of.embeddings + int64_t(of.length - 1 + lowest) * of.key, of.length + X - 1, of.key,
                               vectors + at.d_queries + (first + x) * of.key);
    });
    for_offsets(of, first, count, [&](int o, auto together, int begin, int end) {
        add_window_channels<1, decltype(together)::value>(
            d_scores + begin * at.row + first + begin + o, at.row, vectors + at.queries + (first + begin) * of.key,
            end - begin, of.key, vectors + at.d_embeddings + int64_t(of.length - 1 + o) * of.key);
    });
}

// The same in words of two numbers, where there are such; strips begin at an even pixel.
[[maybe_unused]] void differentiate_strip_of_pairs(const LineGradient& of, const Vectors& at, const Tables& tables,
                                                   int first, int count, Vector* vectors) {
    const Vector* const gradient = vectors + at.gradient + first * at.value;
    Vector* const d_scores = vectors + at.d_scores + AROUND;  // at the first pixel of the line
    Vector* const words = vectors + at.d_score_words;
    Vector* const pairs = vectors + at.d_score_pairs + AROUND;
    for_pixels(count, [&](int x, auto pixels) {
        constexpr int X = decltype(pixels)::value;
        dot_pixels<2, X>(gradient + x * at.value, vectors + at.values, at.value, of.length, d_scores, at.row);
        for (int j = 0; j < X; j++) join_columns<2>(d_scores + j * at.row, 1, of.length, words + j * at.row);
        mix_pairs_channels<X>(words, at.row, tables.offsets.words + int64_t(of.length - 1 - first - x) * of.key,
                              words_of<2>(of.length), of.key, vectors + at.d_queries + (first + x) * of.key);
        Vector* const of_both = pairs + x / 2 * at.row;
        for (int i = -1; i < of.length; i++)
            of_both[i] = pair(d_scores[i], X > 1 ? d_scores[at.row + i + 1] : Vector{});
    });
    for_offsets(of, first, count, [&](int o, auto together, int begin, int end) {
        const int word = begin / 2;
        add_window_channels<2, decltype(together)::value>(
            pairs + word * at.row + first + 2 * word + o, at.row,
            vectors + at.query_rows + (first / 2 + word) * of.key, words_of<2>(end) - word, of.key,
            vectors + at.d_embeddings + int64_t(of.length - 1 + o) * of.key);
    });
}

// The four rows of a norm's numbers, of the channels of a group.
void gather_channels(const LineGradient& of, const Group& group, const float* from, Vector* to) {
    gather(Starts<const float>(group, from, of.value), int64_t(of.heads) * of.value, 4, of.value, to);
}

// The values behind their norm; others keep them without its scale and shift.
void normalise(const LineGradient& of, const Vectors& at, const Group& group, Vector* vectors) {
    Vector *const values = vectors + at.values, *const others = vectors + at.others;
    const Vector *const scale = vectors + at.channels, *const shift = scale + of.value;
    const Vector *const mean = shift + of.value, *const inverse = mean + of.value;
    gather_channels(of, group, of.norm, vectors + at.channels);
    for (int i = 0; i < of.length; i++)
        for (int c = 0; c < of.value; c++) {
            Vector& value = values[i * of.value + c];
            others[i * of.value + c] = (value - mean[c]) * inverse[c];
            value = value * scale[c] + shift[c];
        }
}

// The gradient of the output from that of what a norm made of it.
void differentiate_norm(const LineGradient& of, const Vectors& at, const Group& group, Vector* vectors) {
    Vector *const gradient = vectors + at.gradient, *const outputs = vectors + at.others;
    const Vector *const a = vectors + at.channels, *const b = a + of.value, *const c = b + of.value;
    const Vector* const d = c + of.value;
    gather_channels(of, group, of.coefficients, vectors + at.channels);
    gather(group, of.output, of.length, of.value, outputs);
    for (int i = 0; i < of.length; i++)
        for (int v = 0; v < of.value; v++) {
            Vector& one = gradient[i * of.value + v];
            one = one * a[v] + (outputs[i * of.value + v] - c[v]) * b[v] + d[v];
        }
}

// d_norm: sums of all channels, or null.
template <int EACH>
void differentiate(const LineGradient& of, const Vectors& at, const Tables& tables, const Group& group, double* d_norm,
                   Vector* vectors) {
    Vector *const gradient = vectors + at.gradient, *const d_queries = vectors + at.d_queries;
    Vector* const d_values = vectors + at.d_values;
    gather(group, of.queries, of.length, of.key, vectors + at.queries);
    gather(group, of.values, of.length, of.value, vectors + at.values);
    gather(group, of.gradient, of.length, of.value, gradient);
    if (of.norm) normalise(of, at, group, vectors);
    if (of.coefficients) differentiate_norm(of, at, group, vectors);
    if (group.count < LANES) {  // a pair that only stands in adds nothing
        const Bits others = lanes_from(group.count);
        for (int64_t i = 0; i < int64_t(of.length) * of.value; i++) gradient[i] = others ? Vector{} : gradient[i];
    }
    if (of.add)
        gather(group, of.d_queries, of.length, of.key, d_queries);
    else
        clear(d_queries, int64_t(of.length) * of.key);

    join_rows<EACH>(vectors + at.queries, of.length, of.key, vectors + at.query_rows);
    join_rows<EACH>(gradient, of.length, of.value, vectors + at.gradient_rows);
    join_columns<EACH>(vectors + at.queries, of.length, of.key, vectors + at.queries);
    join_columns<EACH>(gradient, of.length, of.value, gradient);
    join_columns<EACH>(vectors + at.values, of.length, of.value, vectors + at.values);
    differentiate_values<EACH>(of, at, tables, vectors);
    for (int first = 0; first < of.length; first += at.strip) {
        const int count = of.length - first < at.strip ? of.length - first : at.strip;
        if constexpr (EACH == 1)
            differentiate_strip(of, at, first, count, vectors);
        else
            differentiate_strip_of_pairs(of, at, tables, first, count, vectors);
    }

    if (d_norm)
        add_sums(group, d_values, vectors + at.others, of.length, of.value, of.heads * of.value, d_norm);
    scatter(group, of.d_queries, of.length, of.key, d_queries);
    scatter(group, of.d_values, of.length, of.value, d_values);
}

}  // namespace

// Which groups are a share's is fixed, whatever the number of threads, so that two runs give the same bits.
extern "C" void differentiate_along_lines(const LineGradient* lines) {
    const LineGradient& of = *lines;
    const Vectors at(of);
    const int groups = count_groups(of.lines, of.heads);
    const int64_t units = int64_t(of.images) * groups, numbers = (2 * int64_t(of.length) - 1) * of.key;
    const int channels = of.heads * of.value;
    const Tables tables(of);
    std::atomic<int64_t> next{0};
    in_threads(of.threads, [&] {
        Scratch<Vector> vectors(at.count);
        clear(vectors.data + at.d_scores, at.d_embeddings - at.d_scores);
        Vector* const d_embeddings = vectors.data + at.d_embeddings;
        for_units(next, of.shares, [&](int64_t share) {
            clear(d_embeddings, numbers);
            double* const d_norm = of.d_norm ? of.d_norm + share * 2 * channels : nullptr;
            for (int i = 0; d_norm && i < 2 * channels; i++) d_norm[i] = 0;
            for (int64_t unit = units * share / of.shares; unit < units * (share + 1) / of.shares; unit++) {
                const Group group(static_cast<int>(unit / groups), static_cast<int>(unit % groups), of.lines, of.heads);
                with_words(of.queries.element, [&](auto each) {
                    differentiate<decltype(each)::value>(of, at, tables, group, d_norm, vectors.data);
                });
            }
            for (int64_t i = 0; i < numbers; i++) {
                float sum = 0;
                for (int lane = 0; lane < LANES; lane++) sum += d_embeddings[i][lane];
                of.d_embeddings[share * numbers + i] = sum;
            }
        });
    });
}
