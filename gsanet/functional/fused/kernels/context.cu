// The context vectors of content attention, C = softmax(K)^T V over all pixels of an image, and their gradient Q^T dY.
//
// Both are sums over pixels of products of two maps. `context_partial` takes LENGTH pixels of an image and some of its
// heads at a time (SOFTMAX: with exp(K - max), max over these pixels). Where that is the whole image (WHOLE) it finishes the
// work, else `context_combine` or `context_gradient` brings the pieces of an image together, in order.
#include "tiles.cuh"

constexpr int QUERY_WIDTH = padded(KEY), VALUE_WIDTH = padded(VALUE);
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

// Where element (key, value) of the context vectors is, packed with keys or with values as columns.
DEVICE int by_key(int key, int value) {
  constexpr int DEPTH = depth_of<T>(VALUE_WIDTH);
  return packed_index<T, DEPTH>(key, value, VALUE_WIDTH / DEPTH);
}

DEVICE int by_value(int key, int value) {
  constexpr int DEPTH = depth_of<T>(QUERY_WIDTH);
  return packed_index<T, DEPTH>(value, key, QUERY_WIDTH / DEPTH);
}

// Shared memory, in scalars, then floats for the reductions.
constexpr int RIGHT_TILE = LeftTile::SIZE;
constexpr int REDUCTION = RIGHT_TILE + RightTile::SIZE + 16;

// The results of the threads that share channels, brought together for each of them.
template <class Combine>
DEVICE void combine_threads(float (&values)[ACCESS], float* shared, Combine combine) {
  using Threads = Accesses<KEY>;
  block_barrier();
#pragma unroll
  for (int i = 0; i < ACCESS; ++i) shared[i * THREADS + thread_index()] = values[i];
  block_barrier();
#pragma unroll
  for (int i = 0; i < ACCESS; ++i) {
    const float* row = shared + i * THREADS + thread_index() % Threads::PER_PIXEL;
    values[i] = row[0];
#pragma unroll 2
    for (int group = 1; group < Threads::PIXELS; ++group) values[i] = combine(values[i], row[group * Threads::PER_PIXEL]);
  }
}

using Sums = float[VALUE_WIDTH / 8][4];

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

// The same where these are the sums over the whole image: context vectors, or their gradient.
DEVICE void finish_head(const Arguments& arguments, long long image_head, int key, const Sums& sums, const float* totals) {
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
  const long long start = image_head * QUERY_WIDTH * VALUE_WIDTH;
  T* const straight = (SOFTMAX ? arguments.context : arguments.gradient) + start;
  T* const turned = (SOFTMAX ? arguments.turned : arguments.gradient_turned) + start;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int k = key + row + half * 8;
    const bool exists = k < KEY;
    float inverse = 0.f, offset = 0.f;
    if (exists) inverse = SOFTMAX ? 1.f / totals[k] : arguments.key_inverse[image_head * KEY + k];
#pragma unroll
    for (int tile = 0; tile < VALUE_WIDTH / 8; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int v = tile * 8 + column + i;
        const float result = exists ? sums[tile][half * 2 + i] * inverse : 0.f;
        if (k >= QUERY_WIDTH) continue;
        if (!SOFTMAX && exists) offset += result * to_float(arguments.context[start + by_key(k, v)]);
        straight[by_key(k, v)] = to_scalar<T>(result);
        turned[by_value(k, v)] = to_scalar<T>(result);
      }
    if constexpr (SOFTMAX) {
      if (exists && column == 0) arguments.key_inverse[image_head * KEY + k] = inverse;
    } else {
      offset += shuffle_xor(offset, 1);
      offset += shuffle_xor(offset, 2);
      if (exists && column == 0) arguments.key_offset[image_head * KEY + k] = offset;
    }
  }
}

KERNEL(THREADS, BLOCKS) context_partial(const Arguments arguments) {
  static_assert(Accesses<KEY>::PER_PIXEL <= THREADS, "a thread has one group of channels");
  SHARED_MEMORY(memory);
  T* const shared = reinterpret_cast<T*>(memory);
  float* const reduction = reinterpret_cast<float*>(shared + REDUCTION);
  float* const totals = reduction + ACCESS * THREADS;  // of the softmax, for each channel
  const LeftTile left{shared};
  const RightTile right{shared + RIGHT_TILE};
  const int image = block_index() / arguments.pieces, piece = block_index() % arguments.pieces;
  const int begin = piece * LENGTH;
  const int count = arguments.pixels - begin < LENGTH ? arguments.pixels - begin : LENGTH;
  const int first_head = block_row() * HEADS;

  fill_with_zeros(shared, REDUCTION);
  block_barrier();
  auto copy = [&](auto tile, const Map& map, auto width, auto pooled) {
    constexpr int WIDTH = decltype(width)::value;
    Accesses<WIDTH>::visit([&](int head, int channel) {
      const T* from = static_cast<const T*>(map.data) + image * map.batch + (first_head + head) * WIDTH + channel;
      auto to = [=](int pixel) { return tile.at(0, pixel, head) + channel; };
      if constexpr (decltype(pooled)::value)
        return Moves{[=, &map, &arguments](int, int pixel) {
                       const int here = begin + (pixel < count ? pixel : 0);
                       const int x = here / arguments.width / 2, y = here % arguments.width / 2;
                       return read_access(from + (static_cast<long long>(x) * (arguments.width / 2) + y) * map.pixel);
                     },
                     [=](const Access& access, int, int pixel) {
                       float values[ACCESS];
                       to_floats(values, access);
#pragma unroll
                       for (int i = 0; i < ACCESS; ++i) values[i] *= pixel < count ? 0.25f : 0.f;
                       write_access(to(pixel), values);
                     }};
      else if constexpr (VECTOR)
        return Moves{[=, &map](int, int pixel) {
                       const long long here = begin + (pixel < count ? pixel : 0);
                       copy_async(to(pixel), from + here * map.pixel, pixel < count);
                       return 0;
                     },
                     [](int, int, int) {}};
      else
        return Moves{[=, &map](int, int pixel) { return from[static_cast<long long>(begin + (pixel < count ? pixel : 0)) * map.pixel]; },
                     [=](T value, int, int pixel) { *to(pixel) = pixel < count ? value : T{}; }};
    });
  };
  copy(left, arguments.left, Constant<KEY>{}, Constant<0>{});
  copy(right, arguments.right, Constant<VALUE>{}, Constant<POOL>{});
  wait_for_copies();
  block_barrier();

  if constexpr (SOFTMAX) {
    float largest[ACCESS], sum[ACCESS] = {};
#pragma unroll
    for (int i = 0; i < ACCESS; ++i) largest[i] = -infinity();
    auto visit = [&](auto change) {
      Accesses<KEY>::visit([&](int head, int channel) {
        return Moves{[=](int, int pixel) { return read_access(left.at(0, pixel, head) + channel); },
                     [=](const Access& access, int, int pixel) {
                       if (pixel >= count) return;
                       float values[ACCESS];
                       to_floats(values, access);
                       change(values, left.at(0, pixel, head) + channel);
                     }};
      });
    };
    visit([&](const float(&keys)[ACCESS], T*) {
#pragma unroll
      for (int i = 0; i < ACCESS; ++i) largest[i] = largest[i] < keys[i] ? keys[i] : largest[i];
    });
    combine_threads(largest, reduction, [](float a, float b) { return a < b ? b : a; });
    visit([&](float(&keys)[ACCESS], T* place) {
#pragma unroll
      for (int i = 0; i < ACCESS; ++i) keys[i] = exponential(keys[i] - largest[i]);
      write_access(place, keys);
      to_floats(keys, read_access(place));  // the sum is of what is multiplied, rounded
#pragma unroll
      for (int i = 0; i < ACCESS; ++i) sum[i] += keys[i];
    });
    combine_threads(sum, reduction, [](float a, float b) { return a + b; });
    if (thread_index() < Accesses<KEY>::PER_PIXEL) {
      const long long own = static_cast<long long>(block_index()) * arguments.heads * KEY + first_head * KEY + thread_index() * ACCESS;
#pragma unroll
      for (int i = 0; i < ACCESS; ++i) {
        (WHOLE ? arguments.key_max : arguments.maxima)[own + i] = largest[i];
        if constexpr (WHOLE)
          totals[thread_index() * ACCESS + i] = sum[i];
        else
          arguments.sums[own + i] = sum[i];
      }
    }
    block_barrier();
  }

  constexpr int DEPTH = depth_of<T>(16), KEY_TILES = (KEY + 15) / 16;
  for (int unit = warp_index(); unit < HEADS * KEY_TILES; unit += WARPS) {
    const int head = unit / KEY_TILES, key = unit % KEY_TILES * 16;
    Sums sums = {};
#pragma unroll 1
    for (int pixel = 0; pixel < count; pixel += DEPTH) {
      const auto weight = load_left_transposed<T, DEPTH>([&](int step) { return left.at(0, pixel + step, head) + key; });
#pragma unroll
      for (int tile = 0; tile < VALUE_WIDTH / 8; ++tile)
        multiply(sums[tile], weight, load_right_transposed<T, DEPTH>([&](int step) {
                   return right.at(0, pixel + step, head) + tile * 8;
                 }));
    }
    if constexpr (WHOLE)
      finish_head(arguments, image * arguments.heads + first_head + head, key, sums, totals + head * KEY);
    else
      write_partial(arguments.partial + (static_cast<long long>(block_index()) * arguments.heads + first_head + head) * KEY * VALUE,
                    key, sums);
  }
}

// One block for each image and head.
KERNEL(THREADS, BLOCKS) context_combine(const Arguments arguments) {
  const int image = block_index() / arguments.heads, head = block_index() % arguments.heads;
  const long long channels = static_cast<long long>(arguments.heads) * KEY;
  for (int i = thread_index(); i < QUERY_WIDTH * VALUE_WIDTH; i += THREADS) {
    const int key = i / VALUE_WIDTH, value = i % VALUE_WIDTH;
    float result = 0.f;
    if (key < KEY && value < VALUE) {
      const long long own = image * arguments.pieces * channels + head * KEY + key;
      float largest = -infinity(), sum = 0.f;
      for (int piece = 0; piece < arguments.pieces; ++piece) {
        const float here = arguments.maxima[own + piece * channels];
        largest = largest < here ? here : largest;
      }
      for (int piece = 0; piece < arguments.pieces; ++piece) {
        const float weight = exponential(arguments.maxima[own + piece * channels] - largest);
        sum += weight * arguments.sums[own + piece * channels];
        result += weight * arguments.partial[(((static_cast<long long>(image) * arguments.pieces + piece) * arguments.heads + head) *
                                                  KEY + key) * VALUE + value];
      }
      result /= sum;
      if (value == 0) {
        arguments.key_max[image * channels + head * KEY + key] = largest;
        arguments.key_inverse[image * channels + head * KEY + key] = 1.f / sum;
      }
    }
    const long long start = static_cast<long long>(block_index()) * QUERY_WIDTH * VALUE_WIDTH;
    arguments.context[start + by_key(key, value)] = to_scalar<T>(result);
    arguments.turned[start + by_value(key, value)] = to_scalar<T>(result);
  }
}

// The same for the gradient: dC / sum, and for each key the sum over values of C dC / sum.
KERNEL(THREADS, BLOCKS) context_gradient(const Arguments arguments) {
  const int image = block_index() / arguments.heads, head = block_index() % arguments.heads;
  const long long start = static_cast<long long>(block_index()) * QUERY_WIDTH * VALUE_WIDTH;
  // A warp for each key, so that the sum over values is one of lanes.
  for (int key = warp_index(); key < QUERY_WIDTH; key += WARPS) {
    const long long own = (static_cast<long long>(image) * arguments.heads + head) * KEY + key;
    const float inverse = key < KEY ? arguments.key_inverse[own] : 0.f;
    float offset = 0.f;
    for (int value = lane_index(); value < VALUE_WIDTH; value += 32) {
      float result = 0.f;
      if (key < KEY && value < VALUE) {
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
