"""The backend `native`: attention on a CPU in C++ kernels, compiled at first use by the compiler that is there.

Scores never leave the first cache. `compiler` is the way from source to a loaded library, `calls` has one function for
each kernel, `module` the whole module, `kernels` the source. The kernels have no gradients: where one is asked for, the
backend `torch` does the work.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from gsanet.functional.backends import Axis, Backend, Norm, Operation
from gsanet.functional.lean import fit_table
from gsanet.functional.native import calls
from gsanet.functional.native.compiler import unavailable
from gsanet.functional.native.module import attention_map
from gsanet.functional.transforms import is_transformed

FEW = 2**12  # numbers in a map, below which nothing is worth compiling for


def content_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `gsanet.functional.content_attention`."""
    q, k, v = (calls.side_by_side(tensor) for tensor in (q, k, v))
    return calls.attend(q, v, None, "row", v.new_empty(v.shape), context=calls.context_vectors(k, v))


def positional_attention(q: Tensor, v: Tensor, rel: Tensor, axis: Axis, reach: int | None) -> Tensor:
    """As `gsanet.functional.positional_attention`."""
    table = fit_table(rel, q.shape[1 if axis == "column" else 2], reach).contiguous()
    q, v = calls.side_by_side(q), calls.side_by_side(v)
    return calls.attend(q, v, table, axis, v.new_empty(v.shape))


def refuses(operation: Operation, *arguments: Any, **settings: Any) -> str | None:
    """Why this backend cannot take a call, or None."""
    first = arguments[0]
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    if is_transformed():
        return "its kernels take no part in torch.func's transforms"
    if first.device.type != "cpu":
        return f"it runs on CPUs, not on {first.device.type}"
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "its kernels are no operators that could be traced"
    if first.dtype != torch.float32:
        return f"its kernels compute in float32, not in {first.dtype}"
    if is_in_torch_dispatch_mode() or any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return "it takes plain tensors only, with nothing that watches operators"
    if first.numel() < FEW:
        return f"a map of {first.numel()} numbers is too small to compile kernels for"
    if operation == "global_self_attention_map":
        if (reason := _refuses_map(*arguments, **settings)) is not None:
            return reason
    elif _differentiated(*tensors):
        return "its kernels have no gradient"
    return unavailable()


def _refuses_map(
    x: Tensor,
    weight: Tensor,
    rel_column: Tensor | None,
    rel_row: Tensor | None,
    norm: Norm | Tensor | None,
    *,
    finish: Tensor | None = None,
    content: bool,
    **others: int | None,
) -> str | None:
    if not content and rel_column is None and rel_row is None:
        return "there is nothing to attend by"
    fixed = [] if finish is None else [finish]
    if rel_column is not None and rel_row is not None and norm is not None:
        if isinstance(norm, Tensor):
            fixed.append(norm)
        elif type(norm) is not nn.BatchNorm2d or norm.training or norm.running_mean is None:
            return f"it computes whole modules with a batch norm in evaluation, not with {type(norm).__name__} as it is"
        elif norm._forward_hooks or norm._forward_pre_hooks:
            return "the norm has hooks, which a kernel would pass by"
        elif norm.num_features != weight.shape[0] - others["dim_key"] * (2 if content else 1):
            return f"the norm is for {norm.num_features} channels"
        else:
            fixed += [*norm.parameters(), norm.running_mean, norm.running_var]
    if any(tensor.dtype != torch.float32 or tensor.device.type != "cpu" for tensor in fixed):
        return "it takes norms in float32 on the CPU only"
    tables = (table for table in (rel_column, rel_row) if table is not None)
    if _differentiated(x, weight, *tables, *fixed):
        return "its kernels have no gradient"
    return None


def _differentiated(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


BACKEND = Backend("native", content_attention, positional_attention, refuses, attention_map)
