// Local attention: products of a pixel with the pixels of the window around it, `gsanet/functional/local.py` in kernels.
//
//   local_scores   s[x', o]  = q[x'] k[x' + o]
//   local_mix      y[x']     = sum over o of w[x', o] v[x' + o]
//   local_spread   y[x' + o] = sum over x' of w[x', o] q[x'],  gathered: no two threads write to one place
//
// A window is its WINDOW x WINDOW offsets o in reading order; the neighbour of pixel x' at offset i is pixel stride x' + i -
// padding, and nothing if that is outside. Neighbours are read again and again, from the cache.
#include "channels.cuh"
#include "fragments.cuh"

constexpr int OFFSETS = WINDOW * WINDOW;
constexpr int ACCESS = VECTOR ? WIDTH : 1;      // channels that a thread moves at once
constexpr int ACCESSES = CHANNELS / ACCESS;     // of a pixel and head
static_assert(CHANNELS % ACCESS == 0, "a head is whole accesses");

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

template <int COUNT>
DEVICE void load(float (&values)[COUNT], const T* from) {
  if constexpr (COUNT == WIDTH) {
    const Group group = load_group(from, 0);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = channel(group, i);
  } else {
    values[0] = to_float(*from);
  }
}

template <int COUNT>
DEVICE void store(T* to, const float (&values)[COUNT]) {
  if constexpr (COUNT == WIDTH)
    store_group(to, 0, pack_group(values));
  else
    *to = to_scalar<T>(values[0]);
}

DEVICE void add_product(float (&sums)[ACCESS], float weight, const float (&values)[ACCESS]) {
#pragma unroll
  for (int i = 0; i < ACCESS; ++i) sums[i] += weight * values[i];
}

// A thread for each pixel and head. The scores of a block go out together: alone, each thread would write to places of its
// own.
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

// A thread for each access to the output.
KERNEL(THREADS, BLOCKS) local_mix(const Arguments arguments) {
  const Field &inner = arguments.inner, &outer = arguments.outer;
  const long long index = static_cast<long long>(block_index()) * THREADS + thread_index(), number = index / ACCESSES;
  const Unit unit(arguments, inner, number);
  take_turn();
  if (!unit.exists) return;
  const int own = static_cast<int>(index % ACCESSES) * ACCESS;
  const T* const weights = arguments.weights + number * OFFSETS;
  float sums[ACCESS] = {};
  for (int i = 0; i < WINDOW; ++i) {
    const int x = arguments.stride * unit.x + i - arguments.padding;
    if (x < 0 || x >= outer.height) continue;
#pragma unroll
    for (int j = 0; j < WINDOW; ++j) {
      const int y = arguments.stride * unit.y + j - arguments.padding;
      if (y < 0 || y >= outer.width) continue;
      float values[ACCESS];
      load(values, outer.at(unit.image, x, y, unit.head) + own);
      add_product(sums, to_float(weights[i * WINDOW + j]), values);
    }
  }
  store(inner.at(unit.image, unit.x, unit.y, unit.head) + own, sums);
}

// The same, of the other field: from all pixels x' that have this one as a neighbour.
KERNEL(THREADS, BLOCKS) local_spread(const Arguments arguments) {
  const Field &inner = arguments.inner, &outer = arguments.outer;
  const long long index = static_cast<long long>(block_index()) * THREADS + thread_index();
  const Unit unit(arguments, outer, index / ACCESSES);
  take_turn();
  if (!unit.exists) return;
  const int own = static_cast<int>(index % ACCESSES) * ACCESS, stride = arguments.stride;
  float sums[ACCESS] = {};
  for (int i = 0; i < WINDOW; ++i) {
    const int below = unit.x + arguments.padding - i, x = below / stride;
    if (below < 0 || below % stride || x >= inner.height) continue;
#pragma unroll
    for (int j = 0; j < WINDOW; ++j) {
      const int beside = unit.y + arguments.padding - j, y = beside / stride;
      if (beside < 0 || beside % stride || y >= inner.width) continue;
      const long long number =
          ((static_cast<long long>(unit.image) * inner.height + x) * inner.width + y) * arguments.heads + unit.head;
      float values[ACCESS];
      load(values, inner.at(unit.image, x, y, unit.head) + own);
      add_product(sums, to_float(arguments.weights[number * OFFSETS + i * WINDOW + j]), values);
    }
  }
  store(outer.at(unit.image, unit.x, unit.y, unit.head) + own, sums);
}
