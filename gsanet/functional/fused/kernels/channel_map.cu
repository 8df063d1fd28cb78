// The same linear map for each pixel's channels, and what is behind it: out = [first | second] weight + LEVEL + ADDEND, zero where
// MASK is not positive, or, with RELU, where it is negative itself, each as it is asked for. It is a 1x1 convolution with the sum and
// the ReLU behind it, or the gradient of one with those before it.
//
// A block has COLUMNS channels of the output, and goes through every block_count()-th stretch of LENGTH pixels; the next STAGES - 1
// of them are on their way meanwhile. Blocks that have other columns of the same pixels run beside it and find these in the cache.
// The weight stays in registers: a warp has 32 columns, and of the sum one of PARTS. What the parts have is added through shared
// memory, in a fixed order; each of them writes its share of the pixels. The 32 columns are in such an order that a lane has eight
// neighbours of its pixels: it reads and writes 16 bytes at once, and its addends and masks come to a place in shared memory that
// nobody else touches.
#include "pixels.cuh"

using T = SCALAR;

constexpr int THREADS = 32 * WARPS;
constexpr int ACCESS = PER_ACCESS<T>;
constexpr int CHANNELS = FIRST + SECOND;
constexpr int GROUPS = COLUMNS / 32;  // of columns
constexpr int SETS = WARPS / GROUPS / PARTS;  // of warps, by their pixels
constexpr int LENGTH = SETS * DOWN;
constexpr int STEPS = CHANNELS / 16 / PARTS;
constexpr int SIXTEENS = DOWN / 16, OWN = SIXTEENS / PARTS;  // of pixels: of a warp's sums, and of what it writes
constexpr int MAPS = ADDEND + MASK;
static_assert(!IS_FLOAT<T>, "16-bit scalars");
static_assert(FIRST % 16 == 0 && SECOND % 16 == 0 && STEPS * 16 * PARTS == CHANNELS, "whole steps");
static_assert(GROUPS * 32 == COLUMNS && ALL_COLUMNS % COLUMNS == 0, "whole groups of columns");
static_assert(SETS * GROUPS * PARTS == WARPS && OWN * 16 * PARTS == DOWN, "all warps have the same work");
static_assert(STAGES > 1, "one to work on, one on its way");

// Shared memory, in scalars: STAGES stretches of pixels and what a thread has of addends and masks; then, in floats, sums that
// parts give to each other. Before the last stage is used each warp has a place there for 16 rows of the weight.
constexpr int ROW = CHANNELS + ACCESS;  // an odd number of 16 bytes
constexpr int PLACES = MAPS * OWN * 2;  // of a thread, 16 bytes each
constexpr int STAGE = LENGTH * ROW + PLACES * THREADS * ACCESS;
constexpr int WEIGHT_ROW = 32 + ACCESS, WEIGHTS = 16 * WEIGHT_ROW * WARPS;
constexpr int EXCHANGED = (STAGES - 1) * STAGE + (STAGE < WEIGHTS ? WEIGHTS : STAGE);  // where the sums begin

struct Arguments {
  const T* first;          // (pixels, FIRST)
  const T* second;         // (pixels, SECOND)
  const T* weight;         // (FIRST, ALL_COLUMNS)
  const T* second_weight;  // (SECOND, ALL_COLUMNS)
  const T* level;          // (ALL_COLUMNS)
  const T* addend;         // (pixels, ALL_COLUMNS)
  const T* mask;           // (pixels, ALL_COLUMNS)
  T* out;                  // (pixels, ALL_COLUMNS)
  int first_stride;        // from pixel to pixel
  int second_stride;
  int pixels;
};

// What a warp has: its columns and its part of the sum, and of the pixels those that it adds up and those that it writes.
struct Share {
  int column, part, set;

  DEVICE Share() {
    const int warp = anew(warp_index());
    column = block_row() * COLUMNS + warp % GROUPS * 32, part = warp / GROUPS % PARTS, set = warp / (GROUPS * PARTS);
  }

  // Of this lane, in a stretch: the first pixel that it writes, and the eight columns.
  DEVICE int own_pixel() const { return set * DOWN + part * OWN * 16 + lane_index() / 4; }
  DEVICE int own_column() const { return column + lane_index() % 4 * 8; }
};

// Eight neighbours, as they lie in memory and as floats.
struct Eight {
  float values[8];

  DEVICE static Eight load(const T* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    Eight eight;
    unpack<T>(words.x, eight.values[0], eight.values[1]);
    unpack<T>(words.y, eight.values[2], eight.values[3]);
    unpack<T>(words.z, eight.values[4], eight.values[5]);
    unpack<T>(words.w, eight.values[6], eight.values[7]);
    return eight;
  }

  DEVICE void store(T* to) const {
    *reinterpret_cast<uint4*>(to) = make_uint4(pack<T>(values[0], values[1]), pack<T>(values[2], values[3]),
                                               pack<T>(values[4], values[5]), pack<T>(values[6], values[7]));
  }
};

// A warp's part of the weight. Of the eight columns in which lanes l % 4 = q have columns 2 q and 2 q + 1 of a product, number j has
// columns 8 q + 2 j and the next one of the output: rows are written to shared memory in this order and turned as they are loaded.
struct Weight {
  Right<T, 16> steps[STEPS][4];

  DEVICE Weight(const Arguments& arguments, const Share& share, T* shared) {
    const int row = lane_index() / 4, four = lane_index() % 4;
    uint4 found[STEPS][2];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int channel = (share.part * STEPS + i) * 16;
      const bool is_first = SECOND == 0 || channel < FIRST;
      const T* const matrix = is_first ? arguments.weight : arguments.second_weight;
      const T* const from = matrix + (channel - (is_first ? 0 : FIRST) + row) * ALL_COLUMNS + share.own_column();
#pragma unroll
      for (int half = 0; half < 2; ++half) found[i][half] = *reinterpret_cast<const uint4*>(from + half * 8 * ALL_COLUMNS);
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      warp_barrier();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Word* const to = reinterpret_cast<Word*>(shared + (half * 8 + row) * WEIGHT_ROW) + four;
        to[0] = found[i][half].x, to[4] = found[i][half].y, to[8] = found[i][half].z, to[12] = found[i][half].w;
      }
      warp_barrier();
      load_right_transposed(steps[i], [&](int channel) { return shared + channel * WEIGHT_ROW; });
    }
  }
};

// A warp's sums: of 16 pixels, 32 columns in the order of the weight.
struct Sums {
  float products[SIXTEENS][4][4] = {};

  DEVICE void add(const T* pixels, const Weight& weight) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < SIXTEENS; ++i) {
        const Left<T, 16> left = load_left<T, 16>([&](int row) { return pixels + (i * 16 + row) * ROW + step * 16; });
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply(products[i][j], left, weight.steps[step][j]);
      }
  }

  // To and from the warps that have the other parts: number i of 16 pixels belongs to part i / OWN. A lane's sums stay its own.
  DEVICE void exchange(float* shared, const Share& share) {
    constexpr int OTHERS = PARTS - 1, SIZE = 4 * 32;  // in float4
    const int warp = share.set * GROUPS + warp_index() % GROUPS;
    auto place = [&](int i, int other) {
      return reinterpret_cast<float4*>(shared) + ((i * OTHERS + other) * SETS * GROUPS + warp) * SIZE + lane_index();
    };
#pragma unroll
    for (int i = 0; i < SIXTEENS; ++i)
      if (share.part != i / OWN) {
        float4* const to = place(i, (share.part - i / OWN + PARTS) % PARTS - 1);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          to[j * 32] = make_float4(products[i][j][0], products[i][j][1], products[i][j][2], products[i][j][3]);
      }
    block_barrier();
#pragma unroll
    for (int i = 0; i < SIXTEENS; ++i)
      if (share.part == i / OWN)
#pragma unroll
        for (int other = 0; other < OTHERS; ++other)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float4 more = place(i, other)[j * 32];
            products[i][j][0] += more.x, products[i][j][1] += more.y, products[i][j][2] += more.z, products[i][j][3] += more.w;
          }
  }
};

KERNEL(THREADS, BLOCKS) map_channels(const Arguments arguments) {
  SHARED_MEMORY(memory);
  T* const shared = reinterpret_cast<T*>(memory);
  const int stretches = (arguments.pixels + LENGTH - 1) / LENGTH;
  const Share share;
  const int own_pixel = share.own_pixel(), own_column = share.own_column();
  T* const places = shared + LENGTH * ROW + thread_index() * ACCESS;  // of this thread, in the first stage

  // All pixels of a stretch that does not exist become zeros, for nobody: cheaper than a branch in the way of the products.
  auto fetch_stretch = [&](int number, int stage) {
    const bool exists = number < stretches;
    T* const to = shared + stage * STAGE;
    const long long first = exists ? static_cast<long long>(number) * LENGTH : 0;
    const int count = exists ? arguments.pixels - number * LENGTH : 0;
    const int stride = arguments.first_stride, second_stride = arguments.second_stride;
    fetch_pixels<THREADS, LENGTH, FIRST, ROW>(to, arguments.first + first * stride, stride, count);
    if constexpr (SECOND > 0)
      fetch_pixels<THREADS, LENGTH, SECOND, ROW>(to + FIRST, arguments.second + first * second_stride, second_stride, count);
    const long long own = (first + own_pixel) * ALL_COLUMNS + own_column;
#pragma unroll
    for (int i = 0; i < 2 * OWN; ++i) {
      const bool is_pixel = own_pixel + i * 8 < count;
      const long long from = is_pixel ? own + i * 8 * ALL_COLUMNS : 0;
      T* const own_place = places + stage * STAGE + i * MAPS * THREADS * ACCESS;
      if constexpr (ADDEND) copy_async(own_place, arguments.addend + from, is_pixel);
      if constexpr (MASK) copy_async(own_place + ADDEND * THREADS * ACCESS, arguments.mask + from, is_pixel);
    }
    end_group();
  };

  take_turn();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch_stretch(block_index() + i * block_count(), i);
  const Weight weight(arguments, share, shared + (STAGES - 1) * STAGE + warp_index() * 16 * WEIGHT_ROW);
  Eight level{};
  if constexpr (LEVEL) level = Eight::load(arguments.level + own_column);
  int stage = 0;
  for (int number = block_index(); number < stretches; number += block_count()) {
    wait_for_groups<STAGES - 2>();
    block_barrier();  // the pixels are there, and nobody works on those before them
    fetch_stretch(number + (STAGES - 1) * block_count(), stage == 0 ? STAGES - 1 : stage - 1);
    Sums sums;
    sums.add(shared + stage * STAGE + share.set * DOWN * ROW + share.part * STEPS * 16, weight);
    if constexpr (PARTS > 1) sums.exchange(reinterpret_cast<float*>(shared + EXCHANGED), share);
    const int count = arguments.pixels - number * LENGTH;
    T* const out = arguments.out + (static_cast<long long>(number) * LENGTH + own_pixel) * ALL_COLUMNS + own_column;
#pragma unroll
    for (int i = 0; i < SIXTEENS; ++i) {
      if (PARTS > 1 && share.part != i / OWN) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int eight = i % OWN * 2 + half;  // of the pixels that this warp writes
        const T* const own_place = places + stage * STAGE + eight * MAPS * THREADS * ACCESS;
        Eight sum;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          sum.values[j] = sums.products[i][j / 2][half * 2 + j % 2];
          if constexpr (LEVEL) sum.values[j] += level.values[j];
        }
        if constexpr (ADDEND) {
          const Eight addend = Eight::load(own_place);
#pragma unroll
          for (int j = 0; j < 8; ++j) sum.values[j] += addend.values[j];
        }
        if constexpr (MASK) {
          const Eight mask = Eight::load(own_place + ADDEND * THREADS * ACCESS);
#pragma unroll
          for (int j = 0; j < 8; ++j) sum.values[j] = mask.values[j] > 0.f ? sum.values[j] : 0.f;
        }
        if constexpr (RELU) {
#pragma unroll
          for (int j = 0; j < 8; ++j) sum.values[j] = sum.values[j] <= 0.f ? 0.f : sum.values[j];  // what is not a number is kept
        }
        if (own_pixel + eight * 8 < count) sum.store(out + eight * 8 * ALL_COLUMNS);
      }
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  wait_for_copies();  // of what does not exist
}
