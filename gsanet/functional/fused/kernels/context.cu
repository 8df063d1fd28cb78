// The context vectors of content attention, C = softmax(K)^T V over all pixels of an image, and their gradient Q^T dY.
//
// Both are sums over pixels of products of two maps. `context_partial` takes LENGTH pixels of an image and some of its
// heads at a time (SOFTMAX: with exp(K - max), max over these pixels); `context_combine` and `context_gradient` bring the
// pieces of an image together, in order.
#include "tiles.cuh"

constexpr int QUERY_WIDTH = padded(KEY), VALUE_WIDTH = padded(VALUE);
using LeftTile = Tile<QUERY_WIDTH>;
using RightTile = Tile<VALUE_WIDTH>;

struct Arguments {
  Map left, right;       // (keys, values), or (queries, gradient of the output)
  float* partial;        // (image, piece, head, KEY, VALUE)
  float* maxima;         // (image, piece, heads KEY)
  float* sums;           // (image, piece, heads KEY)
  T* context;            // (image, head, QUERY_WIDTH, VALUE_WIDTH): context vectors; in `context_gradient` an input
  T* turned;             // (image, head, VALUE_WIDTH, QUERY_WIDTH): the same transposed
  T* gradient;           // their gradient divided by the softmax's sums, and the same transposed
  T* gradient_turned;
  float* key_max;        // (image, heads KEY): of the softmax
  float* key_inverse;    // (image, heads KEY): 1 / sum of the softmax
  float* key_offset;     // (image, heads KEY): what the softmax's gradient subtracts
  int pixels;            // of an image
  int width;             // of an image, in pixels
  int pieces;            // of an image
  int heads;
};

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
    for (int group = 1; group < Threads::PIXELS; ++group) values[i] = combine(values[i], row[group * Threads::PER_PIXEL]);
  }
}

KERNEL(THREADS, BLOCKS) context_partial(const Arguments arguments) {
  static_assert(Accesses<KEY>::PER_PIXEL <= THREADS, "a thread has one group of channels");
  SHARED_MEMORY(memory);
  T* const shared = reinterpret_cast<T*>(memory);
  float* const reduction = reinterpret_cast<float*>(shared + REDUCTION);
  const LeftTile left{shared};
  const RightTile right{shared + RIGHT_TILE};
  const int image = block_index() / arguments.pieces, piece = block_index() % arguments.pieces;
  const int begin = piece * LENGTH;
  const int count = arguments.pixels - begin < LENGTH ? arguments.pixels - begin : LENGTH;
  const int first_head = block_row() * HEADS;

  fill_with_zeros(shared, REDUCTION);
  block_barrier();
  auto copy = [&](auto tile, const Map& map, auto width, bool pooled) {
    constexpr int WIDTH = decltype(width)::value;
    Accesses<WIDTH>::visit([&](int head, int channel) {
      return [&, head, channel](int) {
        const T* from = static_cast<const T*>(map.data) + image * map.batch + (first_head + head) * WIDTH + channel;
        return [&, from, head, channel](int pixel) {
          if (pixel >= count) return;
          T* to = tile.at(0, pixel, head) + channel;
          if (pooled) {
            const int x = (begin + pixel) / arguments.width, y = (begin + pixel) % arguments.width;
            float values[ACCESS];
            load_access(values, from + (static_cast<long long>(x / 2) * (arguments.width / 2) + y / 2) * map.pixel);
#pragma unroll
            for (int i = 0; i < ACCESS; ++i) values[i] *= 0.25f;
            store_access(to, values);
          } else if constexpr (VECTOR) {
            copy_async(to, from + static_cast<long long>(begin + pixel) * map.pixel, true);
          } else {
            *to = from[static_cast<long long>(begin + pixel) * map.pixel];
          }
        };
      };
    });
  };
  copy(left, arguments.left, Constant<KEY>{}, false);
  copy(right, arguments.right, Constant<VALUE>{}, POOL);
  wait_for_copies();
  block_barrier();

  if constexpr (SOFTMAX) {
    float largest[ACCESS], sum[ACCESS] = {};
#pragma unroll
    for (int i = 0; i < ACCESS; ++i) largest[i] = -infinity();
    auto visit = [&](auto change) {
      Accesses<KEY>::visit([&](int head, int channel) {
        return [&, head, channel](int) {
          return [&, head, channel](int pixel) {
            if (pixel < count) change(left.at(0, pixel, head) + channel);
          };
        };
      });
    };
    visit([&](T* key) {
      float values[ACCESS];
      load_access(values, key);
#pragma unroll
      for (int i = 0; i < ACCESS; ++i) largest[i] = largest[i] < values[i] ? values[i] : largest[i];
    });
    combine_threads(largest, reduction, [](float a, float b) { return a < b ? b : a; });
    visit([&](T* key) {
      float values[ACCESS];
      load_access(values, key);
#pragma unroll
      for (int i = 0; i < ACCESS; ++i) values[i] = exponential(values[i] - largest[i]);
      store_access(key, values);
      load_access(values, key);  // the sum is of what is multiplied, rounded
#pragma unroll
      for (int i = 0; i < ACCESS; ++i) sum[i] += values[i];
    });
    combine_threads(sum, reduction, [](float a, float b) { return a + b; });
    if (thread_index() < Accesses<KEY>::PER_PIXEL) {
      const long long own = static_cast<long long>(block_index()) * arguments.heads * KEY + first_head * KEY + thread_index() * ACCESS;
#pragma unroll
      for (int i = 0; i < ACCESS; ++i) arguments.maxima[own + i] = largest[i], arguments.sums[own + i] = sum[i];
    }
    block_barrier();
  }

  constexpr int DEPTH = depth_of<T>(16), KEY_TILES = (KEY + 15) / 16;
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
  for (int unit = warp_index(); unit < HEADS * KEY_TILES; unit += WARPS) {
    const int head = unit / KEY_TILES, key = unit % KEY_TILES * 16;
    float sums[VALUE_WIDTH / 8][4] = {};
    for (int pixel = 0; pixel < count; pixel += DEPTH) {
      const auto weight = load_left_transposed<T, DEPTH>([&](int step) { return left.at(0, pixel + step, head) + key; });
#pragma unroll
      for (int tile = 0; tile < VALUE_WIDTH / 8; ++tile)
        multiply(sums[tile], weight, load_right_transposed<T, DEPTH>([&](int step) {
                   return right.at(0, pixel + step, head) + tile * 8;
                 }));
    }
    float* out = arguments.partial + (static_cast<long long>(block_index()) * arguments.heads + first_head + head) * KEY * VALUE;
#pragma unroll
    for (int tile = 0; tile < VALUE_WIDTH / 8; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = key + row + i / 2 * 8, v = tile * 8 + column + i % 2;
        if (k < KEY && v < VALUE) out[k * VALUE + v] = sums[tile][i];
      }
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
    arguments.context[start + i] = to_scalar<T>(result);
    arguments.turned[start + value * QUERY_WIDTH + key] = to_scalar<T>(result);
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
        offset += result * to_float(arguments.context[start + key * VALUE_WIDTH + value]);
      }
      arguments.gradient[start + key * VALUE_WIDTH + value] = to_scalar<T>(result);
      arguments.gradient_turned[start + value * QUERY_WIDTH + key] = to_scalar<T>(result);
    }
    warp_barrier();
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) offset += shuffle_xor(offset, mask);
    if (key < KEY && lane_index() == 0) arguments.key_offset[own] = offset;
  }
}
