"""Whether a call is seen through `torch.func`: `vmap`, `grad`, `jacrev` and the like."""

import torch


def is_transformed() -> bool:
    """Whether one of `torch.func`'s transforms is at work, outside of `torch.compile`, which goes into them itself.

    They take no part in custom operators, and do not let a part of a tensor be written over with what they batch.
    """
    # PyTorch has no public question for it; torch.autograd.Function asks this one.
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
