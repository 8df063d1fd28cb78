// Positional attention along all lines of a map, or queries times context vectors, or both.
#include "attention.h"
#include "moments.h"
#include "threads.h"

namespace {

struct Lines {
    Map queries, values, out;
    const float* embeddings;  // (2 * length - 1, key); or null: no positional attention, and values are not read
    const float* context;     // (image, head, key, value): adds queries times this; or null
    const float* norm;        // scales and shifts, (2, head, value), through which the values go; or null
    double* moments;          // of the output, (share, 3, head, value): count, mean and squared deviations; or null
    int images, lines, length, heads, key, value, shares, threads;
};

// The vectors of one group: queries [x][key], values [i][value], sums [x][value], scores, context vectors [key][value],
// and scales and shifts [2][value].
struct Vectors {
    int64_t queries, values, sums, scores, context, norm, count;

    explicit Vectors(const Lines& of) {
        Layout take;
        queries = take(int64_t(of.length) * of.key);
        values = take(of.embeddings ? int64_t(of.length) * of.value : 0);
        sums = take(int64_t(of.length) * of.value);
        scores = take(PIXELS * cached_pixels(of.value));
        context = take(of.context ? int64_t(of.key) * of.value : 0);
        norm = take(of.norm ? 2 * of.value : 0);
        count = take.end;
    }
};

// embeddings: in words.
template <int EACH>
void attend(const Lines& of, const Vectors& at, const float* embeddings, const Group& group, Vector* vectors) {
    Vector *const queries = vectors + at.queries, *const sums = vectors + at.sums;
    const int key = words_of<EACH>(of.key);
    gather(group, of.queries, of.length, of.key, queries);
    join_columns<EACH>(queries, of.length, of.key, queries);
    if (of.context) {
        const float* const context = of.context + int64_t(group.image) * of.heads * of.key * of.value;
        Vector* const all = vectors + at.context;
        gather(Starts<const float>(group, context, of.key * of.value), of.value, of.key, of.value, all);
        join_rows<EACH>(all, of.key, of.value, all);
        attend_by_content<EACH>(queries, all, of.length, key, of.value, sums);
    }
    if (of.embeddings) {
        Vector* const values = vectors + at.values;
        gather(group, of.values, of.length, of.value, values);
        if (of.norm) {
            Vector *const scale = vectors + at.norm, *const shift = scale + of.value;
            gather(Starts<const float>(group, of.norm, of.value), int64_t(of.heads) * of.value, 2, of.value, scale);
            for (int i = 0; i < of.length; i++)
                for (int c = 0; c < of.value; c++) {
                    Vector& value = values[i * of.value + c];
                    value = value * scale[c] + shift[c];
                }
        }
        join_rows<EACH>(values, of.length, of.value, values);
        attend_by_position<EACH>(queries, values, embeddings, of.length, key, of.value, of.context != nullptr,
                                 vectors + at.scores, sums);
    }
    scatter(group, of.out, of.length, of.value, sums);
}

}  // namespace

// Which groups are a share's is fixed, whatever the number of threads, so that two runs give the same moments.
extern "C" void attend_along_lines(const Lines* lines) {
    const Lines& of = *lines;
    const Vectors at(of);
    const int groups = count_groups(of.lines, of.heads), channels = of.heads * of.value;
    const int64_t units = int64_t(of.images) * groups, shares = of.moments ? of.shares : units;
    const Table embeddings(of.queries.element, of.embeddings, 2 * int64_t(of.length) - 1, of.key);
    std::atomic<int64_t> next{0};
    in_threads(of.threads, [&] {
        Scratch<Vector> vectors(at.count);
        for_units(next, shares, [&](int64_t share) {
            double* const moments = of.moments ? of.moments + share * 3 * channels : nullptr;
            for (int i = 0; moments && i < 3 * channels; i++) moments[i] = 0;
            for (int64_t unit = units * share / shares; unit < units * (share + 1) / shares; unit++) {
                const Group group(static_cast<int>(unit / groups), static_cast<int>(unit % groups), of.lines, of.heads);
                with_words(of.queries.element, [&](auto each) {
                    attend<decltype(each)::value>(of, at, embeddings.words, group, vectors.data);
                });
                if (moments) add_moments(group, vectors.data + at.sums, of.length, of.value, channels, moments);
            }
        });
    });
}
