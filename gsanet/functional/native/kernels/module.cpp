// A whole module in evaluation, for a map that is seen as lines: projection, attention along the lines, then across
// them, and content attention.
//
// Vectors hold one number of LANES pairs of a line and a head, as everywhere here. The projection writes them as such:
// its weights are packed with the heads of a channel side by side. So a group of lines is projected, attends and is
// handed over to the groups across without leaving the second cache, and nothing is turned but the output.
#include <atomic>
#include <thread>
#include <vector>

#include "attention.h"
#include "exponential.h"
#include "projection.h"

namespace {

// A norm with fixed statistics: scale * (x - mean) / sqrt(variance + epsilon) + shift, for (head, value). Null: ones, or
// zeros; without a variance there is no mean either.
struct Norm {
    const float *scale, *shift, *mean, *variance;
    float epsilon;
    int present;
};

struct Module {
    const float* x;
    int64_t x_image, x_line, x_pixel, x_channel;  // distances, in numbers
    const float* weight;  // (row, channel): rows of queries, keys (if there is content attention) and values
    const float* along;   // embeddings, (2 * length - 1, key); or null: no attention along the lines
    const float* across;  // embeddings, (2 * lines - 1, key); or null
    Norm between;         // of the output of attention along the lines
    Norm finish;          // of the module's output, before a ReLU
    float* out;
    int64_t out_image, out_line, out_pixel;
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

inline const float* floats(const Vector* vectors) { return reinterpret_cast<const float*>(vectors); }
inline float* floats(Vector* vectors) { return reinterpret_cast<float*>(vectors); }

// What all threads share: of each set weights [panel][channel][WIDE] and scales and shifts [2][value]; of each set of a few
// images, whose places are taken by later ones, queries and values [group across][pixel][channel], what each group has to
// say of the context vectors [group][part], and these [key][value].
struct Shared {
    Lanes lanes;
    int width, panels, groups, groups_across, part, ring;
    int64_t weights, between, finish, queries, values, parts, context, count;

    explicit Shared(const Module& of) : lanes(of.heads) {
        width = of.key * (of.content ? 2 : 1) + of.value;
        panels = divide_up(width * lanes.slot, WIDE * LANES);
        groups = lanes.groups(of.lines);
        groups_across = lanes.groups(of.length);
        part = of.key * (2 + of.value);
        ring = 2 + divide_up(of.threads, groups);  // images: one to attend across, one along, and no thread waits
        if (ring > of.images) ring = of.images;
        const int64_t each = int64_t(ring) * lanes.sets;
        Layout take;
        weights = take(int64_t(lanes.sets) * panels * of.channels * WIDE);
        between = take(of.between.present ? lanes.sets * 2 * of.value : 0);
        finish = take(of.finish.present ? lanes.sets * 2 * of.value : 0);
        queries = take(each * groups_across * of.lines * of.key);
        values = take(of.across ? each * groups_across * of.lines * of.value : 0);
        parts = take(of.content ? each * groups * part : 0);
        context = take(of.content ? each * of.key * of.value : 0);
        count = take.end;
    }
    int64_t place(int image, int set) const { return int64_t(image % ring) * lanes.sets + set; }
};

// The vectors of one thread: pixels as pack_pixels leaves them, a tile of outputs, queries and keys [pixel][key], values
// and sums [pixel][value], and scores.
struct Own {
    int64_t pixels, tile, queries, keys, values, sums, scores, count;

    explicit Own(const Module& of, const Lanes& lanes) {
        const int64_t length = of.length, longest = of.length > of.lines ? of.length : of.lines;
        Layout take;
        pixels = take((length * lanes.together * of.channels + LANES - 1) / LANES);
        tile = take(TALL * WIDE);
        queries = take(length * of.key);
        keys = take(of.content ? length * of.key : 0);
        values = take(length * of.value);
        sums = take(longest * of.value);
        scores = take(PIXELS * cached_pixels(of.value));
        count = take.end;
    }
};

// One panel of the weights of a set: the rows of WIDE * LANES / slot channels, all heads of one before the next.
void pack_panel(const Module& of, const Shared& at, int set, int panel, Vector* to) {
    const int slot = at.lanes.slot;
    const float* rows[WIDE * LANES];
    for (int i = 0; i < WIDE * LANES; i++) {
        int c = (panel * WIDE * LANES + i) / slot, head = set * slot + i % slot, first = 0, width = of.key;
        const int parts = of.content ? 2 : 1;  // of which each has the width of keys
        if (c >= parts * of.key) {
            c -= parts * of.key;
            first = parts * of.key * of.heads;
            width = of.value;
        } else if (c >= of.key) {
            c -= of.key;
            first = of.key * of.heads;
        }
        const bool there = head < of.heads && c < width;
        rows[i] = there ? of.weight + int64_t(first + head * width + c) * of.channels : nullptr;
    }
    pack_weights(rows, of.channels, to);
}

// What a norm does to a set, as scales and shifts [2][value].
void spread(const Module& of, const Lanes& lanes, const Norm& norm, int set, Vector* to) {
    for (int c = 0; c < of.value; c++)
        for (int lane = 0; lane < LANES; lane++) {
            const int head = set * lanes.slot + lane % lanes.slot;
            const int channel = (head < of.heads ? head : 0) * of.value + c;
            float scale = norm.scale ? norm.scale[channel] : 1, shift = norm.shift ? norm.shift[channel] : 0;
            if (norm.variance) {
                scale /= __builtin_sqrtf(norm.variance[channel] + norm.epsilon);
                shift -= norm.mean[channel] * scale;
            }
            to[c][lane] = scale;
            to[of.value + c][lane] = shift;
        }
}

// Scales and shifts [2][width], and a ReLU.
void scale_shift_and_cut(const Vector* affine, int pixels, int width, Vector* sums) {
    for (int x = 0; x < pixels; x++)
        for (int c = 0; c < width; c++) {
            const Vector sum = sums[x * width + c] * affine[c] + affine[width + c];
            sums[x * width + c] = sum < 0 ? Vector{} : sum;  // NaN stays NaN
        }
}

// The pixels of a group of lines, tile behind tile; calls f with each: where it begins, and how many pixels it has.
template <class F>
void for_pixel_tiles(int count, F&& f) {
    const int tiles = divide_up(count, TALL);
    for (int tile = 0; tile < tiles; tile++) {
        const int first = count * tile / tiles;
        f(first, count * (tile + 1) / tiles - first);
    }
}

void pack_group(const Module& of, const Lanes& lanes, int image, int group, int present, float* to) {
    const float* const start = of.x + image * of.x_image + int64_t(group) * lanes.together * of.x_line;
    for_pixel_tiles(present * of.length, [&](int first, int count) {
        const float* pixels[TALL];
        for (int p = 0; p < count; p++)
            pixels[p] = start + (first + p) / present * of.x_pixel + (first + p) % present * of.x_line;
        pack_pixels(pixels, count, of.channels, of.x_channel, to + int64_t(first) * of.channels);
    });
}

// Where a channel of what is projected begins, and how far its next pixel is.
struct Channel {
    Vector* at;
    int64_t step;

    Channel(const Module& of, const Own& own, int c, Vector* mine) {
        const int values = of.key * (of.content ? 2 : 1);
        step = c < values ? of.key : of.value;
        at = mine + (c < of.key ? own.queries + c : c < values ? own.keys + c - of.key : own.values + c - values);
    }
};

// Where the blocks of a panel go: to their channels if slots hold whole blocks, and else to the tile. Blocks behind the
// last channel all go to the tile's first pixels, and no further.
void find_blocks(const Module& of, const Shared& at, const Own& own, int panel, Vector* mine, Places& places) {
    for (int b = 0; b < WIDE * BLOCKS; b++) {
        const int output = (panel * WIDE * BLOCKS + b) * BLOCK, c = output / at.lanes.slot;
        if (at.lanes.slot < BLOCK || c >= at.width) {
            places.at[b] = floats(mine + own.tile) + b * BLOCK;
            places.step[b] = at.lanes.slot < BLOCK ? WIDE * LANES : 0;
        } else {
            const Channel channel(of, own, c, mine);
            places.at[b] = floats(channel.at) + output % at.lanes.slot;
            places.step[b] = channel.step * LANES;
        }
    }
}

// From the tile to channels, number by number.
void distribute(const Module& of, const Shared& at, const Own& own, int panel, int first, int count, int present,
                Vector* mine) {
    const int slot = at.lanes.slot;
    const float* const tile = floats(mine + own.tile);
    for (int i = 0; i < WIDE * LANES; i++) {
        const int output = panel * WIDE * LANES + i;
        if (output >= at.width * slot) return;
        const Channel channel(of, own, output / slot, mine);
        for (int p = 0; p < count; p++) {
            const int x = (first + p) / present, line = (first + p) % present;
            floats(channel.at + x * channel.step)[line * slot + output % slot] = tile[p * WIDE * LANES + i];
        }
    }
}

void project_group(const Module& of, const Shared& at, const Own& own, const Vector* weights, int present,
                   Vector* mine) {
    const bool by_blocks = at.lanes.slot >= BLOCK;
    if (present < at.lanes.together) {  // lanes without a line
        clear(mine + own.queries, int64_t(of.length) * of.key);
        if (of.content) clear(mine + own.keys, int64_t(of.length) * of.key);
        clear(mine + own.values, int64_t(of.length) * of.value);
    }
    Places places;
    for (int panel = 0; panel < at.panels; panel++, weights += int64_t(of.channels) * WIDE) {
        find_blocks(of, at, own, panel, mine, places);
        for_pixel_tiles(present * of.length, [&](int first, int count) {
            for (int p = 0; p < count; p++) {
                places.x[p] = by_blocks ? (first + p) / present : p;
                places.lane[p] = by_blocks ? (first + p) % present * at.lanes.slot : 0;
            }
            const float* const pixels = floats(mine + own.pixels) + int64_t(first) * of.channels;
            with_known<TALL>(count, [&](auto known) {
                project<decltype(known)::value>(pixels, weights, of.channels, places);
            });
            if (!by_blocks) distribute(of, at, own, panel, first, count, present, mine);
        });
    }
}

// Of one pixel, from a slot to another slot of other vectors; scaled and shifted unless that is null.
template <int slot>
inline void hand_over_pixel(const float* from, int width, const Vector* affine, float* to) {
    typedef float Piece __attribute__((vector_size(4 * slot)));
    for (int c = 0; c < width; c++) {
        Piece piece;
        __builtin_memcpy(&piece, from + c * LANES, sizeof piece);
        if (affine) {
            Piece scale, shift;
            __builtin_memcpy(&scale, affine + c, sizeof scale);
            __builtin_memcpy(&shift, affine + width + c, sizeof shift);
            piece = piece * scale + shift;
        }
        __builtin_memcpy(to + c * LANES, &piece, sizeof piece);
    }
}

// From the pixels of a group of lines, [pixel][width], to those of the groups across: [group][line][width].
void hand_over(const Module& of, const Lanes& lanes, int group, int present, const Vector* from, int width,
               const Vector* affine, Vector* to) {
    with_slot(lanes.slot, [&](auto known) {
        constexpr int slot = decltype(known)::value;
        for (int x = 0; x < of.length; x++) {
            Vector* const pixels = to + (int64_t(x / lanes.together) * of.lines + group * lanes.together) * width;
            for (int line = 0; line < present; line++)
                hand_over_pixel<slot>(floats(from + x * width) + line * slot, width, affine,
                                      floats(pixels + line * width) + x % lanes.together * slot);
        }
    });
}

// What the lines of a group add to the context vectors, each lane for itself: the largest keys, the sums of weights, and
// the sums of weights times values. A lane without a line has lost before it begins.
void add_to_context(const Module& of, const Own& own, int spare, Vector* mine, Vector* part) {
    Vector *const maxima = part, *const totals = part + of.key, *const sums = part + 2 * of.key;
    Vector* const keys = mine + own.keys;
    for (int c = 0; c < of.key; c++) {
        maxima[c] = keys[c];
        totals[c] = Vector{};
    }
    for (int x = 1; x < of.length; x++)
        for (int c = 0; c < of.key; c++) {
            const Vector key = keys[x * of.key + c];
            maxima[c] = key > maxima[c] ? key : maxima[c];
        }
    for (int x = 0; x < of.length; x++)
        for (int c = 0; c < of.key; c++) {
            Vector& key = keys[x * of.key + c];
            key = exponential<Vector, Bits>(key - maxima[c]);
            totals[c] += key;
        }
    for (int c = 0; c < of.key; c++)
        for (int lane = LANES - spare; lane < LANES; lane++) maxima[c][lane] = -__builtin_inff();
    for_pixels(of.key, [&](int c, auto rows) {
        mix_channels<decltype(rows)::value>(keys + c, 1, of.key, mine + own.values, of.length, of.value, false,
                                            sums + c * of.value);
    });
}

// The same number of all lines: a lane, joined by f with that of the same head in each other slot.
template <class F>
Vector over_slots(Vector vector, int slot, F&& f) {
    for (int step = slot; step < LANES; step *= 2) {
        Vector twice[2] = {vector, vector}, turned;
        __builtin_memcpy(&turned, floats(twice) + step, sizeof turned);
        vector = f(vector, turned);
    }
    return vector;
}

// The context vectors of an image, from what all groups have to say.
void join_context(const Module& of, const Shared& at, int image, Vector* all) {
    const auto larger = [](Vector a, Vector b) { return a > b ? a : b; };
    const auto plus = [](Vector a, Vector b) { return a + b; };
    const int rows = at.lanes.sets * of.key;
    for (int row = 0; row < rows; row++) {
        const int c = row % of.key;
        const int64_t place = at.place(image, row / of.key);
        const Vector* const parts = all + at.parts + place * at.groups * at.part;
        Vector* const sums = all + at.context + (place * of.key + c) * of.value;
        Vector maximum = parts[c], total = {};
        for (int group = 1; group < at.groups; group++) maximum = larger(maximum, parts[group * at.part + c]);
        maximum = over_slots(maximum, at.lanes.slot, larger);
        clear(sums, of.value);
        for (int group = 0; group < at.groups; group++) {
            const Vector* const part = parts + group * at.part;
            const Vector weight = exponential<Vector, Bits>(part[c] - maximum);
            total += weight * part[of.key + c];
            for (int i = 0; i < of.value; i++) sums[i] += weight * part[2 * of.key + c * of.value + i];
        }
        total = over_slots(total, at.lanes.slot, plus);
        for (int i = 0; i < of.value; i++) sums[i] = over_slots(sums[i], at.lanes.slot, plus) / total;
    }
}

void attend_along(const Module& of, const Shared& at, const Own& own, int image, int group, Vector* all, Vector* mine) {
    const int present = at.lanes.present(group, of.lines);
    pack_group(of, at.lanes, image, group, present, floats(mine + own.pixels));
    for (int set = 0; set < at.lanes.sets; set++) {
        const int64_t place = at.place(image, set);
        project_group(of, at, own, all + at.weights + int64_t(set) * at.panels * of.channels * WIDE, present, mine);
        if (of.content)
            add_to_context(of, own, (at.lanes.together - present) * at.lanes.slot, mine,
                           all + at.parts + (place * at.groups + group) * at.part);
        const Vector *values = mine + own.values, *affine = nullptr;
        if (of.along) {
            attend_by_position(mine + own.queries, values, of.along, of.length, of.key, of.value, false,
                               mine + own.scores, mine + own.sums);
            values = mine + own.sums;
            if (of.between.present) affine = all + at.between + set * 2 * of.value;
        }
        const int64_t pixels = place * at.groups_across * of.lines;
        hand_over(of, at.lanes, group, present, mine + own.queries, of.key, nullptr, all + at.queries + pixels * of.key);
        if (of.across)
            hand_over(of, at.lanes, group, present, values, of.value, affine, all + at.values + pixels * of.value);
    }
}

void attend_across(const Module& of, const Shared& at, const Own& own, int image, int group, const Vector* all,
                   Vector* mine) {
    Vector* const sums = mine + own.sums;
    for (int set = 0; set < at.lanes.sets; set++) {
        const int64_t place = at.place(image, set), pixel = (place * at.groups_across + group) * of.lines;
        const Vector* const queries = all + at.queries + pixel * of.key;
        if (of.content)
            attend_by_content(queries, all + at.context + place * of.key * of.value, of.lines, of.key, of.value, sums);
        if (of.across)
            attend_by_position(queries, all + at.values + pixel * of.value, of.across, of.lines, of.key, of.value,
                               of.content, mine + own.scores, sums);
        if (of.finish.present) scale_shift_and_cut(all + at.finish + set * 2 * of.value, of.lines, of.value, sums);
        Starts starts;
        for (int lane = 0; lane < LANES; lane++) {
            const int line = group * at.lanes.together + lane / at.lanes.slot;
            const int head = set * at.lanes.slot + lane % at.lanes.slot;
            if (line < of.length && head < of.heads)
                starts.at[lane] = of.out + image * of.out_image + line * of.out_pixel + head * of.value;
        }
        scatter(starts, of.out_line, of.lines, of.value, sums);
    }
}

// How far each image is: groups that have attended along the lines, and across them.
struct Progress {
    std::atomic<int> next{0};
    std::vector<std::atomic<int>> along, across;

    explicit Progress(int images) : along(images), across(images) {}
};

inline void wait_for(const std::atomic<int>& done, int count) {
    while (done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

// Takes groups as long as there are any: those along the lines of an image, those across the lines of the one before,
// and so on. So nobody waits but for what others are at work on already, and few images are in memory at a time.
void take_groups(const Module& of, const Shared& at, const Own& own, Progress& progress, Vector* all, Vector* mine) {
    const int each = at.groups + at.groups_across;
    for (int unit; (unit = progress.next++) < of.images * each;) {
        const bool begins = unit < at.groups;  // the first image has none before it
        const int step = begins ? 0 : (unit - at.groups) / each + 1, place = begins ? unit : (unit - at.groups) % each;
        if (step < of.images && place < at.groups) {
            if (step >= at.ring) wait_for(progress.across[step - at.ring], at.groups_across);
            attend_along(of, at, own, step, place, all, mine);
            // Whoever comes last joins what all have said. Those across wait until one more than all have come.
            if (progress.along[step].fetch_add(1, std::memory_order_acq_rel) == at.groups - 1) {
                if (of.content) join_context(of, at, step, all);
                progress.along[step].fetch_add(1, std::memory_order_release);
            }
        } else {
            const int image = step - 1;
            wait_for(progress.along[image], at.groups + 1);
            attend_across(of, at, own, image, step < of.images ? place - at.groups : place, all, mine);
            progress.across[image].fetch_add(1, std::memory_order_release);
        }
    }
}

}  // namespace

extern "C" void attend_as_module(const Module* module) {
    const Module& of = *module;
    const Shared at(of);
    const Own own(of, at.lanes);
    Scratch<Vector> shared(at.count);
    Vector* const all = shared.data;
    for (int set = 0; set < at.lanes.sets; set++) {
        if (of.between.present) spread(of, at.lanes, of.between, set, all + at.between + set * 2 * of.value);
        if (of.finish.present) spread(of, at.lanes, of.finish, set, all + at.finish + set * 2 * of.value);
    }
    Progress progress(of.images);
#pragma omp parallel num_threads(of.threads)
    {
        Scratch<Vector> vectors(own.count);
#pragma omp for
        for (int unit = 0; unit < at.lanes.sets * at.panels; unit++)
            pack_panel(of, at, unit / at.panels, unit % at.panels,
                       all + at.weights + int64_t(unit) * of.channels * WIDE);
        take_groups(of, at, own, progress, all, vectors.data);
    }
}
