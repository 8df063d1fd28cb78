// Vectors of the compiler's own kind: GCC and clang make of them what the machine has.
#pragma once

#include <cstdint>

// Vectors are never longer than registers: GCC takes those that are apart, and keeps the pieces in memory.
#if defined(__AVX512F__)
constexpr int LANES = 16;  // numbers in a vector
constexpr int TILE = 8;    // two rows of so many sums, and what they are made of, fit into the registers
#elif defined(__AVX__)
constexpr int LANES = 8;
constexpr int TILE = 4;
#elif defined(__x86_64__)
constexpr int LANES = 4;
constexpr int TILE = 4;
#else  // ARM and others with 32 registers of 128 bits
constexpr int LANES = 4;
constexpr int TILE = 8;
#endif
constexpr int BLOCK = LANES < 8 ? LANES : 8;  // channels that lie side by side in memory and are moved together
constexpr int CACHE_LINE = 16;                // numbers

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Block __attribute__((vector_size(4 * BLOCK)));
typedef int32_t Bits __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * BLOCK)));

#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define UNROLLED _Pragma("GCC unroll 16")
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Integers{__VA_ARGS__})
#endif

inline int divide_up(int a, int b) { return (a + b - 1) / b; }

// Vectors as numbers.
template <class T>
inline float* floats(T* vectors) {
    return reinterpret_cast<float*>(vectors);
}
template <class T>
inline const float* floats(const T* vectors) {
    return reinterpret_cast<const float*>(vectors);
}

// Memory of one thread, aligned as vectors want it.
template <class T>
struct Scratch {
    T* data;
    explicit Scratch(int64_t count) : data(new T[count]) {}
    ~Scratch() { delete[] data; }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
};

// Rows become columns.
#if defined(__AVX__)
inline void transpose(Block (&rows)[8]) {
    Block pairs[8], quads[8];
    UNROLLED for (int i = 0; i < 8; i += 2) {
        pairs[i] = SHUFFLE(rows[i], rows[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        pairs[i + 1] = SHUFFLE(rows[i], rows[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    UNROLLED for (int i = 0; i < 8; i++) {
        const Block a = pairs[i & ~2], b = pairs[i | 2];
        quads[i] = i & 2 ? SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15) : SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    }
    UNROLLED for (int i = 0; i < 4; i++) {
        rows[i] = SHUFFLE(quads[i], quads[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        rows[i + 4] = SHUFFLE(quads[i], quads[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
#else
inline void transpose(Block (&rows)[4]) {
    Block pairs[4];
    UNROLLED for (int i = 0; i < 4; i += 2) {
        pairs[i] = SHUFFLE(rows[i], rows[i + 1], 0, 4, 2, 6);
        pairs[i + 1] = SHUFFLE(rows[i], rows[i + 1], 1, 5, 3, 7);
    }
    UNROLLED for (int i = 0; i < 2; i++) {
        rows[i] = SHUFFLE(pairs[i], pairs[i + 2], 0, 1, 4, 5);
        rows[i + 2] = SHUFFLE(pairs[i], pairs[i + 2], 2, 3, 6, 7);
    }
}
#endif

// The lanes from `first` on, as what ?: takes. (Lanes are not written one by one from a number that the compiler does not know:
// GCC 12 takes their addresses for those of whole vectors, and stores them as such.)
inline Bits lanes_from(int first) {
    Bits numbers;
    UNROLLED for (int lane = 0; lane < LANES; lane++) numbers[lane] = lane;
    return numbers >= first;
}

// A number that the compiler knows.
template <int N>
struct Number {
    static constexpr int value = N;
};

// Calls f with the smaller of `most` and `count`, which is 1 or more, as a number that the compiler knows.
template <int most, class F>
inline void with_known(int count, F&& f) {
    if constexpr (most > 1) {
        if (count < most) return with_known<most - 1>(count, f);
    }
    f(Number<most>{});
}
