"""The ends that the operators of whole modules share: q, k and v before, a feature map behind."""

import torch
from torch import Tensor

from gsanet.functional.attention import split_heads, to_feature_map
from gsanet.functional.fused import calls, pointwise
from gsanet.functional.fused.calls.tensors import pixels, to_map
from gsanet.functional.fused.plan import projection as plans

# A module of fewer channels projects q, k and v again in the backward pass: three maps less in memory, for a product
# whose time is that of reading and writing these maps. With more channels it takes longer, and they are kept. Between
# the two, where a kernel writes q and v alone, these are kept, and k is projected again.
KEPT = 256
KEPT_IN_PART = 128

gradients_wanted = True  # whether both gradients are one kernel where that is planned


def project(x: Tensor, weight: Tensor) -> Tensor:
    """q, k and v, stacked as in `weight`, (pixels, channels of all)."""
    return pixels(x) @ weight.T


def project_few(x: Tensor, weight: Tensor, early_weight: bool) -> Tensor | None:
    """The same by a kernel of ours, for few pixels; None where that is not wanted or not the plan.

    Args:
        x: (batch, channels, height, width).
        weight: As for `project`.
        early_weight: It is older than the kernel before, which is one of ours.
    """
    if not pointwise.wanted:
        return None
    projected = calls.product(x.permute(0, 2, 3, 1), weight, early_weight=early_weight)
    return None if projected is None else projected.flatten(0, 2)


def project_on_chip(x: Tensor, weight: Tensor, heads: int, dim_key: int, content: bool) -> calls.Projected | None:
    """By one kernel: q and v, maps as large as x, and the context vectors; None where that is not the plan."""
    maps = x.permute(0, 2, 3, 1)
    if x.shape[1] >= KEPT or not _are_alike(x, weight, dim_key, content) or not maps.is_contiguous():
        return None
    return calls.project_with_context(maps, weight, heads) if weight.dtype == x.dtype else None


def _are_alike(x: Tensor, weight: Tensor, dim_key: int, content: bool) -> bool:
    """Whether there are q, k and v, each with as many channels as x."""
    channels = x.shape[1]
    return content and dim_key == channels and weight.shape == (3 * channels, channels)


def project_heads(
    x: Tensor, weight: Tensor, heads: int, dim_key: int, content: bool
) -> tuple[Tensor, Tensor, calls.ContextVectors, Tensor]:
    """Maps as large as x, q and v; the context vectors; and what is kept of q, k and v (`channels_kept`)."""
    channels = channels_kept(x, weight, dim_key, content)
    on_chip = project_on_chip(x, weight, heads, dim_key, content)
    if on_chip is not None:
        return *on_chip, on_chip.both if channels else x.new_empty(0)
    projected = project(x, weight)
    q, k, v = split(projected, x, heads, dim_key, content)
    vectors = no_context(x) if k is None else calls.context_vectors(k, v)
    if channels == 0:
        return q, v, vectors, x.new_empty(0)
    if channels < weight.shape[0]:
        projected = torch.cat((projected[:, :dim_key], projected[:, 2 * dim_key :]), 1)
    return q, v, vectors, projected


def project_gradient(d_projected: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x, channels-last, and of weight."""
    rows = pixels(x)
    found = calls.pointwise_gradients(d_projected, rows, weight) if gradients_wanted else None
    d_rows, d_weight = (d_projected @ weight, d_projected.T @ rows) if found is None else found
    return to_map(d_rows, x), d_weight


def split(
    projected: Tensor, x: Tensor, heads: int, dim_key: int, content: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """q, k and v, maps as large as x, of one tensor (pixels, channels of all)."""
    maps = projected.view(x.shape[0], x.shape[2], x.shape[3], projected.shape[1])
    return split_heads(maps, heads, dim_key, content)


def channels_kept(x: Tensor, weight: Tensor, dim_key: int, content: bool) -> int:
    """How many channels of q, k and v an operator gives its gradient: all, those of q and v, or none."""
    channels = x.shape[1]
    if channels >= KEPT:
        return weight.shape[0]
    if channels < KEPT_IN_PART or channels not in plans.ON_CHIP or x.element_size() != 2:
        return 0
    may_be_planned = x.shape[2] * x.shape[3] >= plans.ON_CHIP[channels].start
    return 2 * channels if may_be_planned and _are_alike(x, weight, dim_key, content) else 0


def recall(
    kept: Tensor, x: Tensor, weight: Tensor, heads: int, dim_key: int, content: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """In the gradient: q, k and v, of what was kept; the rest is projected again."""
    if kept.numel() == 0:
        kept = project(x, weight)
    if kept.shape[1] == weight.shape[0]:
        return split(kept, x, heads, dim_key, content)
    batch, _, height, width = x.shape
    q, v = kept.view(batch, height, width, 2, heads, -1).unbind(3)
    k = project(x, weight[dim_key : 2 * dim_key]).view(batch, height, width, heads, -1)
    return q, k, v


def no_context(x: Tensor) -> calls.ContextVectors:
    """What stands for the context vectors where there is no content attention."""
    return calls.ContextVectors(
        *(x.new_empty(0) for _ in range(2)), *(x.new_empty(0, dtype=torch.float32) for _ in range(2))
    )


def empty_results(
    x: Tensor, weight: Tensor, heads: int, dim_key: int, content: bool, stride: int
) -> tuple[Tensor, Tensor, calls.ContextVectors, Tensor]:
    """Tensors of the right shapes: the output, a map (batch, x, y, head, v), the context vectors, what is kept."""
    batch, _, height, width = x.shape
    value = (weight.shape[0] - dim_key * (2 if content else 1)) // heads
    q = x.new_empty(batch, height, width, heads, dim_key // heads)
    v = x.new_empty(batch, height, width, heads, value)
    out = x.new_empty(batch, height // stride, width // stride, heads, value)
    vectors = calls.empty_context(q, v) if content else no_context(x)
    channels = channels_kept(x, weight, dim_key, content)
    kept = x.new_empty(batch * height * width, channels) if channels else x.new_empty(0)
    return to_feature_map(out), v, vectors, kept
