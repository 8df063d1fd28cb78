// Sums over all pixels of a map, channel by channel, of what a group has at hand.
#pragma once

#include "lanes.h"

// Joins the output of a group, [x][value], to the moments of all channels, (3, head, value): how many numbers, their
// mean, and the sum of their squared deviations from it. Deviations are from a group's own mean, so nothing cancels.
inline void add_moments(const Group& group, const Vector* outputs, int length, int value, int channels,
                        double* moments) {
    for (int c = 0; c < value; c++) {
        Vector sum = {}, squares = {};
        for (int x = 0; x < length; x++) sum += outputs[x * value + c];
        const Vector mean = sum / static_cast<float>(length);
        for (int x = 0; x < length; x++) {
            const Vector deviation = outputs[x * value + c] - mean;
            squares += deviation * deviation;
        }
        for (int lane = 0; lane < group.count; lane++) {
            double* const count = moments + group.head[lane] * value + c;
            const double before = count[0], all = before + length, apart = mean[lane] - count[channels];
            count[0] = all;
            count[channels] += apart * length / all;
            count[2 * channels] += squares[lane] + apart * apart * before * length / all;
        }
    }
}

// Adds the sums over pixels of what a group has, [x][value], and of that times another, to those of all channels,
// (2, head, value).
inline void add_sums(const Group& group, const Vector* numbers, const Vector* others, int length, int value,
                     int channels, double* sums) {
    for (int c = 0; c < value; c++) {
        Vector sum = {}, product = {};
        for (int x = 0; x < length; x++) {
            sum += numbers[x * value + c];
            product += numbers[x * value + c] * others[x * value + c];
        }
        for (int lane = 0; lane < group.count; lane++) {
            double* const both = sums + group.head[lane] * value + c;
            both[0] += sum[lane];
            both[channels] += product[lane];
        }
    }
}
