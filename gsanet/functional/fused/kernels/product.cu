// A product of few rows, for one image at a time: out = x w^T, with BIAS, RESIDUAL and RELU as they are asked for. It is a 1x1
// convolution, or the projection of q, k and v.
//
// Such a product is latency more than work. A block has LENGTH pixels and COLUMNS columns of the output, and all CHANNELS of
// both operands in shared memory at once: every copy is on its way before the first one is waited for. They may come as two
// CHUNKS, half of the channels each: the first one is multiplied while the other arrives. Its warps share
// the tile, DOWN x ALONG for each, and the sum, of which each of PARTS has a stretch of each chunk; what they have is added through
// shared memory, in a fixed order. EARLY_WEIGHT: weight and bias were there before the kernel before this one began, and are
// fetched while that one still runs; else they are only asked for, which brings them near and is right whoever wrote them.
#include "tiles.cuh"

static_assert(VECTOR && !IS_FLOAT<T>, "16-bit scalars, moved by eights");
static_assert(CHANNELS % 16 == 0 && LENGTH % DOWN == 0 && COLUMNS % ALONG == 0 && DOWN % 16 == 0 && ALONG % 8 == 0, "whole fragments");

constexpr int GROUPS = LENGTH / DOWN * (COLUMNS / ALONG);  // of warps, by their part of the tile
constexpr int PARTS = WARPS / GROUPS;
constexpr int CHUNK = CHANNELS / CHUNKS;
constexpr int STEPS = CHUNK / 16 / PARTS;
static_assert(GROUPS * PARTS == WARPS && STEPS * PARTS * 16 * CHUNKS == CHANNELS, "all warps have the same work");
static_assert(CHUNKS == 1 || CHUNKS == 2, "all at once, or in halves");

// Shared memory: pixels and rows of the weight, in scalars; later, in floats, what each part has of the sums.
constexpr int ROW = odd_stride(CHANNELS);
constexpr int SUM_ROW = COLUMNS + 8;  // eight lanes, and four rows, never meet in one bank
constexpr int SUMS = LENGTH * SUM_ROW;

// The way out: a thread has four columns, the same ones each time, of some pixels.
constexpr int PER_ROW = COLUMNS / 4;
constexpr int ROUNDS = (LENGTH * PER_ROW + THREADS - 1) / THREADS;
static_assert(THREADS % PER_ROW == 0, "the same columns each time");

struct Arguments {
  Map x;              // where the pixels of the output are in it: with strides, if that has fewer
  const T* weight;    // (columns, CHANNELS)
  const T* bias;      // (columns)
  const T* residual;  // (pixels, columns)
  T* out;             // (pixels, columns)
  int pixels;         // of the output, of all images
  int height, width;  // of the output
  int columns;
};

// Where the pixels of a tile begin in x, from a channel on.
struct Pixels {
  const Arguments& arguments;
  int first, channel;

  DEVICE const T* operator()(int row) const {
    const Map& x = arguments.x;
    const T* const data = static_cast<const T*>(x.data) + channel;
    const int pixel = first + row;
    if constexpr (!STRIDED) return data + static_cast<long long>(pixel) * x.pixel;
    const int line = pixel / arguments.width, image = line / arguments.height;
    return data + image * x.batch + static_cast<long long>(line - image * arguments.height) * x.line +
           static_cast<long long>(pixel - line * arguments.width) * x.pixel;
  }
};

// Four neighbours, as floats.
struct Four {
  float values[4];

  DEVICE static Four load(const T* from) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    Four four;
    unpack<T>(words.x, four.values[0], four.values[1]);
    unpack<T>(words.y, four.values[2], four.values[3]);
    return four;
  }
};

// Adds a warp's stretch of a chunk to the sums of its part of the tile.
DEVICE void multiply_stretch(float (&sums)[DOWN / 16][ALONG / 8][4], const T* pixels, const T* weight) {
#pragma unroll 4
  for (int step = 0; step < STEPS; ++step) {
    Left<T, 16> left[DOWN / 16];
    Right<T, 16> right[ALONG / 8];
#pragma unroll
    for (int i = 0; i < DOWN / 16; ++i)
      left[i] = load_left<T, 16>([&](int row) { return pixels + (i * 16 + row) * ROW + step * 16; });
    load_right(right, [&](int column) { return weight + column * ROW + step * 16; });
#pragma unroll
    for (int i = 0; i < DOWN / 16; ++i)
#pragma unroll
      for (int j = 0; j < ALONG / 8; ++j) multiply(sums[i][j], left[i], right[j]);
  }
}

KERNEL(THREADS, BLOCKS) product(const Arguments arguments) {
  SHARED_MEMORY(memory);
  T* const pixels = reinterpret_cast<T*>(memory);
  T* const weight = pixels + LENGTH * ROW;
  const int first_pixel = block_index() * LENGTH, first_column = block_row() * COLUMNS;
  const int rows = min(arguments.pixels - first_pixel, LENGTH), columns = min(arguments.columns - first_column, COLUMNS);
  const int own_row = thread_index() / PER_ROW, own_column = thread_index() % PER_ROW * 4;
  const bool is_column = own_column < columns;
  const T* const own_weight = arguments.weight + static_cast<long long>(first_column) * CHANNELS;

  Four bias{};
  if constexpr (EARLY_WEIGHT) {
    fetch_rows<COLUMNS, CHANNELS, ROW, 4>(weight, columns, Spaced{own_weight, CHANNELS});
    if (BIAS && is_column) bias = Four::load(arguments.bias + first_column + own_column);
  } else if (block_index() == 0 && thread_index() == 0) {
    bring_near(own_weight, columns * CHANNELS * static_cast<int>(sizeof(T)));
  }
  take_turn();
  // Code that runs once is as slow as it is long: nothing is unrolled further than copies and products need it.
#pragma unroll 1
  for (int channel = 0; channel < CHANNELS; channel += CHUNK) {
    if constexpr (!EARLY_WEIGHT)
      fetch_rows<COLUMNS, CHUNK, ROW, 4>(weight + channel, columns, Spaced{own_weight + channel, CHANNELS});
    fetch_rows<LENGTH, CHUNK, ROW, 4>(pixels + channel, rows, Pixels{arguments, first_pixel, channel});
    if constexpr (CHUNKS > 1) end_group();
  }
  if (BIAS && !EARLY_WEIGHT && is_column) bias = Four::load(arguments.bias + first_column + own_column);
  // Where this thread's outputs are, the first of them.
  const long long own = static_cast<long long>(first_pixel + own_row) * arguments.columns + first_column + own_column;
  auto exists = [&](int round) { return is_column && own_row + round * (THREADS / PER_ROW) < rows; };
  auto place = [&](int round) { return own + static_cast<long long>(round * (THREADS / PER_ROW)) * arguments.columns; };
  Four residual[ROUNDS] = {};
  if constexpr (RESIDUAL)
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
      if (exists(i)) residual[i] = Four::load(arguments.residual + place(i));

  const int group = warp_index() % GROUPS, part = warp_index() / GROUPS;
  const int down = group / (COLUMNS / ALONG) * DOWN, along = group % (COLUMNS / ALONG) * ALONG;
  const int stretch = part * STEPS * 16;
  float sums[DOWN / 16][ALONG / 8][4] = {};
#pragma unroll 1
  for (int first = stretch; first < CHANNELS; first += CHUNK) {
    if (first + CHUNK < CHANNELS)
      wait_for_groups<1>();
    else
      wait_for_copies();
    block_barrier();
    multiply_stretch(sums, pixels + down * ROW + first, weight + along * ROW + first);
  }
  block_barrier();  // nobody needs the operands any more
  float* const all = reinterpret_cast<float*>(memory);
  float* const to = all + part * SUMS + (down + lane_index() / 4) * SUM_ROW + along + lane_index() % 4 * 2;
#pragma unroll
  for (int i = 0; i < DOWN / 16; ++i)
#pragma unroll
    for (int j = 0; j < ALONG / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2*>(to + (i * 16 + half * 8) * SUM_ROW + j * 8) =
            make_float2(sums[i][j][half * 2], sums[i][j][half * 2 + 1]);
  block_barrier();

#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    if (!exists(i)) break;
    const float* from = all + (own_row + i * (THREADS / PER_ROW)) * SUM_ROW + own_column;
    float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll
    for (int other = 1; other < PARTS; ++other) {
      const float4 more = *reinterpret_cast<const float4*>(from + other * SUMS);
      sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
    }
    float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (BIAS) values[j] += bias.values[j];
      if constexpr (RESIDUAL) values[j] += residual[i].values[j];
      if constexpr (RELU) values[j] = maximum(values[j], 0.f);
    }
    *reinterpret_cast<uint2*>(arguments.out + place(i)) = make_uint2(pack<T>(values[0], values[1]), pack<T>(values[2], values[3]));
  }
}
