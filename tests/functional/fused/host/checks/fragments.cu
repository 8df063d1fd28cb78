// Products of 16 x 2 DEPTH and 2 DEPTH x 16 matrices, by every way to load them.
#include <fragments.cuh>

struct Arguments {
  const void *left, *right;  // 16 x 2 DEPTH, and 16 x 2 DEPTH too: the right one's columns
  float* sums;               // ways x 16 x 16
  void* rounded;             // the same as scalars
  float* reloaded;           // and these as floats
};

template <class T, int DEPTH>
DEVICE void products(const Arguments& arguments, unsigned char* memory) {
  constexpr int LENGTH = 2 * DEPTH, STRIDE = LENGTH + PER_ACCESS<T>, STRIDE_TRANSPOSED = 16 + PER_ACCESS<T>;
  const int lane = lane_index();
  T* left = reinterpret_cast<T*>(memory);
  T* right = left + 16 * STRIDE;
  T* left_transposed = right + 16 * STRIDE;
  T* right_transposed = left_transposed + LENGTH * STRIDE_TRANSPOSED;
  T* packed = right_transposed + LENGTH * STRIDE_TRANSPOSED;  // LENGTH x 16
  const T* global_left = static_cast<const T*>(arguments.left);
  const T* global_right = static_cast<const T*>(arguments.right);
  for (int i = thread_index(); i < 16 * LENGTH; i += 32) {
    const int row = i / LENGTH, step = i % LENGTH;
    left[row * STRIDE + step] = left_transposed[step * STRIDE_TRANSPOSED + row] = global_left[i];
    right[row * STRIDE + step] = right_transposed[step * STRIDE_TRANSPOSED + row] = global_right[i];
    packed[packed_index<T, DEPTH>(row, step, 2)] = global_right[i];
  }
  warp_barrier();
  for (int way = 0; way < 12; ++way) {
    float sums[2][4] = {};
    for (int start = 0; start < LENGTH; start += DEPTH) {
      const auto in_left = [&](int row) { return left + row * STRIDE + start; };
      const auto in_left_transposed = [&](int step) { return left_transposed + (start + step) * STRIDE_TRANSPOSED; };
      const auto in_right = [&](int column) { return right + column * STRIDE + start; };
      const auto in_right_transposed = [&](int step) { return right_transposed + (start + step) * STRIDE_TRANSPOSED; };
      Left<T, DEPTH> a;
      Right<T, DEPTH> b[2];
      if (way < 6)
        a = load_left<T, DEPTH>(in_left);
      else
        a = load_left_transposed<T, DEPTH>(in_left_transposed);
      if (way % 6 == 0) {
        b[0] = load_right<T, DEPTH>(in_right);
        b[1] = load_right<T, DEPTH>([&](int column) { return in_right(column + 8); });
      } else if (way % 6 == 1) {
        b[0] = load_right_transposed<T, DEPTH>(in_right_transposed);
        b[1] = load_right_transposed<T, DEPTH>([&](int step) { return in_right_transposed(step) + 8; });
      } else if (way % 6 == 2) {
        load_right(b, in_right);
      } else if (way % 6 == 3) {
        load_right_transposed(b, in_right_transposed);
      } else if (way % 6 == 4) {
        b[0] = load_right_packed<T, DEPTH>(packed, start / DEPTH);
        b[1] = load_right_packed<T, DEPTH>(packed, 2 + start / DEPTH);
      } else {
        Right<T, DEPTH> both[2];
        for (int half = 0; half < 2; ++half) {
          load_right_transposed_long(both, [&](int step) { return right_transposed + step * STRIDE_TRANSPOSED + half * 8; });
          b[half] = both[start / DEPTH];
        }
      }
      multiply(sums[0], a, b[0]);
      multiply(sums[1][0], sums[1][1], sums[1][2], sums[1][3], a, b[1]);
    }
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < 2; ++i) {
        const int where = way * 256 + (lane / 4 + 8 * i) * 16 + half * 8 + lane % 4 * 2;
        T* rounded = static_cast<T*>(arguments.rounded) + where;
        store_two(arguments.sums + where, sums[half][2 * i], sums[half][2 * i + 1]);
        store_two(rounded, sums[half][2 * i], sums[half][2 * i + 1]);
        load_two(rounded, arguments.reloaded[where], arguments.reloaded[where + 1]);
      }
  }
}

// What products leave, stored row by row: 1 to TILES of them, of 8 and of 16 rows, with the instruction for matrices and without.
struct StoreArguments {
  const float* sums;  // 16 x 8 TILES
  void* stored;       // (tiles, rows, way) x 16 x STRIDE
};

constexpr int TILES = 7;

template <class T, int COUNT>
DEVICE void store_tiles(const StoreArguments& arguments, unsigned char* memory) {
  constexpr int STRIDE = 8 * (TILES + TILES % 2 + 1);  // an odd number of 16 bytes
  const int lane = lane_index();
  float sums[COUNT][4];
  for (int i = 0; i < COUNT * 4; ++i)
    sums[i / 4][i % 4] = arguments.sums[(lane / 4 + i % 4 / 2 * 8) * 8 * TILES + i / 4 * 8 + lane % 4 * 2 + i % 2];
  T* to = reinterpret_cast<T*>(memory);
  T* stored = static_cast<T*>(arguments.stored) + (COUNT - 1) * 4 * 16 * STRIDE;
  for (int way = 0; way < 4; ++way) {
    for (int i = lane; i < 16 * STRIDE; i += 32) to[i] = T{};
    warp_barrier();
    const auto row = [&](int r) { return to + r * STRIDE; };
    if (way == 0) store_rows<16, T, true>(sums, row);
    if (way == 1) store_rows<16, T, false>(sums, row);
    if (way == 2) store_rows<8, T, true>(sums, row);
    if (way == 3) store_rows<8, T, false>(sums, row);
    warp_barrier();
    for (int i = lane; i < 16 * STRIDE; i += 32) stored[way * 16 * STRIDE + i] = to[i];
    warp_barrier();
  }
  if constexpr (COUNT < TILES) store_tiles<T, COUNT + 1>(arguments, memory);
}

// clang-format off
KERNEL(32, 1) bf16_rows(StoreArguments arguments) { SHARED_MEMORY(memory); store_tiles<bf16, 1>(arguments, memory); }
KERNEL(32, 1) f16_rows(StoreArguments arguments) { SHARED_MEMORY(memory); store_tiles<f16, 1>(arguments, memory); }
KERNEL(32, 1) float_rows(StoreArguments arguments) { SHARED_MEMORY(memory); store_tiles<float, 1>(arguments, memory); }
KERNEL(32, 1) bf16_8(Arguments arguments) { SHARED_MEMORY(memory); products<bf16, 8>(arguments, memory); }
KERNEL(32, 1) bf16_16(Arguments arguments) { SHARED_MEMORY(memory); products<bf16, 16>(arguments, memory); }
KERNEL(32, 1) f16_8(Arguments arguments) { SHARED_MEMORY(memory); products<f16, 8>(arguments, memory); }
KERNEL(32, 1) f16_16(Arguments arguments) { SHARED_MEMORY(memory); products<f16, 16>(arguments, memory); }
KERNEL(32, 1) float_8(Arguments arguments) { SHARED_MEMORY(memory); products<float, 8>(arguments, memory); }

static_assert(depth_of<bf16>(32) == 16 && depth_of<f16>(24) == 8 && depth_of<float>(32) == 8, "");
