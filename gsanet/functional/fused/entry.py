"""The entry of a residual block in training: a 1x1 convolution whose gradient takes in all else that reaches its input.

A block's input y comes out of the ReLU of the block before, and goes to two places: to the block's first convolution
and along the shortcut. So its gradient is the sum of two, and the ReLU's mask is applied to that: a map is written and
two are read, after the convolution's gradient, where one kernel could add and mask as it writes. Here it does: y comes
back beside the convolution's output, for the shortcut, so that both gradients arrive at the same time.

What is returned for y is the gradient of what entered the ReLU. Whoever computed that ReLU is to leave it as it is, and
nobody else may use y.
"""

from typing import Any

import torch
from torch import Tensor, nn

from gsanet.functional.fused import available, calls, expansion
from gsanet.functional.fused.calls.tensors import pixels, to_map
from gsanet.functional.fused.fitting import fits_entry

wanted = True  # whether blocks whose entry `takes` takes are computed so; read when they are compiled


def takes(like: Tensor, channels: int, convolution: nn.Conv2d) -> bool:
    """Whether `enter` is faster than a convolution, and a sum and a mask behind its gradient.

    Args:
        like: A map of the block before, (batch, any, height, width), of the dtype and the pixels of its output.
        channels: Of that output.
        convolution: 1 x 1 pixels with a stride of 1, in one group, without a bias.
    """
    weight = convolution.weight
    if not wanted or like.dtype not in expansion.DTYPES or weight.device != like.device:
        return False
    planned = weight.shape[1] == channels and fits_entry(like, weight.shape[0], channels)
    return planned and expansion.is_cast(weight, like)


def enter(y: Tensor, convolution: nn.Conv2d) -> tuple[Tensor, Tensor]:
    """convolution(y), and y for the shortcut; the gradient is that of what entered the ReLU which y came out of.

    Args:
        y: (batch, channels, height, width), behind a ReLU.
        convolution: As in `takes`.
    """
    with torch.autocast(y.device.type, enabled=False):
        z, shortcut = _Entry.apply(y, convolution.weight.to(y.dtype))
    return z, shortcut


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(y, weight)
        return nn.functional.conv2d(y, weight), y.view_as(y)

    @staticmethod
    def backward(ctx: Any, d_z: Tensor, d_shortcut: Tensor) -> tuple[Tensor | None, Tensor | None]:
        y, weight = ctx.saved_tensors
        d_y = d_weight = None
        if ctx.needs_input_grad[0]:
            d_y = entry_gradient(d_z, weight, d_shortcut, y)
        if ctx.needs_input_grad[1]:
            # Not as the gradient of a convolution: cuDNN may take three times as long, most of it for its workspace.
            d_weight = (pixels(d_z).T @ pixels(y)).view_as(weight)
        return d_y, d_weight


@torch.library.custom_op("gsanet::entry_gradient", mutates_args=())
def entry_gradient(d_z: Tensor, weight: Tensor, d_shortcut: Tensor, y: Tensor) -> Tensor:
    """The gradient of a 1x1 convolution's input, plus another one, where y is positive: a map, channels-last.

    Args:
        d_z: Of the convolution's output, (batch, channels out, height, width).
        weight: (channels out, channels, 1, 1).
        d_shortcut: (batch, channels, height, width).
        y: The convolution's input, the same.
    """
    rows, matrix, addend, mask = pixels(d_z), weight.flatten(1), pixels(d_shortcut), pixels(y)
    out = None
    if available.runs_on_device(rows):
        out = calls.map_channels(rows, matrix, addend=addend, mask=mask)
    if out is None:
        out = torch.where(mask > 0, torch.addmm(addend, rows, matrix), 0)
    return to_map(out, y)


@entry_gradient.register_fake
def _(d_z: Tensor, weight: Tensor, d_shortcut: Tensor, y: Tensor) -> Tensor:
    batch, channels, height, width = y.shape
    return y.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)
