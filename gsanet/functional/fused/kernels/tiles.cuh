// Lines of a map in shared memory, and the way there and back.
//
// A block works on LINES lines (columns or rows of the map, LENGTH pixels each) with HEADS heads each: PAIRS pairs of a
// line, or of a bundle of short ones, and a head. The constants in capitals are given on the compiler's command line:
// SCALAR, LENGTH, HEADS, LINES, WARPS, and VECTOR, whether 16 bytes may be moved at once (all widths, strides and addresses
// are multiples of that).
#pragma once
#include "fragments.cuh"

using T = SCALAR;

constexpr int THREADS = 32 * WARPS;
constexpr int ACCESS = VECTOR ? PER_ACCESS<T> : 1;  // scalars that a thread moves at once

template <int VALUE_>
struct Constant {
  static constexpr int value = VALUE_;
};

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Rows of shared memory are an odd number of 16 bytes apart, so that eight of them never meet in one bank.
constexpr int odd_stride(int width) {
  return round_up(width, PER_ACCESS<T>) / PER_ACCESS<T> % 2 ? round_up(width, PER_ACCESS<T>)
                                                            : round_up(width, PER_ACCESS<T>) + PER_ACCESS<T>;
}

// Channels of a head, padded with zeros to what products need.
constexpr int padded(int width) { return round_up(width, IS_FLOAT<T> || width <= 8 ? 8 : 16); }

// Products have 16 rows. Lines of at most 8 pixels share them: a bundle of lines of one image, one behind the other, is
// treated as one line of 16 pixels, each of which attends to those of its own line only. A single line is not bundled: it is
// what the context vectors' kernels take a map for.
constexpr int BUNDLE = LENGTH > 8 || LINES == 1 ? 1 : LENGTH > 4 ? 2 : 4;  // lines
constexpr bool BUNDLED = BUNDLE > 1;
static_assert(LINES % BUNDLE == 0, "whole bundles");
constexpr int LINE_ROWS = BUNDLED ? 16 / BUNDLE : round_up(LENGTH, 16);  // pixels of a line, padded with zeros
constexpr int TILE_ROWS = BUNDLE * LINE_ROWS;
constexpr int PAIRS = LINES / BUNDLE * HEADS;
static_assert(PAIRS <= (BUNDLED ? 8 : 16), "the rows of a product");

// Rows of a line or a bundle from END on are not pixels, but zeros; of a bundle some before it are not either.
constexpr int END = BUNDLED ? 16 : LENGTH;
DEVICE bool is_pixel(int row) { return !BUNDLED || row % LINE_ROWS < LENGTH; }

// Whether two rows of a line or a bundle belong to one line.
DEVICE bool of_one_line(int row, int other) { return !BUNDLED || row / LINE_ROWS == other / LINE_ROWS; }

// A map in global memory: strides, in scalars, from image to image, from line to line and along a line.
struct Map {
  void* data;
  long long batch;
  int line;
  int pixel;
};

// How many times LINES lines there are: of each image, where they are bundled, or of the whole batch.
DEVICE int count_items(int total, int per_image) {
  if constexpr (BUNDLED)
    return total / per_image * ((per_image + LINES - 1) / LINES);
  else
    return (total + LINES - 1) / LINES;
}

// The lines that a block works on at one time. They may belong to different images, unless they are bundled; some may not
// exist.
struct Lines {
  int total;  // in the whole batch
  int per_image;
  int first_head;
  int first = 0;  // counted over the whole batch
  int first_image = 0, first_in_image = 0;

  DEVICE void move_to_item(int item) {
    if constexpr (BUNDLED) {
      const int items_per_image = (per_image + LINES - 1) / LINES;
      first_image = item / items_per_image, first_in_image = (item - first_image * items_per_image) * LINES;
    } else {
      move_to(item * LINES);
    }
  }

  DEVICE void move_to(int line) {
    first = line, first_image = line / per_image, first_in_image = line - first_image * per_image;
  }

  DEVICE bool exists(int slot) const { return BUNDLED ? first_in_image + slot < per_image : first + slot < total; }
  DEVICE bool exists(int slot, int) const { return exists(slot); }  // a pixel: all of a line

  // A slot's image, and the line's number in it; of a line that does not exist, those of the first one.
  DEVICE void find(int slot, int& image, int& line) const {
    image = first_image, line = first_in_image + (exists(slot) ? slot : 0);
    if constexpr (BUNDLED) {
    } else if constexpr (LINES <= 2) {
      if (line >= per_image) line -= per_image, ++image;
    } else {
      image += line / per_image, line %= per_image;
    }
  }

  // Where the pixels of a line begin, at channel 0 of the block's first head.
  DEVICE auto start(const Map& map, int slot, int width) const {
    int image, line;
    find(slot, image, line);
    T* const first_pixel =
        static_cast<T*>(map.data) + image * map.batch + static_cast<long long>(line) * map.line + first_head * width;
    return [first_pixel, &map](int pixel) { return first_pixel + static_cast<long long>(pixel) * map.pixel; };
  }

  // The number of a pair's image and head among those of the whole batch.
  DEVICE long long image_head(int pair, int heads) const {
    int image, line;
    find(pair / HEADS * BUNDLE, image, line);
    return static_cast<long long>(image) * heads + first_head + pair % HEADS;
  }

  // Lines of the map of 2 x 2 means: a block's lines come in twos of one image.
  DEVICE Lines pooled() const {
    Lines half{total / 2, per_image / 2, first_head};
    if constexpr (BUNDLED)
      half.first_image = first_image, half.first_in_image = first_in_image / 2;
    else
      half.move_to(first / 2);
    return half;
  }
};

// LENGTH pixels of the lines that a block works on, where the whole lines are longer; those past their end do not exist.
struct Piece : Lines {
  int length;     // of a whole line
  int begin = 0;  // its first pixel

  using Lines::exists;
  DEVICE bool exists(int slot, int pixel) const { return exists(slot) && begin + pixel < length; }

  // Of a pixel that does not exist, where the first one begins.
  DEVICE auto start(const Map& map, int slot, int width) const {
    const auto whole = Lines::start(map, slot, width);
    return [whole, this](int pixel) { return whole(begin + pixel < length ? begin + pixel : begin); };
  }

  // Pieces begin at an even pixel.
  DEVICE Piece pooled() const { return Piece{Lines::pooled(), length / 2, begin / 2}; }
};

// [slot][pixel][head][channel], each row of channels padded to WIDTH. Eight heads of one pixel and eight pixels of one
// head are both read without bank conflicts; of bundles, eight pairs of fewer heads are so too, if heads are wide.
// PER_SLOT lines that are not bundled have one slot together.
template <int WIDTH, int ROWS = LINE_ROWS, int PER_SLOT = 1>
struct Tile {
  static constexpr int HEAD = WIDTH >= 32 ? odd_stride(WIDTH) : WIDTH;
  static constexpr int PIXEL = odd_stride(HEADS * HEAD);
  static constexpr int LINE = ROWS * PIXEL;
  static constexpr int ALL = BUNDLE * LINE + (BUNDLED && HEADS < 8 ? HEADS * PER_ACCESS<T> : 0);  // that are bundled
  static constexpr int SIZE = LINES / PER_SLOT / BUNDLE * ALL;

  T* data;

  DEVICE T* at(int slot, int pixel, int head) const {
    return data + slot / BUNDLE * ALL + slot % BUNDLE * LINE + pixel * PIXEL + head * HEAD;
  }
  DEVICE T* of_pair(int pair, int row) const { return at(pair / HEADS / PER_SLOT * BUNDLE, row, pair % HEADS); }
};

struct alignas(16) Words {
  Word words[4];
};

// `data` and `count` are multiples of 16 bytes.
template <class S>
DEVICE void fill_with_zeros(S* data, int count) {
  for (int i = thread_index(); i < count * static_cast<int>(sizeof(S)) / 16; i += THREADS)
    reinterpret_cast<Words*>(data)[i] = Words{};
}

// Where rows begin that are at one distance.
struct Spaced {
  const T* first;
  long long distance;

  DEVICE const T* operator()(int row) const { return first + row * distance; }
};

// Rows of WIDTH scalars from global to shared memory in the background, PITCH apart there: ROWS of them, of which
// `count` exist, the others become zeros. `from(row)` is where a row begins; UNROLLED copies are one after the other in the code.
template <int ROWS, int WIDTH, int PITCH, int UNROLLED, class Row>
DEVICE void fetch_rows(T* to, int count, Row from) {
  static_assert(VECTOR && WIDTH % ACCESS == 0, "16 bytes at a time");
  constexpr int PER_ROW = WIDTH / ACCESS;
  const int thread = thread_anew(THREADS);
#pragma unroll UNROLLED
  for (int i = 0; i < (ROWS * PER_ROW + THREADS - 1) / THREADS; ++i) {
    const int number = i * THREADS + thread, row = number / PER_ROW, channel = number % PER_ROW * ACCESS;
    if (ROWS * PER_ROW % THREADS && row >= ROWS) break;
    copy_async(to + row * PITCH + channel, from(row < count ? row : 0) + channel, row < count);
  }
}

// What a thread moves at once, as it lies in memory.
struct Access {
  Word words[VECTOR ? 4 : 1];
};

DEVICE Access read_access(const T* from) {
  Access access;
  if constexpr (VECTOR) {
    const Words words = *reinterpret_cast<const Words*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) access.words[i] = words.words[i];
  } else {
    access.words[0] = float_bits(to_float(*from));
  }
  return access;
}

template <class S = T>
DEVICE void to_floats(float (&values)[ACCESS], const Access& access) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Access) / 4); ++i) {
    if constexpr (!VECTOR || IS_FLOAT<S>)
      values[i] = bits_float(access.words[i]);
    else
      unpack<S>(access.words[i], values[2 * i], values[2 * i + 1]);
  }
}

template <class S = T>
DEVICE Access to_access(const float (&values)[ACCESS]) {
  Access access;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Access) / 4); ++i) {
    if constexpr (!VECTOR || IS_FLOAT<S>)
      access.words[i] = float_bits(values[i]);
    else
      access.words[i] = pack<S>(values[2 * i], values[2 * i + 1]);
  }
  return access;
}

template <class S>
DEVICE void write_access(S* to, const Access& access) {
  if constexpr (VECTOR) {
    Words words;
#pragma unroll
    for (int i = 0; i < 4; ++i) words.words[i] = access.words[i];
    *reinterpret_cast<Words*>(to) = words;
  } else {
    *to = to_scalar<S>(bits_float(access.words[0]));
  }
}

template <class S>
DEVICE void write_access(S* to, const float (&values)[ACCESS]) {
  write_access(to, to_access<S>(values));
}

// The access, or zeros.
DEVICE Access only_if(bool there, Access access) {
#pragma unroll
  for (Word& word : access.words) word = there ? word : 0;
  return access;
}

// `from` is a multiple of 16 bytes if accesses are.
DEVICE void load_floats(float (&values)[ACCESS], const float* from) {
  if constexpr (VECTOR) {
#pragma unroll
    for (int i = 0; i < ACCESS; i += 4) {
      const Words words = *reinterpret_cast<const Words*>(from + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) values[i + j] = bits_float(words.words[j]);
    }
  } else {
    values[0] = from[0];
  }
}

// Two functions of a pixel: what is read there, and what is done with it.
template <class Read, class Write>
struct Moves {
  Read read;
  Write write;
};
template <class Read, class Write>
Moves(Read, Write) -> Moves<Read, Write>;

// How the threads share the pixels of a tile: each has its own channels, and neighbours move neighbouring channels. A thread
// goes along each of its lines in steps of AT_ONCE pixels: what an address owes to the line is worked out once for all of them.
template <int WIDTH, int SLOT_COUNT = LINES, int PIXEL_COUNT = LENGTH>
struct Accesses {
  static constexpr int PER_HEAD = WIDTH / ACCESS;
  static constexpr int PER_PIXEL = HEADS * PER_HEAD;
  static constexpr int PIXELS = PER_PIXEL < THREADS ? THREADS / PER_PIXEL : 1;  // moved at once, of
  static constexpr int SLOTS = PIXELS < 2 * PIXEL_COUNT      ? 1                // so many lines
                               : PIXELS / PIXEL_COUNT < SLOT_COUNT ? PIXELS / PIXEL_COUNT
                                                                   : SLOT_COUNT;
  static constexpr int AT_ONCE = PIXELS / SLOTS;
  static constexpr int ROUNDS = (PIXEL_COUNT + AT_ONCE - 1) / AT_ONCE;  // of one line
  static constexpr int TURNS = (SLOT_COUNT + SLOTS - 1) / SLOTS;        // of lines

  // begin(head, channel) gives a function that begins a line: along(slot) gives Moves, read(pixel) and write(what was
  // read, pixel).
  template <class Begin>
  static DEVICE void visit(Begin begin) {
    const int thread = thread_anew(THREADS);
    const int first = PER_PIXEL < THREADS ? thread / PER_PIXEL : 0;
    if (first >= SLOTS * AT_ONCE) return;
    const int first_slot = SLOTS > 1 ? first / AT_ONCE : 0, first_pixel = SLOTS > 1 ? first % AT_ONCE : first;
    for (int access = PER_PIXEL < THREADS ? thread % PER_PIXEL : thread; access < PER_PIXEL; access += THREADS) {
      auto along = begin(access / PER_HEAD, access % PER_HEAD * ACCESS);
      using Found = decltype(along(0).read(0));
      // So many are read before the first is written, and their waits overlap.
      constexpr int MOST = sizeof(Found) > 16 ? 2 : 4, BATCH = ROUNDS < MOST ? ROUNDS : MOST;
      constexpr int LINE_BATCH = MOST / BATCH < TURNS ? MOST / BATCH : TURNS;
#pragma unroll 1
      for (int turn = 0; turn < TURNS; turn += LINE_BATCH)
#pragma unroll 1
        for (int round = 0; round < ROUNDS; round += BATCH) {
          Found found[LINE_BATCH][BATCH];
          auto each = [&](auto move) {
#pragma unroll
            for (int i = 0; i < LINE_BATCH; ++i) {
              const int slot = first_slot + (turn + i) * SLOTS;
              if (TURNS * SLOTS > SLOT_COUNT || TURNS % LINE_BATCH)
                if (slot >= SLOT_COUNT) break;
              const auto moves = along(slot);
#pragma unroll
              for (int j = 0; j < BATCH; ++j) {
                const int pixel = first_pixel + (round + j) * AT_ONCE;
                if ((ROUNDS * AT_ONCE == PIXEL_COUNT && ROUNDS % BATCH == 0) || pixel < PIXEL_COUNT)
                  move(moves, found[i][j], pixel);
              }
            }
          };
          each([](const auto& moves, Found& one, int pixel) { one = moves.read(pixel); });
          each([](const auto& moves, Found& one, int pixel) { moves.write(one, pixel); });
        }
    }
  }
};

// From global to shared memory as it is; lines that do not exist become zeros. Wait and meet before reading.
template <int WIDTH, class TileType, class LinesType>
DEVICE void copy_in(TileType tile, const Map& map, const LinesType& lines) {
  Accesses<WIDTH>::visit([&](int head, int channel) {
    return [&, head, channel](int slot) {
      const auto line = lines.start(map, slot, WIDTH);
      auto from = [=](int pixel) { return line(pixel) + head * WIDTH + channel; };
      auto to = [=](int pixel) { return tile.at(slot, pixel, head) + channel; };
      if constexpr (VECTOR)
        return Moves{[=, &lines](int pixel) {
                       copy_async(to(pixel), from(pixel), lines.exists(slot, pixel));
                       return 0;
                     },
                     [](int, int) {}};
      else
        return Moves{[=](int pixel) { return *from(pixel); },
                     [=, &lines](T value, int pixel) { *to(pixel) = lines.exists(slot, pixel) ? value : T{}; }};
    };
  });
}

// What was read of a pixel, and what else.
template <class Other>
struct WithOther {
  Access access;
  Other other;
};

// The same with a change on the way: change(head, channel)(slot) gives Moves of its own, from a pixel to what else is read,
// and then a function of (values, what else was read).
template <int WIDTH, class TileType, class LinesType, class Change>
DEVICE void copy_in(TileType tile, const Map& map, const LinesType& lines, Change change) {
  Accesses<WIDTH>::visit([&](int head, int channel) {
    return [&, head, channel, along = change(head, channel)](int slot) {
      const auto changes = along(slot);
      const auto from = lines.start(map, slot, WIDTH);
      using Found = WithOther<decltype(changes.read(0))>;
      return Moves{[=](int pixel) {
                     return Found{read_access(from(pixel) + head * WIDTH + channel), changes.read(pixel)};
                   },
                   [=, &lines](const Found& found, int pixel) {
                     float values[ACCESS];
                     to_floats(values, found.access);
                     changes.write(values, found.other);
                     write_access(tile.at(slot, pixel, head) + channel, only_if(lines.exists(slot, pixel), to_access(values)));
                   }};
    };
  });
}

// The gradient of a mean of 2 x 2 pixels: each pixel gets a quarter of its group's. EACH: in a place of its own, or else in
// one for all four.
template <int WIDTH, bool EACH, class TileType, class LinesType>
DEVICE void copy_in_pooled(TileType tile, const Map& map, const LinesType& lines) {
  constexpr int SHARE = EACH ? 2 : 1, SIDE = 2 / SHARE;  // places of a group, and pixels of a place, in each direction
  const LinesType pooled = lines.pooled();
  Accesses<WIDTH, LINES / SIDE, LENGTH / SIDE>::visit([&](int head, int channel) {
    return [&, head, channel](int slot) {
      const auto from = pooled.start(map, slot / SHARE, WIDTH);
      return Moves{[=](int pixel) { return read_access(from(pixel / SHARE) + head * WIDTH + channel); },
                   [=, &lines](const Access& access, int pixel) {
                     float values[ACCESS];
                     to_floats(values, access);
#pragma unroll
                     for (float& value : values) value *= 0.25f;
                     const bool exists = lines.exists(slot * SIDE, pixel * SIDE);
                     write_access(tile.at(slot, pixel, head) + channel, only_if(exists, to_access(values)));
                   }};
    };
  });
}

// From shared to global memory as it is, the lines that exist.
template <int WIDTH, class LinesType, class TileType>
DEVICE void copy_out(const Map& map, const LinesType& lines, TileType tile) {
  Accesses<WIDTH>::visit([&](int head, int channel) {
    return [&, head, channel](int slot) {
      const auto to = lines.start(map, slot, WIDTH);
      return Moves{[=](int pixel) { return read_access(tile.at(slot, pixel, head) + channel); },
                   [=, &lines](const Access& access, int pixel) {
                     if (lines.exists(slot, pixel)) write_access(to(pixel) + head * WIDTH + channel, access);
                   }};
    };
  });
}

// The same with a change as in `copy_in`, its first function given where it goes. Unless it is CHANGED, what goes out is what
// was there, and the second function just sees it.
template <int WIDTH, bool CHANGED, class LinesType, class TileType, class Change>
DEVICE void copy_out(const Map& map, const LinesType& lines, TileType tile, Change change) {
  Accesses<WIDTH>::visit([&](int head, int channel) {
    return [&, head, channel, along = change(head, channel)](int slot) {
      const auto changes = along(slot);
      const auto line = lines.start(map, slot, WIDTH);
      auto to = [=](int pixel) { return line(pixel) + head * WIDTH + channel; };
      using Found = WithOther<decltype(changes.read(static_cast<const T*>(nullptr), 0))>;
      return Moves{[=](int pixel) {
                     return Found{read_access(tile.at(slot, pixel, head) + channel), changes.read(to(pixel), pixel)};
                   },
                   [=, &lines](const Found& found, int pixel) {
                     if (!lines.exists(slot, pixel)) return;
                     float values[ACCESS];
                     to_floats(values, found.access);
                     changes.write(values, found.other);
                     write_access(to(pixel), CHANGED ? to_access(values) : found.access);
                   }};
    };
  });
}

struct Nothing {};

// A thread's channels of COUNT rows of numbers, one for each channel of the map, read once for all its pixels.
template <int COUNT>
struct OfChannels {
  float rows[COUNT][ACCESS];

  DEVICE OfChannels(const float* first, int channels) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) load_floats(rows[i], first + i * channels);
  }
};

// A change of values by their channel: (2, channels) floats, scale and shift.
DEVICE auto scale_and_shift(const float* scales, int channels, int width) {
  return [=](int head, int channel) {
    return [own = OfChannels<2>(scales + head * width + channel, channels)](int) {
      return Moves{[](int) { return Nothing{}; },
                   [own](float(&values)[ACCESS], Nothing) {
#pragma unroll
                     for (int i = 0; i < ACCESS; ++i) values[i] = values[i] * own.rows[0][i] + own.rows[1][i];
                   }};
    };
  };
}

// What a block adds up for each channel over all its lines: two sums for each channel, taken by the thread that moves these
// channels, in its own part of shared memory, and written once, [block][2][channels], in a fixed order.
template <int WIDTH>
struct ChannelSums {
  float* shared;  // 2 ACCESS THREADS

  DEVICE void set(const float (&first)[ACCESS], const float (&second)[ACCESS]) const {
    static_assert(Accesses<WIDTH>::PER_PIXEL <= THREADS || !VECTOR, "a thread has the sums of one access");
#pragma unroll
    for (int i = 0; i < ACCESS; ++i) {
      shared[2 * i * THREADS + thread_index()] = first[i];
      shared[(2 * i + 1) * THREADS + thread_index()] = second[i];
    }
  }

  DEVICE void add(const float (&first)[ACCESS], const float (&second)[ACCESS]) const {
#pragma unroll
    for (int i = 0; i < ACCESS; ++i) {
      shared[2 * i * THREADS + thread_index()] += first[i];
      shared[(2 * i + 1) * THREADS + thread_index()] += second[i];
    }
  }

  DEVICE void write(float* partial, int channels, int first_channel) const {
    using Threads = Accesses<WIDTH>;
    block_barrier();
    if (thread_index() >= Threads::PER_PIXEL) return;
    float* row = partial + block_index() * 2ll * channels + first_channel + thread_index() * ACCESS;
    for (int i = 0; i < 2 * ACCESS; ++i) {
      float sum = 0.f;
      for (int group = 0; group < Threads::PIXELS; ++group)
        sum += shared[i * THREADS + group * Threads::PER_PIXEL + thread_index()];
      row[i % 2 * channels + i / 2] = sum;
    }
  }
};
