// Positional attention along one axis, forward: Y = S V with S = Q R^T, one x at a time (scores.cuh), or one pair of a line and
// a head at a time, by one warp, with scores in registers (IN_REGISTERS: skewed_scores.cuh).
//
// On the way in the values may be normalised (NORM_VALUES: a scale and a shift for each channel); on the way out content
// attention may be added (CONTENT: q times the image's context vectors), 2 x 2 pixels averaged (POOL), a scale, a shift
// and a ReLU applied (FINISH), and each channel's sum and sum of squares taken (STATISTICS). EARLY_TABLE: the embeddings were
// there before the kernel before this one began, and are read while that one still runs.
#include "skewed_scores.cuh"

constexpr int VALUE_WIDTH = padded(VALUE);
constexpr int OUT_WIDTH = QUERY_WIDTH > VALUE_WIDTH ? QUERY_WIDTH : VALUE_WIDTH;  // the output takes the queries' place

using QueryTile = Tile<OUT_WIDTH>;
using ValueTile = Tile<VALUE_WIDTH>;

struct Arguments {
  Map queries, values, out;
  const T* rel;         // (2 LENGTH - 1, KEY)
  const float* norm;    // (2, channels): scale and shift of the values
  const T* context;     // (image, head): context vectors, packed with values as columns
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
constexpr int TABLE = SCORES + (IN_REGISTERS ? 0 : SCORES_SIZE);

constexpr int OWN_PAIRS = (PAIRS + WARPS - 1) / WARPS;
constexpr int VALUE_TILES = VALUE_WIDTH / 8;
constexpr int VALUE_STEPS = SCORE_COLUMNS / ALONG;
using Sums = float[OWN_PAIRS][VALUE_TILES][4];
constexpr int LAST = TOGETHER == 1 ? END : PLACES;  // rows of the output from here on are not stored

// Whole lines are unrolled, and what serves all pixels of a line stays in registers where it fits. Of bundles nothing serves
// twice.
constexpr bool WHOLE_LINES = LENGTH <= BAND && WARPS % 8 == 0 && !BUNDLED && !IN_REGISTERS;

struct Values {
  Right<T, ALONG> right[VALUE_STEPS][VALUE_TILES];
};
// With two pixels together its values would serve half as many steps, and there are twice as many windows.
constexpr bool VALUES_IN_REGISTERS = IN_REGISTERS ? sizeof(Values) <= 64 : WHOLE_LINES && TOGETHER == 1;

struct Context {
  Right<T, QUERY_DEPTH> right[QUERY_STEPS][VALUE_TILES];
};
constexpr bool CONTEXT_IN_REGISTERS = CONTENT && sizeof(Context) <= (IN_REGISTERS ? 64 : 16);

// The windows of two pixels may have what sums, context vectors and some 24 others leave of a thread's registers.
constexpr int CONTEXT_REGISTERS = CONTENT ? sizeof(Context) / 4 * (CONTEXT_IN_REGISTERS ? OWN_PAIRS : 1) : 0;
constexpr int SPARE_REGISTERS = 65536 / (THREADS * BLOCKS) - 24 - static_cast<int>(sizeof(Sums)) / 4 - CONTEXT_REGISTERS;
constexpr bool WINDOWS_IN_REGISTERS = WHOLE_LINES && WINDOW_REGISTERS <= (TOGETHER == 1 ? 28 : SPARE_REGISTERS);

DEVICE void load_context(Context& context, const T* vectors) {
#pragma unroll
  for (int step = 0; step < QUERY_STEPS; ++step)
#pragma unroll
    for (int tile = 0; tile < VALUE_TILES; ++tile)
      context.right[step][tile] = load_right_packed<T, QUERY_DEPTH>(vectors, tile * QUERY_STEPS + step);
}

// Up to eight places have their first pixels in the upper eight rows of a product and their second ones in the lower eight.
constexpr bool FOLDED = TOGETHER == 2 && PLACES <= 8;
constexpr int CONTENT_PARTS = FOLDED ? 1 : TOGETHER;

// One of the pixels of a place, from x on, that is in a row of a product. Of eight places in a row four give the first one
// first, the others the second: these eight do not meet in one bank. Past the line they are zeros, or else pixels of the next
// line whose output is there already, and rows of the product that nobody uses.
DEVICE int pixel_in_row(int x, int row, int part) {
  if constexpr (TOGETHER == 1) return x + row;
  const int place = FOLDED ? row % 8 : x + row;
  return 2 * place + ((FOLDED ? row / 8 : part) ^ (place / 4 % 2));
}

// Adds q times the context vectors of a pair's image and head, for 16 places from x on.
DEVICE void add_content(float (&sums)[VALUE_TILES][4], QueryTile queries, int pair, int x, const Context& context) {
#pragma unroll
  for (int part = 0; part < CONTENT_PARTS; ++part)
#pragma unroll
    for (int step = 0; step < QUERY_STEPS; ++step) {
      const auto query = load_left<T, QUERY_DEPTH>(
          [&](int row) { return queries.of_pair(pair, pixel_in_row(x, row, part)) + step * QUERY_DEPTH; });
#pragma unroll
      for (int tile = 0; tile < VALUE_TILES; ++tile) multiply(sums[tile], query, context.right[step][tile]);
    }
}

// The pixel of step `step` of a sum along the ATTENDED pixels from `begin` on: scores in registers have their own order.
DEVICE int attended_pixel(int begin, int step) {
  return IN_REGISTERS ? place_in_line(step / 8, step % 8) : begin + step;
}

// The values of the ATTENDED pixels of a pair from `begin` on.
DEVICE void load_values(Values& own, ValueTile values, int pair, int begin) {
  if constexpr (VALUE_TILES == 1) {
    Right<T, ALONG> right[VALUE_STEPS];
    load_right_transposed_long(right, [&](int step) { return values.of_pair(pair, attended_pixel(begin, step)); });
#pragma unroll
    for (int i = 0; i < VALUE_STEPS; ++i) own.right[i][0] = right[i];
  } else {
#pragma unroll
    for (int i = 0; i < VALUE_STEPS; ++i)
      load_right_transposed(own.right[i], [&](int step) { return values.of_pair(pair, attended_pixel(begin, i * ALONG + step)); });
  }
}

// Adds S V for 16 attending places of a pair; `score(i)` is S along the i-th ALONG pixels.
template <class Score>
DEVICE void add_positional(float (&sums)[VALUE_TILES][4], const Values& values, int begin, Score score) {
#pragma unroll
  for (int i = 0; i < VALUE_STEPS; ++i) {
    if (LENGTH > BAND && begin + i * ALONG >= TILE_ROWS) break;  // the last band may reach past the line
    const Left<T, ALONG> left = score(i);
#pragma unroll
    for (int tile = 0; tile < VALUE_TILES; ++tile) multiply(sums[tile], left, values.right[i][tile]);
  }
}

// The same with scores in shared memory.
DEVICE void add_positional(float (&sums)[VALUE_TILES][4], T* scores, const Values& values, int pair, int begin) {
  add_positional(sums, values, begin, [&](int i) {
    return load_left<T, ALONG>([&](int row) { return scores_of(scores, row, pair) + i * ALONG; });
  });
}

// The context vectors of a pair's image and head.
DEVICE void load_context(Context& context, int pair, const Lines& lines, const Arguments& arguments) {
  load_context(context, arguments.context + lines.image_head(pair, arguments.heads) * VALUE_WIDTH * QUERY_WIDTH);
}

// The same with the context vectors in registers or not.
DEVICE void add_content(float (&sums)[VALUE_TILES][4], QueryTile queries, int pair, int x, const Lines& lines,
                        const Arguments& arguments, const Context& context) {
  if constexpr (CONTEXT_IN_REGISTERS) {
    add_content(sums, queries, pair, x, context);
  } else {
    Context loaded;
    load_context(loaded, pair, lines, arguments);
    add_content(sums, queries, pair, x, loaded);
  }
}

// Stores the output of 16 places of a pair from x on where its queries were; of two pixels together it is the mean.
DEVICE void store_pair(float (&sums)[VALUE_TILES][4], QueryTile queries, int pair, int x, int row, int column) {
#pragma unroll
  for (int tile = 0; tile < VALUE_TILES; ++tile) {
    const int channel = tile * 8 + column;
    auto& out = sums[tile];
    if constexpr (TOGETHER == 2)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] *= 0.5f;
    if (x + row < LAST && is_pixel(x + row)) store_two(queries.of_pair(pair, x + row) + channel, out[0], out[1]);
    if (x + row + 8 < LAST && is_pixel(x + row + 8))
      store_two(queries.of_pair(pair, x + row + 8) + channel, out[2], out[3]);
  }
}

// The output of 16 places from x on. It goes where the queries of as many pixels were, which nobody needs any more but for
// content attention, which is added first.
DEVICE void store_output(Sums& sums, QueryTile queries, int x, const Lines& lines, const Arguments& arguments,
                         const Context (&contexts)[OWN_PAIRS]) {
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
  for (int own = 0; own < OWN_PAIRS; ++own) {
    const int pair = warp_index() + own * WARPS;
    if (pair >= PAIRS) break;
    if constexpr (CONTENT) {
      if constexpr (!FOLDED) add_content(sums[own], queries, pair, x, lines, arguments, contexts[own]);
      warp_barrier();
    }
    store_pair(sums[own], queries, pair, x, row, column);
  }
}

// The places from X0 on of lines that fit into one band.
template <int X0>
DEVICE void attend(QueryTile queries, ValueTile values, const Values (&own_values)[OWN_PAIRS], T* scores, const T* table,
                   const Windows& windows, const Lines& lines, const Arguments& arguments,
                   const Context (&contexts)[OWN_PAIRS]) {
  const int warp = warp_index();
  if constexpr (WINDOWS_IN_REGISTERS) {
    constexpr int EIGHT = X0 * TOGETHER / 8;
    if (X0 + warp < PLACES) score_place<EIGHT>(scores, warp, queries, X0 + warp, windows);
    if constexpr (WARPS == 8)
      if (X0 + 8 + warp < PLACES) score_place<EIGHT + TOGETHER>(scores, warp + 8, queries, X0 + 8 + warp, windows);
  } else {
    constexpr int SCORED = TOGETHER == 2 && PLACES - X0 < 16 ? PLACES - X0 : 16;
    for (int slot = warp; slot < SCORED; slot += WARPS)
      if (X0 + slot < PLACES) score_place(scores, slot, queries, X0 + slot, table, 0);
  }
  block_barrier();
  Sums sums = {};
#pragma unroll
  for (int own = 0; own < OWN_PAIRS; ++own)
    if (const int pair = warp + own * WARPS; pair < PAIRS) {
      if constexpr (CONTENT && FOLDED) {
        add_content(sums[own], queries, pair, X0, lines, arguments, contexts[own]);
#pragma unroll
        for (auto& out : sums[own]) out[0] += out[2], out[1] += out[3];
      }
      if constexpr (VALUES_IN_REGISTERS) {
        add_positional(sums[own], scores, own_values[own], pair, 0);
      } else {
        Values right;
        load_values(right, values, pair, 0);
        add_positional(sums[own], scores, right, pair, 0);
      }
    }
  block_barrier();
  store_output(sums, queries, X0, lines, arguments, contexts);
  if constexpr (X0 + 16 < PLACES)
    attend<X0 + 16>(queries, values, own_values, scores, table, windows, lines, arguments, contexts);
}

// The same for longer lines, and for bundles.
DEVICE void attend_long(QueryTile queries, ValueTile values, T* scores, const T* table, const Lines& lines,
                        const Arguments& arguments, const Context (&contexts)[OWN_PAIRS]) {
  const int warp = warp_index();
  for (int x0 = 0; x0 < PLACES; x0 += 16) {
    Sums sums = {};
    for (int band = 0; band < LENGTH; band += BAND) {
      for (int slot = warp; slot < SLOTS; slot += WARPS)
        if (x0 + slot < LAST && is_pixel(x0 + slot)) score_place(scores, slot, queries, x0 + slot, table, band);
      block_barrier();
#pragma unroll
      for (int own = 0; own < OWN_PAIRS; ++own)
        if (warp + own * WARPS < PAIRS) {
          Values right;
          load_values(right, values, warp + own * WARPS, band);
          add_positional(sums[own], scores, right, warp + own * WARPS, band);
        }
      block_barrier();
    }
    store_output(sums, queries, x0, lines, arguments, contexts);
  }
}

// What a pair keeps in registers over its pixels leaves so many to the table's groups, which all pairs meet: besides there are
// the queries, products and scores of 16 pixels, their output, the sums of channels and some 30 others.
constexpr int OF_16_PIXELS = 4 * QUERY_STEPS + 2 * (SCORE_GROUPS + 2) + 4 * VALUE_TILES;
constexpr int OF_A_PAIR = (VALUES_IN_REGISTERS ? sizeof(Values) / 4 : 0) + (CONTEXT_IN_REGISTERS ? sizeof(Context) / 4 : 0);
constexpr int FREE_REGISTERS = 65536 / (THREADS * BLOCKS) - OF_16_PIXELS - OF_A_PAIR - (STATISTICS ? 2 * ACCESS : 0) - 30;
using ScoreTable = TableGroups<IN_REGISTERS && TABLE_REGISTERS <= FREE_REGISTERS>;

// What a warp has in registers of one pair.
struct Pair {
  int number;
  Values values;
  Context context;
};

// The pixels from X0 on of a pair, by one warp, which reads the queries of 16 of them and then stores the output there.
template <int X0>
DEVICE void attend_in_registers(QueryTile queries, ValueTile values, const Pair& pair, const ScoreTable& table, const Skew& skew,
                                const Lines& lines, const Arguments& arguments) {
  Left<T, QUERY_DEPTH> query[QUERY_STEPS];
#pragma unroll
  for (int step = 0; step < QUERY_STEPS; ++step)
    query[step] =
        load_left<T, QUERY_DEPTH>([&](int row) { return queries.of_pair(pair.number, X0 + row) + step * QUERY_DEPTH; });
  ScoreWords upper, lower;
  score_pixels<X0>(upper, lower, query, table, skew);

  float sums[VALUE_TILES][4] = {};
  // Sums are 16 long: of an odd number of groups the last one has zeros behind it.
  auto score = [&](int i) {
    constexpr int LAST_GROUP = SCORE_GROUPS - 1;
    Left<T, ALONG> left{{upper[2 * i], lower[2 * i], 0, 0}};
    if (2 * i < LAST_GROUP) left.words[2] = upper[2 * i + 1], left.words[3] = lower[2 * i + 1];
    return left;
  };
  if constexpr (VALUES_IN_REGISTERS) {
    add_positional(sums, pair.values, 0, score);
  } else {
    Values loaded;
    load_values(loaded, values, pair.number, 0);
    add_positional(sums, loaded, 0, score);
  }
  if constexpr (CONTENT) add_content(sums, queries, pair.number, X0, lines, arguments, pair.context);
  warp_barrier();
  store_pair(sums, queries, pair.number, X0, lane_index() / 4, lane_index() % 4 * 2);
  if constexpr (X0 + 16 < LENGTH) attend_in_registers<X0 + 16>(queries, values, pair, table, skew, lines, arguments);
}

// The mean of 2 x 2 pixels, or of two lines of means of two.
template <class Change>
DEVICE void copy_out_pooled(const Map& map, const Lines& lines, QueryTile tile, Change change) {
  constexpr int ALONG_LINE = 2 / TOGETHER, COUNT = 2 * ALONG_LINE;
  const Lines pooled = lines.pooled();
  Accesses<VALUE, LINES / 2, LENGTH / 2>::visit([&](int head, int channel) {
    return [&, head, channel, along = change(head, channel)](int slot) {
      const auto changes = along(slot);
      const auto to = pooled.start(map, slot, VALUE);
      return Moves{[](int) { return Nothing{}; },
                   [=, &lines](Nothing, int pixel) {
                     if (!lines.exists(2 * slot)) return;
                     float mean[ACCESS] = {};
#pragma unroll
                     for (int i = 0; i < COUNT; ++i) {
                       const int of_two = ALONG_LINE * pixel + i % ALONG_LINE;
                       float values[ACCESS];
                       to_floats(values, read_access(tile.at(2 * slot + i / ALONG_LINE, of_two, head) + channel));
#pragma unroll
                       for (int j = 0; j < ACCESS; ++j) mean[j] += values[j] * (1.f / COUNT);
                     }
                     changes.write(mean, Nothing{});
                     write_access(to(pixel) + head * VALUE + channel, mean);
                   }};
    };
  });
}

KERNEL(THREADS, BLOCKS) line_forward(const Arguments arguments) {
  assume_threads(THREADS);
  SHARED_MEMORY(memory);
  T* const shared = reinterpret_cast<T*>(memory);
  const QueryTile queries{shared};
  const ValueTile values{shared + VALUE_TILE};
  T* const scores = shared + SCORES;
  T* const table = shared + TABLE;
  const int warp = warp_index();

  fill_with_zeros(shared, TABLE);
  if constexpr (EARLY_TABLE) copy_table(table, arguments.rel);
  take_turn();
  if constexpr (!EARLY_TABLE) copy_table(table, arguments.rel);
  block_barrier();
  Windows windows;
  if constexpr (WINDOWS_IN_REGISTERS) windows.load(table);
  const ScoreTable table_groups{table};
  const Skew skew;

  Lines lines{arguments.total_lines, arguments.lines_per_image, block_row() * HEADS};
  const int first_channel = lines.first_head * VALUE, channels = arguments.heads * VALUE;
  float sum[ACCESS] = {}, sum_of_squares[ACCESS] = {};

  // What happens to an output on its way.
  auto finish = [&](int head, int channel) {
    const int own = first_channel + head * VALUE + channel;
    float centre[ACCESS];
    if constexpr (STATISTICS && IN_REGISTERS) load_floats(centre, arguments.centre + own);
    return [=, &arguments, &sum, &sum_of_squares](int) {
      auto change = [=, &arguments, &sum, &sum_of_squares](float(&out)[ACCESS], Nothing) {
        if constexpr (FINISH) {
          float scale[ACCESS], shift[ACCESS];
          load_floats(scale, arguments.finish + own);
          load_floats(shift, arguments.finish + channels + own);
#pragma unroll
          for (int i = 0; i < ACCESS; ++i) {
            out[i] = out[i] * scale[i] + shift[i];
            out[i] = out[i] < 0.f ? 0.f : out[i];  // a NaN stays one
          }
        }
        if constexpr (STATISTICS) {
          float here[ACCESS];  // where registers are few
          if constexpr (!IN_REGISTERS) load_floats(here, arguments.centre + own);
#pragma unroll
          for (int i = 0; i < ACCESS; ++i) {
            const float distance = out[i] - (IN_REGISTERS ? centre : here)[i];
            sum[i] += distance, sum_of_squares[i] += distance * distance;
          }
        }
      };
      return Moves{[](const T*, int) { return Nothing{}; }, change};
    };
  };

  const int items = count_items(arguments.total_lines, arguments.lines_per_image);
  // Neighbouring lines go to the same block: they share their image's context vectors.
  const int begin = static_cast<int>(static_cast<long long>(items) * block_index() / block_count());
  const int end = static_cast<int>(static_cast<long long>(items) * (block_index() + 1) / block_count());
  for (int item = begin; item < end; ++item) {
    lines.move_to_item(item);
    copy_in<KEY>(queries, arguments.queries, lines);
    if constexpr (NORM_VALUES)
      copy_in<VALUE>(values, arguments.values, lines, scale_and_shift(arguments.norm + first_channel, channels, VALUE));
    else
      copy_in<VALUE>(values, arguments.values, lines);
    Context contexts[OWN_PAIRS];
    if constexpr (CONTEXT_IN_REGISTERS && !IN_REGISTERS)
#pragma unroll
      for (int own = 0; own < OWN_PAIRS; ++own)
        if (const int pair = warp + own * WARPS; pair < PAIRS) load_context(contexts[own], pair, lines, arguments);
    wait_for_copies();
    block_barrier();

    if constexpr (IN_REGISTERS) {
#pragma unroll 1
      for (int number = warp; number < PAIRS; number += WARPS) {
        Pair pair;
        pair.number = number;
        if constexpr (CONTEXT_IN_REGISTERS) load_context(pair.context, number, lines, arguments);
        if constexpr (VALUES_IN_REGISTERS) load_values(pair.values, values, number, 0);
        attend_in_registers<0>(queries, values, pair, table_groups, skew, lines, arguments);
      }
    } else if constexpr (WHOLE_LINES) {
      Values own_values[OWN_PAIRS];
      if constexpr (VALUES_IN_REGISTERS)
#pragma unroll
        for (int own = 0; own < OWN_PAIRS; ++own)
          if (warp + own * WARPS < PAIRS) load_values(own_values[own], values, warp + own * WARPS, 0);
      attend<0>(queries, values, own_values, scores, table, windows, lines, arguments, contexts);
    } else {
      attend_long(queries, values, scores, table, lines, arguments, contexts);
    }
    block_barrier();
    if constexpr (POOL)
      copy_out_pooled(arguments.out, lines, queries, finish);
    else
      copy_out<VALUE, FINISH>(arguments.out, lines, queries, finish);
    block_barrier();
    if constexpr (KEY < QUERY_WIDTH) {  // a bad image leaves more than zeros in the padding
      fill_with_zeros(shared, VALUE_TILE);
      block_barrier();
    }
  }
  if constexpr (STATISTICS) {
    const ChannelSums<VALUE> sums{reinterpret_cast<float*>(shared)};
    sums.set(sum, sum_of_squares);
    sums.write(arguments.statistics, channels, first_channel);
  }
}
