// q, k and v projected on chip, for content attention: q and v go to memory, and of k and v the context vectors (see
// context.cu), so that k is never written.
//
// A block goes through pieces of images, LENGTH pixels at a time, while the next ones arrive. A warp has 16 channels of q, k
// and v each, whose rows of the weight stay in its registers, and each SETS-th group of pixels. The products are W X^T, with
// channels as rows: k and v are then the operands of the context vectors' product as they come out of theirs, without a way
// through shared memory, and so are 16-bit scalars here as there. For memory q and v are turned in registers.
//
// Where a piece is the whole image (WHOLE) the block finishes the context vectors, else `context_combine` does: each set of
// each piece is a piece to it.
#include "context.cuh"

static_assert(VECTOR && !IS_FLOAT<T>, "16-bit scalars, moved by eights");
static_assert(KEY == VALUE && (KEY == 8 || KEY == 16), "a warp's 16 channels are one head or two");

constexpr int CHANNELS = HEADS * KEY;  // of x, q, k and v
constexpr int DEPTHS = CHANNELS / 16;
constexpr int GROUPS = CHANNELS / 16;  // of 16 channels
constexpr int SETS = WARPS / GROUPS;   // of pixels
constexpr int STEP = 16 * STEPS;       // pixels that a warp takes at once
static_assert(WARPS % GROUPS == 0 && LENGTH % (SETS * STEP) == 0, "all warps have the same work");

// Shared memory, in scalars: two stages of pixels, the weight where the second one will be, and what warps leave of an image.
constexpr int ROW = odd_stride(CHANNELS);
constexpr int STAGE = LENGTH * ROW;
constexpr int TILES = STAGE + (LENGTH > 3 * CHANNELS ? LENGTH : 3 * CHANNELS) * ROW;

struct Arguments {
  Map x;               // pixels of all images
  const T* weight;     // (3 CHANNELS, CHANNELS): q, k, v
  T* projected;        // (pixels of all images, 2 CHANNELS): q, v
  float* partial;      // (image, piece, set, CHANNELS, VALUE)
  float* maxima;       // (image, piece, set, CHANNELS)
  float* sums;         // the same
  T* context;          // (image, head): context vectors, packed with keys as columns
  T* turned;           // the same packed with values as columns
  float* key_max;      // (image, CHANNELS): of the softmax
  float* key_inverse;  // (image, CHANNELS): 1 / sum of the softmax
  int pixels;          // of an image
  int pieces;          // of an image
  int items;           // pieces of all images
};

enum Part { QUERIES, KEYS, VALUES };

// Which of 16 channels is a row of the product: of keys the same one. Of queries and values, once they are turned, a lane has
// rows 2 (l % 4) and the next one of both halves, and so four neighbours.
DEVICE int channel_of(int part, int row) { return part == KEYS ? row : row % 8 / 2 * 4 + row / 8 * 2 + row % 2; }

// A warp's rows of the weight.
struct Weights {
  Left<T, 16> rows[3][DEPTHS];

  // From shared memory, (3 CHANNELS, ROW), for the 16 channels from `first` on.
  DEVICE void load(const T* weight, int first) {
#pragma unroll
    for (int part = 0; part < 3; ++part)
#pragma unroll
      for (int i = 0; i < DEPTHS; ++i)
        rows[part][i] = load_left<T, 16>([&](int row) {
          return weight + (part * CHANNELS + first + channel_of(part, row)) * ROW + i * 16;
        });
  }
};

// What a warp has of 16 keys, of rows lane / 4 and lane / 4 + 8: their products with 16 values, and of the softmax the largest
// key and the sum, in each column of a product with ones: of what is multiplied, rounded.
struct Unit {
  float sums[2][4] = {}, total[4] = {};
  float largest[2] = {-infinity(), -infinity()};

  // Adds 16 times STEPS pixels: keys as rows, values as columns.
  DEVICE void add(const Left<T, 16> (&keys)[STEPS], const Right<T, 16> (&values)[STEPS][2]) {
    constexpr float LOG2_E = 1.4426950408889634f;
    float numbers[STEPS][4][2];
    float offset[2];
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) unpack<T>(keys[i].words[j], numbers[i][j][0], numbers[i][j][1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = largest[half];
#pragma unroll
      for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int j = half; j < 4; j += 2)
          largest[half] = maximum(largest[half], maximum(numbers[i][j][0], numbers[i][j][1]));
      largest[half] = combine_row(largest[half], maximum);
      offset[half] = -LOG2_E * largest[half];
      // What was there is about a smaller key.
      const float factor = power_of_two(multiply_then_add(before, LOG2_E, offset[half]));
#pragma unroll
      for (int i = half * 2; i < half * 2 + 2; ++i) sums[0][i] *= factor, sums[1][i] *= factor, total[i] *= factor;
    }
    const Word one = pack<T>(1.f, 1.f);
    const Right<T, 16> ones{{one, one}};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      Left<T, 16> weights;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        auto weight = [&](float key) { return power_of_two(multiply_then_add(key, LOG2_E, offset[j % 2])); };
        weights.words[j] = pack<T>(weight(numbers[i][j][0]), weight(numbers[i][j][1]));
      }
      multiply(sums[0], weights, values[i][0]);
      multiply(sums[1], weights, values[i][1]);
      multiply(total, weights, ones);
    }
  }

  // As `combine_pieces` reads them, for the 16 channels from `first` on. Of two heads the products of one's keys with the
  // other's values are nobody's.
  DEVICE void write(float* partial, float* maxima, float* totals, int first) const {
    const int row = lane_index() / 4, value = lane_index() % 4 * 4;
    auto products = [&](int half) {
      return make_float4(sums[0][half * 2], sums[0][half * 2 + 1], sums[1][half * 2], sums[1][half * 2 + 1]);
    };
    const float4 upper = products(0), lower = products(1);
    auto place = [&](int half) { return reinterpret_cast<float4*>(partial + (first + row + half * 8) * VALUE + value % VALUE); };
    if constexpr (VALUE == 16)
      *place(0) = upper, *place(1) = lower;
    else
      *place(value / 8) = value < 8 ? upper : lower;
    if (lane_index() % 4 == 0)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        maxima[first + row + half * 8] = largest[half], totals[first + row + half * 8] = total[half * 2];
  }
};

// Projects STEP pixels, of which `count` exist. `pixels` is where they are in shared memory, `projected` where this lane's part
// of q and v goes: four channels each of pixel lane / 4, and of those eight, 16, ... behind it.
DEVICE void project(const Weights& weights, Unit& unit, const T* pixels, T* projected, int count) {
  float sums[3][STEPS][2][4] = {};  // of 16 channels and 8 pixels
#pragma unroll
  for (int depth = 0; depth < DEPTHS; ++depth)
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      Right<T, 16> columns[2];
      load_right(columns, [&](int pixel) { return pixels + (i * 16 + pixel) * ROW + depth * 16; });
#pragma unroll
      for (int part = 0; part < 3; ++part)
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) multiply(sums[part][i][eight], weights.rows[part][depth], columns[eight]);
    }
  if (count < STEP) {  // pixels that do not exist weigh nothing
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (i * 16 + j / 4 * 8 + j % 2 >= count - lane_index() % 4 * 2) sums[KEYS][i][j / 4][j % 4] = -infinity();
  }
  Left<T, 16> keys[STEPS];
  Right<T, 16> values[STEPS][2];
#pragma unroll
  for (int i = 0; i < STEPS; ++i)
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      auto word = [&](int part, int half) { return pack<T>(sums[part][i][eight][half * 2], sums[part][i][eight][half * 2 + 1]); };
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        keys[i].words[eight * 2 + half] = word(KEYS, half);
        values[i][half].words[eight] = word(VALUES, half);
      }
      const uint2 own_queries = make_uint2(turn_matrix(word(QUERIES, 0)), turn_matrix(word(QUERIES, 1)));
      const uint2 own_values = make_uint2(turn_matrix(values[i][0].words[eight]), turn_matrix(values[i][1].words[eight]));
      const int pixel = i * 16 + eight * 8;
      if (pixel < count - lane_index() / 4) {
        *reinterpret_cast<uint2*>(projected + pixel * (2 * CHANNELS)) = own_queries;
        *reinterpret_cast<uint2*>(projected + pixel * (2 * CHANNELS) + CHANNELS) = own_values;
      }
    }
  unit.add(keys, values);
}

// LENGTH pixels of a piece of an image, or fewer at its end.
struct Stretch {
  int item, image, first, end;

  DEVICE Stretch(const Arguments& arguments, int piece_of_all) { begin(arguments, piece_of_all); }

  DEVICE void begin(const Arguments& arguments, int piece_of_all) {
    const int stretches = (arguments.pixels + LENGTH - 1) / LENGTH;
    const int length = (stretches + arguments.pieces - 1) / arguments.pieces * LENGTH;
    item = piece_of_all, image = item / arguments.pieces;
    first = (item - image * arguments.pieces) * length, end = min(first + length, arguments.pixels);
  }

  DEVICE Stretch next(const Arguments& arguments) const {
    Stretch after = *this;
    after.first += LENGTH;
    if (after.first >= end) after.begin(arguments, item + block_count());
    return after;
  }
};

// Context vectors of an image from what all sets of warps have left. A thread has the same key and value of some heads.
DEVICE void finish_image(const Arguments& arguments, int image, const float* partial, const float* maxima, const float* sums) {
  static_assert(THREADS % (KEY * VALUE) == 0, "whole heads at a time");
  const int key = thread_index() % (KEY * VALUE) / VALUE, value = thread_index() % VALUE;
  const int straight = by_key(key, value), turned = by_value(key, value);
  for (int head = thread_index() / (KEY * VALUE); head < HEADS; head += THREADS / (KEY * VALUE)) {
    const int channel = head * KEY + key;
    const Combined combined =
        combine_pieces(maxima + channel, sums + channel, partial + channel * VALUE + value, SETS, CHANNELS, CHANNELS * VALUE);
    const long long vectors = (static_cast<long long>(image) * HEADS + head) * (KEY * VALUE);
    arguments.context[vectors + straight] = arguments.turned[vectors + turned] = to_scalar<T>(combined.result);
    if (value == 0) {
      const long long own = static_cast<long long>(image) * CHANNELS + channel;
      arguments.key_max[own] = combined.largest, arguments.key_inverse[own] = combined.inverse;
    }
  }
}

KERNEL(THREADS, BLOCKS) project_with_context(const Arguments arguments) {
  assume_threads(THREADS);
  SHARED_MEMORY(memory);
  T* const shared = reinterpret_cast<T*>(memory);
  const int first_channel = warp_index() % GROUPS * 16, set = warp_index() / GROUPS;

  auto fetch_pixels = [&](const Stretch& stretch, int stage) {
    const T* from = static_cast<const T*>(arguments.x.data) + stretch.image * arguments.x.batch +
                    static_cast<long long>(stretch.first) * arguments.x.pixel;
    fetch_rows<LENGTH, CHANNELS, ROW, LENGTH>(shared + stage * STAGE, stretch.end - stretch.first, Spaced{from, arguments.x.pixel});
  };
  Stretch stretch(arguments, block_index());
  take_turn();
  fetch_rows<3 * CHANNELS, CHANNELS, ROW, 3 * CHANNELS>(shared + STAGE, 3 * CHANNELS, Spaced{arguments.weight, CHANNELS});
  fetch_pixels(stretch, 0);
  wait_for_copies();
  block_barrier();
  Weights weights;
  weights.load(shared + STAGE, first_channel);
  Unit unit;
  for (int stage = 0; stretch.item < arguments.items; stage = 1 - stage) {
    wait_for_copies();
    block_barrier();  // the pixels are there, and nobody works on those before them, or loads the weight
    const Stretch next = stretch.next(arguments);
    if (next.item < arguments.items) fetch_pixels(next, 1 - stage);
    const int lane = anew(lane_index());
    const long long first = static_cast<long long>(stretch.image) * arguments.pixels + stretch.first + set * STEP + lane / 4;
    const T* from = shared + stage * STAGE + set * STEP * ROW;
    T* to = arguments.projected + first * (2 * CHANNELS) + first_channel + lane % 4 * 4;
#pragma unroll 1
    for (int count = min(stretch.end - stretch.first, LENGTH) - set * STEP; count > 0; count -= SETS * STEP) {
      project(weights, unit, from, to, count);
      from += SETS * STEP * ROW, to += SETS * STEP * (2 * CHANNELS);
    }
    if (next.item != stretch.item) {
      float* const left = reinterpret_cast<float*>(shared + TILES);
      const long long own = WHOLE ? 0 : static_cast<long long>(stretch.item) * SETS * CHANNELS;
      float* const partial = (WHOLE ? left : arguments.partial) + own * VALUE;
      float* const maxima = (WHOLE ? left + SETS * CHANNELS * VALUE : arguments.maxima) + own;
      float* const sums = (WHOLE ? left + SETS * CHANNELS * (VALUE + 1) : arguments.sums) + own;
      unit.write(partial + set * CHANNELS * VALUE, maxima + set * CHANNELS, sums + set * CHANNELS, first_channel);
      unit = Unit{};
      if constexpr (WHOLE) {
        block_barrier();
        finish_image(arguments, stretch.image, partial, maxima, sums);
      }
    }
    stretch = next;
  }
}
