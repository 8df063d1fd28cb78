// Positional attention along one axis, forward: Y = S V with S = Q R^T, one x at a time (scores.cuh).
//
// On the way in the values may be normalised (NORM_VALUES: a scale and a shift for each channel); on the way out content
// attention may be added (CONTENT: q times the image's context vectors), 2 x 2 pixels averaged (POOL), a scale, a shift
// and a ReLU applied (FINISH), and each channel's sum and sum of squares taken (STATISTICS).
#include "scores.cuh"

constexpr int VALUE_WIDTH = padded(VALUE);
constexpr int OUT_WIDTH = QUERY_WIDTH > VALUE_WIDTH ? QUERY_WIDTH : VALUE_WIDTH;  // the output takes the queries' place

using QueryTile = Tile<OUT_WIDTH>;
using ValueTile = Tile<VALUE_WIDTH>;

struct Arguments {
  Map queries, values, out;
  const T* rel;         // (2 LENGTH - 1, KEY)
  const float* norm;    // (2, channels): scale and shift of the values
  const T* context;     // (image, head, VALUE_WIDTH, QUERY_WIDTH): transposed context vectors
  const float* finish;  // (2, channels): scale and shift of the output
  const float* centre;  // (channels): what the statistics are taken about
  float* statistics;    // (block, 2, channels): sum and sum of squares
  int lines_per_image;
  int total_lines;
  int heads;  // of the whole map
};

// Shared memory, in scalars.
constexpr int VALUE_TILE = QueryTile::SIZE;
constexpr int SCORES = VALUE_TILE + ValueTile::SIZE;
constexpr int TABLE = SCORES + SCORES_SIZE;

// Adds q times the context vectors of a pair's image and head, for 16 pixels from x on.
DEVICE void add_content(float (&sums)[VALUE_WIDTH / 8][4], QueryTile queries, int pair, int x, const T* context) {
  constexpr int DEPTH = depth_of<T>(QUERY_WIDTH);
#pragma unroll
  for (int step = 0; step < QUERY_WIDTH; step += DEPTH) {
    const auto query = load_left<T, DEPTH>([&](int row) { return queries.of_pair(pair, x + row) + step; });
#pragma unroll
    for (int tile = 0; tile < VALUE_WIDTH / 8; ++tile)
      multiply(sums[tile], query, load_right_directly<T, DEPTH>([&](int channel) {
                 return context + (tile * 8 + channel) * QUERY_WIDTH + step;
               }));
  }
}

// Adds S V for 16 attending pixels of a pair and the ATTENDED pixels from `begin` on.
DEVICE void add_positional(float (&sums)[VALUE_WIDTH / 8][4], T* scores, ValueTile values, int pair, int begin) {
#pragma unroll
  for (int i = 0; i < SCORE_COLUMNS; i += ALONG) {
    if (LENGTH > BAND && begin + i >= TILE_ROWS) break;  // the last band may reach past the line
    const auto score = load_left<T, ALONG>([&](int row) { return scores_of(scores, row, pair) + i; });
    auto value = [&](int step) { return values.of_pair(pair, begin + i + step); };
#pragma unroll
    for (int tile = 0; tile < VALUE_WIDTH / 8; tile += 2) {
      if (tile + 1 < VALUE_WIDTH / 8) {
        Right<T, ALONG> right[2];
        load_right_transposed_pair<T, ALONG>(right[0], right[1], [&](int step) { return value(step) + tile * 8; });
        multiply(sums[tile], score, right[0]);
        multiply(sums[tile + 1], score, right[1]);
      } else {
        multiply(sums[tile], score, load_right_transposed<T, ALONG>([&](int step) { return value(step) + tile * 8; }));
      }
    }
  }
}

// The mean of 2 x 2 pixels: the block's lines come in twos, each two of one image.
template <class Change>
DEVICE void copy_out_pooled(const Map& map, const Lines& lines, QueryTile tile, Change change) {
  const Lines pooled{lines.first / 2, lines.total / 2, lines.per_image / 2, lines.first_head};
  Accesses<VALUE>::visit([&](int head, int channel) {
    return [&, head, channel, changed = change(head, channel)](int slot) {
      T* to = pooled.start(map, slot / 2, VALUE) + head * VALUE + channel;
      const bool exists = slot % 2 == 0 && lines.exists(slot);
      return [&, head, channel, slot, to, exists](int pixel) {
        if (!exists || pixel >= LENGTH / 2) return;
        float mean[ACCESS] = {};
        for (int corner = 0; corner < 4; ++corner) {
          float values[ACCESS];
          load_access(values, tile.at(slot + corner / 2, 2 * pixel + corner % 2, head) + channel);
#pragma unroll
          for (int i = 0; i < ACCESS; ++i) mean[i] += 0.25f * values[i];
        }
        T* target = to + static_cast<long long>(pixel) * map.pixel;
        changed(mean, slot, pixel, target);
        store_access(target, mean);
      };
    };
  });
}

KERNEL(THREADS, BLOCKS) line_forward(const Arguments arguments) {
  SHARED_MEMORY(memory);
  T* const shared = reinterpret_cast<T*>(memory);
  const QueryTile queries{shared};
  const ValueTile values{shared + VALUE_TILE};
  T* const scores = shared + SCORES;
  T* const table = shared + TABLE;
  const int warp = warp_index(), row = lane_index() / 4, column = lane_index() % 4 * 2;

  fill_with_zeros(shared, TABLE);
  copy_table(table, arguments.rel);
  block_barrier();

  Lines lines{0, arguments.total_lines, arguments.lines_per_image, block_row() * HEADS};
  const int first_channel = lines.first_head * VALUE, channels = arguments.heads * VALUE;
  ChannelSums<VALUE> sums_of_channels;

  // What happens to an output on its way.
  auto finish = [&](int head, int channel) {
    const int own = first_channel + head * VALUE + channel;
    float scale[ACCESS] = {}, shift[ACCESS] = {}, centre[ACCESS] = {};
    if constexpr (FINISH) {
      load_floats(scale, arguments.finish + own);
      load_floats(shift, arguments.finish + channels + own);
    }
    if constexpr (STATISTICS) load_floats(centre, arguments.centre + own);
    return [&sums_of_channels, scale, shift, centre](float(&out)[ACCESS], int, int, T*) {
#pragma unroll
      for (int i = 0; i < ACCESS; ++i) {
        if constexpr (FINISH) {
          out[i] = out[i] * scale[i] + shift[i];
          out[i] = out[i] < 0.f ? 0.f : out[i];  // a NaN stays one
        }
        if constexpr (STATISTICS) {
          const float distance = out[i] - centre[i];
          sums_of_channels.first[i] += distance;
          sums_of_channels.second[i] += distance * distance;
        }
      }
    };
  };

  const int items = (arguments.total_lines + LINES - 1) / LINES;
  // Neighbouring lines go to the same block: they share their image's context vectors.
  const int begin = static_cast<int>(static_cast<long long>(items) * block_index() / block_count());
  const int end = static_cast<int>(static_cast<long long>(items) * (block_index() + 1) / block_count());
  for (int item = begin; item < end; ++item) {
    lines.first = item * LINES;
    copy_in<KEY>(queries, arguments.queries, lines);
    if constexpr (NORM_VALUES)
      copy_in<VALUE>(values, arguments.values, lines, scale_and_shift(arguments.norm + first_channel, channels, VALUE));
    else
      copy_in<VALUE>(values, arguments.values, lines);
    wait_for_copies();
    block_barrier();

    for (int x0 = 0; x0 < LENGTH; x0 += 16) {
      float sums[(PAIRS + WARPS - 1) / WARPS][VALUE_WIDTH / 8][4] = {};
      for (int band = 0; band < LENGTH; band += BAND) {
        for (int slot = warp; slot < 16; slot += WARPS)
          if (x0 + slot < LENGTH) score_pixel(scores, slot, queries, x0 + slot, table, band);
        block_barrier();
#pragma unroll
        for (int own = 0; own < (PAIRS + WARPS - 1) / WARPS; ++own)
          if (warp + own * WARPS < PAIRS) add_positional(sums[own], scores, values, warp + own * WARPS, band);
        block_barrier();
      }
#pragma unroll
      for (int own = 0; own < (PAIRS + WARPS - 1) / WARPS; ++own) {
        const int pair = warp + own * WARPS;
        if (pair >= PAIRS) break;
        if constexpr (CONTENT) {
          const int slot = pair / HEADS;
          const long long image_head =
              static_cast<long long>(lines.image(lines.exists(slot) ? slot : 0)) * arguments.heads + lines.first_head + pair % HEADS;
          add_content(sums[own], queries, pair, x0, arguments.context + image_head * VALUE_WIDTH * QUERY_WIDTH);
          warp_barrier();
        }
#pragma unroll
        for (int tile = 0; tile < VALUE_WIDTH / 8; ++tile) {
          const int channel = tile * 8 + column;
          if (x0 + row < LENGTH) store_two(queries.of_pair(pair, x0 + row) + channel, sums[own][tile][0], sums[own][tile][1]);
          if (x0 + row + 8 < LENGTH)
            store_two(queries.of_pair(pair, x0 + row + 8) + channel, sums[own][tile][2], sums[own][tile][3]);
        }
      }
    }
    block_barrier();
    if constexpr (POOL)
      copy_out_pooled(arguments.out, lines, queries, finish);
    else
      copy_out<VALUE>(arguments.out, lines, queries, finish);
    block_barrier();
  }
  if constexpr (STATISTICS)
    sums_of_channels.write(arguments.statistics, channels, first_channel, reinterpret_cast<float*>(shared));
}
