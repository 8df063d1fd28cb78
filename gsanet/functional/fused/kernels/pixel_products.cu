// Sums over the pixels of two maps: Y^T X, of the products of each channel of y with each one of x, and Y^T 1, of the channels of
// y themselves.
//
// A block has ROWS channels of y and COLUMNS of x. It goes through every block_count()-th stretch of LENGTH pixels, and the next
// STAGES - 1 of them are on their way meanwhile. In shared memory as in global memory the pixels are rows, and the sums run
// across them: both operands are turned as they are loaded. A warp has UNIT_ROWS x UNIT_COLUMNS of the products, in registers,
// and each SETS-th group of 16 pixels. It adds the channels of y as they are in its operands. In the end the sets' sums are added
// through shared memory, in order, and left in `partial`; `sum_pixel_products` adds what blocks have left.
//
// SYMMETRIC: x is y. What is under the diagonal is left out: blocks are those above and on it, and where one block has all
// channels (WHOLE) units of warps are too. If it is one unit its two operands are the same registers.
//
// MAP: as each stretch of y is there, y WEIGHT goes to `out`, and the channels of y are not added up. With WEIGHT that of a 1x1
// convolution of x and y the gradient of its output, `out` is the gradient of x, and Y^T X that of the weight. A warp has 16 columns
// of `out`, for which its part of the weight stays in registers, and one of MAP_SETS parts of the stretch.
#include "pixels.cuh"

using T = SCALAR;

constexpr int THREADS = 32 * WARPS;
constexpr int ACCESS = PER_ACCESS<T>;
constexpr bool TRIANGLE = SYMMETRIC && WHOLE;
constexpr int ROW_UNITS = ROWS / UNIT_ROWS, COLUMN_UNITS = COLUMNS / UNIT_COLUMNS;
constexpr int UNITS = TRIANGLE ? ROW_UNITS * (ROW_UNITS + 1) / 2 : ROW_UNITS * COLUMN_UNITS;
constexpr int SETS = WARPS / UNITS;
constexpr bool ALONE = TRIANGLE && UNITS == 1;
constexpr int DOWN = UNIT_ROWS / 16, ALONG = UNIT_COLUMNS / 8;  // fragments of a unit
// Warps that have the same rows share the sums of these.
constexpr int SHARES = TRIANGLE ? 1 : COLUMN_UNITS < DOWN ? COLUMN_UNITS : DOWN;
static_assert(!IS_FLOAT<T>, "16-bit scalars");
static_assert(ROWS % 32 == 0 && COLUMNS % 32 == 0, "rows of shared memory that are an odd number of 16 bytes apart");
static_assert(ROW_UNITS * UNIT_ROWS == ROWS && COLUMN_UNITS * UNIT_COLUMNS == COLUMNS, "whole units");
static_assert(DOWN * 16 == UNIT_ROWS && UNIT_COLUMNS % 16 == 0 && DOWN % SHARES == 0, "whole fragments");
static_assert(SETS * UNITS == WARPS && LENGTH % (16 * SETS) == 0, "all warps have the same work");
static_assert(!SYMMETRIC || ROWS == COLUMNS, "a square");
static_assert(!TRIANGLE || UNIT_ROWS == UNIT_COLUMNS, "squares");
static_assert(STAGES > 1, "one to work on, one on its way");
constexpr int MAP_GROUPS = COLUMNS / 16, MAP_SETS = MAP ? WARPS / MAP_GROUPS : 1, MAP_LENGTH = LENGTH / MAP_SETS;
static_assert(!MAP || (WHOLE && !SYMMETRIC), "all channels in one block");
static_assert(!MAP || (MAP_SETS * MAP_GROUPS == WARPS && MAP_LENGTH * MAP_SETS == LENGTH && MAP_LENGTH % 16 == 0),
              "all warps have the same work");

// Shared memory, in scalars: STAGES stretches of y and, unless it is the same, of x. Later, in floats, 16 rows of all warps.
constexpr int Y_ROW = ROWS + ACCESS, X_ROW = COLUMNS + ACCESS;
constexpr int STAGE = LENGTH * (TRIANGLE ? Y_ROW : Y_ROW + X_ROW);
constexpr int SUM_ROW = UNIT_COLUMNS + 8;  // four rows of eight floats never meet in one bank

struct Arguments {
  const T* x;       // (pixels, columns)
  const T* y;       // (pixels, rows)
  float* partial;   // (blocks, rows * columns + rows): products, sums; with MAP, products only
  const T* weight;  // (rows, columns)
  T* out;           // (pixels, columns)
  int x_stride;     // from pixel to pixel
  int y_stride;
  int pixels;
  int columns;
  int rows;
};

struct Place {
  int row, column;
};

// Where something is, of those that are on the diagonal of a square or right of it, counted by rows.
DEVICE Place in_triangle(int number, int side) {
  int row = 0;
  for (; number >= side - row; ++row) number -= side - row;
  return {row, row + number};
}

// Which of the channels a block has, and of these a unit.
DEVICE Place place_of_block(const Arguments& arguments) {
  const int down = arguments.rows / ROWS;
  if constexpr (WHOLE)
    return {0, 0};
  else if constexpr (SYMMETRIC)
    return in_triangle(block_row(), down);
  else
    return {block_row() % down, block_row() / down};
}

DEVICE Place place_of_unit(int unit) {
  if constexpr (TRIANGLE)
    return in_triangle(unit, ROW_UNITS);
  else
    return {unit / COLUMN_UNITS, unit % COLUMN_UNITS};
}

// What a warp has.
struct Part {
  int set, share;
  Place unit;

  DEVICE Part() {
    const int warp = anew(warp_index());
    set = warp / UNITS, unit = place_of_unit(warp % UNITS), share = unit.column % SHARES;
  }
};

// What a warp has: the products of its unit, and sums of its share of the unit's rows. Of rows lane / 4 and lane / 4 + 8 of each
// 16 a lane has those pixels that it has of the left operand.
struct Sums {
  float products[DOWN][ALONG][4] = {};
  float totals[DOWN / SHARES][2] = {};

  // Adds 16 pixels: `rows` and `columns` are the first one's channels of the unit in shared memory.
  DEVICE void add(const T* rows, const T* columns, int share) {
    Left<T, 16> left[DOWN];
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
      left[i] = load_left_transposed<T, 16>([&](int pixel) { return rows + pixel * Y_ROW + i * 16; });
#pragma unroll
    for (int j = 0; j < ALONG; j += 2) {
      Right<T, 16> right[2];
      if constexpr (ALONE)
        right[0] = {{left[j / 2].words[0], left[j / 2].words[2]}}, right[1] = {{left[j / 2].words[1], left[j / 2].words[3]}};
      else
        load_right_transposed(right, [&](int pixel) { return columns + pixel * X_ROW + j * 8; });
#pragma unroll
      for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int eight = 0; eight < 2; ++eight)
          if (!ALONE || i <= j / 2) multiply(products[i][j + eight], left[i], right[eight]);
    }
    if constexpr (MAP) return;
#pragma unroll
    for (int i = 0; i < DOWN / SHARES; ++i) {
      Left<T, 16> own = left[i * SHARES];
#pragma unroll
      for (int other = 1; other < SHARES; ++other)
        if (share == other) own = left[i * SHARES + other];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float first, second;
        unpack<T>(own.words[j], first, second);
        totals[i][j % 2] += first + second;
      }
    }
  }

  // 16 rows of products, number i of the unit, as (16, SUM_ROW).
  DEVICE void write(float* to, int i) const {
    to += lane_index() / 4 * SUM_ROW + lane_index() % 4 * 2;
#pragma unroll
    for (int j = ALONE ? 2 * i : 0; j < ALONG; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2*>(to + half * 8 * SUM_ROW + j * 8) =
            make_float2(products[i][j][half * 2], products[i][j][half * 2 + 1]);
  }

  // The sums, to those of all the unit's rows.
  DEVICE void write_totals(float* to, int share) const {
#pragma unroll
    for (int i = 0; i < DOWN / SHARES; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = totals[i][half];
        total += shuffle_xor(total, 1);
        total += shuffle_xor(total, 2);
        if (lane_index() % 4 == 0) to[(i * SHARES + share) * 16 + half * 8 + lane_index() / 4] = total;
      }
  }
};

// A warp's columns of y WEIGHT. They are in such an order that a lane has four neighbours of its pixels: of the two products side
// by side, in which lanes l % 4 = q have columns 2 q and 2 q + 1, number j has columns 4 q + 2 j and the next one of `out`.
struct Map {
  Right<T, 16> steps[MAP ? ROWS / 16 : 1][2];
  int first_pixel, column;  // the first one of the warp in a stretch, and of the lane's four

  DEVICE Map(const Arguments& arguments) {
    if constexpr (!MAP) return;
    const int warp = anew(warp_index()), group = warp % MAP_GROUPS * 16, eighth = lane_index() / 4, four = lane_index() % 4;
    first_pixel = warp / MAP_GROUPS * MAP_LENGTH, column = group + four * 4;
    const T* const from = arguments.weight + four * 2 * COLUMNS + group + eighth / 2 * 4 + eighth % 2;
#pragma unroll
    for (int step = 0; step < ROWS / 16; ++step)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const T* const place = from + (step * 16 + half * 8) * COLUMNS + j * 2;
          steps[step][j].words[half] = place[0].bits | static_cast<Word>(place[COLUMNS].bits) << 16;
        }
  }

  // Of the stretch at `pixels` in shared memory, of which `count` exist, to where its first pixel is in `out`.
  DEVICE void write(const T* pixels, T* out, int count) const {
    if constexpr (!MAP) return;
    pixels += first_pixel * Y_ROW;
    float products[MAP_LENGTH / 16][2][4] = {};
#pragma unroll
    for (int step = 0; step < ROWS / 16; ++step)
#pragma unroll
      for (int i = 0; i < MAP_LENGTH / 16; ++i) {
        const Left<T, 16> left = load_left<T, 16>([&](int row) { return pixels + (i * 16 + row) * Y_ROW + step * 16; });
#pragma unroll
        for (int j = 0; j < 2; ++j) multiply(products[i][j], left, steps[step][j]);
      }
    const int own = first_pixel + lane_index() / 4;
    out += static_cast<long long>(own) * COLUMNS + column;
#pragma unroll
    for (int i = 0; i < MAP_LENGTH / 16; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&one)[4] = products[i][0], (&other)[4] = products[i][1];
        const int down = i * 16 + half * 8;
        if (own + down < count)
          *reinterpret_cast<uint2*>(out + down * COLUMNS) =
              make_uint2(pack<T>(one[half * 2], one[half * 2 + 1]), pack<T>(other[half * 2], other[half * 2 + 1]));
      }
  }
};

KERNEL(THREADS, BLOCKS) pixel_products(const Arguments arguments) {
  assume_threads(THREADS);
  SHARED_MEMORY(memory);
  T* const shared = reinterpret_cast<T*>(memory);
  const Place block = place_of_block(arguments);
  const bool same = SYMMETRIC && (WHOLE || block.row == block.column);
  const int stretches = (arguments.pixels + LENGTH - 1) / LENGTH;

  // All pixels of a stretch that does not exist become zeros, for nobody: cheaper than a branch in the way of the products.
  auto fetch_stretch = [&](int number, int stage) {
    const bool exists = number < stretches;
    T* const to = shared + stage * STAGE;
    const long long first = exists ? static_cast<long long>(number) * LENGTH : 0;
    const int count = exists ? arguments.pixels - number * LENGTH : 0;
    const T* const y = arguments.y + first * arguments.y_stride + block.row * ROWS;
    const T* const x = arguments.x + first * arguments.x_stride + block.column * COLUMNS;
    fetch_pixels<THREADS, LENGTH, ROWS, Y_ROW>(to, y, arguments.y_stride, count);
    if (!same) fetch_pixels<THREADS, LENGTH, COLUMNS, X_ROW>(to + LENGTH * Y_ROW, x, arguments.x_stride, count);
    end_group();
  };
  take_turn();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch_stretch(block_index() + i * block_count(), i);
  const Map map(arguments);
  Sums sums;
  const Part part;
  int stage = 0;
  for (int number = block_index(); number < stretches; number += block_count()) {
    wait_for_groups<STAGES - 2>();
    block_barrier();  // the pixels are there, and nobody works on those before them
    const T* const y = shared + stage * STAGE + part.set * 16 * Y_ROW + part.unit.row * UNIT_ROWS;
    const T* const x =
        shared + stage * STAGE + (same ? 0 : LENGTH * Y_ROW) + part.set * 16 * X_ROW + part.unit.column * UNIT_COLUMNS;
    sums.add(y, x, part.share);
    fetch_stretch(number + (STAGES - 1) * block_count(), stage == 0 ? STAGES - 1 : stage - 1);
#pragma unroll 3
    for (int i = 1; i < LENGTH / 16 / SETS; ++i) sums.add(y + i * SETS * 16 * Y_ROW, x + i * SETS * 16 * X_ROW, part.share);
    map.write(shared + stage * STAGE, arguments.out + static_cast<long long>(number) * LENGTH * COLUMNS,
              arguments.pixels - number * LENGTH);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }

  wait_for_copies();  // of what does not exist
  float* const left = reinterpret_cast<float*>(memory);  // (SETS, UNITS, 16, SUM_ROW)
  const long long products = static_cast<long long>(arguments.rows) * arguments.columns;
  float* const partial = arguments.partial + block_index() * (products + (MAP ? 0 : arguments.rows));
#pragma unroll
  for (int i = 0; i < DOWN; ++i) {
    block_barrier();
    sums.write(left + warp_index() * 16 * SUM_ROW, i);
    block_barrier();
    for (int four = thread_index(); four < UNITS * 16 * UNIT_COLUMNS / 4; four += THREADS) {
      const int sixteen = four / (UNIT_COLUMNS / 4), inner = four % (UNIT_COLUMNS / 4) * 4;  // a row of a unit, of 16
      const Place of = place_of_unit(sixteen / 16);
      const int row = block.row * ROWS + of.row * UNIT_ROWS + i * 16 + sixteen % 16;
      const int column = block.column * COLUMNS + of.column * UNIT_COLUMNS + inner;
      if (SYMMETRIC && column + 3 < row) continue;
      const float* const from = left + sixteen * SUM_ROW + inner;
      float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll
      for (int other = 1; other < SETS; ++other) {
        const float4 more = *reinterpret_cast<const float4*>(from + other * UNITS * 16 * SUM_ROW);
        sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
      }
      *reinterpret_cast<float4*>(partial + static_cast<long long>(row) * arguments.columns + column) = sum;
    }
  }
  // Of the blocks, and of the warps, that have the same rows, one each.
  if (MAP || block.column != (SYMMETRIC ? block.row : 0)) return;
  block_barrier();
  const Part again;
  if (TRIANGLE ? again.unit.column == again.unit.row : again.unit.column < SHARES)
    sums.write_totals(left + again.set * ROWS + again.unit.row * UNIT_ROWS, again.share);
  block_barrier();
  for (int row = thread_index(); row < ROWS; row += THREADS) {
    float sum = left[row];
#pragma unroll
    for (int other = 1; other < SETS; ++other) sum += left[other * ROWS + row];
    partial[products + block.row * ROWS + row] = sum;
  }
}
