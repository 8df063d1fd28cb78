// Positional attention along all lines of a map, or queries times context vectors, or both.
#include "attention.h"
#include "threads.h"

namespace {

struct Lines {
    Map queries, values, out;
    const float* embeddings;  // (2 * length - 1, key); or null: no positional attention, and values are not read
    const float* context;     // (image, head, key, value): adds queries times this; or null
    int images, lines, length, heads, key, value, threads;
};

// The vectors of one group: queries [x][key], values [i][value], sums [x][value], scores, and context vectors
// [key][value].
struct Vectors {
    int64_t queries, values, sums, scores, context, count;

    explicit Vectors(const Lines& of) {
        Layout take;
        queries = take(int64_t(of.length) * of.key);
        values = take(of.embeddings ? int64_t(of.length) * of.value : 0);
        sums = take(int64_t(of.length) * of.value);
        scores = take(PIXELS * cached_pixels(of.value));
        context = take(of.context ? int64_t(of.key) * of.value : 0);
        count = take.end;
    }
};

void attend(const Lines& of, const Vectors& at, const Group& group, Vector* vectors) {
    Vector *const queries = vectors + at.queries, *const sums = vectors + at.sums;
    gather(Starts(group, of.queries, of.key, true), of.queries.pixel, of.length, of.key, queries);
    if (of.context) {
        const float* const context = of.context + int64_t(group.image) * of.heads * of.key * of.value;
        gather(Starts(group, context, of.key * of.value), of.value, of.key, of.value, vectors + at.context);
        attend_by_content(queries, vectors + at.context, of.length, of.key, of.value, sums);
    }
    if (of.embeddings) {
        Vector* const values = vectors + at.values;
        gather(Starts(group, of.values, of.value, true), of.values.pixel, of.length, of.value, values);
        attend_by_position(queries, values, of.embeddings, of.length, of.key, of.value, of.context != nullptr,
                           vectors + at.scores, sums);
    }
    scatter(Starts(group, of.out, of.value, false), of.out.pixel, of.length, of.value, sums);
}

}  // namespace

extern "C" void attend_along_lines(const Lines* lines) {
    const Lines& of = *lines;
    const Vectors at(of);
    const int groups = count_groups(of.lines, of.heads);
    std::atomic<int64_t> next{0};
    in_threads(of.threads, [&] {
        Scratch<Vector> vectors(at.count);
        for_units(next, int64_t(of.images) * groups, [&](int64_t unit) {
            const Group group(static_cast<int>(unit / groups), static_cast<int>(unit % groups), of.lines, of.heads);
            attend(of, at, group, vectors.data);
        });
    });
}
