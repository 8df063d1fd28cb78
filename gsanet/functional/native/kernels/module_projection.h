// From the pixels of a group of lines to their queries, keys and values as vectors.
#pragma once

#include "module.h"

// Where the outputs of a tile go: block b of pixel p to at[b] + x[p] * step[b] + lane[p].
struct Places {
    float* at[WIDE * BLOCKS];
    int64_t step[WIDE * BLOCKS];
    int64_t x[TALL], lane[TALL];
};

// P pixels times WIDE vectors of weights, block by block to their places.
template <class E, int P>
inline void project(const float* pixels, const Vector* weights, int words, const Places& to) {
    Vector sums[P][WIDE];
    multiply_tile<P, Words<E>::each>(pixels, weights, words, sums);
    UNROLLED for (int p = 0; p < P; p++)
        UNROLLED for (int i = 0; i < WIDE; i++) {
            Block blocks[BLOCKS];
            __builtin_memcpy(blocks, &sums[p][i], sizeof blocks);
            UNROLLED for (int b = 0; b < BLOCKS; b++) {
                const int block = i * BLOCKS + b;
                store(to.at[block] + to.x[p] * to.step[block] + to.lane[p], blocks[b]);
            }
        }
}

// One panel of the weights of a set: the rows of WIDE * LANES / slot channels, all heads of one before the next.
template <class E>
inline void pack_panel(const Module& of, const Shared& at, int set, int panel, Vector* to) {
    const int slot = at.lanes.slot;
    const E* rows[WIDE * LANES];
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
        rows[i] = there ? static_cast<const E*>(of.weight) + int64_t(first + head * width + c) * of.channels : nullptr;
    }
    pack_weights(rows, of.channels, to);
}

// Pixel by pixel, all lines of a pixel before the next.
template <class E>
inline void pack_group(const Module& of, const Lanes& lanes, int image, int group, int present, float* to) {
    const E* const map = static_cast<const E*>(of.x);
    const E* const start = map + image * of.x_image + int64_t(group) * lanes.together * of.x_line;
    const int words = words_of<Words<E>::each>(of.channels);
    for_pixel_tiles(present * of.length, [&](int first, int count) {
        const E* pixels[TALL];
        for (int p = 0; p < count; p++)
            pixels[p] = start + (first + p) / present * of.x_pixel + (first + p) % present * of.x_line;
        pack_pixels(pixels, count, of.channels, of.x_channel, to + int64_t(first) * words);
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
inline void find_blocks(const Module& of, const Shared& at, const Own& own, int panel, Vector* mine, Places& places) {
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
inline void distribute(const Module& of, const Shared& at, const Own& own, int panel, int first, int count,
                       int present, Vector* mine) {
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

// A group of an image.
struct Place {
    int image, group;
};

// Has one of `shares` of the pixels of a group brought from memory. Columns lie across it, so it does not guess by itself.
template <class E>
inline void fetch_group(const Module& of, const Shared& at, Place of_group, int share, int shares) {
    const auto [image, group] = of_group;
    if (image >= of.images || group >= at.groups || of.x_channel != 1) return;
    const E* const map = static_cast<const E*>(of.x);
    const E* const start = map + image * of.x_image + int64_t(group) * at.lanes.together * of.x_line;
    const int present = at.lanes.present(group, of.lines);
    for (int x = of.length * share / shares; x < of.length * (share + 1) / shares; x++)
        for (int line = 0; line < present; line++)
            for (int c = 0; c < of.channels; c += CACHE_LINE * sizeof(float) / sizeof(E))
                __builtin_prefetch(start + x * of.x_pixel + line * of.x_line + c, 0, 2);
}

// The queries, keys and values of a group whose pixels are packed; meanwhile those of a later group are on their way.
template <class E>
inline void project_group(const Module& of, const Shared& at, const Own& own, const Vector* weights, int present,
                          Place later, Vector* mine) {
    const bool by_blocks = at.lanes.slot >= BLOCK;
    const int words = words_of<Words<E>::each>(of.channels);
    if (present < at.lanes.together) {  // lanes without a line
        clear(mine + own.queries, int64_t(of.length) * of.key);
        if (of.content) clear(mine + own.keys, int64_t(of.length) * of.key);
        clear(mine + own.values, int64_t(of.length) * of.value);
    }
    Places places;
    for (int panel = 0; panel < at.panels; panel++, weights += int64_t(words) * WIDE) {
        find_blocks(of, at, own, panel, mine, places);
        fetch_group<E>(of, at, later, panel, at.panels);
        for_pixel_tiles(present * of.length, [&](int first, int count) {
            for (int p = 0; p < count; p++) {
                places.x[p] = by_blocks ? (first + p) / present : p;
                places.lane[p] = by_blocks ? (first + p) % present * at.lanes.slot : 0;
            }
            const float* const pixels = floats(mine + own.pixels) + int64_t(first) * words;
            with_known<TALL>(count, [&](auto known) {
                project<E, decltype(known)::value>(pixels, weights, words, places);
            });
            if (!by_blocks) distribute(of, at, own, panel, first, count, present, mine);
        });
    }
}
