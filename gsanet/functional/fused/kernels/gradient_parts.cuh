// What all kernels of the gradient of positional attention have besides the products with scores: lines on their way in and
// out, and content attention.
//
// On the way in the values may be normalised (NORM_VALUES) and the gradient may be that of a batch norm's input
// (NORM_GRADIENT: a dY + b Y + c) or of a 2 x 2 mean (POOL). Of content attention the kernel of the rows, which has the
// gradient of the output, takes dQ += dY C^T (CONTENT_QUERIES), that of the columns, which has V, takes dK and dV
// (CONTENT_KEYS); the only kernel of a module with one axis takes both. ACCUMULATE adds to the dQ that is there already;
// STATISTICS sums dV and dV times the normalised values for each channel: the gradients of the batch norm's weight and bias.
#pragma once
#include "scores.cuh"

constexpr int VALUE_WIDTH = padded(VALUE);
using QueryTile = Tile<QUERY_WIDTH>;
using ValueTile = Tile<VALUE_WIDTH>;
using GradientTile = Tile<VALUE_WIDTH, TOGETHER == 1 ? LINE_ROWS : round_up(PLACES, 16), TOGETHER>;

struct Arguments {
  Map queries, values, gradient;
  Map second;                // NORM_GRADIENT: the batch norm's input
  Map keys;                  // CONTENT_KEYS
  Map d_queries, d_values, d_keys;
  const T* rel;              // (offsets, KEY): 2 length - 1 of them
  float* d_rel;              // (block, offsets, KEY)
  const float* norm;         // NORM_VALUES: (2, channels), scale and shift. NORM_GRADIENT: (3, channels), a, b and c
  const T* d_context;        // CONTENT_KEYS: (image, head), gradient of the context vectors, divided by the softmax's sums,
                             // packed with keys as columns
  const T* d_context_turned; // CONTENT_KEYS: the same packed with values as columns
  const float* key_max;      // CONTENT_KEYS: (image, heads KEY), of the softmax
  const float* key_offset;   // CONTENT_KEYS: (image, heads KEY), what the softmax's gradient subtracts
  const float* moments;      // STATISTICS: (2, channels), mean and 1 / standard deviation of the values before the norm
  float* statistics;         // STATISTICS: (block, 2, channels)
  int lines_per_image;
  int total_lines;
  int heads;
  int length;                // pixels of a whole line
  const T* context;          // CONTENT_QUERIES: (image, head), context vectors, packed with keys as columns
};

// The lines that a block works on.
struct Tiles {
  QueryTile queries;
  ValueTile values;
  GradientTile gradient;
  QueryTile keys;  // CONTENT_KEYS

  // dV takes dY's place, or that of V if there is more of it.
  DEVICE ValueTile d_values() const { return {TOGETHER == 1 ? gradient.data : values.data}; }
};

constexpr int OWN_PAIRS = (PAIRS + WARPS - 1) / WARPS;
constexpr int VALUE_TILES = VALUE_WIDTH / 8, QUERY_TILES = QUERY_WIDTH / 8;
constexpr int X_DEPTH = depth_of<T>(16);  // depth of products over 16 attending pixels or 16 pairs

using ValueSums = float[LINE_TILES][VALUE_TILES][4];

constexpr int VALUE_DEPTH = depth_of<T>(VALUE_WIDTH), VALUE_STEPS = VALUE_WIDTH / VALUE_DEPTH;
constexpr int CONTEXT_SIZE = QUERY_WIDTH * VALUE_WIDTH;  // scalars of the context vectors of an image and head

// Context vectors, or their gradient, of a head for eight keys: right operands whose sums run along the values.
struct KeyColumns {
  Right<T, VALUE_DEPTH> right[VALUE_STEPS];

  DEVICE KeyColumns(const T* context, int tile) {
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; ++step)
      right[step] = load_right_packed<T, VALUE_DEPTH>(context, tile * VALUE_STEPS + step);
  }

  // Adds the products of 16 pixels of a pair, from `pixel` on.
  template <class TileType>
  DEVICE void add_products(float (&sums)[4], TileType left, int pair, int pixel) const {
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; ++step)
      multiply(sums, load_left<T, VALUE_DEPTH>([&](int row) { return left.of_pair(pair, pixel + row) + step * VALUE_DEPTH; }),
               right[step]);
  }
};

// dQ += dY C^T for both pixels of each place. Which of them comes first changes after four places, so that eight rows do not
// meet in one bank.
DEVICE void add_content_to_both(QueryTile queries, GradientTile gradient, int pair, const T* context) {
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < QUERY_TILES; ++tile) {
    const KeyColumns columns(context, tile);
#pragma unroll
    for (int place = 0; place < PLACES; place += 16) {
      float sums[4] = {};
      columns.add_products(sums, gradient, pair, place);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (place + half * 8 + row >= PLACES) continue;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const int pixel = 2 * (place + half * 8 + row) + (part ^ (row / 4));
          T* where = queries.of_pair(pair, pixel) + tile * 8 + column;
          float first, second;
          load_two(where, first, second);
          store_two(where, first + sums[2 * half], second + sums[2 * half + 1]);
        }
      }
    }
  }
}

// dQ += dY C^T, for all pixels of a pair, in the tile of dQ.
DEVICE void add_content_to_queries(QueryTile queries, GradientTile gradient, int pair, const T* context) {
  if constexpr (TOGETHER == 2) return add_content_to_both(queries, gradient, pair, context);
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < QUERY_TILES; ++tile) {
    const KeyColumns columns(context, tile);
#pragma unroll
    for (int i = 0; i < LINE_TILES; ++i) {
      T* upper = queries.of_pair(pair, i * 16 + row) + tile * 8 + column;
      T* lower = queries.of_pair(pair, i * 16 + row + 8) + tile * 8 + column;
      float sums[4];
      load_two(upper, sums[0], sums[1]);
      load_two(lower, sums[2], sums[3]);
      columns.add_products(sums, gradient, pair, i * 16);
      // Rows past the line are padding, which stays zero even if the context vectors are not finite.
      if (i * 16 + row < END && is_pixel(i * 16 + row)) store_two(upper, sums[0], sums[1]);
      if (i * 16 + row + 8 < END && is_pixel(i * 16 + row + 8)) store_two(lower, sums[2], sums[3]);
    }
  }
}

// exp(K - max) of a channel; zero in the padding.
DEVICE float weight_of(float key, const float* largest, int channel) {
  return channel < KEY ? exponential(key - largest[channel]) : 0.f;
}

// The same of a left operand whose sums run along the channels, from `first` on.
template <class S = T>
DEVICE Left<S, QUERY_DEPTH> weights_of(Left<S, QUERY_DEPTH> keys, const float* largest, int first) {
  const int lane = lane_index();
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(keys) / 4); ++i) {
    if constexpr (IS_FLOAT<S>) {
      keys.words[i] = float_bits(weight_of(bits_float(keys.words[i]), largest, first + lane % 4 + i / 2 * 4));
    } else {
      const int channel = first + lane % 4 * 2 + i / 2 * 8;
      float low, high;
      unpack<S>(keys.words[i], low, high);
      keys.words[i] = pack<S>(weight_of(low, largest, channel), weight_of(high, largest, channel + 1));
    }
  }
  return keys;
}

// Narrow heads have all that the next function needs of context vectors in registers, and exponentials are taken once.
constexpr bool CONTEXT_IN_REGISTERS = !IS_FLOAT<T> && CONTEXT_SIZE <= 256 && QUERY_STEPS == 1 && QUERY_TILES <= 2;

// The same as below, 16 pixels at a time. What a lane has of keys as a left operand and of dK is in the same places.
DEVICE void differentiate_narrow_content(ValueSums& d_values, QueryTile keys, ValueTile values, int pair, const T* d_context,
                                         const T* d_context_turned, const float* largest, const float* offset) {
  const int column = lane_index() % 4 * 2;
  Right<T, QUERY_DEPTH> right[VALUE_TILES];
#pragma unroll
  for (int tile = 0; tile < VALUE_TILES; ++tile) right[tile] = load_right_packed<T, QUERY_DEPTH>(d_context_turned, tile);
  const KeyColumns columns[2] = {{d_context, 0}, {d_context, QUERY_TILES - 1}};
  float largest_here[QUERY_TILES][2], offset_here[QUERY_TILES][2];
#pragma unroll
  for (int i = 0; i < 2 * QUERY_TILES; ++i) {
    const int channel = i / 2 * 8 + column + i % 2;
    largest_here[i / 2][i % 2] = channel < KEY ? largest[channel] : infinity();  // zeros of the padding have no weight
    offset_here[i / 2][i % 2] = channel < KEY ? offset[channel] : 0.f;
  }
#pragma unroll
  for (int i = 0; i < LINE_TILES; ++i) {
    auto left = load_left<T, QUERY_DEPTH>([&](int pixel) { return keys.of_pair(pair, i * 16 + pixel); });
    float weights[QUERY_TILES][4];
#pragma unroll
    for (int word = 0; word < 2 * QUERY_TILES; ++word) {
      float &low = weights[word / 2][word % 2 * 2], &high = weights[word / 2][word % 2 * 2 + 1];
      unpack<T>(left.words[word], low, high);
      low = exponential(low - largest_here[word / 2][0]), high = exponential(high - largest_here[word / 2][1]);
      left.words[word] = pack<T>(low, high);
    }
#pragma unroll
    for (int tile = 0; tile < VALUE_TILES; ++tile) multiply(d_values[i][tile], left, right[tile]);
    warp_barrier();  // these keys have been read
#pragma unroll
    for (int tile = 0; tile < QUERY_TILES; ++tile) {
      const auto& own = offset_here[tile];
      float sums[1][4] = {{-own[0], -own[1], -own[0], -own[1]}};
      columns[tile].add_products(sums[0], values, pair, i * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[0][j] *= weights[tile][j];
      store_rows<16, T>(sums, [&](int pixel) { return keys.of_pair(pair, i * 16 + pixel) + tile * 8; });
    }
  }
}

// dV += E dC' and dK = E (V dC'^T - offset), with E = exp(K - max) and dC' = dC / sum; dK takes K's place.
DEVICE void differentiate_content(ValueSums& d_values, QueryTile keys, ValueTile values, int pair, const T* d_context,
                                  const T* d_context_turned, const float* largest, const float* offset) {
  if constexpr (CONTEXT_IN_REGISTERS)
    return differentiate_narrow_content(d_values, keys, values, pair, d_context, d_context_turned, largest, offset);
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
  for (int step = 0; step < QUERY_STEPS; ++step) {
    Right<T, QUERY_DEPTH> right[VALUE_TILES];
#pragma unroll
    for (int tile = 0; tile < VALUE_TILES; ++tile)
      right[tile] = load_right_packed<T, QUERY_DEPTH>(d_context_turned, tile * QUERY_STEPS + step);
#pragma unroll
    for (int i = 0; i < LINE_TILES; ++i) {
      const auto weights = weights_of(
          load_left<T, QUERY_DEPTH>([&](int pixel) { return keys.of_pair(pair, i * 16 + pixel) + step * QUERY_DEPTH; }), largest,
          step * QUERY_DEPTH);
#pragma unroll
      for (int tile = 0; tile < VALUE_TILES; ++tile) multiply(d_values[i][tile], weights, right[tile]);
    }
  }
  warp_barrier();  // the keys have been read
#pragma unroll
  for (int tile = 0; tile < QUERY_TILES; ++tile) {
    const KeyColumns columns(d_context, tile);
    const int channel = tile * 8 + column;
    const float first = channel < KEY ? offset[channel] : 0.f, second = channel + 1 < KEY ? offset[channel + 1] : 0.f;
#pragma unroll
    for (int i = 0; i < LINE_TILES; ++i) {
      float sums[4] = {-first, -second, -first, -second};
      columns.add_products(sums, values, pair, i * 16);
      T* upper = keys.of_pair(pair, i * 16 + row) + channel;
      T* lower = keys.of_pair(pair, i * 16 + row + 8) + channel;
      float weights[4];
      load_two(upper, weights[0], weights[1]);
      load_two(lower, weights[2], weights[3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) weights[j] = weight_of(weights[j], largest, channel + j % 2);
      store_two(upper, weights[0] * sums[0], weights[1] * sums[1]);
      store_two(lower, weights[2] * sums[2], weights[3] * sums[3]);
    }
  }
}

// dV of a pair goes to its tile; (row, column) is where the lane's sums begin, as the kernel has it in registers.
DEVICE void store_values(ValueTile to, const ValueSums& d_values, int pair, int row, int column) {
  if constexpr (TOGETHER == 2 && CONTENT_KEYS) warp_barrier();  // the values have been read
#pragma unroll
  for (int i = 0; i < LINE_TILES; ++i)
#pragma unroll
    for (int tile = 0; tile < VALUE_TILES; ++tile) {
      const int pixel = i * 16 + row, channel = tile * 8 + column;
      const auto& sums = d_values[i][tile];
      if (pixel < END && is_pixel(pixel)) store_two(to.of_pair(pair, pixel) + channel, sums[0], sums[1]);
      if (pixel + 8 < END && is_pixel(pixel + 8)) store_two(to.of_pair(pair, pixel + 8) + channel, sums[2], sums[3]);
    }
}

// What comes after the products with scores, for one pair: content attention's part, and dV goes to its tile.
DEVICE void finish_pair(ValueSums& d_values, const Tiles& tiles, int pair, int row, int column, const Lines& lines,
                        const Arguments& arguments) {
  const long long image_head = lines.image_head(pair, arguments.heads);
  if constexpr (CONTENT_QUERIES) {
    add_content_to_queries(tiles.queries, tiles.gradient, pair, arguments.context + image_head * CONTEXT_SIZE);
    warp_barrier();
  }
  if constexpr (CONTENT_KEYS)
    differentiate_content(d_values, tiles.keys, tiles.values, pair, arguments.d_context + image_head * CONTEXT_SIZE,
                          arguments.d_context_turned + image_head * CONTEXT_SIZE, arguments.key_max + image_head * KEY,
                          arguments.key_offset + image_head * KEY);
  store_values(tiles.d_values(), d_values, pair, row, column);
}

// What a block brings into shared memory at a time: all of lines, or what belongs to their pixels as attending or as attended
// ones.
enum class Part { ALL, ATTENDING, ATTENDED };

// Those that need no change on the way go first: they travel while others are waited for.
template <Part PART, class LinesType>
DEVICE void load_lines(const Tiles& tiles, const LinesType& lines, const Arguments& arguments) {
  const int first_channel = lines.first_head * VALUE, channels = arguments.heads * VALUE;
  if constexpr (PART != Part::ATTENDED) copy_in<KEY>(tiles.queries, arguments.queries, lines);
  if constexpr (PART == Part::ALL && CONTENT_KEYS) copy_in<KEY>(tiles.keys, arguments.keys, lines);
  if constexpr (PART != Part::ATTENDING && !NORM_VALUES) copy_in<VALUE>(tiles.values, arguments.values, lines);
  if constexpr (PART == Part::ATTENDED) {
  } else if constexpr (POOL)
    copy_in_pooled<VALUE, TOGETHER == 1>(tiles.gradient, arguments.gradient, lines);
  else if constexpr (NORM_GRADIENT)
    copy_in<VALUE>(tiles.gradient, arguments.gradient, lines, [&](int head, int channel) {
      const int own = head * VALUE + channel;
      return [&, own, coefficients = OfChannels<3>(arguments.norm + first_channel + own, channels)](int slot) {
        const auto second = lines.start(arguments.second, slot, VALUE);
        return Moves{[=](int pixel) { return read_access(second(pixel) + own); },
                     [coefficients](float(&d_out)[ACCESS], const Access& read) {
                       const auto& [a, b, c] = coefficients.rows;
                       float input[ACCESS];
                       to_floats(input, read);
#pragma unroll
                       for (int i = 0; i < ACCESS; ++i) d_out[i] = a[i] * d_out[i] + (b[i] * input[i] + c[i]);
                     }};
      };
    });
  else
    copy_in<VALUE>(tiles.gradient, arguments.gradient, lines);
  if constexpr (PART != Part::ATTENDING && NORM_VALUES)
    copy_in<VALUE>(tiles.values, arguments.values, lines, scale_and_shift(arguments.norm + first_channel, channels, VALUE));
}

// Takes dQ to global memory; ADD: adds it to what is there.
template <bool ADD, class LinesType>
DEVICE void store_queries(const Tiles& tiles, const LinesType& lines, const Arguments& arguments) {
  if constexpr (ADD)
    copy_out<KEY, true>(arguments.d_queries, lines, tiles.queries, [](int, int) {
      return [](int) {
        return Moves{[](const T* to, int) { return read_access(to); },
                     [](float(&out)[ACCESS], const Access& there) {
                       float before[ACCESS];
                       to_floats(before, there);
#pragma unroll
                       for (int i = 0; i < ACCESS; ++i) out[i] += before[i];
                     }};
      };
    });
  else
    copy_out<KEY>(arguments.d_queries, lines, tiles.queries);
}

// Takes dV and dK to global memory; of all of lines dQ too.
template <Part PART, class LinesType>
DEVICE void store_lines(const Tiles& tiles, const LinesType& lines, const Arguments& arguments, const ChannelSums<VALUE>& sums) {
  const int first_channel = lines.first_head * VALUE, channels = arguments.heads * VALUE;
  if constexpr (PART == Part::ALL) store_queries<ACCUMULATE>(tiles, lines, arguments);
  if constexpr (STATISTICS) {
    float sum[ACCESS] = {}, sum_of_products[ACCESS] = {};
    copy_out<VALUE, false>(arguments.d_values, lines, tiles.d_values(), [&](int head, int channel) {
      const int own = head * VALUE + channel;
      return [&, own, moments = OfChannels<2>(arguments.moments + first_channel + own, channels)](int slot) {
        const auto values = lines.start(arguments.values, slot, VALUE);
        return Moves{[=](const T*, int pixel) { return read_access(values(pixel) + own); },
                     [=, &sum, &sum_of_products](float(&out)[ACCESS], const Access& value) {
                       const auto& [mean, inverse_deviation] = moments.rows;
                       float input[ACCESS];
                       to_floats(input, value);
#pragma unroll
                       for (int i = 0; i < ACCESS; ++i) {
                         sum[i] += out[i];
                         sum_of_products[i] += out[i] * (input[i] - mean[i]) * inverse_deviation[i];
                       }
                     }};
      };
    });
    sums.add(sum, sum_of_products);
  } else {
    copy_out<VALUE>(arguments.d_values, lines, tiles.d_values());
  }
  if constexpr (CONTENT_KEYS) copy_out<KEY>(arguments.d_keys, lines, tiles.keys);
}
