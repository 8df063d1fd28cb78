// What the gradient of a batch norm, and of the ReLU behind it, needs of each channel: the sums of dY and of dY times the
// normalised input, where the ReLU is open. Whether it is follows from the input: its output is not read.
#include "channels.cuh"

struct Arguments {
  const void* x;         // (rows, channels), the norm's input
  const void* d_out;     // the same
  const float* applied;  // (5, channels): scale, shift, mean, 1 / standard deviation, variance
  float* partial;        // (blocks, 2, channels)
  long long rows;
  int channels;
  int groups;  // of a block's slice of the channels
};

KERNEL(THREADS, BLOCKS) norm_sums(const Arguments arguments) {
  SHARED_MEMORY(shared);
  const int channels = arguments.channels;
  const Place place(arguments.groups, channels);
  float scale[WIDTH], level[WIDTH], mean[WIDTH], sums[2 * WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) scale[i] = level[i] = mean[i] = sums[i] = sums[WIDTH + i] = 0.f;
  take_turn();
  const float* const applied = arguments.applied + place.first;
  if (place.used) {
    load_floats(scale, applied);
    load_floats(level, applied + channels);
    load_floats(mean, applied + 2 * channels);
  }
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) level[i] += mean[i] * scale[i];
  const void* const maps[2] = {arguments.x, arguments.d_out};
  for_each_row<2>(place, maps, arguments.rows, channels, [&](const Group(&groups)[2]) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const float distance = channel(groups[0], i) - mean[i];
      float d_out = channel(groups[1], i);
      if (RELU && distance * scale[i] + level[i] <= 0.f) d_out = 0.f;
      sums[i] += d_out, sums[WIDTH + i] += d_out * distance;
    }
  });
  float inverse[WIDTH] = {};
  if (place.used) load_floats(inverse, applied + 3 * channels);
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) sums[WIDTH + i] *= inverse[i];
  write_sums(place, sums, reinterpret_cast<float*>(shared), arguments.partial, channels);
}
