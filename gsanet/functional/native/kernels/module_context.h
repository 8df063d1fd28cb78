// The context vectors of a module: each group of lines says what it knows, and the last one joins it.
#pragma once

#include "exponential.h"
#include "module.h"

// What the lines of a group add to the context vectors, each lane for itself: the largest keys, the sums of weights,
// and the sums of weights times values. Keys become weights. A lane without a line has the least of all keys.
inline void add_to_context(const Module& of, const Own& own, int spare, Vector* mine, Vector* part) {
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
    const Bits without_line = lanes_from(LANES - spare);
    for (int c = 0; c < of.key; c++) maxima[c] = without_line ? Vector{} - __builtin_inff() : maxima[c];
    for_pixels(of.key, [&](int c, auto rows) {
        mix_channels<1, decltype(rows)::value>(keys + c, 1, of.key, mine + own.values, of.length, of.value, false,
                                            sums + c * of.value);
    });
}

// The same number of all lines: a lane, joined by f with that of the same head in each other slot.
template <class F>
inline Vector over_slots(Vector vector, int slot, F&& f) {
    for (int step = slot; step < LANES; step *= 2) {
        Vector twice[2] = {vector, vector}, turned;
        __builtin_memcpy(&turned, floats(twice) + step, sizeof turned);
        vector = f(vector, turned);
    }
    return vector;
}

// The context vectors of an image, from what all groups have to say, at last in words of keys.
template <int EACH>
inline void join_context(const Module& of, const Shared& at, int image, Vector* all) {
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
    for (int set = 0; set < at.lanes.sets; set++) {
        Vector* const context = all + at.context + at.place(image, set) * of.key * of.value;
        join_rows<EACH>(context, of.key, of.value, context);
    }
}
