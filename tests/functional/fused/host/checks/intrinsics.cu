// Each intrinsic on its own.
#include <intrinsics.cuh>

struct MatrixArguments {
  const unsigned char* rows;  // 32 x 16 bytes
  Word* words;                // 32 lanes x 14
};

template <int COUNT, bool TRANSPOSED>
DEVICE Word* load(Word* to, const unsigned char* memory) {
  Word words[COUNT];
  // Rows in an order of their own; lanes without a row have no address.
  load_matrices<COUNT, TRANSPOSED>(words, lane_index() < 8 * COUNT ? memory + lane_index() * 5 % 32 * 16 : nullptr);
  for (int i = 0; i < COUNT; ++i) to[i] = words[i];
  return to + COUNT;
}

KERNEL(32, 1) matrices(MatrixArguments arguments) {
  SHARED_MEMORY(memory);
  for (int i = 0; i < 16; ++i) memory[lane_index() * 5 % 32 * 16 + i] = arguments.rows[lane_index() * 16 + i];
  warp_barrier();
  Word* to = arguments.words + lane_index() * 14;
  to = load<1, false>(to, memory);
  to = load<2, false>(to, memory);
  to = load<4, false>(to, memory);
  to = load<1, true>(to, memory);
  to = load<2, true>(to, memory);
  load<4, true>(to, memory);
}

struct TurnArguments {
  const Word* words;  // 32
  Word* turned;
};

struct ShuffleArguments {
  const Word *words, *lanes;  // 32 each
  Word* shuffled;
};

KERNEL(32, 1) shuffles(ShuffleArguments arguments) {
  arguments.shuffled[lane_index()] = shuffle(arguments.words[lane_index()], arguments.lanes[lane_index()]);
}

KERNEL(32, 1) turns(TurnArguments arguments) { arguments.turned[lane_index()] = turn_matrix(arguments.words[lane_index()]); }

struct ProductArguments {
  const Word *left, *right;  // 32 lanes x 4 and x 2
  float* sums;               // 32 lanes x 4
  int kind;
};

template <class T, int DEPTH>
DEVICE void product(float (&d)[4], const Word* left, const Word* right) {
  Word a[DEPTH / 4], b[DEPTH / 8];
  for (int i = 0; i < DEPTH / 4; ++i) a[i] = left[i];
  for (int i = 0; i < DEPTH / 8; ++i) b[i] = right[i];
  multiply_add<T>(d[0], d[1], d[2], d[3], a, b);
}

KERNEL(32, 1) products(ProductArguments arguments) {
  const Word *left = arguments.left + lane_index() * 4, *right = arguments.right + lane_index() * 2;
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = arguments.sums[lane_index() * 4 + i];
  if (arguments.kind == 0) product<bf16, 8>(d, left, right);
  if (arguments.kind == 1) product<bf16, 16>(d, left, right);
  if (arguments.kind == 2) product<f16, 8>(d, left, right);
  if (arguments.kind == 3) product<f16, 16>(d, left, right);
  if (arguments.kind == 4) {
    float a[4], b[2];
    for (int i = 0; i < 4; ++i) a[i] = bits_float(left[i]);
    for (int i = 0; i < 2; ++i) b[i] = bits_float(right[i]);
    multiply_add_tf32(d[0], d[1], d[2], d[3], a, b);
  }
  for (int i = 0; i < 4; ++i) arguments.sums[lane_index() * 4 + i] = d[i];
}

struct ScalarArguments {
  const float* values;
  Word *bf16_words, *f16_words;
  float *tf32, *exponentials, *roots, *maxima, *products;
  float *from_bf16, *from_f16;  // of all 65536 patterns
  int count;
};

KERNEL(256, 1) scalars(ScalarArguments arguments) {
  const int start = block_index() * 256 + thread_index(), step = block_count() * 256;
  for (int i = start; i < arguments.count; i += step) {
    const float value = arguments.values[i];
    arguments.bf16_words[i] = pack<bf16>(value, -value);
    arguments.f16_words[i] = pack<f16>(value, -value);
    arguments.tf32[i] = round_to_tf32(value);
    arguments.exponentials[i] = exponential(value);
    arguments.roots[i] = square_root(to_float(bits_float(float_bits(value))));
    const float other = arguments.values[arguments.count - 1 - i];
    arguments.maxima[i] = maximum(value, other);
    arguments.products[i] = multiply_then_add(value, other, 1.f);
  }
  for (int i = start; i < 65536; i += step) {
    arguments.from_bf16[i] = to_float(bf16{static_cast<unsigned short>(i)});
    arguments.from_f16[i] = to_float(f16{static_cast<unsigned short>(i)});
  }
}

struct BlockArguments {
  const float* values;  // rows x columns x 256
  float* sums;          // rows x columns
  float* shuffled;      // rows x columns x 256
  int valid;            // values from here on count as zero
};

// The sum of a block's values, which come by background copies.
KERNEL(256, 1) reduction(BlockArguments arguments) {
  SHARED_MEMORY(memory);
  float* values = reinterpret_cast<float*>(memory);
  const int thread = thread_index(), block = block_row() * block_count() + block_index();
  const int first = thread < 32 ? 4 * thread : 128 + 2 * (thread - 32);
  if (thread < 32) copy_async(values + first, arguments.values + block * 256 + first, first < arguments.valid);
  if (thread >= 32 && thread < 96) copy_async<8>(values + first, arguments.values + block * 256 + first, first < arguments.valid);
  wait_for_copies();
  block_barrier();
  float sum = values[thread];
  arguments.shuffled[block * 256 + thread] = shuffle_xor(sum, 1 + warp_index());
  for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  block_barrier();
  if (lane_index() == 0) values[warp_index()] = sum;
  block_barrier();
  if (thread == 0) {
    for (int i = 1; i < 8; ++i) sum += values[i];
    arguments.sums[block] = sum;
  }
}
