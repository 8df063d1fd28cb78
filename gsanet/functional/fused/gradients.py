"""What operators with a kernel for their gradient share: what they keep, and what is differentiated, once and again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    """For an operator of tensors alone, and for its gradient."""
    ctx.save_for_backward(*inputs)


def differentiate_first(ctx: Any, outputs: tuple[Any, ...]) -> None:
    """Of an operator's outputs only the first has a gradient, and no zeros are made in the place of the others'."""
    ctx.mark_non_differentiable(*outputs[1:])
    ctx.set_materialize_grads(False)


def second_gradient(
    operator: Callable[..., Tensor], given: Callable[[Tensor], Tensor] = lambda gradient: gradient
) -> Callable[..., tuple[Tensor, ...]]:
    """The gradient of an operator's gradient, by PyTorch's own operators.

    Args:
        operator: What the kernels compute, in PyTorch's operators.
        given: What the kernels give of the gradient of each tensor.
    """

    def differentiate(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            d_out, *tensors = (one.detach().requires_grad_() for one in ctx.saved_tensors)
            first = torch.autograd.grad(operator(*tensors), tensors, d_out, create_graph=True)
            first = tuple(given(one) for one in first)
        return torch.autograd.grad(first, (d_out, *tensors), gradients, materialize_grads=True)

    return differentiate
