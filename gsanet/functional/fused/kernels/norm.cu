// From the sums that the attention kernels take to what they apply: the statistics of the batch norm between the column
// and the row layer, and its gradients. A warp for each channel adds the blocks' sums in a fixed order.
#include <intrinsics.cuh>

constexpr int THREADS = 32 * WARPS;

struct Arguments {
  const float* partial;  // (blocks, 2, channels)
  const float* centre;   // (channels): what the sums of `norm_statistics` are taken about
  const float* weight;   // (channels), or null: 1
  const float* bias;     // (channels), or null: 0
  float* applied;        // (5, channels): scale, shift, mean, 1 / standard deviation, variance
  float* coefficients;   // (5, channels): a, b, c of dx = a dy + b x + c; gradient of the weight, of the bias
  int blocks;
  int channels;
  float count;           // values of a channel
  float epsilon;
  int fixed;             // the statistics were given and not taken: they have no gradient
};

// Both sums of a channel, for all lanes.
DEVICE void add_blocks(const Arguments& arguments, int channel, float& first, float& second) {
  first = 0.f, second = 0.f;
  for (int block = lane_index(); block < arguments.blocks; block += 32) {
    const float* row = arguments.partial + 2ll * block * arguments.channels + channel;
    first += row[0], second += row[arguments.channels];
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) first += shuffle_xor(first, mask), second += shuffle_xor(second, mask);
}

KERNEL(THREADS, BLOCKS) norm_statistics(const Arguments arguments) {
  const int channel = block_index() * WARPS + warp_index(), channels = arguments.channels;
  if (channel >= channels) return;
  float first, second;
  add_blocks(arguments, channel, first, second);
  if (lane_index() != 0) return;
  const float distance = first / arguments.count, mean = arguments.centre[channel] + distance;
  float variance = second / arguments.count - distance * distance;
  variance = variance < 0.f ? 0.f : variance;
  const float inverse = 1.f / square_root(variance + arguments.epsilon);
  const float scale = (arguments.weight ? arguments.weight[channel] : 1.f) * inverse;
  arguments.applied[channel] = scale;
  arguments.applied[channels + channel] = (arguments.bias ? arguments.bias[channel] : 0.f) - mean * scale;
  arguments.applied[2 * channels + channel] = mean;
  arguments.applied[3 * channels + channel] = inverse;
  arguments.applied[4 * channels + channel] = variance;
}

KERNEL(THREADS, BLOCKS) norm_gradient(const Arguments arguments) {
  const int channel = block_index() * WARPS + warp_index(), channels = arguments.channels;
  if (channel >= channels) return;
  float d_bias, d_weight;
  add_blocks(arguments, channel, d_bias, d_weight);
  if (lane_index() != 0) return;
  const float scale = arguments.applied[channel], mean = arguments.applied[2 * channels + channel];
  const float inverse = arguments.applied[3 * channels + channel];
  const float slope = arguments.fixed ? 0.f : -scale * inverse * d_weight / arguments.count;
  arguments.coefficients[channel] = scale;
  arguments.coefficients[channels + channel] = slope;
  arguments.coefficients[2 * channels + channel] = (arguments.fixed ? 0.f : -scale * d_bias / arguments.count) - slope * mean;
  arguments.coefficients[3 * channels + channel] = d_weight;
  arguments.coefficients[4 * channels + channel] = d_bias;
}
