"""Whether a call is seen through `torch.func`: `vmap`, `grad`, `jacrev` and the like."""

from collections.abc import Callable

import torch
from torch import Tensor

# Of PyTorch's complaints about a batch norm in training, under `vmap` and under gradients.
COMPLAINTS = ("running_mean or running_var", "mutate a captured Tensor")


def is_transformed() -> bool:
    """Whether one of `torch.func`'s transforms is at work.

    They take no part in custom operators, and go into a `torch.autograd.Function` only by rules of its own.
    """
    # PyTorch has no public question for it; torch.autograd.Function asks this one, and torch.compile knows it.
    return torch._C._are_functorch_transforms_active()


def call_with_norms(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`call(x)`; says what to do where a batch norm in it would change statistics that a transform knows nothing of."""
    if not is_transformed():
        return call(x)
    try:
        return call(x)
    except RuntimeError as error:
        if not any(words in str(error) for words in COMPLAINTS):
            raise
        raise ValueError(
            "torch.func cannot follow batch norms in training, which change their running statistics: call eval(), or "
            "torch.func.replace_all_batch_norm_modules_(model), or give functional_call the buffers as well"
        ) from error
