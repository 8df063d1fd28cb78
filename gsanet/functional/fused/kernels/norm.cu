// From the sums that other kernels take to what they apply: the statistics of a batch norm, and its gradients, a lane of warp 0 for
// each channel; and what a norm keeps of its statistics, a thread for each.
#include "rows.cuh"

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
  float* running_mean;   // (channels)
  float* running_variance;
  long long* batches;    // how many there were so far
  float share;           // of this batch in what is kept
};

// Both sums of a channel; whether this thread has one.
DEVICE bool add_blocks(const Arguments& arguments, int channel, float (&sums)[2], float* shared) {
  const int channels = arguments.channels;
  return add_rows(sums, arguments.partial + channel, channels, arguments.blocks, 2ll * channels, channel < channels, shared);
}

KERNEL(THREADS, BLOCKS) norm_statistics(const Arguments arguments) {
  SHARED_MEMORY(memory);
  const int channel = block_index() * 32 + lane_index(), channels = arguments.channels;
  float sums[2];
  take_turn();
  if (!add_blocks(arguments, channel, sums, reinterpret_cast<float*>(memory))) return;
  const float distance = sums[0] / arguments.count, mean = arguments.centre[channel] + distance;
  float variance = sums[1] / arguments.count - distance * distance;
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
  SHARED_MEMORY(memory);
  const int channel = block_index() * 32 + lane_index(), channels = arguments.channels;
  float sums[2];
  take_turn();
  if (!add_blocks(arguments, channel, sums, reinterpret_cast<float*>(memory))) return;
  const float d_bias = sums[0], d_weight = sums[1];
  const float scale = arguments.applied[channel], mean = arguments.applied[2 * channels + channel];
  const float inverse = arguments.applied[3 * channels + channel];
  const float slope = arguments.fixed ? 0.f : -scale * inverse * d_weight / arguments.count;
  arguments.coefficients[channel] = scale;
  arguments.coefficients[channels + channel] = slope;
  arguments.coefficients[2 * channels + channel] = (arguments.fixed ? 0.f : -scale * d_bias / arguments.count) - slope * mean;
  arguments.coefficients[3 * channels + channel] = d_weight;
  arguments.coefficients[4 * channels + channel] = d_bias;
}

KERNEL(THREADS, BLOCKS) keep_statistics(const Arguments arguments) {
  const int channel = block_index() * THREADS + thread_index(), channels = arguments.channels;
  take_turn();
  if (channel == 0) *arguments.batches += 1;
  if (channel >= channels) return;
  const float mean = arguments.applied[2 * channels + channel];
  // As an estimate for more than this batch, whose own variance is smaller.
  const float variance = arguments.applied[4 * channels + channel] * (arguments.count / (arguments.count - 1.f));
  arguments.running_mean[channel] += arguments.share * (mean - arguments.running_mean[channel]);
  arguments.running_variance[channel] += arguments.share * (variance - arguments.running_variance[channel]);
}
