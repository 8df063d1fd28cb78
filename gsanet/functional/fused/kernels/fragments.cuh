// Pieces of matrices in registers, as the tensor cores want them: how they are loaded, multiplied and stored.
//
// A product is always 16 x 8 in the output; DEPTH is the length of its sums: 16 or 8 for 16-bit scalars, 8 for floats.
// In the output lane l holds of rows l / 4 and l / 4 + 8 the columns 2 (l % 4) and the next one.
//
// Loaders take a function `row(r)` that gives the address of a row of the matrix as it lies in memory: of the rows of the
// operand (`load_left`, `load_right`: the sum runs along the row), or of those of its transpose (`..._transposed`: the
// sum runs across rows).
#pragma once
#include <intrinsics.cuh>

DEVICE float infinity() { return bits_float(0x7f800000u); }

template <class T>
constexpr bool IS_FLOAT = sizeof(T) == 4;

template <class T>
constexpr int PER_ACCESS = 16 / sizeof(T);  // scalars in 16 bytes

// The depth of a product that a sum of this (padded) length is made of.
template <class T>
constexpr int depth_of(int length) {
  return !IS_FLOAT<T> && length % 16 == 0 ? 16 : 8;
}

template <class T, int DEPTH>
struct Left {  // 16 rows
  Word words[IS_FLOAT<T> ? 4 : DEPTH / 4];
};

template <class T, int DEPTH>
struct alignas(IS_FLOAT<T> || DEPTH == 16 ? 8 : 4) Right {  // 8 columns
  Word words[IS_FLOAT<T> ? 2 : DEPTH / 8];
};

template <class T, int DEPTH, class Row>
DEVICE Left<T, DEPTH> load_left(Row row) {
  Left<T, DEPTH> left;
  const int lane = lane_index();
  if constexpr (IS_FLOAT<T>) {
    const T *upper = row(lane / 4), *lower = row(lane / 4 + 8);
    left.words[0] = float_bits(upper[lane % 4]);
    left.words[1] = float_bits(lower[lane % 4]);
    left.words[2] = float_bits(upper[lane % 4 + 4]);
    left.words[3] = float_bits(lower[lane % 4 + 4]);
  } else {
    load_matrices<DEPTH / 4, false>(left.words, row(lane % 16) + (DEPTH == 16 ? lane / 16 * 8 : 0));
  }
  return left;
}

// `lower` is where in memory's rows the operand's rows 8 to 15 begin: 0 reads the first eight twice.
template <class T, int DEPTH, class Row>
DEVICE Left<T, DEPTH> load_left_transposed(Row row, int lower = 8) {
  Left<T, DEPTH> left;
  const int lane = lane_index();
  if constexpr (IS_FLOAT<T>) {
    const T *first = row(lane % 4), *second = row(lane % 4 + 4);
    left.words[0] = float_bits(first[lane / 4]);
    left.words[1] = float_bits(first[lane / 4 + lower]);
    left.words[2] = float_bits(second[lane / 4]);
    left.words[3] = float_bits(second[lane / 4 + lower]);
  } else {
    load_matrices<DEPTH / 4, true>(left.words, row(lane % 8 + (DEPTH == 16 ? lane / 16 * 8 : 0)) + lane / 8 % 2 * lower);
  }
  return left;
}

template <class T, int DEPTH, class Row>
DEVICE Right<T, DEPTH> load_right(Row row) {
  Right<T, DEPTH> right;
  const int lane = lane_index();
  if constexpr (IS_FLOAT<T>) {
    const T* column = row(lane / 4);
    right.words[0] = float_bits(column[lane % 4]);
    right.words[1] = float_bits(column[lane % 4 + 4]);
  } else {
    load_matrices<DEPTH / 8, false>(right.words, row(lane % 8) + (DEPTH == 16 ? lane / 8 % 2 * 8 : 0));
  }
  return right;
}

template <class T, int DEPTH, class Row>
DEVICE Right<T, DEPTH> load_right_transposed(Row row) {
  Right<T, DEPTH> right;
  const int lane = lane_index();
  if constexpr (IS_FLOAT<T>) {
    right.words[0] = float_bits(row(lane % 4)[lane / 4]);
    right.words[1] = float_bits(row(lane % 4 + 4)[lane / 4]);
  } else {
    load_matrices<DEPTH / 8, true>(right.words, row(lane % DEPTH));
  }
  return right;
}

// COUNT right operands, as many at once as there are in one instruction: `address(i)` is this lane's row of those from
// number i on, `one(i)` loads a single float one.
template <bool TRANSPOSED, class T, int DEPTH, int COUNT, class Address, class One>
DEVICE void load_several(Right<T, DEPTH> (&right)[COUNT], Address address, One one) {
  if constexpr (IS_FLOAT<T>) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) right[i] = one(i);
  } else {
    constexpr int WORDS = DEPTH / 8, ALL = COUNT * WORDS, REST = ALL % 4;
    // Instructions for fewer matrices use the first lanes' rows only: they are the same for all.
    auto load = [&](int first, auto& words) {
      constexpr int LOADED = sizeof(words) / 4;
      load_matrices<LOADED, TRANSPOSED>(words, address(first / WORDS));
#pragma unroll
      for (int j = 0; j < LOADED; ++j) right[(first + j) / WORDS].words[(first + j) % WORDS] = words[j];
    };
#pragma unroll
    for (int first = 0; first + 4 <= ALL; first += 4) {
      Word words[4];
      load(first, words);
    }
    if constexpr (REST >= 2) {
      Word words[2];
      load(ALL - REST, words);
    }
    if constexpr (REST % 2) {
      Word words[1];
      load(ALL - 1, words);
    }
  }
}

// Neighbouring groups of 8 columns.
template <class T, int DEPTH, int COUNT, class Row>
DEVICE void load_right(Right<T, DEPTH> (&right)[COUNT], Row row) {
  const int lane = lane_index();
  load_several<false>(
      right,
      [&](int i) {
        return DEPTH == 16 ? row(i * 8 + lane % 8 + lane / 16 * 8) + lane / 8 % 2 * 8 : row(i * 8 + lane);
      },
      [&](int i) { return load_right<T, DEPTH>([&](int column) { return row(i * 8 + column); }); });
}

// The same where the sum runs across rows: groups of 8 columns side by side.
template <class T, int DEPTH, int COUNT, class Row>
DEVICE void load_right_transposed(Right<T, DEPTH> (&right)[COUNT], Row row) {
  const int lane = lane_index();
  load_several<true>(
      right, [&](int i) { return row(lane % DEPTH) + i * 8 + lane / DEPTH * 8; },
      [&](int i) { return load_right_transposed<T, DEPTH>([&](int step) { return row(step) + i * 8; }); });
}

// The same one group wide and COUNT depths long, one under the other.
template <class T, int DEPTH, int COUNT, class Row>
DEVICE void load_right_transposed_long(Right<T, DEPTH> (&right)[COUNT], Row row) {
  load_several<true>(
      right, [&](int i) { return row(i * DEPTH + lane_index()); },
      [&](int i) { return load_right_transposed<T, DEPTH>([&](int step) { return row(i * DEPTH + step); }); });
}

// A matrix in global memory as its fragments follow each other, 8 columns by DEPTH after the other, so that each is read by
// neighbouring lanes from neighbouring addresses. `packed_index` says where element (depth, column) is, of `steps` DEPTHs.
template <class T, int DEPTH>
DEVICE int packed_index(int column, int depth, int steps) {
  const int fragment = column / 8 * steps + depth / DEPTH, inner = depth % DEPTH;
  if constexpr (IS_FLOAT<T>)
    return (fragment * 32 + column % 8 * 4 + inner % 4) * 2 + inner / 4;
  else
    return (fragment * 32 + column % 8 * 4 + inner % 8 / 2) * (DEPTH / 4) + inner / 8 * 2 + inner % 2;
}

// Fragment number `fragment` of a packed matrix.
template <class T, int DEPTH>
DEVICE Right<T, DEPTH> load_right_packed(const T* matrix, int fragment) {
  return reinterpret_cast<const Right<T, DEPTH>*>(matrix)[fragment * 32 + lane_index()];
}

template <class T, int DEPTH>
DEVICE void multiply(float& d0, float& d1, float& d2, float& d3, const Left<T, DEPTH>& left, const Right<T, DEPTH>& right) {
  if constexpr (IS_FLOAT<T>) {
    // a b = (a1 + a2)(b1 + b2) without a2 b2: three products of 10-bit fractions give float precision.
    float a1[4], a2[4], b1[2], b2[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a1[i] = round_to_tf32(bits_float(left.words[i]));
      a2[i] = round_to_tf32(bits_float(left.words[i]) - a1[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      b1[i] = round_to_tf32(bits_float(right.words[i]));
      b2[i] = round_to_tf32(bits_float(right.words[i]) - b1[i]);
    }
    multiply_add_tf32(d0, d1, d2, d3, a2, b1);
    multiply_add_tf32(d0, d1, d2, d3, a1, b2);
    multiply_add_tf32(d0, d1, d2, d3, a1, b1);
  } else {
    multiply_add<T>(d0, d1, d2, d3, left.words, right.words);
  }
}

template <class T, int DEPTH>
DEVICE void multiply(float (&d)[4], const Left<T, DEPTH>& left, const Right<T, DEPTH>& right) {
  multiply(d[0], d[1], d[2], d[3], left, right);
}

template <class T>
DEVICE T to_scalar(float value) {
  if constexpr (IS_FLOAT<T>)
    return value;
  else
    return T{static_cast<unsigned short>(pack<T>(value, 0.f))};
}

// Two neighbouring scalars, the first at an even index.
template <class T>
DEVICE void store_two(T* where, float first, float second) {
  if constexpr (IS_FLOAT<T>) {
    where[0] = first, where[1] = second;
  } else {
    *reinterpret_cast<Word*>(where) = pack<T>(first, second);
  }
}

// Sums of TILES products beside each other, of HEIGHT (8 or 16) of their rows, as scalars; `row(r)` is where a row begins, a
// multiple of 16 bytes. MATRICES: by the instruction that stores 8 x 8 of them at a time.
template <int HEIGHT, class T, bool MATRICES = MATRICES_ARE_STORED, int TILES, class Row>
DEVICE void store_rows(const float (&sums)[TILES][4], Row row) {
  static_assert(HEIGHT == 8 || HEIGHT == 16, "half a product or all of it");
  const int lane = lane_index();
  if constexpr (MATRICES && !IS_FLOAT<T>) {
    constexpr int HALVES = HEIGHT / 8, AT_ONCE = 4 / HALVES;  // tiles
    T* const own = row(lane % HEIGHT) + lane / HEIGHT * 8;
    auto store = [&](int first, auto& words) {
      constexpr int COUNT = sizeof(words) / 4;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const auto& tile = sums[first + i / HALVES];
        words[i] = i % HALVES ? pack<T>(tile[2], tile[3]) : pack<T>(tile[0], tile[1]);
      }
      store_matrices(own + first * 8, words);
    };
#pragma unroll
    for (int first = 0; first + AT_ONCE <= TILES; first += AT_ONCE) {
      Word words[4];
      store(first, words);
    }
    constexpr int REST = TILES % AT_ONCE;
    if constexpr (REST >= 2) {  // of three tiles of eight rows, two
      Word words[2];
      store(TILES - REST, words);
    }
    if constexpr (REST % 2) {
      Word words[HALVES];
      store(TILES - 1, words);
    }
  } else {
    const int own = lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      store_two(row(own) + tile * 8 + column, sums[tile][0], sums[tile][1]);
      if (HEIGHT == 16) store_two(row(own + 8) + tile * 8 + column, sums[tile][2], sums[tile][3]);
    }
  }
}

template <class T>
DEVICE void unpack(Word word, float& first, float& second) {
  first = to_float(T{static_cast<unsigned short>(word)}), second = to_float(T{static_cast<unsigned short>(word >> 16)});
}

template <class T>
DEVICE void load_two(const T* where, float& first, float& second) {
  if constexpr (IS_FLOAT<T>)
    first = where[0], second = where[1];
  else
    unpack<T>(*reinterpret_cast<const Word*>(where), first, second);
}
