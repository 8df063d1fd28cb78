// Sums over the pixels of two maps, from what the blocks of `pixel_products` left of them.
#include "rows.cuh"

struct Arguments {
  const float* partial;  // (blocks, rows * columns + rows): products, sums
  float* products;       // (rows, columns)
  float* sums;           // (rows)
  int blocks;
  int columns;
  int rows;
};

KERNEL(THREADS, BLOCKS) sum_pixel_products(const Arguments arguments) {
  SHARED_MEMORY(memory);
  const int products = arguments.rows * arguments.columns, all = products + arguments.rows;
  const int number = block_index() * 32 + lane_index(), row = number / arguments.columns, column = number % arguments.columns;
  // Of a product that is its own transpose nothing was left under the diagonal.
  const bool exists = number < all && (!SYMMETRIC || number >= products || column >= row);
  float sums[1];
  take_turn();
  if (!add_rows(sums, arguments.partial + number, 0, arguments.blocks, all, exists, reinterpret_cast<float*>(memory))) return;
  if (number >= products) {
    arguments.sums[number - products] = sums[0];
    return;
  }
  arguments.products[number] = sums[0];
  if constexpr (SYMMETRIC) arguments.products[column * arguments.columns + row] = sums[0];
}
