// Positional attention along one axis, backward, of lines of 9 to 64 pixels in 16-bit scalars whose scores stay in registers
// (skew.cuh). One warp does all of a pair of a line and a head, 16 attending pixels x at a time, with no barrier of the block
// between loading lines and storing them:
//
//   P = Q R^T, moved along to S     dV += S^T dY
//   dS = dY V^T, moved back to dP   dQ = dP R (in the place of Q),   dR += dP^T Q
//
// Columns of S and P are in the order of `place_in_line`, and so are the rows of dV and of dR. The sums of dR stay in
// registers over all lines of a block. Words alive at one time are few: those of S are gone before those of dS come.
#include "gradient_parts.cuh"
#include "skew.cuh"

static_assert(!IS_FLOAT<T> && !POOL && LENGTH > 8 && LENGTH <= 64, "what is held in registers");

// All groups of rows of the table that a line meets: those of pixels from X0 on begin with group `first_group(X0)`. The
// last group of an odd number of them has zeros beside it.
constexpr int first_group(int x) { return (LINE_ROWS - 16 - x) / 4; }
constexpr int GROUP_PAIRS = (first_group(0) + PRODUCT_GROUPS + 1) / 2;
using TableSums = float[GROUP_PAIRS][QUERY_TILES][4];

// The row of the table, which may lie before it or behind it, that is at a place of half a line or of the other half.
DEVICE int table_row(int place, int half) { return first_offset(LINE_ROWS - 16) + place + HALF * half; }

// In shared memory the table lies twice, for the first and for the second column of a word, as groups have them: so that the
// eight rows of a group, four of each, are in different banks, the second lies an odd multiple of 64 bytes behind the first.
constexpr int GROUPS_AT_ONCE = 32 / QUERY_DEPTH;  // that one instruction loads
constexpr int GROUP_SIZE = 4 * TABLE_STRIDE;
constexpr int STORED_GROUPS = round_up(first_group(0) + round_up(PRODUCT_GROUPS, 4), 4) + 1;
constexpr int HALF_TABLE = STORED_GROUPS * GROUP_SIZE;

DEVICE void copy_both_tables(T* table, const T* rel) {
  for (int i = thread_index(); i < 2 * HALF_TABLE; i += THREADS) {
    const int row = table_row(i % HALF_TABLE / TABLE_STRIDE, i / HALF_TABLE), channel = i % TABLE_STRIDE;
    table[i] = row >= 0 && row < TABLE_ROWS && channel < KEY ? rel[row * KEY + channel] : T{};
  }
}

// A row of the table, as columns of groups have them.
DEVICE const T* row_of_column(const T* table, int column) {
  return table + column % 2 * HALF_TABLE + column / 8 * GROUP_SIZE + column % 8 / 2 * TABLE_STRIDE;
}

// Shared memory, in scalars.
constexpr int VALUE_TILE = QueryTile::SIZE;
constexpr int GRADIENT_TILE = VALUE_TILE + ValueTile::SIZE;
constexpr int KEY_TILE = GRADIENT_TILE + GradientTile::SIZE;
constexpr int TABLE = KEY_TILE + (CONTENT_KEYS ? QueryTile::SIZE : 0);
constexpr int TABLE_FLOATS = round_up(TABLE_ROWS * KEY, 4);  // dR, at the end, in the place of all this
constexpr int USED = TABLE + 2 * HALF_TABLE > 2 * TABLE_FLOATS ? TABLE + 2 * HALF_TABLE : 2 * TABLE_FLOATS;

// The pixel in a row of dV's sums. An odd number of groups leaves eight rows without one.
struct InGroups {
  DEVICE int operator()(int row) const { return row / 8 < SCORE_GROUPS ? place_in_line(row / 8, row % 8) : END; }
};

// The values of a pair as right operands whose columns are pixels.
struct Values {
  Right<T, VALUE_DEPTH> right[VALUE_STEPS][SCORE_GROUPS];

  DEVICE void load(ValueTile values, int pair) {
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; ++step)
      load_right(right[step], [&](int column) {
        return values.of_pair(pair, place_in_line(column / 8, column % 8)) + step * VALUE_DEPTH;
      });
  }
};
constexpr bool VALUES_IN_REGISTERS = LINE_TILES > 1 && sizeof(Values) <= 32;

// Groups of products: those that upper or lower rows of the 16 have nothing of are zero.
DEVICE Word upper_word(const ProductWords& upper, int group) {
  return group >= 2 && group < PRODUCT_GROUPS ? upper[group - 2] : 0;
}
DEVICE Word lower_word(const ProductWords& lower, int group) { return group < SCORE_GROUPS + 2 ? lower[group] : 0; }

// S of 16 pixels from X0 on: words of its upper and of its lower rows.
template <int X0>
DEVICE void score_pixels(ScoreWords& upper_scores, ScoreWords& lower_scores, QueryTile queries, int pair, const T* table,
                         const Skew& skew) {
  Left<T, QUERY_DEPTH> query[QUERY_STEPS];
#pragma unroll
  for (int step = 0; step < QUERY_STEPS; ++step)
    query[step] = load_left<T, QUERY_DEPTH>([&](int row) { return queries.of_pair(pair, X0 + row) + step * QUERY_DEPTH; });
  ProductWords upper, lower;
#pragma unroll
  for (int first = 0; first < PRODUCT_GROUPS; first += GROUPS_AT_ONCE) {
    float sums[GROUPS_AT_ONCE][4] = {};
#pragma unroll
    for (int step = 0; step < QUERY_STEPS; ++step) {
      Right<T, QUERY_DEPTH> right[GROUPS_AT_ONCE];
      load_right(right, [&](int column) {
        return row_of_column(table, column) + (first_group(X0) + first) * GROUP_SIZE + step * QUERY_DEPTH;
      });
#pragma unroll
      for (int i = 0; i < GROUPS_AT_ONCE; ++i)
        if (first + i < PRODUCT_GROUPS) multiply(sums[i], query[step], right[i]);
    }
#pragma unroll
    for (int i = 0; i < GROUPS_AT_ONCE; ++i) {
      const int group = first + i;
      if (group >= 2 && group < PRODUCT_GROUPS) upper[group - 2] = pack<T>(sums[i][0], sums[i][1]);
      if (group < SCORE_GROUPS + 2) lower[group] = pack<T>(sums[i][2], sums[i][3]);
    }
  }
  skew.score(upper_scores, upper);
  skew.score(lower_scores, lower);
}

// dV += S^T dY for 16 pixels from x on.
DEVICE void add_to_values(ValueSums& d_values, const ScoreWords& upper, const ScoreWords& lower, GradientTile gradient, int pair,
                          int x) {
  Right<T, 16> right[VALUE_TILES];
  load_right_transposed(right, [&](int row) { return gradient.of_pair(pair, x + row); });
#pragma unroll
  for (int i = 0; i < LINE_TILES; ++i) {
    const bool both = 2 * i + 1 < SCORE_GROUPS;
    const Left<T, 16> left{{turn_matrix(upper[2 * i]), both ? turn_matrix(upper[2 * i + 1]) : 0, turn_matrix(lower[2 * i]),
                            both ? turn_matrix(lower[2 * i + 1]) : 0}};
#pragma unroll
    for (int tile = 0; tile < VALUE_TILES; ++tile) multiply(d_values[i][tile], left, right[tile]);
  }
}

// dP of 16 pixels from x on, dS = dY V^T moved back.
DEVICE void differentiate_scores(ProductWords& upper, ProductWords& lower, const Values& values, GradientTile gradient, int pair,
                                 int x, const Skew& skew) {
  Left<T, VALUE_DEPTH> left[VALUE_STEPS];
#pragma unroll
  for (int step = 0; step < VALUE_STEPS; ++step)
    left[step] = load_left<T, VALUE_DEPTH>([&](int row) { return gradient.of_pair(pair, x + row) + step * VALUE_DEPTH; });
  ScoreWords upper_scores, lower_scores;
#pragma unroll
  for (int i = 0; i < SCORE_GROUPS; ++i) {
    float sums[4] = {};
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; ++step) multiply(sums, left[step], values.right[step][i]);
    upper_scores[i] = pack<T>(sums[0], sums[1]), lower_scores[i] = pack<T>(sums[2], sums[3]);
  }
  skew.unscore(upper, upper_scores);
  skew.unscore(lower, lower_scores);
}

// The table's groups 2 i and 2 i + 1 of pixels from X0 on as right operands whose sums run across rows, for all i.
template <int X0>
DEVICE void load_turned_table(Right<T, 16> (&right)[QUERY_TILES], const T* table, int i) {
  load_right_transposed(right, [&](int row) { return row_of_column(table, row) + (first_group(X0) + 2 * i) * GROUP_SIZE; });
}

// dQ = dP R and dR += dP^T Q for 16 pixels from X0 on.
template <int X0>
DEVICE void differentiate_products(TableSums& d_table, const ProductWords& upper, const ProductWords& lower, QueryTile queries,
                                   int pair, const T* table) {
  Right<T, 16> query[QUERY_TILES];
  load_right_transposed(query, [&](int row) { return queries.of_pair(pair, X0 + row); });
  float sums[QUERY_TILES][4] = {};
#pragma unroll
  for (int i = 0; i < (PRODUCT_GROUPS + 1) / 2; ++i) {
    const int first = 2 * i, second = 2 * i + 1;
    Right<T, 16> right[QUERY_TILES];
    load_turned_table<X0>(right, table, i);
    const Left<T, 16> products{
        {upper_word(upper, first), lower_word(lower, first), upper_word(upper, second), lower_word(lower, second)}};
    auto turned = [](bool there, Word word) { return there ? turn_matrix(word) : 0; };
    const Left<T, 16> turned_products{{turned(i > 0, products.words[0]), turned(i > 0 && second < PRODUCT_GROUPS, products.words[2]),
                                       turned(first < SCORE_GROUPS + 2, products.words[1]),
                                       turned(second < SCORE_GROUPS + 2, products.words[3])}};
#pragma unroll
    for (int tile = 0; tile < QUERY_TILES; ++tile) {
      multiply(sums[tile], products, right[tile]);
      multiply(d_table[first_group(X0) / 2 + i][tile], turned_products, query[tile]);
    }
  }
  warp_barrier();  // Q has been read
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < QUERY_TILES; ++tile) {
    if (X0 + row < END) store_two(queries.of_pair(pair, X0 + row) + tile * 8 + column, sums[tile][0], sums[tile][1]);
    if (X0 + row + 8 < END) store_two(queries.of_pair(pair, X0 + row + 8) + tile * 8 + column, sums[tile][2], sums[tile][3]);
  }
}

// Everything about a pair's pixels from X0 on; X0 is a constant so that registers have constant numbers.
template <int X0>
DEVICE void differentiate_pixels(ValueSums& d_values, TableSums& d_table, const Tiles& tiles, int pair, const T* table,
                                 const Values& values, const Skew& skew) {
  {
    ScoreWords upper, lower;
    score_pixels<X0>(upper, lower, tiles.queries, pair, table, skew);
    add_to_values(d_values, upper, lower, tiles.gradient, pair, X0);
  }
  ProductWords upper, lower;
  if constexpr (VALUES_IN_REGISTERS) {
    differentiate_scores(upper, lower, values, tiles.gradient, pair, X0, skew);
  } else {
    Values loaded;
    loaded.load(tiles.values, pair);
    differentiate_scores(upper, lower, loaded, tiles.gradient, pair, X0, skew);
  }
  differentiate_products<X0>(d_table, upper, lower, tiles.queries, pair, table);
  if constexpr (X0 + 16 < LENGTH) differentiate_pixels<X0 + 16>(d_values, d_table, tiles, pair, table, values, skew);
}

// Adds the warps' dR to (TABLE_ROWS, KEY) floats in shared memory, one warp after the other, and of each the first columns of
// words before the second ones: they may have the same row.
DEVICE void add_warps(float* shared, const TableSums& d_table) {
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
  for (int turn = 0; turn < 2 * WARPS; ++turn) {
    block_barrier();
    if (turn != 2 * warp_index() + row % 2) continue;
#pragma unroll
    for (int group = 0; group < 2 * GROUP_PAIRS; ++group) {
      const int offset = table_row(4 * group + row / 2, row % 2);
      if (offset < 0 || offset >= TABLE_ROWS) continue;
#pragma unroll
      for (int tile = 0; tile < QUERY_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (tile * 8 + column + i < KEY)
            shared[offset * KEY + tile * 8 + column + i] += d_table[group / 2][tile][group % 2 * 2 + i];
    }
  }
  block_barrier();
}

KERNEL(THREADS, BLOCKS) line_backward_registers(const Arguments arguments) {
  SHARED_MEMORY(memory);
  T* const shared = reinterpret_cast<T*>(memory);
  const Tiles tiles{{shared}, {shared + VALUE_TILE}, {shared + GRADIENT_TILE}, {shared + KEY_TILE}};
  T* const table = shared + TABLE;
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;

  fill_with_zeros(shared, TABLE);
  take_turn();
  copy_both_tables(table, arguments.rel);

  Lines lines{arguments.total_lines, arguments.lines_per_image, block_row() * HEADS};
  const ChannelSums<VALUE> sums_of_channels{reinterpret_cast<float*>(shared + USED)};
  if constexpr (STATISTICS) {
    const float zeros[ACCESS] = {};
    sums_of_channels.set(zeros, zeros);
  }
  block_barrier();
  const Skew skew;
  TableSums d_table = {};

  const int items = count_items(arguments.total_lines, arguments.lines_per_image);
  const int begin = static_cast<int>(static_cast<long long>(items) * block_index() / block_count());
  const int end = static_cast<int>(static_cast<long long>(items) * (block_index() + 1) / block_count());
  for (int item = begin; item < end; ++item) {
    lines.move_to_item(item);
    load_lines<Part::ALL>(tiles, lines, arguments);
    wait_for_copies();
    block_barrier();
#pragma unroll 1
    for (int pair = warp_index(); pair < PAIRS; pair += WARPS) {
      // Addresses are worked out for each pair: kept over all of them, they are more than there are registers.
      T* const here = shared + anew(0);
      const Tiles own{{here}, {here + VALUE_TILE}, {here + GRADIENT_TILE}, {here + KEY_TILE}};
      ValueSums d_values = {};
      Values values;
      if constexpr (VALUES_IN_REGISTERS) values.load(own.values, pair);
      differentiate_pixels<0>(d_values, d_table, own, pair, here + TABLE, values, skew);
      warp_barrier();  // dQ is there, and dY has been read
      finish_pair(d_values, own, pair, row, column, lines, arguments, InGroups{});
    }
    block_barrier();
    store_lines<Part::ALL>(tiles, lines, arguments, sums_of_channels);
    block_barrier();
    if constexpr (KEY < QUERY_WIDTH || VALUE < VALUE_WIDTH) {  // a bad image leaves more than zeros in the padding
      fill_with_zeros(shared, TABLE);
      block_barrier();
    }
  }
  float* const table_sums = reinterpret_cast<float*>(shared);
  fill_with_zeros(table_sums, TABLE_FLOATS);
  add_warps(table_sums, d_table);
  write_block_table(table_sums, arguments.d_rel);
  if constexpr (STATISTICS)
    sums_of_channels.write(arguments.statistics, arguments.heads * VALUE, lines.first_head * VALUE);
}
