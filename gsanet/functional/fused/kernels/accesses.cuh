// Maps whose pixels have heads of CHANNELS channels, as floats in the registers of a thread: ACCESS of them are moved at once.
#pragma once
#include "channels.cuh"
#include "fragments.cuh"

constexpr int ACCESS = VECTOR ? WIDTH : CHANNELS <= 4 ? CHANNELS : 1;
constexpr int ACCESSES = CHANNELS / ACCESS;  // of a pixel and head
static_assert(CHANNELS % ACCESS == 0, "a head is whole accesses");

template <int COUNT>
DEVICE void load(float (&values)[COUNT], const T* from) {
  if constexpr (VECTOR) {
    const Group group = load_group(from, 0);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = channel(group, i);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = to_float(from[i]);
  }
}

template <int COUNT>
DEVICE void store(T* to, const float (&values)[COUNT]) {
  if constexpr (VECTOR) {
    store_group(to, 0, pack_group(values));
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i] = to_scalar<T>(values[i]);
  }
}

DEVICE void add_product(float (&sums)[ACCESS], float weight, const float (&values)[ACCESS]) {
#pragma unroll
  for (int i = 0; i < ACCESS; ++i) sums[i] += weight * values[i];
}

DEVICE float add_product(float sum, const float (&one)[ACCESS], const float (&other)[ACCESS]) {
#pragma unroll
  for (int i = 0; i < ACCESS; ++i) sum += one[i] * other[i];
  return sum;
}

// All channels of a head.
struct Head {
  float values[ACCESSES][ACCESS];

  DEVICE void read(const T* from) {
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) load(values[i], from + i * ACCESS);
  }
  DEVICE void write(T* to) const {
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) store(to + i * ACCESS, values[i]);
  }
  DEVICE void add(float weight, const Head& other) {
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) add_product(values[i], weight, other.values[i]);
  }
  DEVICE void scale(float factor) {
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i)
#pragma unroll
      for (int j = 0; j < ACCESS; ++j) values[i][j] *= factor;
  }
  DEVICE float times(const Head& other) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) sum = add_product(sum, values[i], other.values[i]);
    return sum;
  }
};
