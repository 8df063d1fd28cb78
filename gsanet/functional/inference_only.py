"""Operators that only networks from `gsanet.fuse_for_inference` call."""

from typing import Any

from torch.library import CustomOpDef


def refuse_gradients(operator: CustomOpDef) -> None:
    """Have an operator's backward pass say that there is none, and what to do instead."""

    def refuse(ctx: Any, *gradients: Any) -> None:
        raise RuntimeError(
            f"{operator._qualname} has no gradient: differentiate the network that fuse_for_inference was given"
        )

    operator.register_autograd(refuse)
