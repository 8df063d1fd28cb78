// Numbers as they lie in memory: floats, or bfloat16, which are their upper halves. In registers all are floats.
#pragma once

#include "vectors.h"

struct Bfloat16 {
    uint16_t bits;
};

// What a map has in memory, as those who call the kernels say it.
enum Element : int { FLOAT32, BFLOAT16 };

// Calls f with one number of the kind.
template <class F>
inline void with_element(int element, F&& f) {
    if (element == BFLOAT16)
        f(Bfloat16{});
    else
        f(0.f);
}

// What a vector is made of.
template <class T>
struct Of;
template <>
struct Of<Block> {
    static constexpr int numbers = BLOCK;
    typedef Integers Bits;
    typedef uint32_t Words __attribute__((vector_size(4 * BLOCK)));
    typedef uint16_t Halves __attribute__((vector_size(2 * BLOCK)));
};
#if defined(__AVX512F__)  // elsewhere both are one
template <>
struct Of<Vector> {
    static constexpr int numbers = LANES;
    typedef ::Bits Bits;
    typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
    typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
};
#endif

inline float to_float(float number) { return number; }
inline float to_float(Bfloat16 number) {
    const uint32_t word = uint32_t(number.bits) << 16;
    float out;
    __builtin_memcpy(&out, &word, sizeof out);
    return out;
}

// To the nearest bfloat16, in the upper half; of two as near, the even one. NaN stays NaN. Words: a vector, or one.
template <class Words>
inline Words rounded(Words words) {
    const Words up = words + 0x7fffu + (words >> 16 & 1u);
    return (words & 0x7fffffffu) > 0x7f800000u ? words | 0x400000u : up;
}

template <class E>
inline E from_float(float number);
template <>
inline float from_float<float>(float number) {
    return number;
}
template <>
inline Bfloat16 from_float<Bfloat16>(float number) {
    uint32_t word;
    __builtin_memcpy(&word, &number, sizeof word);
    return {static_cast<uint16_t>(rounded(word) >> 16)};
}

// A vector from any address.
template <class T>
inline T load(const float* from) {
    T vector;
    __builtin_memcpy(&vector, from, sizeof vector);
    return vector;
}
template <class T>
inline T load(const Bfloat16* from) {
    typename Of<T>::Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    const typename Of<T>::Words words = __builtin_convertvector(halves, typename Of<T>::Words) << 16;
    T vector;
    __builtin_memcpy(&vector, &words, sizeof vector);
    return vector;
}

template <class T>
inline void store(float* to, T vector) {
    __builtin_memcpy(to, &vector, sizeof vector);
}
template <class T>
inline void store(Bfloat16* to, T vector) {
    typename Of<T>::Words words;
    __builtin_memcpy(&words, &vector, sizeof words);
    const auto halves = __builtin_convertvector(rounded(words) >> 16, typename Of<T>::Halves);
    __builtin_memcpy(to, &halves, sizeof halves);
}

// The `count` numbers that are left, fewer than a vector has. Not inlined: it is in many loops, and seldom called.
template <class T, class E>
[[gnu::noinline]] T load_rest(const E* from, int count) {
    E numbers[Of<T>::numbers] = {};
    for (int i = 0; i < count; i++) numbers[i] = from[i];
    return load<T>(numbers);
}
template <class T, class E>
[[gnu::noinline]] void store_rest(E* to, T vector, int count) {
    E numbers[Of<T>::numbers];
    store(numbers, vector);
    for (int i = 0; i < count; i++) to[i] = numbers[i];
}

// A vector, or what is left.
template <class T, class E>
inline T load_some(const E* from, int count) {
    return count >= Of<T>::numbers ? load<T>(from) : load_rest<T>(from, count);
}
template <class T, class E>
inline void store_some(E* to, T vector, int count) {
    if (count >= Of<T>::numbers)
        store(to, vector);
    else
        store_rest(to, vector, count);
}
