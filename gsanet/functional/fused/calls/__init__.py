"""Tensors in, tensors out: one function for each kernel, which plans, allocates and launches.

Maps are (batch, x, y, head, channel) with the channels of a pixel side by side; those without heads are contiguous. All
results are new tensors unless an argument says otherwise; those that a kernel writes whole are not initialised.
"""

from gsanet.functional.fused.calls.context import (
    ContextVectors,
    Projected,
    content_gradient,
    context_gradient,
    context_vectors,
    empty_context,
    project_with_context,
    unpacked,
)
from gsanet.functional.fused.calls.launching import compile_ahead
from gsanet.functional.fused.calls.lines import Attended, AttendedGradient, ContentGradient, attend, attend_gradient
from gsanet.functional.fused.calls.norms import (
    Pooled,
    channel_sums,
    keep_statistics,
    norm_gradient,
    norm_pool,
    norm_pool_gradient,
    norm_pool_sums,
    norm_statistics,
    norm_sums,
    pixel_sums,
)
from gsanet.functional.fused.calls.products import (
    PixelProducts,
    map_channels,
    pixel_products,
    pointwise_gradients,
    product,
)
from gsanet.functional.fused.calls.tensors import shape_of, side_by_side

__all__ = [
    "Attended",
    "AttendedGradient",
    "ContentGradient",
    "ContextVectors",
    "PixelProducts",
    "Pooled",
    "Projected",
    "attend",
    "attend_gradient",
    "channel_sums",
    "compile_ahead",
    "content_gradient",
    "context_gradient",
    "context_vectors",
    "empty_context",
    "keep_statistics",
    "map_channels",
    "norm_gradient",
    "norm_pool",
    "norm_pool_gradient",
    "norm_pool_sums",
    "norm_statistics",
    "norm_sums",
    "pixel_products",
    "pixel_sums",
    "pointwise_gradients",
    "product",
    "project_with_context",
    "shape_of",
    "side_by_side",
    "unpacked",
]
