// Positional attention treats all pairs of a line and a head alike, so a vector holds one number of LANES such pairs.
#pragma once

#include "numbers.h"

// A map in memory, seen as lines of pixels; the channels of a pixel lie side by side, head behind head. Distances are
// in numbers.
struct Map {
    void* data;
    int64_t image, line, pixel;
    int element;  // what the numbers are
};

// LANES pairs of one image. Where a map has fewer left, the first stands in for the missing ones, and is not written.
struct Group {
    int image, count;
    int line[LANES], head[LANES];

    Group(int image, int number, int lines, int heads) : image(image) {
        const int first = number * LANES, left = lines * heads - first;
        count = left < LANES ? left : LANES;
        for (int lane = 0; lane < LANES; lane++) {
            const int pair = first + (lane < count ? lane : 0);
            line[lane] = pair / heads;
            head[lane] = pair % heads;
        }
    }
};

inline int count_groups(int lines, int heads) { return divide_up(lines * heads, LANES); }

// Where each lane begins in some memory; null: nowhere.
template <class E>
struct Starts {
    E* at[LANES] = {};

    Starts() = default;
    // Of all lanes, for reading, or of those that do not stand in for others, for writing.
    Starts(const Group& group, const Map& map, int width, bool all) {
        E* const image = static_cast<E*>(map.data) + group.image * map.image;
        for (int lane = 0; lane < (all ? LANES : group.count); lane++)
            at[lane] = image + group.line[lane] * map.line + group.head[lane] * width;
    }
    Starts(const Group& group, E* data, int64_t head) {  // what is the same for all lines
        for (int lane = 0; lane < LANES; lane++) at[lane] = data + group.head[lane] * head;
    }
};

constexpr int AHEAD = 2;  // rows that are on their way from memory while one is turned

// Rows of `width` numbers of each lane, `step` apart, as vectors [row][number].
template <class E>
inline void gather(const Starts<E>& starts, int64_t step, int rows, int width, Vector* to) {
    for (int row = 0; row < rows; row++, to += width) {
        if (row + AHEAD < rows)
            for (int lane = 0; lane < LANES; lane++) __builtin_prefetch(starts.at[lane] + (row + AHEAD) * step);
        float* const out = reinterpret_cast<float*>(to);
        int c = 0;
        for (; c + BLOCK <= width; c += BLOCK) {
            for (int lane = 0; lane < LANES; lane += BLOCK) {
                Block block[BLOCK];
                UNROLLED for (int i = 0; i < BLOCK; i++) block[i] = load<Block>(starts.at[lane + i] + row * step + c);
                transpose(block);
                UNROLLED for (int i = 0; i < BLOCK; i++) store(out + (c + i) * LANES + lane, block[i]);
            }
        }
        for (; c < width; c++)
            for (int lane = 0; lane < LANES; lane++) out[c * LANES + lane] = to_float(starts.at[lane][row * step + c]);
    }
}

// The way back.
template <class E>
inline void scatter(const Starts<E>& starts, int64_t step, int rows, int width, const Vector* from) {
    bool whole = true;
    for (int lane = 0; lane < LANES; lane++) whole = whole && starts.at[lane];
    for (int row = 0; row < rows; row++, from += width) {
        const float* const in = reinterpret_cast<const float*>(from);
        int c = 0;
        for (; whole && c + BLOCK <= width; c += BLOCK) {
            for (int lane = 0; lane < LANES; lane += BLOCK) {
                Block block[BLOCK];
                UNROLLED for (int i = 0; i < BLOCK; i++) block[i] = load<Block>(in + (c + i) * LANES + lane);
                transpose(block);
                UNROLLED for (int i = 0; i < BLOCK; i++) store(starts.at[lane + i] + row * step + c, block[i]);
            }
        }
        for (; c < width; c++)
            for (int lane = 0; lane < LANES; lane++)
                if (starts.at[lane]) starts.at[lane][row * step + c] = from_float<E>(in[c * LANES + lane]);
    }
}

// The pixels of a group's lines, [pixel][width]; and the way back.
inline void gather(const Group& group, const Map& map, int length, int width, Vector* to) {
    with_element(map.element, [&](auto number) {
        gather(Starts<decltype(number)>(group, map, width, true), map.pixel, length, width, to);
    });
}

inline void scatter(const Group& group, const Map& map, int length, int width, const Vector* from) {
    with_element(map.element, [&](auto number) {
        scatter(Starts<decltype(number)>(group, map, width, false), map.pixel, length, width, from);
    });
}

inline void clear(Vector* vectors, int64_t count) {
    for (int64_t i = 0; i < count; i++) vectors[i] = Vector{};
}

// Hands out places one behind the other.
struct Layout {
    int64_t end = 0;
    int64_t operator()(int64_t count) {
        end += count;
        return end - count;
    }
};

// How many pixels of so many channels stay in the first cache, beside other things, while others are made of them.
inline int cached_pixels(int channels) {
    const int pixels = (1 << 15) / static_cast<int>(channels * sizeof(Vector)) / TILE * TILE;
    return pixels < TILE ? TILE : pixels;
}
