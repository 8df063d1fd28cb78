// Positional attention along one axis, backward, of lines that are held as a whole (line_gradient.cuh). The sums of dR stay
// in registers over all lines of a block.
#include "line_gradient.cuh"

// Shared memory, in scalars.
constexpr int VALUE_TILE = QueryTile::SIZE;
constexpr int GRADIENT_TILE = VALUE_TILE + ValueTile::SIZE;
constexpr int KEY_TILE = GRADIENT_TILE + GradientTile::SIZE;
constexpr int SCORES = KEY_TILE + (CONTENT_KEYS ? QueryTile::SIZE : 0);
constexpr int TABLE = SCORES + SCORES_SIZE;

// Takes the block's dR to its place.
DEVICE void write_table(const TableSums& d_table, float* shared, float* d_rel) {
  fill_with_zeros(shared, round_up(TABLE_ROWS * KEY, 4));
  add_warps(shared, d_table);
  for (int i = thread_index(); i < TABLE_ROWS * KEY; i += THREADS)
    d_rel[static_cast<long long>(block_row() * block_count() + block_index()) * TABLE_ROWS * KEY + i] = shared[i];
}

KERNEL(THREADS, BLOCKS) line_backward(const Arguments arguments) {
  assume_threads(THREADS);
  SHARED_MEMORY(memory);
  T* const shared = reinterpret_cast<T*>(memory);
  const Tiles tiles{{shared}, {shared + VALUE_TILE}, {shared + GRADIENT_TILE}, {shared + KEY_TILE}};
  T* const scores = shared + SCORES;
  T* const table = shared + TABLE;
  const int warp = warp_index(), row = lane_index() / 4, column = lane_index() % 4 * 2;

  fill_with_zeros(shared, TABLE);
  take_turn();
  copy_table(table, arguments.rel);
  block_barrier();
  Windows windows;
  if constexpr (WINDOWS_IN_REGISTERS) windows.load(table);
  TurnedWindows turned;
  if constexpr (TURNED_IN_REGISTERS) turned.load(table);

  Lines lines{arguments.total_lines, arguments.lines_per_image, block_row() * HEADS};
  const ChannelSums<VALUE> sums_of_channels{reinterpret_cast<float*>(table + TABLE_SIZE)};
  if constexpr (STATISTICS) {
    const float zeros[ACCESS] = {};
    sums_of_channels.set(zeros, zeros);
  }
  TableSums d_table = {};

  const int items = count_items(arguments.total_lines, arguments.lines_per_image);
  const int begin = static_cast<int>(static_cast<long long>(items) * block_index() / block_count());
  const int end = static_cast<int>(static_cast<long long>(items) * (block_index() + 1) / block_count());
  for (int item = begin; item < end; ++item) {
    lines.move_to_item(item);
    load_lines<Part::ALL>(tiles, lines, arguments);
    wait_for_copies();
    block_barrier();

    ValueSums d_values[OWN_PAIRS] = {};
    differentiate_pixels<0>(d_values, d_table, tiles, scores, table, windows, turned);
    block_barrier();

#pragma unroll
    for (int own = 0; own < OWN_PAIRS; ++own) {
      const int pair = warp + own * WARPS;
      if (pair >= PAIRS) break;
      finish_pair(d_values[own], tiles, pair, row, column, lines, arguments);
    }
    block_barrier();
    store_lines<Part::ALL>(tiles, lines, arguments, sums_of_channels);
    block_barrier();
    if constexpr (KEY < QUERY_WIDTH || VALUE < VALUE_WIDTH) {  // a bad image leaves more than zeros in the padding
      fill_with_zeros(shared, SCORES);
      block_barrier();
    }
  }
  write_table(d_table, reinterpret_cast<float*>(shared), arguments.d_rel);
  if constexpr (STATISTICS)
    sums_of_channels.write(arguments.statistics, arguments.heads * VALUE, lines.first_head * VALUE);
}
