// Lines of a map in shared memory, and the way there and back.
//
// A block works on LINES lines (columns or rows of the map, LENGTH pixels each) with HEADS heads each: PAIRS pairs of a
// line and a head. The constants in capitals are given on the compiler's command line: SCALAR, LENGTH, HEADS, LINES,
// WARPS, and VECTOR, whether 16 bytes may be moved at once (all widths, strides and addresses are multiples of that).
#pragma once
#include "fragments.cuh"

using T = SCALAR;

constexpr int THREADS = 32 * WARPS;
constexpr int PAIRS = LINES * HEADS;
constexpr int ACCESS = VECTOR ? PER_ACCESS<T> : 1;  // scalars that a thread moves at once

DEVICE float infinity() { return bits_float(0x7f800000u); }

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

constexpr int TILE_ROWS = round_up(LENGTH, 16);  // pixels of a line, padded with zeros

// A map in global memory: strides, in scalars, from image to image, from line to line and along a line.
struct Map {
  void* data;
  long long batch;
  int line;
  int pixel;
};

// The lines that a block works on at one time. They may belong to different images; some may not exist.
struct Lines {
  int first;      // counted over the whole batch
  int total;      // in the whole batch
  int per_image;
  int first_head;

  DEVICE bool exists(int slot) const { return first + slot < total; }
  DEVICE int image(int slot) const { return (first + slot) / per_image; }

  // Where channel 0 of the block's first head of a line begins.
  DEVICE T* start(const Map& map, int slot, int width) const {
    const int line = exists(slot) ? first + slot : first, number = line / per_image;
    return static_cast<T*>(map.data) + number * map.batch + static_cast<long long>(line - number * per_image) * map.line +
           first_head * width;
  }
};

// [slot][pixel][head][channel], each row of channels padded to WIDTH. Eight heads of one pixel and eight pixels of one
// head are both read without bank conflicts.
template <int WIDTH>
struct Tile {
  static constexpr int HEAD = WIDTH >= 32 ? odd_stride(WIDTH) : WIDTH;
  static constexpr int PIXEL = odd_stride(HEADS * HEAD);
  static constexpr int LINE = TILE_ROWS * PIXEL;
  static constexpr int SIZE = LINES * LINE;

  T* data;

  DEVICE T* at(int slot, int pixel, int head) const { return data + slot * LINE + pixel * PIXEL + head * HEAD; }
  DEVICE T* of_pair(int pair, int pixel) const { return at(pair / HEADS, pixel, pair % HEADS); }
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

template <class S>
DEVICE void unpack(Word word, float& low, float& high) {
  low = to_float(S{static_cast<unsigned short>(word)}), high = to_float(S{static_cast<unsigned short>(word >> 16)});
}

template <class S>
DEVICE void load_access(float (&values)[ACCESS], const S* from) {
  if constexpr (ACCESS == 1) {
    values[0] = to_float(*from);
  } else {
    const Words access = *reinterpret_cast<const Words*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (IS_FLOAT<S>)
        values[i] = bits_float(access.words[i]);
      else
        unpack<S>(access.words[i], values[2 * i], values[2 * i + 1]);
    }
  }
}

template <class S>
DEVICE S to_scalar(float value) {
  if constexpr (IS_FLOAT<S>)
    return value;
  else
    return S{static_cast<unsigned short>(pack<S>(value, 0.f))};
}

template <class S>
DEVICE void store_access(S* to, const float (&values)[ACCESS]) {
  if constexpr (ACCESS == 1) {
    *to = to_scalar<S>(values[0]);
  } else {
    Words access;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (IS_FLOAT<S>)
        access.words[i] = float_bits(values[i]);
      else
        access.words[i] = pack<S>(values[2 * i], values[2 * i + 1]);
    }
    *reinterpret_cast<Words*>(to) = access;
  }
}

DEVICE void load_floats(float (&values)[ACCESS], const float* from) {
#pragma unroll
  for (int i = 0; i < ACCESS; ++i) values[i] = from[i];
}

// How the threads share the pixels of a tile: each has its own channels, and neighbours move neighbouring channels.
template <int WIDTH>
struct Accesses {
  static constexpr int PER_HEAD = WIDTH / ACCESS;
  static constexpr int PER_PIXEL = HEADS * PER_HEAD;
  static constexpr int PIXELS = PER_PIXEL < THREADS ? THREADS / PER_PIXEL : 1;  // moved at once

  // Calls begin(head, channel)(slot)(pixel): what depends on the channels alone is prepared once.
  template <class Begin>
  static DEVICE void visit(Begin begin) {
    const int first = PER_PIXEL < THREADS ? thread_index() / PER_PIXEL : 0;
    if (first >= PIXELS) return;
    for (int access = PER_PIXEL < THREADS ? thread_index() % PER_PIXEL : thread_index(); access < PER_PIXEL; access += THREADS) {
      auto channels = begin(access / PER_HEAD, access % PER_HEAD * ACCESS);
#pragma unroll 2
      for (int slot = 0; slot < LINES; ++slot) {
        auto line = channels(slot);
#pragma unroll 4
        for (int pixel = first; pixel < LENGTH; pixel += PIXELS) line(pixel);
      }
    }
  }
};

// From global to shared memory as it is; lines that do not exist become zeros. Wait and meet before reading.
template <int WIDTH, class TileType>
DEVICE void copy_in(TileType tile, const Map& map, const Lines& lines) {
  Accesses<WIDTH>::visit([&](int head, int channel) {
    return [&, head, channel](int slot) {
      const T* from = lines.start(map, slot, WIDTH) + head * WIDTH + channel;
      T* to = tile.at(slot, 0, head) + channel;
      const bool exists = lines.exists(slot);
      return [&map, from, to, exists](int pixel) {
        if constexpr (VECTOR)
          copy_async(to + pixel * TileType::PIXEL, from + static_cast<long long>(pixel) * map.pixel, exists);
        else
          to[pixel * TileType::PIXEL] = exists ? from[static_cast<long long>(pixel) * map.pixel] : T{};
      };
    };
  });
}

// The same with a change of the values on the way: change(head, channel) gives a function of (values, slot, pixel).
template <int WIDTH, class TileType, class Change>
DEVICE void copy_in(TileType tile, const Map& map, const Lines& lines, Change change) {
  Accesses<WIDTH>::visit([&](int head, int channel) {
    return [&, head, channel, changed = change(head, channel)](int slot) {
      const T* from = lines.start(map, slot, WIDTH) + head * WIDTH + channel;
      T* to = tile.at(slot, 0, head) + channel;
      const bool exists = lines.exists(slot);
      return [&map, &changed, from, to, exists, slot](int pixel) {
        float values[ACCESS];
        load_access(values, from + static_cast<long long>(pixel) * map.pixel);
        changed(values, slot, pixel);
#pragma unroll
        for (int i = 0; i < ACCESS; ++i) values[i] = exists ? values[i] : 0.f;
        store_access(to + pixel * TileType::PIXEL, values);
      };
    };
  });
}

// The gradient of a mean of 2 x 2 pixels: each pixel gets a quarter of its group's. Lines come in twos of one image.
template <int WIDTH, class TileType>
DEVICE void copy_in_pooled(TileType tile, const Map& map, const Lines& lines) {
  const Lines pooled{lines.first / 2, lines.total / 2, lines.per_image / 2, lines.first_head};
  Accesses<WIDTH>::visit([&](int head, int channel) {
    return [&, head, channel](int slot) {
      const bool exists = lines.exists(slot);
      const T* from = pooled.start(map, exists ? slot / 2 : 0, WIDTH) + head * WIDTH + channel;
      T* to = tile.at(slot, 0, head) + channel;
      return [&map, from, to, exists](int pixel) {
        float values[ACCESS];
        load_access(values, from + static_cast<long long>(pixel / 2) * map.pixel);
#pragma unroll
        for (int i = 0; i < ACCESS; ++i) values[i] = exists ? 0.25f * values[i] : 0.f;
        store_access(to + pixel * TileType::PIXEL, values);
      };
    };
  });
}

// Zeros between and after the channels and the pixels that copies fill.
template <int WIDTH, class TileType>
DEVICE void clear_padding(TileType tile) {
  constexpr int PADDING = padded(WIDTH) - WIDTH;
  for (int i = thread_index(); i < LINES * TILE_ROWS * HEADS; i += THREADS) {
    const int pixel = i / HEADS % TILE_ROWS;
    T* row = tile.at(i / HEADS / TILE_ROWS, pixel, i % HEADS);
    if (pixel >= LENGTH)
      for (int channel = 0; channel < padded(WIDTH); ++channel) row[channel] = T{};
    else
      for (int channel = WIDTH; channel < WIDTH + PADDING; ++channel) row[channel] = T{};
  }
}

// From shared to global memory, the lines that exist: change(head, channel) gives a function of (values, slot, pixel,
// where they go).
template <int WIDTH, class TileType, class Change>
DEVICE void copy_out(const Map& map, const Lines& lines, TileType tile, Change change) {
  Accesses<WIDTH>::visit([&](int head, int channel) {
    return [&, head, channel, changed = change(head, channel)](int slot) {
      T* to = lines.start(map, slot, WIDTH) + head * WIDTH + channel;
      const T* from = tile.at(slot, 0, head) + channel;
      const bool exists = lines.exists(slot);
      return [&map, &changed, from, to, exists, slot](int pixel) {
        if (!exists) return;
        float values[ACCESS];
        load_access(values, from + pixel * TileType::PIXEL);
        T* target = to + static_cast<long long>(pixel) * map.pixel;
        changed(values, slot, pixel, target);
        store_access(target, values);
      };
    };
  });
}

// A change of values by their channel: (2, channels) floats, scale and shift.
DEVICE auto scale_and_shift(const float* scales, int channels, int width) {
  return [=](int head, int channel) {
    float scale[ACCESS], shift[ACCESS];
    load_floats(scale, scales + head * width + channel);
    load_floats(shift, scales + channels + head * width + channel);
    return [scale, shift](float(&values)[ACCESS], int, int) {
#pragma unroll
      for (int i = 0; i < ACCESS; ++i) values[i] = values[i] * scale[i] + shift[i];
    };
  };
}

// What a block adds up for each channel over all its lines: two sums a channel, kept in registers by the thread that
// moves these channels, and written once, [block][2][channels], in a fixed order.
template <int WIDTH>
struct ChannelSums {
  static_assert(Accesses<WIDTH>::PER_PIXEL <= THREADS || !VECTOR, "a thread keeps the sums of one access");
  float first[ACCESS] = {}, second[ACCESS] = {};

  DEVICE void write(float* partial, int channels, int first_channel, float* shared) {
    using Threads = Accesses<WIDTH>;
    block_barrier();
#pragma unroll
    for (int i = 0; i < ACCESS; ++i) {
      shared[(2 * i) * THREADS + thread_index()] = first[i];
      shared[(2 * i + 1) * THREADS + thread_index()] = second[i];
    }
    block_barrier();
    if (thread_index() < Threads::PER_PIXEL) {
      float* row = partial + block_index() * 2ll * channels + first_channel + thread_index() * ACCESS;
      for (int i = 0; i < 2 * ACCESS; ++i) {
        float sum = 0.f;
        for (int group = 0; group < Threads::PIXELS; ++group)
          sum += shared[i * THREADS + group * Threads::PER_PIXEL + thread_index()];
        row[i % 2 * channels + i / 2] = sum;
      }
    }
    block_barrier();
  }
};
