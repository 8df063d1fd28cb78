"""Context vectors, softmax(k)^T v over the pixels: `kernels/context.cu`, and with the projection `projection.cu`."""

from typing import NamedTuple

import torch
from torch import Tensor

from gsanet.functional.fused import arguments
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.calls.lines import ContentGradient
from gsanet.functional.fused.calls.tensors import shape_of
from gsanet.functional.fused.plan import Shape, plan_context, plan_projection


class ContextVectors(NamedTuple):
    """Context vectors, (batch, head, ...) packed as products read them, the same turned, and the keys' softmax."""

    context: Tensor
    turned: Tensor
    key_max: Tensor  # batch, head, k
    key_inverse: Tensor  # 1 / sum


def empty_context(q: Tensor, v: Tensor) -> ContextVectors:
    """Tensors of the right shapes."""
    shape = Shape(q.dtype, q.shape[3], q.shape[4], v.shape[4], vector=True)
    key, value = shape.padded(shape.key), shape.padded(shape.value)
    batch, heads = q.shape[0], q.shape[3]
    return ContextVectors(
        q.new_empty(batch, heads, key * value),
        q.new_empty(batch, heads, key * value),
        q.new_empty(batch, heads, shape.key, dtype=torch.float32),
        q.new_empty(batch, heads, shape.key, dtype=torch.float32),
    )


def unpacked(context: Tensor, key: int, value: int) -> Tensor:
    """Context vectors or their gradient, not turned, as (batch, head, k, v): see `kernels/fragments.cuh`."""
    shape = Shape(context.dtype, 1, key, value, vector=True)
    keys, values = shape.padded(key), shape.padded(value)
    depth = 16 if shape.size == 2 and values % 16 == 0 else 8
    if shape.size == 4:
        parts = context.view(*context.shape[:2], keys // 8, values // 8, 8, 4, 2).permute(0, 1, 2, 4, 3, 6, 5)
    else:
        parts = context.view(*context.shape[:2], keys // 8, values // depth, 8, 4, depth // 8, 2)
        parts = parts.permute(0, 1, 2, 4, 3, 6, 5, 7)
    return parts.reshape(*context.shape[:2], keys, values)[..., :key, :value]


def context_vectors(k: Tensor, v: Tensor) -> ContextVectors:
    """softmax(k)^T v over the pixels of each image."""
    result = empty_context(k, v)
    _sum_over_pixels(
        k, v, softmax=True, pool=False,
        context=result.context, turned=result.turned, key_max=result.key_max, key_inverse=result.key_inverse,
    )  # fmt: skip
    return result


def context_gradient(
    q: Tensor, d_out: Tensor, vectors: ContextVectors, pool: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the context vectors divided by the softmax's sums, turned too, and what the softmax subtracts."""
    gradient, turned = torch.empty_like(vectors.context), torch.empty_like(vectors.turned)
    offset = torch.empty_like(vectors.key_max)
    _sum_over_pixels(
        q, d_out, softmax=False, pool=pool,
        context=vectors.context, key_inverse=vectors.key_inverse,
        gradient=gradient, gradient_turned=turned, key_offset=offset,
    )  # fmt: skip
    return gradient, turned, offset


def content_gradient(
    q: Tensor, k: Tensor, d_k: Tensor, d_out: Tensor, vectors: ContextVectors, pool: bool
) -> ContentGradient:
    """What a line layer's gradient needs to write `d_k` and to add content attention's share to that of the values."""
    gradient, turned, offset = context_gradient(q, d_out, vectors, pool)
    return ContentGradient(k, d_k, gradient, turned, vectors.key_max, offset)


def _sum_over_pixels(left: Tensor, right: Tensor, *, softmax: bool, pool: bool, **tensors: Tensor) -> None:
    batch, height, width, heads, _ = left.shape
    shape = shape_of(left, right)
    plans = plan_context(launching.machine_for(left), shape, height * width, batch, softmax=softmax, pool=pool)
    pieces = plans[0].grid[0] // batch
    if pieces > 1:
        tensors |= _pieces(left, shape, batch * pieces, softmax)
    values = arguments.Context(
        left=arguments.pixel_map(left),
        right=arguments.pixel_map(right),
        pixels=height * width,
        width=width,
        pieces=pieces,
        heads=heads,
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    )
    for plan in plans:
        launching.start(plan, values, left)


def _pieces(like: Tensor, shape: Shape, pieces: int, softmax: bool) -> dict[str, Tensor]:
    """What is left of so many pieces of images until they are combined."""

    def empty(*size: int) -> Tensor:
        return like.new_empty(pieces, shape.heads, *size, dtype=torch.float32)

    partial = {"partial": empty(shape.key, shape.value)}
    return partial | {"maxima": empty(shape.key), "sums": empty(shape.key)} if softmax else partial


class Projected(NamedTuple):
    """q and v, and the context vectors."""

    q: Tensor
    v: Tensor
    vectors: ContextVectors

    @property
    def both(self) -> Tensor:
        """As q and v lie in memory, beside each other for each pixel: (pixels, channels of both)."""
        channels = 2 * self.q.shape[3:].numel()
        return self.q.as_strided((self.q.shape[:3].numel(), channels), (channels, 1))


def project_with_context(x: Tensor, weight: Tensor, heads: int) -> Projected | None:
    """The projections of a map, and softmax(k)^T v over the pixels of each image, in one kernel that does not write k.

    Args:
        x: (batch, x, y, channel), channels side by side and pixels one after the other, at one distance.
        weight: The projections of q, k and v, stacked, each with as many channels as x.
        heads: Number of heads.

    Returns:
        The results, or None where one kernel is not the plan.
    """
    batch, height, width, channels = x.shape
    weight = weight.contiguous()
    like = x.unflatten(3, (heads, -1))
    shape = shape_of(like, like, weight.view(1, 1, 3 * channels, heads, -1))
    plan = plan_projection(launching.machine_for(x), shape, height * width, batch)
    if plan is None:
        return None
    projected = x.new_empty(batch, height, width, 2, heads, shape.key)
    q, v = projected.unbind(3)
    vectors = empty_context(q, v)
    tensors = vectors._asdict() | {"weight": weight, "projected": projected}
    if plan.pieces > 1:
        tensors |= _pieces(x, shape, batch * plan.left, softmax=True)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    first, *others = plan.launches
    launching.start(
        first,
        arguments.Projection(
            x=arguments.pixel_map(x),
            pixels=height * width,
            pieces=plan.pieces,
            items=batch * plan.pieces,
            **addresses,
        ),
        x,
    )
    del addresses["weight"], addresses["projected"]
    for other in others:
        launching.start(other, arguments.Context(pieces=plan.left, heads=heads, **addresses), x)
    return Projected(q, v, vectors)
