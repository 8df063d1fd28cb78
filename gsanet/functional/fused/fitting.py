"""Which shapes the kernels take: whether there is a plan for each that a call would launch."""

from operator import index

import torch
from torch import Tensor

from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.plan import Shape, plan_channel_map, plan_line


def fits(
    like: Tensor,
    shape: tuple[int, int, int, int, int],
    axis: str,
    backward: bool,
    pool: bool = False,
    content_keys: bool = False,
) -> bool:
    """Whether the kernel of positional attention, or of its gradient, takes lines of this shape.

    Args:
        like: A tensor of the dtype and device in question.
        shape: (height, width, heads, k, v).
        axis: The axis.
        backward: The gradient's kernel.
        pool: Whether the output is pooled.
        content_keys: Whether the gradient's kernel has the keys too.
    """
    # torch.compile may have the sizes as symbols: `index` makes them numbers, for which it then compiles.
    return _fits(like.dtype, like.device.index or 0, *map(index, shape), axis, backward, pool, content_keys)


def fits_module(like: Tensor, shape: tuple[int, int, int, int, int], stride: int) -> bool:
    """The same for all kernels of a whole module, with all that they do besides."""
    return _fits_module(like.dtype, like.device.index or 0, *map(index, shape), stride)


def fits_entry(like: Tensor, channels: int, columns: int) -> bool:
    """Whether the kernel for the entry of a residual block is the plan; of its convolution's output and its input."""
    return _fits_entry(like.dtype, like.device.index or 0, channels, columns)


@torch.compiler.assume_constant_result
def _fits_entry(dtype: torch.dtype, device: int, channels: int, columns: int) -> bool:
    machine, asked = launching.machine(torch.device("cuda", device)), {"level": False, "addend": True, "mask": True}
    return plan_channel_map(machine, dtype, 1, channels, 0, columns, **asked) is not None


@torch.compiler.assume_constant_result
def _fits(
    dtype: torch.dtype,
    device: int,
    height: int,
    width: int,
    heads: int,
    key: int,
    value: int,
    axis: str,
    backward: bool,
    pool: bool,
    content_keys: bool,
) -> bool:
    machine, shape = launching.machine(torch.device("cuda", device)), Shape(dtype, heads, key, value, vector=False)
    length = height if axis == "column" else width
    plan = plan_line(machine, shape, length, 1, 1, backward=backward, pool=pool, content_keys=content_keys)
    return plan is not None


@torch.compiler.assume_constant_result
def _fits_module(
    dtype: torch.dtype, device: int, height: int, width: int, heads: int, key: int, value: int, stride: int
) -> bool:
    machine, shape = launching.machine(torch.device("cuda", device)), Shape(dtype, heads, key, value, vector=False)
    pool = stride == 2
    plans = (
        plan_line(machine, shape, height, 1, 1, backward=False, statistics=True),
        plan_line(machine, shape, width, 1, 1, backward=False, norm_values=True, content=True, pool=pool),
        plan_line(machine, shape, width, 1, 1, backward=True, statistics=True, pool=pool),
        plan_line(machine, shape, height, 1, 1, backward=True, content_keys=True),
    )
    return all(plan is not None for plan in plans)
