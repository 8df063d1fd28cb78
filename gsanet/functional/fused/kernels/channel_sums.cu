// The sums of each channel of a map and of its square, for the statistics of a batch norm, at the speed of the memory.
#include "channels.cuh"

struct Arguments {
  const void* x;        // (rows, channels)
  const float* centre;  // (channels): the sums are taken about these
  float* partial;       // (blocks, 2, channels)
  long long rows;
  int channels;
  int groups;  // of a block's slice of the channels
};

KERNEL(THREADS, BLOCKS) channel_sums(const Arguments arguments) {
  SHARED_MEMORY(shared);
  const Place place(arguments.groups, arguments.channels);
  float centre[WIDTH], sums[2 * WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) centre[i] = sums[i] = sums[WIDTH + i] = 0.f;
  take_turn();
  if (place.used) load_floats(centre, arguments.centre + place.first);
  const void* const maps[1] = {arguments.x};
  for_each_row<4>(place, maps, arguments.rows, arguments.channels, [&](const Group(&groups)[1]) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const float distance = channel(groups[0], i) - centre[i];
      sums[i] += distance, sums[WIDTH + i] += distance * distance;
    }
  });
  write_sums(place, sums, reinterpret_cast<float*>(shared), arguments.partial, arguments.channels);
}
