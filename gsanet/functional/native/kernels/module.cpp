// A whole module in evaluation, for a map that is seen as lines: projection, attention along the lines, then across
// them, and content attention.
//
// Vectors hold one number of LANES pairs of a line and a head, as everywhere here. The projection writes them as such:
// its weights are packed with the heads of a channel side by side. So a group of lines is projected, attends and is
// handed over to the groups across without leaving the second cache, and nothing is turned but the output.
#include <vector>

#include "attention.h"
#include "module_context.h"
#include "module_projection.h"
#include "threads.h"

namespace {

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

// Embeddings along the lines and across them, in words.
struct Tables {
    Table along, across;

    explicit Tables(const Module& of)
        : along(of.element, of.along, 2 * int64_t(of.length) - 1, of.key),
          across(of.element, of.across, 2 * int64_t(of.lines) - 1, of.key) {}
};

// A group of lines, from the map to what the groups across need of it.
template <int EACH>
void attend_along(const Module& of, const Shared& at, const Own& own, const Tables& tables, int image, int group,
                  Vector* all, Vector* mine) {
    const int present = at.lanes.present(group, of.lines);
    with_element(of.element, [&](auto number) {
        pack_group<decltype(number)>(of, at.lanes, image, group, present, floats(mine + own.pixels));
    });
    // What this thread is likely to take next.
    const int next = group + of.threads;
    const Place later = next < at.groups ? Place{image, next} : Place{image + 1, next - at.groups};
    for (int set = 0; set < at.lanes.sets; set++) {
        const int64_t place = at.place(image, set);
        const Vector* const weights = all + at.weights + int64_t(set) * at.panels * at.words * WIDE;
        with_element(of.element, [&](auto number) {
            project_group<decltype(number)>(of, at, own, weights, present, later, mine);
        });
        if (of.content)
            add_to_context(of, own, (at.lanes.together - present) * at.lanes.slot, mine,
                           all + at.parts + (place * at.groups + group) * at.part);
        Vector *const queries = mine + own.queries, *values = mine + own.values;
        const Vector* affine = nullptr;
        join_columns<EACH>(queries, of.length, of.key, queries);
        if (of.along) {
            join_rows<EACH>(values, of.length, of.value, values);
            attend_by_position<EACH>(queries, values, tables.along.words, of.length, at.key, of.value, false,
                                     mine + own.scores, mine + own.sums);
            values = mine + own.sums;
            if (of.between.present) affine = all + at.between + set * 2 * of.value;
        }
        const int64_t pixels = place * at.groups_across * of.lines;
        hand_over(of, at.lanes, group, present, queries, at.key, nullptr, all + at.queries + pixels * at.key);
        if (of.across)
            hand_over(of, at.lanes, group, present, values, of.value, affine, all + at.values + pixels * of.value);
    }
}

// A group across the lines, to the output. Where it has fewer lines than slots, the lanes of others hold anything.
template <int EACH>
void attend_across(const Module& of, const Shared& at, const Own& own, const Tables& tables, int image, int group,
                   const Vector* all, Vector* mine) {
    Vector* const sums = mine + own.sums;
    for (int set = 0; set < at.lanes.sets; set++) {
        const int64_t place = at.place(image, set), pixel = (place * at.groups_across + group) * of.lines;
        const Vector* const queries = all + at.queries + pixel * at.key;
        if (of.content)
            attend_by_content<EACH>(queries, all + at.context + place * of.key * of.value, of.lines, at.key, of.value,
                                    sums);
        if (of.across) {
            const Vector* values = all + at.values + pixel * of.value;
            if constexpr (EACH > 1) {
                join_rows<EACH>(values, of.lines, of.value, mine + own.values);
                values = mine + own.values;
            }
            attend_by_position<EACH>(queries, values, tables.across.words, of.lines, at.key, of.value, of.content,
                                     mine + own.scores, sums);
        }
        if (of.finish.present) scale_shift_and_cut(all + at.finish + set * 2 * of.value, of.lines, of.value, sums);
        with_element(of.element, [&](auto number) {
            typedef decltype(number) E;
            Starts<E> starts;
            for (int lane = 0; lane < LANES; lane++) {
                const int line = group * at.lanes.together + lane / at.lanes.slot;
                const int head = set * at.lanes.slot + lane % at.lanes.slot;
                if (line < of.length && head < of.heads)
                    starts.at[lane] =
                        static_cast<E*>(of.out) + image * of.out_image + line * of.out_pixel + head * of.value;
            }
            scatter(starts, of.out_line, of.lines, of.value, sums);
        });
    }
}

// How many panels of weights are packed, and how far each image is: groups that have attended along the lines, and
// across them.
struct Progress {
    std::atomic<int64_t> next_panel{0}, next{0};
    std::atomic<int> packed{0};
    std::vector<std::atomic<int>> along, across;

    explicit Progress(int images) : along(images), across(images) {}
};

// Takes groups as long as there are any: those along the lines of an image, those across the lines of the one before,
// and so on. So nobody waits but for what others are at work on already, and few images are in memory at a time.
template <int EACH>
void take_groups(const Module& of, const Shared& at, const Own& own, const Tables& tables, Progress& progress,
                 Vector* all, Vector* mine) {
    const int each = at.groups + at.groups_across;
    for_units(progress.next, int64_t(of.images) * each, [&](int64_t unit) {
        const int64_t number = unit - at.groups;  // below zero: the first image has none before it
        const int step = number < 0 ? 0 : static_cast<int>(number / each + 1);
        const int place = static_cast<int>(number < 0 ? unit : number % each);
        if (step < of.images && place < at.groups) {
            if (step >= at.ring) wait_for(progress.across[step - at.ring], at.groups_across);
            attend_along<EACH>(of, at, own, tables, step, place, all, mine);
            // Whoever comes last joins what all have said. Those across wait until one more than all have come.
            if (progress.along[step].fetch_add(1, std::memory_order_acq_rel) == at.groups - 1) {
                if (of.content) join_context<EACH>(of, at, step, all);
                progress.along[step].fetch_add(1, std::memory_order_release);
            }
        } else {
            const int image = step - 1;
            wait_for(progress.along[image], at.groups + 1);
            attend_across<EACH>(of, at, own, tables, image, step < of.images ? place - at.groups : place, all, mine);
            progress.across[image].fetch_add(1, std::memory_order_release);
        }
    });
}

}  // namespace

extern "C" void attend_as_module(const Module* module) {
    const Module& of = *module;
    const Shared at(of);
    const Own own(of, at);
    Scratch<Vector> shared(at.count);
    Vector* const all = shared.data;
    for (int set = 0; set < at.lanes.sets; set++) {
        if (of.between.present) spread(of, at.lanes, of.between, set, all + at.between + set * 2 * of.value);
        if (of.finish.present) spread(of, at.lanes, of.finish, set, all + at.finish + set * 2 * of.value);
    }
    const Tables tables(of);
    Progress progress(of.images);
    const int panels = at.lanes.sets * at.panels;
    in_threads(of.threads, [&] {
        Scratch<Vector> vectors(own.count);
        for_units(progress.next_panel, panels, [&](int64_t unit) {
            with_element(of.element, [&](auto number) {
                pack_panel<decltype(number)>(of, at, static_cast<int>(unit / at.panels),
                                             static_cast<int>(unit % at.panels),
                                             all + at.weights + unit * at.words * WIDE);
            });
            progress.packed.fetch_add(1, std::memory_order_release);
        });
        wait_for(progress.packed, panels);
        with_words(of.element, [&](auto each) {
            take_groups<decltype(each)::value>(of, at, own, tables, progress, all, vectors.data);
        });
    });
}
