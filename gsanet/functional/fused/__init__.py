"""The operations as fused CUDA kernels, compiled at first use."""
