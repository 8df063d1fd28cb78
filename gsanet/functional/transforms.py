"""Whether a call is seen through `torch.func`, `vmap`, `grad`, `jacrev` and the like, or carries tangents."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Of PyTorch's complaints about a batch norm in training, under `vmap` and under gradients.
COMPLAINTS = ("running_mean or running_var", "mutate a captured Tensor")


def is_transformed() -> bool:
    """Whether one of `torch.func`'s transforms is at work.

    They take no part in custom operators, and go into a `torch.autograd.Function` only by rules of its own.
    """
    # PyTorch has no public question for it; torch.autograd.Function asks this one, and torch.compile knows it.
    return torch._C._are_functorch_transforms_active()


def have_tangents(tensors: Iterable[Tensor]) -> bool:
    """Whether any of these tensors carries a tangent of forward-mode derivatives."""
    # Outside of all dual levels no tensor does; `unpack_dual` asks the same, one tensor at a time.
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(one).tangent is not None for one in tensors)


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
