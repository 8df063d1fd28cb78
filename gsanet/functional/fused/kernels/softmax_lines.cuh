// Softmax attention along lines, in pieces: a block's lines one after the other, and scores of 16 attending pixels in
// registers. How maps and tables lie in shared memory is a kernel's own.
//
// The constants in capitals are given on the compiler's command line: SCALAR, WARPS and BLOCKS; LENGTH, the pixels of a line;
// and HEADS of a block, one for each warp.
//
// Short lines go in bundles, one behind the other, and are treated as one line of 16 pixels: what lies between two of them
// is masked. Rows behind the last line are zeros on their way in, and are not stored.
#pragma once
#include "fragments.cuh"

using T = SCALAR;

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Rows of shared memory are an odd number of 16 bytes apart, so that eight of them never meet in one bank.
constexpr int odd_stride(int width) {
  const int accesses = (width + PER_ACCESS<T> - 1) / PER_ACCESS<T>;
  return (accesses | 1) * PER_ACCESS<T>;
}

constexpr int THREADS = 32 * WARPS;
constexpr int BUNDLE = LENGTH <= 16 ? 16 / LENGTH : 1;     // lines
constexpr int ROWS = round_up(BUNDLE * LENGTH, 16);        // pixels of a bundle
constexpr int STEPS = ROWS / 16, GROUPS = ROWS / 8;        // of attending, and of attended pixels
constexpr int DEPTH = IS_FLOAT<T> ? 8 : 16;                // of products whose sums run along the line
constexpr int BUFFER_PITCH = odd_stride(ROWS + 16), BUFFER = 16 * BUFFER_PITCH;  // of a warp, for what changes its layout
static_assert(WARPS == HEADS, "a warp has a head");

// A head's channels in shared memory; from pixel to pixel it is DISTANCE scalars.
template <int WIDTH, int DISTANCE>
struct Head {
  static constexpr int CHANNELS = WIDTH, GROUPS = WIDTH / 8, PITCH = DISTANCE;
  static constexpr int DEPTH = depth_of<T>(WIDTH), DEPTHS = WIDTH / DEPTH;
  using Lefts = Left<T, DEPTH>[DEPTHS];
};

struct Map {
  T* data;
  long long batch;
  int line, pixel;
};

// Lines and bundles of an image, and bundles of all.
struct Lines {
  int count, bundles, total;
};

// The lines of a bundle.
struct Bundle {
  int image, first, count;

  DEVICE Bundle(const Lines& lines, int number) {
    image = number / lines.bundles, first = (number - image * lines.bundles) * BUNDLE;
    count = min(BUNDLE, lines.count - first);
  }

  // Where the first of them begins.
  DEVICE T* start(const Map& map) const { return map.data + image * map.batch + static_cast<long long>(first) * map.line; }
};

// All of a block's bundles, one after the other: `fetch(bundle, stage)` is called for the next one before `use(bundle, stage)`
// for this one. All threads are through with the stage that is fetched to.
template <class Fetch, class Use>
DEVICE void for_each_bundle(const Lines& lines, Fetch fetch, Use use) {
  int stage = 0;
  if (block_index() < lines.total) fetch(Bundle(lines, block_index()), stage);
  end_group();
  for (int number = block_index(); number < lines.total; number += block_count()) {
    const int next = number + block_count();
    block_barrier();
    if (next < lines.total) fetch(Bundle(lines, next), stage ^ 1);
    end_group();
    wait_for_groups<1>();
    block_barrier();
    use(Bundle(lines, number), stage);
    stage ^= 1;
  }
}

// Of 16 rows of a tile, those from `tile` on.
template <class H>
DEVICE void load_lefts(typename H::Lefts& lefts, const T* tile) {
#pragma unroll
  for (int i = 0; i < H::DEPTHS; ++i)
    lefts[i] = load_left<T, H::DEPTH>([&](int row) { return tile + row * H::PITCH + i * H::DEPTH; });
}

// sums += left right^T with COUNT groups of eight rows of `right`, an even number.
template <class H, int COUNT>
DEVICE void add_products(float (&sums)[COUNT][4], const typename H::Lefts& lefts, const T* right, int pitch) {
#pragma unroll
  for (int first = 0; first < COUNT; first += 2)
#pragma unroll
    for (int i = 0; i < H::DEPTHS; ++i) {
      Right<T, H::DEPTH> rights[2];
      load_right(rights, [&](int row) { return right + (first * 8 + row) * pitch + i * H::DEPTH; });
#pragma unroll
      for (int j = 0; j < 2; ++j) multiply(sums[first + j], lefts[i], rights[j]);
    }
}

// Sums of eight columns as scalars: of 16 bits two neighbours to a word, the rows l / 4 first.
struct Rounded {
  Word words[IS_FLOAT<T> ? 4 : 2];

  DEVICE Rounded() = default;
  DEVICE explicit Rounded(const float (&sums)[4]) {
    if constexpr (IS_FLOAT<T>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = float_bits(sums[i]);
    } else {
      words[0] = pack<T>(sums[0], sums[1]), words[1] = pack<T>(sums[2], sums[3]);
    }
  }
};

DEVICE void round_all(Rounded (&groups)[GROUPS], const float (&sums)[GROUPS][4]) {
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) groups[i] = Rounded(sums[i]);
}

// COUNT groups to the warp's buffer, (16, BUFFER_PITCH). Nobody reads it before, and all may after it.
template <int COUNT>
DEVICE void put(T* buffer, const Rounded (&groups)[COUNT]) {
  const int lane = lane_index();
  warp_barrier();
  if constexpr (MATRICES_ARE_STORED && !IS_FLOAT<T>) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      const Word words[4] = {groups[i].words[0], groups[i].words[1], groups[i + 1].words[0], groups[i + 1].words[1]};
      store_matrices(buffer + lane % 16 * BUFFER_PITCH + i * 8 + lane / 16 * 8, words);
    }
  } else {
    constexpr int WORDS = IS_FLOAT<T> ? 2 : 1;  // of a row
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
      for (int j = 0; j < 2 * WORDS; ++j)
        reinterpret_cast<Word*>(buffer + (lane / 4 + j / WORDS * 8) * BUFFER_PITCH + i * 8 + lane % 4 * 2)[j % WORDS] = groups[i].words[j];
  }
  warp_barrier();
}

// Number `i` of the left operands, DEPTH columns each, that groups are. Floats come from the buffer that they were put to.
template <int COUNT>
DEVICE Left<T, DEPTH> left_of(const Rounded (&groups)[COUNT], const T* buffer, int i) {
  if constexpr (IS_FLOAT<T>) {
    return load_left<T, DEPTH>([&](int row) { return buffer + row * BUFFER_PITCH + i * DEPTH; });
  } else {
    Left<T, DEPTH> left;
#pragma unroll
    for (int j = 0; j < 4; ++j) left.words[j] = groups[2 * i + j / 2].words[j % 2];
    return left;
  }
}

// sums += left right, with 8 COUNT rows of `right`, whose columns are in OUT groups.
template <int COUNT, int OUT>
DEVICE void add_mixed(float (&sums)[OUT][4], const Rounded (&groups)[COUNT], const T* buffer, const T* right, int pitch) {
#pragma unroll
  for (int i = 0; i < COUNT * 8 / DEPTH; ++i) {
    Right<T, DEPTH> rights[OUT];
    load_right_transposed(rights, [&](int row) { return right + (i * DEPTH + row) * pitch; });
    const Left<T, DEPTH> left = left_of(groups, buffer, i);
#pragma unroll
    for (int j = 0; j < OUT; ++j) multiply(sums[j], left, rights[j]);
  }
}

// sums[FIRST + i] += (columns 16 i to 16 i + 15 of the buffer)^T right, with 16 rows of `right`.
template <int FIRST, int COUNT, int ALL, int OUT>
DEVICE void add_transposed(float (&sums)[ALL][OUT][4], const T* buffer, const T* right, int pitch) {
#pragma unroll
  for (int i = 0; i < 16 / DEPTH; ++i) {
    Right<T, DEPTH> rights[OUT];
    load_right_transposed(rights, [&](int row) { return right + (i * DEPTH + row) * pitch; });
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      const Left<T, DEPTH> left =
          load_left_transposed<T, DEPTH>([&](int row) { return buffer + (i * DEPTH + row) * BUFFER_PITCH + j * 16; });
#pragma unroll
      for (int n = 0; n < OUT; ++n) multiply(sums[FIRST + j][n], left, rights[n]);
    }
  }
}

// Row a of the scores by position is row a of Q R^T, with the 16 rows' window of R, from column 15 - a on: of rows l / 4 one
// group further on than of rows l / 4 + 8, and in both 7 - l / 4 columns on. That is a move between four lanes, of what is at
// most one group further on.
struct Skew {
  int odd, half, more;  // columns on: one of a pair; pairs, rounded down and up

  DEVICE Skew() {
    const int columns = 7 - lane_index() / 4;
    odd = columns % 2, half = columns / 2, more = half + odd;
  }

  DEVICE int beside(int lanes) const { return (lane_index() & ~3) | ((lane_index() + lanes) & 3); }

  // Adds to the scores of group `m` from groups m to m + 2 of the product.
  DEVICE void add(float (&scores)[4], const float (&lower)[4], const float (&middle)[4], const float (&upper)[4]) const {
    const int place = lane_index() % 4;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float(&near)[4] = i ? lower : middle, (&far)[4] = i ? middle : upper;
      const float first = place < half ? (odd ? far[i + 1] : far[i]) : (odd ? near[i + 1] : near[i]);
      const float second = place < more ? (odd ? far[i] : far[i + 1]) : (odd ? near[i] : near[i + 1]);
      scores[i] += bits_float(shuffle(float_bits(first), beside(half)));
      scores[i + 1] += bits_float(shuffle(float_bits(second), beside(more)));
    }
  }

  // The way back, rounded: scores at their offsets, zeros elsewhere.
  DEVICE void back(Rounded (&out)[GROUPS + 2], const float (&scores)[GROUPS][4]) const {
    constexpr int PARTS = IS_FLOAT<T> ? 2 : 1;  // both rows' 16-bit scalars move in one word
    const int place = lane_index() % 4;
    auto word = [&](int group, int part, int i) -> Word {
      if (group < 0 || group >= GROUPS) return 0;
      if constexpr (IS_FLOAT<T>)
        return float_bits(scores[group][2 * part + i]);
      else
        return pack<T>(scores[group][i], scores[group][2 + i]);
    };
    Word moved[GROUPS + 1][2][PARTS];
#pragma unroll
    for (int m = 0; m <= GROUPS; ++m)
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const Word near[2] = {word(m, part, 0), word(m, part, 1)}, far[2] = {word(m - 1, part, 0), word(m - 1, part, 1)};
        const Word first = place >= 4 - more ? (odd ? far[1] : far[0]) : (odd ? near[1] : near[0]);
        const Word second = place >= 4 - half ? (odd ? far[0] : far[1]) : (odd ? near[0] : near[1]);
        moved[m][0][part] = shuffle(first, beside(-more)), moved[m][1][part] = shuffle(second, beside(-half));
      }
#pragma unroll
    for (int n = 0; n < GROUPS + 2; ++n) {
      if constexpr (IS_FLOAT<T>) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          out[n].words[i] = n > 0 ? moved[n - 1][i][0] : 0;
          out[n].words[2 + i] = n <= GROUPS ? moved[n][i][PARTS - 1] : 0;
        }
      } else {
        out[n].words[0] = n > 0 ? (moved[n - 1][0][0] & 0xffff) | moved[n - 1][1][0] << 16 : 0;
        out[n].words[1] = n <= GROUPS ? moved[n][0][0] >> 16 | (moved[n][1][0] & 0xffff0000) : 0;
      }
    }
  }
};

// Adds to scores of 16 attending pixels, number `step` of the line, their products with the embeddings of offsets.
template <class H>
DEVICE void add_by_position(float (&scores)[GROUPS][4], const typename H::Lefts& lefts, const T* table, int pitch, int step,
                            const Skew& skew) {
  float products[GROUPS + 2][4] = {};
  add_products<H>(products, lefts, table + (STEPS - 1 - step) * 16 * pitch, pitch);
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) skew.add(scores[i], products[i], products[i + 1], products[i + 2]);
}

// Gives `value` to what is no pair of pixels of one line: rows are 16 pixels, number `step` of the bundle.
DEVICE void set_others(float (&scores)[GROUPS][4], int step, float value) {
  if constexpr (ROWS != LENGTH) {
    const int own = step * 16 + lane_index() / 4;
#pragma unroll
    for (int i = 0; i < GROUPS * 4; ++i) {
      const int other = i / 4 * 8 + lane_index() % 4 * 2 + i % 2, line = BUNDLE == 1 ? 0 : (own + i / 2 % 2 * 8) / LENGTH;
      if (other / LENGTH != line) scores[i / 4][i % 4] = value;
    }
  }
}

// Scores become exponentials about the largest one, and `inverse` that of their sums; pixels of other lines take no part.
DEVICE void take_exponentials(float (&scores)[GROUPS][4], float (&inverse)[2], int step, float factor) {
  set_others(scores, step, -infinity());
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = scores[0][2 * half], sum = 0.f;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) largest = maximum(maximum(largest, scores[i][2 * half]), scores[i][2 * half + 1]);
    largest = maximum(largest, shuffle_xor(largest, 1));
    largest = maximum(largest, shuffle_xor(largest, 2));
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
#pragma unroll
      for (int j = 2 * half; j < 2 * half + 2; ++j) sum += scores[i][j] = power_of_two((scores[i][j] - largest) * factor);
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    inverse[half] = 1.f / sum;
  }
}

// From weights and the gradients of them to gradients of scores, in the place of the weights.
DEVICE void differentiate(float (&weights)[GROUPS][4], const float (&slopes)[GROUPS][4], float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float mean = 0.f;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
#pragma unroll
      for (int j = 2 * half; j < 2 * half + 2; ++j) mean += weights[i][j] * slopes[i][j];
    mean += shuffle_xor(mean, 1);
    mean += shuffle_xor(mean, 2);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
#pragma unroll
      for (int j = 2 * half; j < 2 * half + 2; ++j) weights[i][j] *= (slopes[i][j] - mean) * scale;
  }
}

// A number that the compiler knows.
template <int NUMBER>
struct Number {
  static constexpr int INDEX = NUMBER;
};

template <int NUMBER = 0, class Use>
DEVICE void for_each_step(Use use) {
  use(Number<NUMBER>{});
  if constexpr (NUMBER + 1 < STEPS) for_each_step<NUMBER + 1>(use);
}

// Sums of a whole line, as scalars, to the warp's head in a tile.
template <class H>
DEVICE void store_line(T* tile, const float (&sums)[STEPS][H::GROUPS][4]) {
  warp_barrier();  // nobody needs what was there
#pragma unroll
  for (int i = 0; i < STEPS; ++i)
    store_rows<16, T>(sums[i], [&](int row) { return tile + (i * 16 + row) * H::PITCH; });
}

template <int COUNT, int OUT>
DEVICE void clear(float (&sums)[COUNT][OUT][4]) {
#pragma unroll
  for (int i = 0; i < COUNT * OUT * 4; ++i) sums[i / (OUT * 4)][i / 4 % OUT][i % 4] = 0.f;
}
