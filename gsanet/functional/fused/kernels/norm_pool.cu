// A batch norm, ReLU and max pooling of 3 x 3 pixels with a stride of 2 and a padding of 1, in one pass over the map;
// and max pooling alone (NORM = 0).
//
// A normalised value grows with the raw one, or falls where the scale is negative: the largest raw value, its sign turned
// there, is where the largest output is, and nothing but that one is normalised. Of each window the raw value is kept,
// from which the batch norm's sums are taken, and its place, 0 to 8 in the order of rows, or NOWHERE where the ReLU lets
// no gradient through.
//
// A thread takes a group of channels of one column of windows and walks down some of its rows: of the three rows of
// pixels that a window has, the last is the first one of the next.
#include "channels.cuh"

constexpr Word NOWHERE = 15;  // with bits that no place has, whatever it is combined with

struct Arguments {
  const void* x;              // (images, height, width, channels)
  const float* applied;       // (5, channels), of norm.cu
  const float* coefficients;  // the same, of the gradient
  void* out;                  // (images, windows down, windows along, channels), as the next three
  void* peak;
  unsigned char* place;
  const void* d_out;
  void* d_x;
  float* partial;             // (blocks, 2, channels): of norm_pool_sums
  int images, height, width;
  int channels;
  int strip;   // rows of windows that a thread walks down
  int groups;  // of a block's slice of the channels: of norm_pool_sums
};

// Where a thread walks: a group of channels, a column of windows, and rows of windows of one image.
struct Walk {
  int down, along;  // windows of an image
  int first;        // channel
  int column, row, end;
  long long image;
  bool used;

  DEVICE explicit Walk(const Arguments& arguments) {
    down = (arguments.height + 1) / 2, along = (arguments.width + 1) / 2;
    const int groups = arguments.channels / WIDTH, strips = (down + arguments.strip - 1) / arguments.strip;
    int index = block_index() * THREADS + thread_index();
    first = index % groups * WIDTH, index /= groups;
    column = index % along, index /= along;
    row = index % strips * arguments.strip, index /= strips;
    end = min(row + arguments.strip, down);
    image = index;
    used = index < arguments.images;
  }

  DEVICE long long pixel(const Arguments& arguments, int y, int x) const {
    return ((image * arguments.height + y) * arguments.width + x) * arguments.channels + first;
  }

  DEVICE long long window(const Arguments& arguments, int y, int x) const {
    return ((image * down + y) * along + x) * arguments.channels + first;
  }
};

// A byte for each channel of a group.
struct alignas(WIDTH) Bytes {
  Word words[WIDTH / 4];
};

// The largest value of each channel so far, and where it is; with signs turned where `signs` has bits.
struct Largest {
  float values[WIDTH];
  Word places[WIDTH];

  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] = bits_float(0xff800000u), places[i] = 0;
  }

  DEVICE void look_at(float value, int i, Word place) {
    const float larger = maximum(values[i], value);
    if (NORM && larger != values[i]) places[i] = place;  // of equal ones the first
    values[i] = larger;
  }

  DEVICE void look_at(Group group, const Group& signs, Word place) {
    if constexpr (NORM) {
#pragma unroll
      for (int i = 0; i < 4; ++i) group.words[i] ^= signs.words[i];
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) look_at(channel(group, i), i, place);
  }
};

// The pixels of one row that belong to a window. There are no branches, so that nothing waits for the first of several
// loads: for a pixel outside of the map its neighbour is loaded a second time, which changes no maximum. Nor does it
// change where that is: the later one of two equals never counts, and where the left pixel is outside, `left` is 1 and
// makes its place that of the middle one.
struct Three {
  Group groups[3];

  DEVICE void load(const Arguments& arguments, const Walk& walk, int y) {
    const int x = 2 * walk.column;
    const long long middle = walk.pixel(arguments, min(y, arguments.height - 1), x);
    groups[0] = load_group(arguments.x, middle - (x > 0 ? arguments.channels : 0));
    groups[1] = load_group(arguments.x, middle);
    groups[2] = load_group(arguments.x, middle + (x + 1 < arguments.width ? arguments.channels : 0));
  }

  DEVICE void show(Largest& largest, const Group& signs, Word left, Word place) const {
    largest.look_at(groups[0], signs, left + place);
    largest.look_at(groups[1], signs, place + 1);
    largest.look_at(groups[2], signs, place + 2);
  }
};

// Of a scale; a negative zero counts as positive.
DEVICE Word sign_of(float scale) { return scale < 0.f ? 0x80000000u : 0; }

// As the kernels of both directions see it: the same bits, and so the same side of zero.
DEVICE float normalise(float value, float scale, float shift) { return multiply_then_add(value, scale, shift); }

// Where the scale is zero all outputs of a window are the same, and the first one counts as the maximum.
DEVICE void take_first(const Arguments& arguments, const Walk& walk, int row, Largest& largest, Word zeros) {
  const int y = row > 0 ? 0 : 1, x = walk.column > 0 ? 0 : 1;
  const Group first = load_group(arguments.x, walk.pixel(arguments, 2 * row - 1 + y, 2 * walk.column - 1 + x));
#pragma unroll
  for (int i = 0; i < WIDTH; ++i)
    if (zeros >> i & 1) largest.values[i] = channel(first, i), largest.places[i] = 3 * y + x;
}

DEVICE void write_window(const Arguments& arguments, const Walk& walk, int row, const Largest& largest) {
  const long long to = walk.window(arguments, row, walk.column);
  if constexpr (!NORM) {
    store_group(arguments.out, to, pack_group(largest.values));
  } else {
    // Loaded each time: registers are scarcer than accesses to the cache.
    float raw[WIDTH], out[WIDTH], scale[WIDTH], shift[WIDTH];
    load_floats(scale, arguments.applied + walk.first);
    load_floats(shift, arguments.applied + arguments.channels + walk.first);
    Bytes places = {};
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      raw[i] = bits_float(float_bits(largest.values[i]) ^ sign_of(scale[i]));
      const float value = normalise(raw[i], scale[i], shift[i]);
      out[i] = maximum(value, 0.f);
      places.words[i / 4] |= (value <= 0.f ? NOWHERE : largest.places[i]) << 8 * (i % 4);
    }
    store_group(arguments.out, to, pack_group(out));
    store_group(arguments.peak, to, pack_group(raw));
    *reinterpret_cast<Bytes*>(arguments.place + to) = places;
  }
}

KERNEL(THREADS, BLOCKS) norm_pool(const Arguments arguments) {
  const Walk walk(arguments);
  take_turn();
  if (!walk.used) return;
  Group signs = {};
  Word zeros = 0;  // a bit for each channel
  if constexpr (NORM) {
    float scale[WIDTH];
    load_floats(scale, arguments.applied + walk.first);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      signs.words[WHOLE_WORDS ? i : i / 2] |= sign_of(scale[i]) >> (WHOLE_WORDS || i % 2 ? 0 : 16);
      zeros |= static_cast<Word>(scale[i] == 0.f) << i;
    }
  }
  const Word left = walk.column > 0 ? 0 : 1;
  Largest largest;  // of the rows of pixels that a window has in common with the one above it, then of all
  largest.clear();
  if (walk.row > 0) {
    Three above;
    above.load(arguments, walk, 2 * walk.row - 1);
    above.show(largest, signs, left, 0);
  }
  for (int row = walk.row; row < walk.end; ++row) {
    Three middle, last;
    middle.load(arguments, walk, 2 * row);
    last.load(arguments, walk, 2 * row + 1);
    middle.show(largest, signs, left, 3);
    Largest below;
    below.clear();
    last.show(below, signs, left, 0);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) largest.look_at(below.values[i], i, below.places[i] + 6);
    if (NORM && zeros) take_first(arguments, walk, row, largest, zeros);
    write_window(arguments, walk, row, largest);
    largest = below;
  }
}

// The sums of the output's gradient where it passes the ReLU, and of that times the normalised value.
KERNEL(THREADS, BLOCKS) norm_pool_sums(const Arguments arguments) {
  SHARED_MEMORY(shared);
  const Place place(arguments.groups, arguments.channels);
  float scale[WIDTH] = {}, shift[WIDTH] = {}, mean[WIDTH] = {}, sums[2 * WIDTH] = {};
  const float* applied = arguments.applied + place.first;
  take_turn();
  if (place.used) {
    load_floats(scale, applied);
    load_floats(shift, applied + arguments.channels);
    load_floats(mean, applied + 2 * arguments.channels);
  }
  const void* const maps[2] = {arguments.d_out, arguments.peak};
  const int down = (arguments.height + 1) / 2, along = (arguments.width + 1) / 2;
  const long long windows = static_cast<long long>(arguments.images) * down * along;
  for_each_row<2>(place, maps, windows, arguments.channels, [&](const Group(&groups)[2]) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const float raw = channel(groups[1], i);
      const float gradient = normalise(raw, scale[i], shift[i]) <= 0.f ? 0.f : channel(groups[0], i);
      sums[i] += gradient, sums[WIDTH + i] += gradient * (raw - mean[i]);
    }
  });
  if (place.used) {
    float inverse[WIDTH];
    load_floats(inverse, applied + 3 * arguments.channels);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sums[WIDTH + i] *= inverse[i];
  }
  write_sums(place, sums, reinterpret_cast<float*>(shared), arguments.partial, arguments.channels);
}

// The gradient of a window's output, and where in the window it goes; nowhere if there is no such window.
struct Window {
  Group gradient;
  Bytes places;
  Word nowhere;  // bits that make every place none

  DEVICE void load(const Arguments& arguments, const Walk& walk, int row, int column) {
    // Without a branch, so that nothing waits here: another window instead of one that does not exist.
    const bool exists = row < walk.down && column < walk.along;
    const long long from = walk.window(arguments, min(row, walk.down - 1), min(column, walk.along - 1));
    gradient = load_group(arguments.d_out, from);
    places = *reinterpret_cast<const Bytes*>(arguments.place + from);
    nowhere = exists ? 0 : NOWHERE * 0x01010101u;
  }

  // What goes to one place.
  DEVICE float at(Word place, int i) const {
    return ((places.words[i / 4] | nowhere) >> 8 * (i % 4) & 0xff) == place ? channel(gradient, i) : 0.f;
  }
};

// A thread has the four pixels that lie in one window's middle, to its right, below it, and across: the windows that reach
// them are this one, the next in the row, and the two below these.
KERNEL(THREADS, BLOCKS) norm_pool_gradient(const Arguments arguments) {
  const Walk walk(arguments);
  take_turn();
  if (!walk.used) return;
  float a[WIDTH], b[WIDTH], c[WIDTH];
  load_floats(a, arguments.coefficients + walk.first);
  load_floats(b, arguments.coefficients + arguments.channels + walk.first);
  load_floats(c, arguments.coefficients + 2 * arguments.channels + walk.first);
  const bool right = 2 * walk.column + 1 < arguments.width;
  Window here, next;
  here.load(arguments, walk, walk.row, walk.column);
  next.load(arguments, walk, walk.row, walk.column + 1);
  for (int row = walk.row; row < walk.end; ++row) {
    const bool down = 2 * row + 1 < arguments.height;
    const bool exists[4] = {true, right, down, right && down};
    const long long first = walk.pixel(arguments, 2 * row, 2 * walk.column);
    const long long line = static_cast<long long>(arguments.width) * arguments.channels;
    const auto pixel = [&](int k) { return first + k / 2 * line + k % 2 * arguments.channels; };
    Group pixels[4];
    Window below, across;
    below.load(arguments, walk, row + 1, walk.column);
    across.load(arguments, walk, row + 1, walk.column + 1);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (exists[k]) pixels[k] = load_group(arguments.x, pixel(k));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (!exists[k]) continue;
      float values[WIDTH];
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        float gradient;
        if (k == 0) gradient = here.at(4, i);
        if (k == 1) gradient = here.at(5, i) + next.at(3, i);
        if (k == 2) gradient = here.at(7, i) + below.at(1, i);
        if (k == 3) gradient = here.at(8, i) + next.at(6, i) + below.at(2, i) + across.at(0, i);
        values[i] = a[i] * gradient + (b[i] * channel(pixels[k], i) + c[i]);
      }
      store_group(arguments.d_x, pixel(k), pack_group(values));
    }
    here = below, next = across;
  }
}
