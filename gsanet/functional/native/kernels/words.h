// What products are made of, in words of four bytes: a float; or two bfloat16, where a machine adds up both products at
// once. A word's numbers are neighbours along what is summed over, channels or pixels; beyond the last there are zeros.
#pragma once

#include "numbers.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>  // no compiler finds these instructions by itself
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif

// Calls f with how many numbers a word has, where maps are of this kind.
template <class F>
inline void with_words(int element, F&& f) {
    if constexpr (PAIRS) {
        if (element == BFLOAT16) return f(Number<2>{});
    }
    f(Number<1>{});
}

// In how many words so many numbers are.
template <int EACH>
inline int words_of(int numbers) {
    return divide_up(numbers, EACH);
}
inline int words_of(int element, int numbers) {
    int words = 0;
    with_words(element, [&](auto each) { words = words_of<decltype(each)::value>(numbers); });
    return words;
}
inline bool are_pairs(int element) { return words_of(element, 2) == 1; }

// sum += the products of the numbers of two words, in each lane; or with a word that all lanes share.
template <int EACH>
inline void multiply_add(Vector a, Vector b, Vector& sum) {
    sum += a * b;
}
template <int EACH>
inline void multiply_add(Vector a, float b, Vector& sum) {
    sum += a * b;
}

// Both rounded to bfloat16, side by side in each lane.
Vector pair(Vector first, Vector second);

#if defined(__AVX512BF16__)
template <>
inline void multiply_add<2>(Vector a, Vector b, Vector& sum) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
template <>
inline void multiply_add<2>(Vector a, float b, Vector& sum) {
    __m512 all = _mm512_set1_ps(b);
#if defined(__clang__)
    asm("" : "+v"(all));  // clang 16 ends with a signal where it sees that all words are one
#endif
    sum = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)all);
}

inline Vector pair(Vector first, Vector second) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Vector)_mm512_permutexvar_epi16(order, halves);
}
#endif

// Numbers [row][width] as words of neighbours in a row, [row][word]; `to` may be `from`.
template <int EACH>
inline void join_columns(const Vector* from, int rows, int width, Vector* to) {
    if constexpr (EACH == 2)
        for (int row = 0; row < rows; row++, from += width)
            for (int c = 0; c < width; c += 2) *to++ = pair(from[c], c + 1 < width ? from[c + 1] : Vector{});
}

// The same as words of neighbours in a column, [word][width].
template <int EACH>
inline void join_rows(const Vector* from, int rows, int width, Vector* to) {
    if constexpr (EACH == 2)
        for (int row = 0; row < rows; row += 2, from += 2 * width)
            for (int c = 0; c < width; c++) *to++ = pair(from[c], row + 1 < rows ? from[width + c] : Vector{});
}

// A table that all lanes share, [row][width], as words: itself where these are floats, and else in memory that it keeps.
// ALONG: [row][word], of neighbours in a row. DOWN: [row][width], each number with the one below it.
struct Table {
    enum Way { ALONG, DOWN };
    const float* words;

    Table(int element, const float* from, int64_t rows, int width, Way way = ALONG)
        : words(from), memory(from && are_pairs(element) ? rows * width : 0) {
        if (!from || !are_pairs(element)) return;
        words = memory.data;
        float* to = memory.data;
        for (int64_t row = 0; row < rows; row++, from += width)
            for (int c = 0; c < width; c += way == ALONG ? 2 : 1) {
                const bool both = way == ALONG ? c + 1 < width : row + 1 < rows;
                const float second = both ? from[c + (way == ALONG ? 1 : width)] : 0;
                const Bfloat16 numbers[2] = {from_float<Bfloat16>(from[c]), from_float<Bfloat16>(second)};
                __builtin_memcpy(to++, numbers, sizeof numbers);
            }
    }

  private:
    Scratch<float> memory;
};
