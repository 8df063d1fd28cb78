// Positional attention along one axis, backward, of lines in pieces of LENGTH pixels (line_gradient.cuh).
//
// Between a piece of attending pixels and a piece of attended ones there are 2 LENGTH - 1 offsets, so this pair of pieces is
// what a whole line is elsewhere, with a window of R in the place of R. A block goes through all pairs of its lines: dV stays
// in registers for all attending pieces, dQ is added up in global memory, by this block alone, and dR after each pair. What
// is taken once for each pixel comes where its sums end: content attention's dQ with the last attended piece, its dV and
// dK, and the batch norm's sums, with the last attending one.
#include "line_gradient.cuh"

static_assert(LENGTH % 8 == 0, "pieces begin at pixels that pooling and groups of eight agree with");

// Shared memory, in scalars. Keys come where queries were.
constexpr int VALUE_TILE = QueryTile::SIZE;
constexpr int GRADIENT_TILE = VALUE_TILE + ValueTile::SIZE;
constexpr int SCORES = GRADIENT_TILE + GradientTile::SIZE;
constexpr int TABLE = SCORES + SCORES_SIZE;
constexpr int WINDOW_FLOATS = round_up(TABLE_ROWS * KEY, 4);  // of dR, behind the table

// The rows of R from `first` on; those that R does not have are between pixels that do not exist.
DEVICE void copy_window(T* table, const T* rel, int first, int rows) {
  for (int i = thread_index(); i < TABLE_SIZE; i += THREADS) {
    const int row = first + i / TABLE_STRIDE, channel = i % TABLE_STRIDE;
    table[i] = row >= 0 && row < rows && channel < KEY ? rel[row * KEY + channel] : T{};
  }
}

// Adds dR's rows from `first` on to those of the block, and leaves zeros in shared memory. Whoever reads these rows of the
// block next, or writes there, comes after another barrier.
DEVICE void add_window(float* d_rel, float* window, const TableSums& d_table, int first, int rows) {
  add_warps(window, d_table);
  for (int i = thread_index(); i < TABLE_ROWS * KEY; i += THREADS) {
    const int row = first + i / KEY;
    if (row >= 0 && row < rows) d_rel[first * KEY + i] += window[i];
    window[i] = 0.f;
  }
}

KERNEL(THREADS, BLOCKS) line_backward_pieces(const Arguments arguments) {
  assume_threads(THREADS);
  SHARED_MEMORY(memory);
  T* const shared = reinterpret_cast<T*>(memory);
  const Tiles tiles{{shared}, {shared + VALUE_TILE}, {shared + GRADIENT_TILE}, {shared}};
  T* const table = shared + TABLE;
  float* const window = reinterpret_cast<float*>(table + TABLE_SIZE);
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
  const int length = arguments.length, rows = 2 * length - 1;
  float* const d_rel = arguments.d_rel + static_cast<long long>(block_row() * block_count() + block_index()) * rows * KEY;

  fill_with_zeros(shared, TABLE);
  fill_with_zeros(window, WINDOW_FLOATS);
  take_turn();
  for (int i = thread_index(); i < rows * KEY; i += THREADS) d_rel[i] = 0.f;
  block_barrier();

  Piece lines{{arguments.total_lines, arguments.lines_per_image, block_row() * HEADS}, length};
  const ChannelSums<VALUE> sums_of_channels{window + WINDOW_FLOATS};
  if constexpr (STATISTICS) {
    const float zeros[ACCESS] = {};
    sums_of_channels.set(zeros, zeros);
  }

  const int items = count_items(arguments.total_lines, arguments.lines_per_image);
  const int begin = static_cast<int>(static_cast<long long>(items) * block_index() / block_count());
  const int end = static_cast<int>(static_cast<long long>(items) * (block_index() + 1) / block_count());
  for (int item = begin; item < end; ++item) {
    lines.move_to_item(item);
    for (int attended = 0; attended < length; attended += LENGTH) {
      lines.begin = attended;
      load_lines<Part::ATTENDED>(tiles, lines, arguments);
      ValueSums d_values[OWN_PAIRS] = {};
      for (int attending = 0; attending < length; attending += LENGTH) {
        const int first = length - LENGTH + attended - attending;
        lines.begin = attending;
        load_lines<Part::ATTENDING>(tiles, lines, arguments);
        copy_window(table, arguments.rel, first, rows);
        wait_for_copies();
        block_barrier();

        Windows windows;
        if constexpr (WINDOWS_IN_REGISTERS) windows.load(table);
        TurnedWindows turned;
        if constexpr (TURNED_IN_REGISTERS) turned.load(table);
        TableSums d_table = {};
        // Addresses are worked out for each pair of pieces: kept over all of them, they are more than there are registers.
        T* const here = shared + anew(0);
        differentiate_pixels<0>(d_values, d_table, {{here}, {here + VALUE_TILE}, {here + GRADIENT_TILE}, {here}},
                                here + SCORES, here + TABLE, windows, turned);
        add_window(d_rel, window, d_table, first, rows);  // waits for all warps, before the next steps need their dQ

        if (CONTENT_QUERIES && attended + LENGTH >= length) {
          for (int pair = warp_index(); pair < PAIRS; pair += WARPS)
            add_content_to_queries(tiles.queries, tiles.gradient, pair,
                                   arguments.context + lines.image_head(pair, arguments.heads) * CONTEXT_SIZE);
          block_barrier();
        }
        if (ACCUMULATE || attended > 0)
          store_queries<true>(tiles, lines, arguments);
        else
          store_queries<false>(tiles, lines, arguments);
        block_barrier();
      }

      lines.begin = attended;
      if constexpr (CONTENT_KEYS) {
        copy_in<KEY>(tiles.keys, arguments.keys, lines);
        wait_for_copies();
        block_barrier();
      }
#pragma unroll
      for (int own = 0; own < OWN_PAIRS; ++own)
        if (const int pair = warp_index() + own * WARPS; pair < PAIRS) {
          const long long image_head = lines.image_head(pair, arguments.heads);
          if constexpr (CONTENT_KEYS)
            differentiate_content(d_values[own], tiles.keys, tiles.values, pair, arguments.d_context + image_head * CONTEXT_SIZE,
                                  arguments.d_context_turned + image_head * CONTEXT_SIZE,
                                  arguments.key_max + image_head * KEY, arguments.key_offset + image_head * KEY);
          store_values(tiles.d_values(), d_values[own], pair, row, column);
        }
      block_barrier();
      store_lines<Part::ATTENDED>(tiles, lines, arguments, sums_of_channels);
      block_barrier();
      fill_with_zeros(shared, SCORES);  // keys are not zero past the line, and a bad line leaves more than zeros everywhere
      block_barrier();
    }
  }
  if constexpr (STATISTICS)
    sums_of_channels.write(arguments.statistics, arguments.heads * VALUE, lines.first_head * VALUE);
}
