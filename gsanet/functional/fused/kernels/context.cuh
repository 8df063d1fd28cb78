// What the kernels of context vectors share: how the vectors are packed, how keys change in registers, and how pieces of an
// image are brought together.
//
// The constants in capitals, besides those of tiles.cuh, are KEY and VALUE: channels of a head.
#pragma once
#include "tiles.cuh"

constexpr int QUERY_WIDTH = padded(KEY), VALUE_WIDTH = padded(VALUE);

// Where element (key, value) of the context vectors is, packed with keys or with values as columns.
DEVICE int by_key(int key, int value) {
  constexpr int DEPTH = depth_of<T>(VALUE_WIDTH);
  return packed_index<T, DEPTH>(key, value, VALUE_WIDTH / DEPTH);
}

DEVICE int by_value(int key, int value) {
  constexpr int DEPTH = depth_of<T>(QUERY_WIDTH);
  return packed_index<T, DEPTH>(value, key, QUERY_WIDTH / DEPTH);
}

DEVICE float larger(float a, float b) { return a < b ? b : a; }

// change(key, half) for each key of a left operand, of its rows lane / 4 (half 0) and, if HALVES is 2, lane / 4 + 8 (half 1).
template <int HALVES, class S, int DEPTH, class Change>
DEVICE void change_keys(Left<S, DEPTH>& keys, Change change) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i % 2 >= HALVES) continue;
    if constexpr (IS_FLOAT<S>) {
      keys.words[i] = float_bits(change(bits_float(keys.words[i]), i % 2));
    } else {
      float first, second;
      unpack<S>(keys.words[i], first, second);
      keys.words[i] = pack<S>(change(first, i % 2), change(second, i % 2));
    }
  }
}

// The same result for the four lanes that share rows of a left operand.
template <class Combine>
DEVICE float combine_row(float value, Combine combine) {
  value = combine(value, shuffle_xor(value, 1));
  return combine(value, shuffle_xor(value, 2));
}

// An element of the context vectors from those of several pieces, each about its own largest key, and of the softmax the
// largest key and 1 / sum. `maxima` and `sums` are `channels` apart from piece to piece, what is in `partial` is `products`.
struct Combined {
  float result, largest, inverse;
};

DEVICE Combined combine_pieces(const float* maxima, const float* sums, const float* partial, int pieces, long long channels,
                               long long products) {
  float largest = -infinity(), sum = 0.f, result = 0.f;
#pragma unroll 8
  for (int piece = 0; piece < pieces; ++piece) largest = larger(largest, maxima[piece * channels]);
#pragma unroll 8
  for (int piece = 0; piece < pieces; ++piece) {
    const float weight = exponential(maxima[piece * channels] - largest);
    sum += weight * sums[piece * channels];
    result += weight * partial[piece * products];
  }
  const float inverse = 1.f / sum;
  return {result * inverse, largest, inverse};
}
