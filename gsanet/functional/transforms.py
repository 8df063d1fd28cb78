"""Whether a call is seen through `torch.func`: `vmap`, `grad`, `jacrev` and the like."""

import torch


def is_transformed() -> bool:
    """Whether one of `torch.func`'s transforms is at work.

    They take no part in custom operators, and go into a `torch.autograd.Function` only by rules of its own.
    """
    # PyTorch has no public question for it; torch.autograd.Function asks this one, and torch.compile knows it.
    return torch._C._are_functorch_transforms_active()
