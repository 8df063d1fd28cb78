"""Products of few pixels, of each pixel, and of channels over all pixels.

`kernels/product.cu`, `channel_map.cu` and `pixel_products.cu`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gsanet.functional.fused import arguments
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.calls.parts import sum_parts
from gsanet.functional.fused.calls.tensors import pointer
from gsanet.functional.fused.plan import plan_channel_map, plan_pixel_products, plan_product


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    relu: bool = False,
    stride: tuple[int, int] = (1, 1),
    early_weight: bool = False,
) -> Tensor | None:
    """For each pixel of a map x @ weight^T + bias + residual, and a ReLU: a 1x1 convolution.

    Args:
        x: (batch, x, y, channel).
        weight: (columns, channels).
        bias: (columns).
        residual: Of the output's shape.
        relu: Whether a ReLU follows.
        stride: Of pixels, down and along.
        early_weight: `weight` and `bias` are older than the kernel before this one, which is one of ours: they are read
            at once.

    Returns:
        (batch, x, y, columns), or None where this kernel is not the plan.
    """
    x = x[:, :: stride[0], :: stride[1]]
    batch, height, width, channels = x.shape
    columns = weight.shape[0]
    others = [tensor for tensor in (weight, bias, residual) if tensor is not None]
    if not all(other.is_contiguous() and other.data_ptr() % 16 == 0 and other.dtype == x.dtype for other in others):
        return None
    strides = _strides(x)
    if x.data_ptr() % 16 or any(distance % 8 for distance in strides[:3]) or strides[3] != 1:
        return None
    plan = plan_product(
        launching.machine_for(x),
        x.dtype,
        batch * height * width,
        channels,
        columns,
        bias=bias is not None,
        residual=residual is not None,
        relu=relu,
        strided=strides[1] != width * strides[2] or strides[0] != height * strides[1],
        early_weight=early_weight,
    )
    if plan is None:
        return None
    out = x.new_empty(batch, height, width, columns)
    values = arguments.Product(
        x=arguments.Map(x.data_ptr(), *strides[:3]),
        weight=weight.data_ptr(),
        bias=pointer(bias),
        residual=pointer(residual),
        out=out.data_ptr(),
        pixels=batch * height * width,
        height=height,
        width=width,
        columns=columns,
    )
    launching.start(plan, values, x)
    return out


def _strides(x: Tensor) -> tuple[int, int, int, int]:
    """Of a map (batch, x, y, channel): where a dimension has length 1, as if what is inside of it followed itself."""
    batch, height, width, channels = x.shape
    inner = x.stride(3) if channels > 1 else 1
    pixel = x.stride(2) if width > 1 else channels
    line = x.stride(1) if height > 1 else width * pixel
    return x.stride(0) if batch > 1 else height * line, line, pixel, inner


def map_channels(
    first: Tensor,
    weight: Tensor,
    second: Tensor | None = None,
    second_weight: Tensor | None = None,
    *,
    level: Tensor | None = None,
    addend: Tensor | None = None,
    mask: Tensor | None = None,
    relu: bool = False,
) -> Tensor | None:
    """For each pixel first @ weight + second @ second_weight + level + addend, zero where the mask is not positive.

    Args:
        first: (pixels, channels), of 16 bits.
        weight: (channels, columns).
        second: The same as `first`, perhaps with other channels.
        second_weight: The same as `weight`.
        level: (columns).
        addend: (pixels, columns).
        mask: (pixels, columns).
        relu: Whether a ReLU follows.

    Returns:
        (pixels, columns), or None where this kernel is not the plan: for channels that are not in `CUTS` of
        `plan/channel_map.py`, other dtypes, and maps that do not begin at multiples of 16 bytes.
    """
    whole = [one for one in (weight, second_weight, level, addend, mask) if one is not None]
    maps = [first] if second is None else [first, second]
    tensors = [*whole, *maps]
    if any(one.data_ptr() % 16 or one.dtype != first.dtype for one in tensors):
        return None
    if not all(one.is_contiguous() for one in whole) or any(one.stride(1) != 1 or one.stride(0) % 8 for one in maps):
        return None
    (pixels, channels), columns = first.shape, weight.shape[1]
    plan = plan_channel_map(
        launching.machine_for(first),
        first.dtype,
        pixels,
        channels,
        0 if second is None else second.shape[1],
        columns,
        level=level is not None,
        addend=addend is not None,
        mask=mask is not None,
        relu=relu,
    )
    if plan is None:
        return None
    out = first.new_empty(pixels, columns)
    values = arguments.ChannelMap(
        first=first.data_ptr(),
        second=pointer(second),
        weight=weight.data_ptr(),
        second_weight=pointer(second_weight),
        level=pointer(level),
        addend=pointer(addend),
        mask=pointer(mask),
        out=out.data_ptr(),
        first_stride=first.stride(0),
        second_stride=0 if second is None else second.stride(0),
        pixels=pixels,
    )
    launching.start(plan, values, first)
    return out


class PixelProducts(NamedTuple):
    """Sums over pixels, in float32: of products, (channels of y, channels of x), and of the channels of y."""

    products: Tensor
    sums: Tensor


def pixel_products(x: Tensor, y: Tensor) -> PixelProducts | None:
    """y^T x and the sums of y over pixels, in one pass over both maps; over one, if `x is y`.

    Args:
        x: (pixels, channels), of 16 bits.
        y: The same, perhaps with other channels.

    Returns:
        The sums, or None where these kernels are not the plan: for channels that are not in `CUTS` of
        `plan/pixel_products.py`, other dtypes, and maps whose pixels do not begin at multiples of 16 bytes.
    """
    if not _may_be_multiplied(x, y):
        return None
    (pixels, columns), rows = x.shape, y.shape[1]
    plan = plan_pixel_products(launching.machine_for(x), x.dtype, pixels, columns, rows, x is y)
    if plan is None:
        return None
    partial = x.new_empty(plan.pieces, rows * columns + rows, dtype=torch.float32)
    found = PixelProducts(x.new_empty(rows, columns, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32))
    shape = {"partial": partial.data_ptr(), "columns": columns, "rows": rows}
    first, total = plan.launches
    values = arguments.PixelProducts(
        x=x.data_ptr(), y=y.data_ptr(), x_stride=x.stride(0), y_stride=y.stride(0), pixels=pixels, **shape
    )
    launching.start(first, values, x)
    values = arguments.PixelProductsSum(
        products=found.products.data_ptr(), sums=found.sums.data_ptr(), blocks=plan.pieces, **shape
    )
    launching.start(total, values, x)
    return found


def pointwise_gradients(d_out: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """The gradients of x @ weight^T, in one pass over both maps: d_out @ weight, and d_out^T @ x.

    Args:
        d_out: (pixels, channels out), of 16 bits.
        x: (pixels, channels).
        weight: (channels out, channels).

    Returns:
        Those of x and of weight, or None where this kernel is not the plan: for channels that are not in `MAPPED` of
        `plan/pixel_products.py`, and as for `pixel_products`.
    """
    if not _may_be_multiplied(x, d_out) or not weight.is_contiguous() or weight.dtype != x.dtype:
        return None
    (pixels, columns), rows = x.shape, d_out.shape[1]
    plan = plan_pixel_products(launching.machine_for(x), x.dtype, pixels, columns, rows, same=False, mapped=True)
    if plan is None:
        return None
    partial = x.new_empty(plan.pieces, rows * columns, dtype=torch.float32)
    d_x = x.new_empty(pixels, columns)
    values = arguments.PixelProducts(
        x=x.data_ptr(), y=d_out.data_ptr(), partial=partial.data_ptr(), weight=weight.data_ptr(), out=d_x.data_ptr(),
        x_stride=x.stride(0), y_stride=d_out.stride(0), pixels=pixels, columns=columns, rows=rows,
    )  # fmt: skip
    (launch,) = plan.launches
    launching.start(launch, values, x)
    return d_x, sum_parts(partial, weight)


def _may_be_multiplied(x: Tensor, y: Tensor) -> bool:
    """Whether the kernel of sums over pixels takes two maps (pixels, channels), if their channels are in its plan."""
    maps = (x, y)
    return x.dtype == y.dtype and all(
        one.stride(1) == 1 and one.stride(0) % 8 == 0 and one.data_ptr() % 16 == 0 for one in maps
    )
