// A whole module: its arguments, which pair of a line and a head each lane is of, and what lies where in memory.
#pragma once

#include "lanes.h"
#include "products.h"
#include "projection.h"

// A norm with fixed statistics: scale * (x - mean) / sqrt(variance + epsilon) + shift, for (head, value). Null: ones,
// or zeros; without a variance there is no mean either.
struct Norm {
    const float *scale, *shift, *mean, *variance;
    float epsilon;
    int present;
};

struct Module {
    const void* x;
    int64_t x_image, x_line, x_pixel, x_channel;  // distances, in numbers
    const void* weight;   // (row, channel): rows of queries, keys (if there is content attention) and values
    const float* along;   // embeddings, (2 * length - 1, key); or null: no attention along the lines
    const float* across;  // embeddings, (2 * lines - 1, key); or null
    Norm between;         // of the output of attention along the lines
    Norm finish;          // of the module's output, before a ReLU
    void* out;
    int64_t out_image, out_line, out_pixel;
    int element;  // what x, weight and out are
    int content, images, lines, length, channels, heads, key, value, threads;
};

// Which pair a lane is of: lanes are cut into slots of a line each, and these have the heads of one set. Slots and sets
// may have lanes to spare, whose weights are zeros.
struct Lanes {
    int slot = 1, together, sets;  // lanes of a line, lines of a group, sets of heads

    explicit Lanes(int heads) {
        while (slot < heads && slot < LANES) slot *= 2;
        together = LANES / slot;
        sets = divide_up(heads, slot);
    }
    int groups(int lines) const { return divide_up(lines, together); }
    int present(int group, int lines) const {
        return lines - group * together < together ? lines - group * together : together;
    }
};

// Calls f with the lanes of a slot as a number that the compiler knows.
template <int most = LANES, class F>
inline void with_slot(int slot, F&& f) {
    if constexpr (most > 1) {
        if (slot < most) return with_slot<most / 2>(slot, f);
    }
    f(Number<most>{});
}

// What all threads share: of each set of heads weights [panel][word][WIDE] and scales and shifts [2][value]; of each
// set of a few images, whose places are taken by later ones, queries and values [group across][pixel][channel], what
// each group has to say of the context vectors [group][part], and these [key][value].
struct Shared {
    Lanes lanes;
    int width, words, key, panels, groups, groups_across, part, ring;  // words of channels, and of keys
    int64_t weights, between, finish, queries, values, parts, context, count;

    explicit Shared(const Module& of) : lanes(of.heads) {
        width = of.key * (of.content ? 2 : 1) + of.value;
        words = words_of(of.element, of.channels);
        key = words_of(of.element, of.key);
        panels = divide_up(width * lanes.slot, WIDE * LANES);
        groups = lanes.groups(of.lines);
        groups_across = lanes.groups(of.length);
        part = of.key * (2 + of.value);
        ring = 2 + divide_up(of.threads, groups);  // images: one to attend across, one along, and no thread waits
        if (ring > of.images) ring = of.images;
        const int64_t each = int64_t(ring) * lanes.sets;
        Layout take;
        weights = take(int64_t(lanes.sets) * panels * words * WIDE);
        between = take(of.between.present ? lanes.sets * 2 * of.value : 0);
        finish = take(of.finish.present ? lanes.sets * 2 * of.value : 0);
        queries = take(each * groups_across * of.lines * key);
        values = take(of.across ? each * groups_across * of.lines * of.value : 0);
        parts = take(of.content ? each * groups * part : 0);
        context = take(of.content ? each * of.key * of.value : 0);
        count = take.end;
    }
    int64_t place(int image, int set) const { return int64_t(image % ring) * lanes.sets + set; }
};

// The vectors of one thread: pixels as pack_pixels leaves them, a tile of outputs, queries and keys [pixel][key],
// values and sums [pixel][value], and scores.
struct Own {
    int64_t pixels, tile, queries, keys, values, sums, scores, count;

    Own(const Module& of, const Shared& at) {
        const Lanes& lanes = at.lanes;
        const int64_t length = of.length, longest = of.length > of.lines ? of.length : of.lines;
        Layout take;
        pixels = take((length * lanes.together * at.words + LANES - 1) / LANES);
        tile = take(TALL * WIDE);
        queries = take(length * of.key);
        keys = take(of.content ? length * of.key : 0);
        values = take(longest * of.value);
        sums = take(longest * of.value);
        scores = take(PIXELS * cached_pixels(of.value));
        count = take.end;
    }
};
