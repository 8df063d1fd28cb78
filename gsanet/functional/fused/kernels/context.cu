// The context vectors of content attention, C = softmax(K)^T V over all pixels of an image, and their gradient Q^T dY.
//
// Both are sums over pixels of products of two maps. A block of `context_partial` takes a piece of an image and some of
// its heads, LENGTH pixels at a time, while the next ones arrive (STAGES == 2); a warp takes 16 keys of one head. SOFTMAX:
// with exp(K - max), the largest of all pixels so far, in registers. Where the piece is the whole image (WHOLE) it finishes
// the work, else `context_combine` or `context_gradient` brings the pieces of an image together, in order.
#include "context.cuh"

using LeftTile = Tile<QUERY_WIDTH>;
using RightTile = Tile<VALUE_WIDTH>;

struct Arguments {
  Map left, right;       // (keys, values), or (queries, gradient of the output)
  float* partial;        // (image, piece, head, KEY, VALUE)
  float* maxima;         // (image, piece, heads KEY)
  float* sums;           // (image, piece, heads KEY)
  T* context;            // (image, head): context vectors, packed with keys as columns; in the gradient's case an input
  T* turned;             // the same packed with values as columns
  T* gradient;           // their gradient divided by the softmax's sums, in both ways
  T* gradient_turned;
  float* key_max;        // (image, heads KEY): of the softmax
  float* key_inverse;    // (image, heads KEY): 1 / sum of the softmax
  float* key_offset;     // (image, heads KEY): what the softmax's gradient subtracts
  int pixels;            // of an image
  int width;             // of an image, in pixels
  int pieces;            // of an image
  int heads;
};

// Shared memory, in scalars, STAGES times; what products read past the last head's keys ends before the values do.
constexpr int RIGHT_TILE = LeftTile::SIZE;
constexpr int STAGE = RIGHT_TILE + RightTile::SIZE;
constexpr int TILES = STAGES * STAGE + 16;

constexpr int DEPTH = depth_of<T>(16);  // pixels that one product sums over
constexpr int KEY_TILES = (KEY + 15) / 16;
constexpr int KEY_HALVES = KEY > 8 ? 2 : 1;  // groups of eight keys in a tile of 16 that hold any
constexpr int UNITS = HEADS * KEY_TILES;     // tiles of keys in a block
constexpr int OWN_UNITS = (UNITS + WARPS - 1) / WARPS;  // of a warp
static_assert(STAGES == 1 || LENGTH % DEPTH == 0, "products would sum over pixels of two stages");

using Sums = float[VALUE_WIDTH / 8][4];

// What a warp has of 16 keys: their products with the values, and of rows lane / 4 and lane / 4 + 8 the largest key and
// the sum of the softmax.
struct Unit {
  Sums sums = {};
  float largest[2] = {-infinity(), -infinity()}, total[2] = {};
};

// 16 rows, from `key` on, of a piece's sums for one head.
DEVICE void write_partial(float* out, int key, const Sums& sums) {
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < VALUE_WIDTH / 8; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = key + row + i / 2 * 8, v = tile * 8 + column + i % 2;
      if (k < KEY && v < VALUE) out[k * VALUE + v] = sums[tile][i];
    }
}

// Element `index` of a packed matrix and the one after it along its depth, of which the first is even.
template <class S>
DEVICE void store_packed(S* matrix, int index, float first, float second) {
  if constexpr (IS_FLOAT<S>)
    matrix[index] = first, matrix[index + 2] = second;
  else
    store_two(matrix + index, first, second);
}

// The same where these are the sums over the whole image: context vectors, or their gradient. `inverse` is 1 / the sum of
// the softmax, of rows lane / 4 and lane / 4 + 8.
DEVICE void finish_head(const Arguments& arguments, long long image_head, int key, const Sums& sums,
                        const float (&inverse)[2]) {
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
  const long long start = image_head * QUERY_WIDTH * VALUE_WIDTH;
  T* const straight = (SOFTMAX ? arguments.context : arguments.gradient) + start;
  T* const turned = (SOFTMAX ? arguments.turned : arguments.gradient_turned) + start;
#pragma unroll
  for (int half = 0; half < KEY_HALVES; ++half) {
    const int k = key + row + half * 8;
    const bool exists = k < KEY, stored = k < QUERY_WIDTH;
    float offset = 0.f;
#pragma unroll
    for (int tile = 0; tile < VALUE_WIDTH / 8; ++tile) {
      const int v = tile * 8 + column;
      const float first = exists ? sums[tile][half * 2] * inverse[half] : 0.f;
      const float second = exists ? sums[tile][half * 2 + 1] * inverse[half] : 0.f;
      if constexpr (!SOFTMAX)
        if (exists)
          offset += first * to_float(arguments.context[start + by_key(k, v)]) +
                    second * to_float(arguments.context[start + by_key(k, v + 1)]);
      // Turned, keys k and k + 1 lie side by side: the lane of the even one takes both for v, the other for v + 1.
      const bool odd = row % 2;
      const float received = shuffle_xor(odd ? first : second, 4);
      if (!stored) continue;
      store_packed(straight, by_key(k, v), first, second);
      store_packed(turned, by_value(k - odd, v + odd), odd ? received : first, odd ? second : received);
    }
    if constexpr (SOFTMAX) {
      if (exists && column == 0) arguments.key_inverse[image_head * KEY + k] = inverse[half];
    } else {
      offset = combine_row(offset, [](float a, float b) { return a + b; });
      if (exists && column == 0) arguments.key_offset[image_head * KEY + k] = offset;
    }
  }
}

// Adds `count` pixels of a stage to 16 keys, from `key` on, of a head.
DEVICE void add_pixels(Unit& unit, const LeftTile& left, const RightTile& right, int count, int head, int key) {
  auto keys_of = [&](int pixel) {
    return load_left_transposed<T, DEPTH>([&](int step) { return left.at(0, pixel + step, head) + key; });
  };
  if constexpr (SOFTMAX) {
    const float before[2] = {unit.largest[0], unit.largest[1]};
#pragma unroll 2
    for (int pixel = 0; pixel < count; pixel += DEPTH) {
      auto keys = keys_of(pixel);
      change_keys<KEY_HALVES>(
          keys, [&](float value, int half) { return unit.largest[half] = larger(unit.largest[half], value), value; });
    }
#pragma unroll
    for (int half = 0; half < KEY_HALVES; ++half) {
      unit.largest[half] = combine_row(unit.largest[half], larger);
      if constexpr (STAGES > 1) {  // what was there is about a smaller key
        const float factor = exponential(before[half] - unit.largest[half]);
        unit.total[half] *= factor;
#pragma unroll
        for (int tile = 0; tile < VALUE_WIDTH / 8; ++tile)
          unit.sums[tile][half * 2] *= factor, unit.sums[tile][half * 2 + 1] *= factor;
      }
    }
  }
  // Tensor cores cut off what other units round: floats are summed up by them over one stage only.
  constexpr bool APART = IS_FLOAT<T> && STAGES > 1;
  Sums of_stage = {};
  Sums& sums = APART ? of_stage : unit.sums;
#pragma unroll 2
  for (int pixel = 0; pixel < count; pixel += DEPTH) {
    auto weights = keys_of(pixel);
    if constexpr (SOFTMAX) {
      change_keys<KEY_HALVES>(weights, [&](float value, int half) { return exponential(value - unit.largest[half]); });
      // The sum is of what is multiplied, rounded.
      auto rounded = weights;
      change_keys<KEY_HALVES>(rounded, [&](float value, int half) { return unit.total[half] += value, value; });
    }
    Right<T, DEPTH> values[VALUE_WIDTH / 8];
    load_right_transposed(values, [&](int step) { return right.at(0, pixel + step, head); });
#pragma unroll
    for (int tile = 0; tile < VALUE_WIDTH / 8; ++tile) multiply(sums[tile], weights, values[tile]);
  }
  if constexpr (APART)
#pragma unroll
    for (int tile = 0; tile < VALUE_WIDTH / 8; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) unit.sums[tile][i] += of_stage[tile][i];
}

KERNEL(THREADS, BLOCKS) context_partial(const Arguments arguments) {
  assume_threads(THREADS);
  SHARED_MEMORY(memory);
  T* const shared = reinterpret_cast<T*>(memory);
  const int image = block_index() / arguments.pieces, piece = block_index() % arguments.pieces;
  const int stretches = (arguments.pixels + LENGTH - 1) / LENGTH;  // of LENGTH pixels
  const int piece_length = (stretches + arguments.pieces - 1) / arguments.pieces * LENGTH;
  const int begin = piece * piece_length, end = min(begin + piece_length, arguments.pixels);
  const int first_head = block_row() * HEADS;

  fill_with_zeros(shared, TILES);
  take_turn();
  block_barrier();
  // LENGTH pixels from `first` on, zeros for those that do not exist.
  auto fetch = [&](int first, int stage) {
    const int count = end - first;
    auto copy = [&](auto tile, const Map& map, auto width, auto pooled) {
      constexpr int WIDTH = decltype(width)::value;
      Accesses<WIDTH>::visit([&](int head, int channel) {
        const T* from = static_cast<const T*>(map.data) + image * map.batch + (first_head + head) * WIDTH + channel;
        auto to = [=](int pixel) { return tile.at(0, pixel, head) + channel; };
        auto source = [=, &map, &arguments](int pixel) {
          int number = first + (pixel < count ? pixel : 0);
          if constexpr (decltype(pooled)::value)
            number = number / arguments.width / 2 * (arguments.width / 2) + number % arguments.width / 2;
          return from + static_cast<long long>(number) * map.pixel;
        };
        return [=](int) {
          if constexpr (VECTOR)
            return Moves{[=](int pixel) {
                           copy_async(to(pixel), source(pixel), pixel < count);
                           return 0;
                         },
                         [](int, int) {}};
          else
            return Moves{[=](int pixel) { return *source(pixel); },
                         [=](T value, int pixel) { *to(pixel) = pixel < count ? value : T{}; }};
        };
      });
    };
    copy(LeftTile{shared + stage * STAGE}, arguments.left, Constant<KEY>{}, Constant<0>{});
    copy(RightTile{shared + stage * STAGE + RIGHT_TILE}, arguments.right, Constant<VALUE>{}, Constant<POOL>{});
  };

  Unit units[OWN_UNITS];
  fetch(begin, 0);
  int stage = 0;
  for (int first = begin; first < end; first += LENGTH) {
    wait_for_copies();
    block_barrier();  // the pixels are there, and nobody works on those before them
    if (STAGES > 1 && first + LENGTH < end) fetch(first + LENGTH, 1 - stage);
    const LeftTile left{shared + stage * STAGE};
    const RightTile right{shared + stage * STAGE + RIGHT_TILE};
    const int count = min(end - first, LENGTH);
    if constexpr (SOFTMAX)
      if (count % DEPTH) {  // pixels that do not exist weigh nothing
        for (int i = thread_index(); i < (round_up(count, DEPTH) - count) * HEADS * KEY; i += THREADS)
          left.at(0, count + i / (HEADS * KEY), i / KEY % HEADS)[i % KEY] = to_scalar<T>(-infinity());
        block_barrier();
      }
#pragma unroll
    for (int own = 0; own < OWN_UNITS; ++own) {
      const int number = own * WARPS + warp_index();
      if (number < UNITS) add_pixels(units[own], left, right, count, number / KEY_TILES, number % KEY_TILES * 16);
    }
    stage = (stage + 1) % STAGES;
  }

#pragma unroll
  for (int own = 0; own < OWN_UNITS; ++own) {
    const int number = own * WARPS + warp_index();
    if (number >= UNITS) continue;
    const int head = number / KEY_TILES, key = number % KEY_TILES * 16, row = lane_index() / 4;
    const long long image_head = static_cast<long long>(image) * arguments.heads + first_head + head;
    const long long piece_head = static_cast<long long>(block_index()) * arguments.heads + first_head + head;
    Unit& unit = units[own];
    if constexpr (POOL)  // each of the four pixels had the whole gradient of their mean
#pragma unroll
      for (int tile = 0; tile < VALUE_WIDTH / 8; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) unit.sums[tile][i] *= 0.25f;
    float inverse[2] = {};
#pragma unroll
    for (int half = 0; half < KEY_HALVES; ++half) {
      const int k = key + row + half * 8;
      if constexpr (SOFTMAX) {
        const float total = combine_row(unit.total[half], [](float a, float b) { return a + b; });
        inverse[half] = 1.f / total;
        if (k < KEY && lane_index() % 4 == 0) {
          (WHOLE ? arguments.key_max : arguments.maxima)[piece_head * KEY + k] = unit.largest[half];
          if constexpr (!WHOLE) arguments.sums[piece_head * KEY + k] = total;
        }
      } else if constexpr (WHOLE) {
        inverse[half] = k < KEY ? arguments.key_inverse[image_head * KEY + k] : 0.f;
      }
    }
    if constexpr (WHOLE)
      finish_head(arguments, image_head, key, unit.sums, inverse);
    else
      write_partial(arguments.partial + piece_head * KEY * VALUE, key, unit.sums);
  }
}

// A row of blocks for each image and head, a thread for each key and value.
KERNEL(THREADS, BLOCKS) context_combine(const Arguments arguments) {
  const int image = block_index() / arguments.heads, head = block_index() % arguments.heads;
  const long long channels = static_cast<long long>(arguments.heads) * KEY;
  const int i = block_row() * THREADS + thread_index(), key = i / VALUE_WIDTH, value = i % VALUE_WIDTH;
  take_turn();
  if (key >= QUERY_WIDTH) return;
  float result = 0.f;
  if (key < KEY && value < VALUE) {
    const long long own = image * arguments.pieces * channels + head * KEY + key;
    const Combined combined =
        combine_pieces(arguments.maxima + own, arguments.sums + own, arguments.partial + own * VALUE + value,
                       arguments.pieces, channels, channels * VALUE);
    result = combined.result;
    if (value == 0) {
      arguments.key_max[image * channels + head * KEY + key] = combined.largest;
      arguments.key_inverse[image * channels + head * KEY + key] = combined.inverse;
    }
  }
  const long long start = static_cast<long long>(block_index()) * QUERY_WIDTH * VALUE_WIDTH;
  arguments.context[start + by_key(key, value)] = to_scalar<T>(result);
  arguments.turned[start + by_value(key, value)] = to_scalar<T>(result);
}

// The same for the gradient, one block for each image and head: dC / sum, and for each key the sum over values of C dC /
// sum.
KERNEL(THREADS, BLOCKS) context_gradient(const Arguments arguments) {
  const int image = block_index() / arguments.heads, head = block_index() % arguments.heads;
  const long long start = static_cast<long long>(block_index()) * QUERY_WIDTH * VALUE_WIDTH;
  take_turn();
  // A warp for each key, so that the sum over values is one of lanes.
  for (int key = warp_index(); key < QUERY_WIDTH; key += WARPS) {
    const long long own = (static_cast<long long>(image) * arguments.heads + head) * KEY + key;
    const float inverse = key < KEY ? arguments.key_inverse[own] : 0.f;
    float offset = 0.f;
    for (int value = lane_index(); value < VALUE_WIDTH; value += 32) {
      float result = 0.f;
      if (key < KEY && value < VALUE) {
#pragma unroll 4
        for (int piece = 0; piece < arguments.pieces; ++piece)
          result += arguments.partial[(((static_cast<long long>(image) * arguments.pieces + piece) * arguments.heads + head) * KEY +
                                       key) * VALUE + value];
        result *= inverse;
        offset += result * to_float(arguments.context[start + by_key(key, value)]);
      }
      arguments.gradient[start + by_key(key, value)] = to_scalar<T>(result);
      arguments.gradient_turned[start + by_value(key, value)] = to_scalar<T>(result);
    }
    warp_barrier();
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) offset += shuffle_xor(offset, mask);
    if (key < KEY && lane_index() == 0) arguments.key_offset[own] = offset;
  }
}
