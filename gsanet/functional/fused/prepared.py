"""Operators whose kernels are compiled together before the first of them is launched."""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import CustomOpDef


def prepared_operator(name: str, function: Callable[..., Any], prepare: Callable[..., None]) -> CustomOpDef:
    """An operator that calls `prepare` and then `function`, both with its arguments.

    Args:
        name: Of the operator.
        function: What it computes; its signature is the operator's.
        prepare: What comes before.
    """

    def run(*arguments: Any) -> Any:
        prepare(*arguments)
        return function(*arguments)

    return torch.library.custom_op(
        name, run, mutates_args=(), schema=torch.library.infer_schema(function, mutates_args=())
    )
