"""1x1 convolutions by kernels of this package: of few pixels, `kernels/product.cu`, and of many, `channel_map.cu`."""

from collections.abc import Sequence

from torch import Tensor

from gsanet.functional.fused import available, calls
from gsanet.functional.fused.calls.tensors import pixels, to_map
from gsanet.functional.fused.plan.channel_map import RELUS

wanted = True  # whether few pixels are computed so, and blocks around them as one operator; read at each call
many_wanted = True  # whether many are; read at each call
MANY = 2**24  # numbers of an output from which on a launch more, for the weight, does not count


def convolve_few(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    relu: bool,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    early_weight: bool = False,
) -> Tensor | None:
    """A convolution with bias, residual and ReLU; None where it is not 1x1, or the kernel is not wanted or the plan.

    Args:
        x: (batch, channels, height, width), channels-last.
        weight: (channels out, channels, kernel height, kernel width).
        bias: (channels out,).
        residual: Of the output's shape, added before the ReLU.
        relu: Whether a ReLU follows.
        stride: Down and along.
        padding: Zeros around the map, the same.
        early_weight: As for `calls.product`.
    """
    if not wanted or tuple(weight.shape[2:]) != (1, 1) or any(padding) or not (x.is_meta or available.take(x)):
        return None
    out = calls.product(
        x.permute(0, 2, 3, 1),
        weight.flatten(1),
        bias,
        None if residual is None else residual.permute(0, 2, 3, 1),
        relu=relu,
        stride=(stride[0], stride[1]),
        early_weight=early_weight,
    )
    return None if out is None else out.permute(0, 3, 1, 2)


def convolve_many(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: Sequence[int], padding: Sequence[int]
) -> Tensor | None:
    """relu(convolution of x + bias + residual); None where it is not 1x1, or the kernel is not wanted or the plan.

    Args:
        x: (batch, channels, height, width), channels-last.
        weight: (channels out, channels, kernel height, kernel width).
        bias: (channels out,).
        residual: Of the output's shape; without one the kernel is not the plan.
        stride: Down and along.
        padding: Zeros around the map, the same.
    """
    channels_out, channels, *size = weight.shape
    if not many_wanted or (channels, channels_out) not in RELUS or residual is None or residual.numel() < MANY:
        return None
    if size != [1, 1] or tuple(stride) != (1, 1) or any(padding) or not available.take(x):
        return None
    turned = weight.flatten(1).T.contiguous()
    out = calls.map_channels(pixels(x), turned, level=bias, addend=pixels(residual), relu=True)
    return None if out is None else to_map(out, x)
