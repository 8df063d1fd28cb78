// Local relation: each pixel takes from the window around it what a softmax of squared differences says,
// `gsanet/functional/relation.py` in kernels.
//
//   y[x'] = sum over o of w[x', o] v[x' + o],   w[x', .] = softmax over o of prior[o] - (q[x'] - k[x' + o])^2
//
// q and k are one number for each pixel and head, so that weights are next to nothing to work out: each kernel does it again, in
// registers, and they are never in memory. Scores are taken relative to that of the pixel's own key: with u = k[x' + o] - k[x'] and
// c = 2 (q[x'] - k[x']) they are prior[o] + u (c - u), which is exact to a few digits wherever q and k are. The window has WINDOW x WINDOW offsets in reading order; the neighbour of pixel x' at
// offset i is pixel STRIDE x' + i - WINDOW / 2, and takes no part if that is outside. Maps are dense.
//
// A thread has one head, and one pixel after the other of its block's, so that gradients of the prior stay in registers. Neighbours
// are read from the cache.
#include "accesses.cuh"

constexpr int OFFSETS = WINDOW * WINDOW;
constexpr int REACH = WINDOW / 2;
constexpr int SLOTS = THREADS / HEADS;  // pixels of a block at a time
constexpr float LOG2_E = 1.4426950408889634f;
static_assert(SLOTS > 0, "a block has a thread for each head");

struct Size {
  int height, width;
};

// What the gradients of a pixel's neighbours need of it: its weights are 2^(score - logarithm), and delta is the mean of their
// gradients.
struct alignas(16) Mark {
  float key, slope;  // k and c of the pixel itself
  float logarithm, delta;
};

struct Arguments {
  const float* queries;   // (batch, x', y', head)
  const float* keys;      // (batch, x, y, head)
  const float* prior;     // (head, offset)
  const T* values;        // (batch, x, y, head, channel)
  T* out;                 // (batch, x', y', head, channel); in the backward pass its gradient
  float *d_queries, *d_keys;
  T* d_values;
  Mark* marks;            // (batch, x', y', head)
  float* partial;         // (block, head, offset): the parts of the prior's gradient
  Size inner, outer;      // of x' and x
  int images, heads;
};

// What is this thread's: a head, and every SLOTS-th of the block's pixels.
struct Task {
  int head, in_block;  // of the map, and of the block's
  int first, end;      // pixels
  bool used;

  DEVICE Task(const Arguments& arguments, const Size& size) {
    const int slot = thread_index() / HEADS;
    in_block = thread_index() - slot * HEADS;
    head = block_row() * HEADS + in_block;
    used = slot < SLOTS;
    const int pixels = arguments.images * size.height * size.width, each = (pixels + block_count() - 1) / block_count();
    first = block_index() * each + slot;
    end = min((block_index() + 1) * each, pixels);
  }
};

struct Pixel {
  int image, x, y;

  DEVICE Pixel(const Size& size, int number) {
    const int row = number / size.width;
    y = number - row * size.width;
    image = row / size.height;
    x = row - image * size.height;
  }
};

DEVICE long long index_of(const Arguments& arguments, const Size& size, int image, int x, int y, int head) {
  return ((static_cast<long long>(image) * size.height + x) * size.width + y) * arguments.heads + head;
}

// The key of a pixel x' itself.
DEVICE float own_key(const Arguments& arguments, const Pixel& pixel, int head) {
  return arguments.keys[index_of(arguments, arguments.outer, pixel.image, STRIDE * pixel.x, STRIDE * pixel.y, head)];
}

// Calls visit(offset, index) for each pixel x' that has this one as its neighbour, with its index in a map of one number for each
// head.
template <class Visit>
DEVICE void visit_centres(const Arguments& arguments, const Pixel& pixel, int head, Visit visit) {
#pragma unroll
  for (int i = 0; i < WINDOW; ++i) {
    const int below = pixel.x + REACH - i, x = below / STRIDE;
    if (below < 0 || below % STRIDE || x >= arguments.inner.height) continue;
    const long long row = index_of(arguments, arguments.inner, pixel.image, x, 0, head);
#pragma unroll
    for (int j = 0; j < WINDOW; ++j) {
      const int beside = pixel.y + REACH - j, y = beside / STRIDE;
      if (beside >= 0 && beside % STRIDE == 0 && y < arguments.inner.width) visit(i * WINDOW + j, row + y * arguments.heads);
    }
  }
}

// The prior of the block's heads, (offset, HEADS), for powers of two.
DEVICE void load_prior(float* to, const Arguments& arguments) {
  for (int i = thread_index(); i < OFFSETS * HEADS; i += THREADS)
    to[i] = LOG2_E * arguments.prior[(block_row() * HEADS + i % HEADS) * OFFSETS + i / HEADS];
  block_barrier();
}

// For powers of two, too.
DEVICE float score_of(float difference, float slope, float prior) { return prior + LOG2_E * difference * (slope - difference); }

// Calls add(weight, difference, index) for each neighbour of a pixel x', row by row: 2^(score - largest), u, and its index in a map of
// one number for each head. The largest score is that of the rows so far: rescale(factor) is called before each row for what the
// rows above gave. Where a row hangs over the border its last pixel on the map takes the place of those beyond, with no weight.
// Returns the largest score of all.
template <class Rescale, class Add>
DEVICE float for_each_weight(const Arguments& arguments, const Task& task, const Pixel& pixel, float key, float slope,
                             const float* prior, Rescale rescale, Add add) {
  const int left = STRIDE * pixel.y - REACH, width = arguments.outer.width;
  float largest = -3.4e38f;  // not infinite: rows of neighbours whose prior shuts them out have no weight
#pragma unroll 1
  for (int i = 0; i < WINDOW; ++i) {
    const int x = STRIDE * pixel.x + i - REACH;
    if (x < 0 || x >= arguments.outer.height) continue;
    const long long row = index_of(arguments, arguments.outer, pixel.image, x, 0, task.head);
    const float* const own_prior = prior + i * WINDOW * HEADS + task.in_block;
    const float before = largest;
    float differences[WINDOW], scores[WINDOW];
    int places[WINDOW];
#pragma unroll
    for (int j = 0; j < WINDOW; ++j) {
      places[j] = max(0, min(left + j, width - 1)) * arguments.heads;
      differences[j] = arguments.keys[row + places[j]] - key;
      scores[j] = left + j >= 0 && left + j < width ? score_of(differences[j], slope, own_prior[j * HEADS]) : -infinity();
      largest = maximum(largest, scores[j]);
    }
    rescale(power_of_two(before - largest));
#pragma unroll
    for (int j = 0; j < WINDOW; ++j) add(power_of_two(scores[j] - largest), differences[j], row + places[j]);
  }
  return largest;
}

// Calls work(task, pixel, own) for each of this thread's pixels x', own its index in a map of one number for each head, with the
// prior where they find it.
template <class Work>
DEVICE void for_each_pixel(const Arguments& arguments, float* prior, Work work) {
  const Task task(arguments, arguments.inner);
  load_prior(prior, arguments);
  if (!task.used) return;
  for (int number = task.first; number < task.end; number += SLOTS)
    work(task, Pixel(arguments.inner, number), static_cast<long long>(number) * arguments.heads + task.head);
}

KERNEL(THREADS, BLOCKS) relation_forward(const Arguments arguments) {
  SHARED_MEMORY(memory);
  float* const prior = reinterpret_cast<float*>(memory);
  take_turn();
  for_each_pixel(arguments, prior, [&](const Task& task, const Pixel& pixel, long long own) {
    const float key = own_key(arguments, pixel, task.head), slope = 2.f * (arguments.queries[own] - key);
    Head sums = {};
    float total = 0.f;
    auto rescale = [&](float factor) { sums.scale(factor), total *= factor; };
    for_each_weight(arguments, task, pixel, key, slope, prior, rescale, [&](float weight, float, long long index) {
      Head value;
      value.read(arguments.values + index * CHANNELS);
      sums.add(weight, value);
      total += weight;
    });
    sums.scale(1.f / total);
    sums.write(arguments.out + own * CHANNELS);
  });
}

// The gradient of the queries, and the marks. With weights w and their gradients g it is twice the sum of w (g - delta) u, delta the
// sum of w g.
KERNEL(THREADS, BLOCKS) relation_queries(const Arguments arguments) {
  SHARED_MEMORY(memory);
  float* const prior = reinterpret_cast<float*>(memory);
  take_turn();
  for_each_pixel(arguments, prior, [&](const Task& task, const Pixel& pixel, long long own) {
    const float key = own_key(arguments, pixel, task.head), slope = 2.f * (arguments.queries[own] - key);
    Head gradient;
    gradient.read(arguments.out + own * CHANNELS);
    float total = 0.f, delta = 0.f, differences = 0.f, products = 0.f;
    auto rescale = [&](float factor) { total *= factor, delta *= factor, differences *= factor, products *= factor; };
    auto add = [&](float weight, float difference, long long index) {
      Head value;
      value.read(arguments.values + index * CHANNELS);
      const float product = weight * gradient.times(value);
      total += weight, delta += product, differences += weight * difference, products += product * difference;
    };
    const float largest = for_each_weight(arguments, task, pixel, key, slope, prior, rescale, add), inverse = 1.f / total;
    delta *= inverse;
    arguments.d_queries[own] = 2.f * inverse * (products - delta * differences);
    arguments.marks[own] = {key, slope, largest + logarithm_of_two(total), delta};
  });
}

// The gradients of keys and values, and the block's part of that of the prior.
KERNEL(THREADS, BLOCKS) relation_neighbours(const Arguments arguments) {
  SHARED_MEMORY(memory);
  float* const prior = reinterpret_cast<float*>(memory);
  const Task task(arguments, arguments.outer);
  float d_prior[OFFSETS] = {};
  take_turn();
  load_prior(prior, arguments);
  for (int number = task.first; number < task.end && task.used; number += SLOTS) {
    const Pixel pixel(arguments.outer, number);
    const long long own = static_cast<long long>(number) * arguments.heads + task.head;
    const float key = arguments.keys[own];
    Head value, d_value = {};
    value.read(arguments.values + own * CHANNELS);
    float d_key = 0.f;
    visit_centres(arguments, pixel, task.head, [&](int offset, long long index) {
      const Mark mark = arguments.marks[index];
      Head gradient;
      gradient.read(arguments.out + index * CHANNELS);
      const float difference = key - mark.key, score = score_of(difference, mark.slope, prior[offset * HEADS + task.in_block]);
      const float weight = power_of_two(score - mark.logarithm);
      const float d_score = weight * (gradient.times(value) - mark.delta);
      d_value.add(weight, gradient);
      d_key += d_score * (mark.slope - 2.f * difference);
      d_prior[offset] += d_score;
    });
    arguments.d_keys[own] = d_key;
    d_value.write(arguments.d_values + own * CHANNELS);
  }
  float* const sums = prior + OFFSETS * HEADS;  // (WINDOW, THREADS)
#pragma unroll
  for (int i = 0; i < WINDOW; ++i) {
    if (i > 0) block_barrier();  // nobody needs those before any more
#pragma unroll
    for (int j = 0; j < WINDOW; ++j) sums[j * THREADS + thread_index()] = d_prior[i * WINDOW + j];
    block_barrier();
    for (int n = thread_index(); n < WINDOW * HEADS; n += THREADS) {
      float sum = 0.f;
      for (int slot = 0; slot < SLOTS; ++slot) sum += sums[n / HEADS * THREADS + slot * HEADS + n % HEADS];
      const int head = block_row() * HEADS + n % HEADS;
      arguments.partial[(static_cast<long long>(block_index()) * arguments.heads + head) * OFFSETS + i * WINDOW + n / HEADS] = sum;
    }
  }
}
