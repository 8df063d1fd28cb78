// Stretches of pixels on their way to shared memory.
#pragma once
#include "fragments.cuh"

// From global to shared memory in the background, by WORKERS threads: PIXELS pixels of WIDTH channels, PITCH apart there, of which
// `count` exist; the others become zeros.
template <int WORKERS, int PIXELS, int WIDTH, int PITCH, class T>
DEVICE void fetch_pixels(T* to, const T* from, int stride, int count) {
  constexpr int ACCESS = PER_ACCESS<T>, PER_ROW = WIDTH / ACCESS, AT_ONCE = WORKERS / PER_ROW;  // pixels
  static_assert(WORKERS % PER_ROW == 0, "a thread has the same channels of all its pixels");
  const int thread = anew(thread_index()), first = thread / PER_ROW, channel = thread % PER_ROW * ACCESS;
  to += first * PITCH + channel, from += channel;
  const T* place = from + static_cast<long long>(first) * stride;
#pragma unroll
  for (int i = 0; i < (PIXELS + AT_ONCE - 1) / AT_ONCE; ++i) {
    const int pixel = first + i * AT_ONCE;
    if ((i + 1) * AT_ONCE <= PIXELS || pixel < PIXELS)
      copy_async(to + i * AT_ONCE * PITCH, pixel < count ? place : from, pixel < count);
    place += static_cast<long long>(AT_ONCE) * stride;
  }
}
