// The gradient of a parameter, such as a table of embeddings, from the parts of it that the blocks of another kernel left.
#include "rows.cuh"

struct Arguments {
  const float* partial;  // (blocks, columns)
  SCALAR* out;           // (columns)
  int blocks;
  int columns;
};

KERNEL(THREADS, BLOCKS) table_gradient(const Arguments arguments) {
  SHARED_MEMORY(memory);
  const int column = block_index() * 32 + lane_index();
  float sums[1];
  take_turn();
  if (!add_rows(sums, arguments.partial + column, 0, arguments.blocks, arguments.columns, column < arguments.columns,
                reinterpret_cast<float*>(memory)))
    return;
  arguments.out[column] = to_scalar<SCALAR>(sums[0]);
}
