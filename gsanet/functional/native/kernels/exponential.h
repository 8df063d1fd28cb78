// The exponential function of vectors.
#pragma once

#include "vectors.h"

// e^x for x <= 0, to about one unit of the last place. NaN stays NaN. Floats and Bits: vectors of as many numbers.
template <class Floats, class Bits>
inline Floats exponential(Floats x) {
    x = x < -87.f ? Floats{} - 87.f : x;  // below it the result is no normal number any more
    // x = n ln 2 + r, |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to a whole number, and leaves it in the lowest bits.
    const Floats shifted = x * 1.44269504f + 12582912.f;
    const Floats n = shifted - 12582912.f;
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, so that n times it is exact
    Floats sum = r * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    sum = sum * r * r + r + 1.f;
    Bits bits;
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + (127 << 23);  // 2^n
    Floats power;
    __builtin_memcpy(&power, &bits, sizeof power);
    return sum * power;
}
