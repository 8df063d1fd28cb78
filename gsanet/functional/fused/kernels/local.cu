// Local attention: products of a pixel with the pixels of the window around it, `gsanet/functional/local.py` in kernels.
//
//   local_scores   s[x', o]  = q[x'] k[x' + o]
//   local_mix      y[x']     = sum over o of w[x', o] v[x' + o]
//   local_spread   y[x' + o] = sum over x' of w[x', o] q[x'],  gathered: no two threads write to one place
//
// A window is its WINDOW x WINDOW offsets o in reading order; the neighbour of pixel x' at offset i is pixel stride x' + i -
// padding, and nothing if that is outside. Neighbours are read again and again, from the cache. Weights are used once: those of
// neighbouring threads lie a window apart, so a block moves them together, by way of shared memory.
#include "accesses.cuh"

constexpr int OFFSETS = WINDOW * WINDOW;

// A map (batch, x, y, head, channel) in which the channels of a pixel lie side by side; strides in scalars.
struct Field {
  T* data;
  long long batch;
  int row, column;
  int height, width;

  DEVICE T* at(int image, int x, int y, int head) const {
    return data + image * batch + static_cast<long long>(x) * row + static_cast<long long>(y) * column + head * CHANNELS;
  }
};

struct Arguments {
  Field inner;  // x': queries, or the output of local_mix
  Field outer;  // their neighbours: keys, values, or the output of local_spread
  T* weights;   // (batch, x', y', head, offset): scores, or what neighbours are weighted with
  int images, heads;
  int stride, padding;
};

// One of a field's pixels and heads, counted in the order of the weights.
struct Unit {
  int image, x, y, head;
  bool exists;

  DEVICE Unit(const Arguments& arguments, const Field& field, long long number) {
    head = static_cast<int>(number % arguments.heads), number /= arguments.heads;
    y = static_cast<int>(number % field.width), number /= field.width;
    x = static_cast<int>(number % field.height), number /= field.height;
    image = static_cast<int>(number);
    exists = image < arguments.images;
  }
};

// A thread for each pixel and head. The scores of a block go out together.
KERNEL(THREADS, BLOCKS) local_scores(const Arguments arguments) {
  SHARED_MEMORY(memory);
  T* const scores = reinterpret_cast<T*>(memory);
  const Field &inner = arguments.inner, &outer = arguments.outer;
  const long long first = static_cast<long long>(block_index()) * THREADS;
  const Unit unit(arguments, inner, first + thread_index());
  take_turn();
  if (unit.exists) {
    float query[ACCESSES][ACCESS];
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) load(query[i], inner.at(unit.image, unit.x, unit.y, unit.head) + i * ACCESS);
    for (int offset = 0; offset < OFFSETS; ++offset) {
      const int x = arguments.stride * unit.x + offset / WINDOW - arguments.padding;
      const int y = arguments.stride * unit.y + offset % WINDOW - arguments.padding;
      float sum = 0.f;
      if (x >= 0 && x < outer.height && y >= 0 && y < outer.width) {
        const T* const key = outer.at(unit.image, x, y, unit.head);
#pragma unroll
        for (int i = 0; i < ACCESSES; ++i) {
          float values[ACCESS];
          load(values, key + i * ACCESS);
#pragma unroll
          for (int j = 0; j < ACCESS; ++j) sum += query[i][j] * values[j];
        }
      }
      scores[thread_index() * OFFSETS + offset] = to_scalar<T>(sum);
    }
  }
  block_barrier();
  const long long all = static_cast<long long>(arguments.images) * inner.height * inner.width * arguments.heads;
  const int units = all - first < THREADS ? static_cast<int>(all - first) : THREADS;
  for (int i = thread_index(); i < units * OFFSETS; i += THREADS) arguments.weights[first * OFFSETS + i] = scores[i];
}

// A thread for each access to the output. Its block has the weights of ROWS rows of the window at a time.
KERNEL(THREADS, BLOCKS) local_mix(const Arguments arguments) {
  SHARED_MEMORY(memory);
  T* const weights = reinterpret_cast<T*>(memory);
  constexpr int UNITS = (THREADS - 1) / ACCESSES + 2;  // pixels and heads of a block, at most
  constexpr int AT_ONCE = ROWS * WINDOW;
  const Field &inner = arguments.inner, &outer = arguments.outer;
  const long long start = static_cast<long long>(block_index()) * THREADS, index = start + thread_index();
  const long long number = index / ACCESSES, first = start / ACCESSES;
  const long long left = static_cast<long long>(arguments.images) * inner.height * inner.width * arguments.heads - first;
  const int units = left < UNITS ? static_cast<int>(left) : UNITS;
  const Unit unit(arguments, inner, number);
  const int own = static_cast<int>(index % ACCESSES) * ACCESS;
  const T* const own_weights = weights + static_cast<int>(number - first) * AT_ONCE;
  float sums[ACCESS] = {};
  take_turn();
  for (int top = 0; top < WINDOW; top += ROWS) {
    if (top > 0) block_barrier();  // nobody needs the rows above any more
    for (int i = thread_index(); i < units * AT_ONCE; i += THREADS)
      weights[i] = arguments.weights[(first + i / AT_ONCE) * OFFSETS + top * WINDOW + i % AT_ONCE];
    block_barrier();
    if (!unit.exists) continue;
    for (int i = 0; i < ROWS; ++i) {
      const int x = arguments.stride * unit.x + top + i - arguments.padding;
      if (x < 0 || x >= outer.height) continue;
#pragma unroll
      for (int j = 0; j < WINDOW; ++j) {
        const int y = arguments.stride * unit.y + j - arguments.padding;
        if (y < 0 || y >= outer.width) continue;
        float values[ACCESS];
        load(values, outer.at(unit.image, x, y, unit.head) + own);
        add_product(sums, to_float(own_weights[i * WINDOW + j]), values);
      }
    }
  }
  if (unit.exists) store(inner.at(unit.image, unit.x, unit.y, unit.head) + own, sums);
}

// The same, of the other field: from all pixels x' that have this one as a neighbour. A block has PIXELS pixels of one row and
// HEADS heads, and of each row x' that reaches them the weights of one row of the window.
KERNEL(THREADS, BLOCKS) local_spread(const Arguments arguments) {
  SHARED_MEMORY(memory);
  T* const weights = reinterpret_cast<T*>(memory);  // (pixel, HEADS, WINDOW)
  const Field &inner = arguments.inner, &outer = arguments.outer;
  const int chunks = (outer.width + PIXELS - 1) / PIXELS, row = block_index() / chunks;
  const int first_y = (block_index() - row * chunks) * PIXELS, first_head = block_row() * HEADS;
  const int image = row / outer.height, own_x = row - image * outer.height;
  const int unit = thread_index() / ACCESSES, head = unit % HEADS, own_y = first_y + unit / HEADS;
  const int own = thread_index() % ACCESSES * ACCESS, stride = arguments.stride;
  const bool exists = unit < PIXELS * HEADS && own_y < outer.width;
  // The pixels x' that may be needed: the first, and how many.
  const int lowest = first_y + arguments.padding - (WINDOW - 1), low = lowest > 0 ? (lowest + stride - 1) / stride : 0;
  const int count = min((first_y + PIXELS - 1 + arguments.padding) / stride, inner.width - 1) - low + 1;
  float sums[ACCESS] = {};
  take_turn();
  for (int i = 0; i < WINDOW; ++i) {
    const int below = own_x + arguments.padding - i, x = below / stride;
    if (below < 0 || below % stride || x >= inner.height) continue;  // for all of the block
    const long long first = (static_cast<long long>(image) * inner.height + x) * inner.width + low;
    block_barrier();  // nobody needs the row before any more
    for (int n = thread_index(); n < count * HEADS * WINDOW; n += THREADS) {
      const int other = n / WINDOW;
      const long long number = (first + other / HEADS) * arguments.heads + first_head + other % HEADS;
      weights[n] = arguments.weights[number * OFFSETS + i * WINDOW + n % WINDOW];
    }
    block_barrier();
    if (!exists) continue;
#pragma unroll
    for (int j = 0; j < WINDOW; ++j) {
      const int beside = own_y + arguments.padding - j, y = beside / stride;
      if (beside < 0 || beside % stride || y >= inner.width) continue;
      float values[ACCESS];
      load(values, inner.at(image, x, y, first_head + head) + own);
      add_product(sums, to_float(weights[((y - low) * HEADS + head) * WINDOW + j]), values);
    }
  }
  if (exists) store(outer.at(image, own_x, own_y, first_head + head) + own, sums);
}
