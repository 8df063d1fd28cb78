"""The backend `native`: attention on a CPU in C++ kernels, compiled at first use by the compiler that is there.

Scores never leave the first cache. `compiler` is the way from source to a loaded library, `calls` has one function for
each kernel, `module` the whole module in evaluation, `kernels` the source. Positional attention has a gradient of its
own; where another is asked for, the backend `torch` does the work.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from gsanet.functional import lean
from gsanet.functional.backends import Axis, Backend, Norm, Operation, is_differentiated
from gsanet.functional.lean import fit_table
from gsanet.functional.native import calls
from gsanet.functional.native.compiler import unavailable
from gsanet.functional.native.module import attention_map, tensors_of
from gsanet.functional.transforms import have_tangents, is_transformed

FEW = 2**12  # numbers in a map, below which nothing is worth compiling for
# Pixels of a line, and channels of a head: a thread keeps a line of several heads in memory.
LONGEST, WIDEST = 2048, 128
PLAIN = (Tensor, nn.Parameter)


def content_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `gsanet.functional.content_attention`."""
    q, k, v = (calls.side_by_side(tensor) for tensor in (q, k, v))
    return calls.attend(q, v, None, "row", v.new_empty(v.shape), context=calls.context_vectors(k, v))


def positional_attention(q: Tensor, v: Tensor, rel: Tensor, axis: Axis, reach: int | None) -> Tensor:
    """As `gsanet.functional.positional_attention`."""
    table = fit_table(rel, q.shape[1 if axis == "column" else 2], reach)
    return _PositionalAttention.apply(q, v, table, axis)


class _PositionalAttention(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, v: Tensor, table: Tensor, axis: Axis) -> Tensor:
        q, v = calls.side_by_side(q), calls.side_by_side(v)
        return calls.attend(q, v, table.contiguous(), axis, v.new_empty(v.shape))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Axis], output: Tensor) -> None:
        *tensors, ctx.axis = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, v, table = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient that is to be differentiated again: PyTorch knows how
            out = lean.positional_attention(q, v, table, ctx.axis, None)
            wanted = [one for one, needs in zip((q, v, table), ctx.needs_input_grad, strict=False) if needs]
            gradients = iter(torch.autograd.grad(out, wanted, d_out, create_graph=True))
            return *(next(gradients) if needs else None for needs in ctx.needs_input_grad[:3]), None
        q, v, d_out = (calls.side_by_side(tensor) for tensor in (q, v, d_out))
        d_q, d_v = q.new_empty(q.shape), v.new_empty(v.shape)
        d_table = calls.attend_gradient(q, v, table.contiguous(), ctx.axis, d_out, d_q, d_v)
        return d_q, d_v, d_table, None


def refuses(operation: Operation, *arguments: Any, **settings: Any) -> str | None:
    """Why this backend cannot take a call, or None."""
    first = arguments[0]
    if is_transformed():
        return "its kernels take no part in torch.func's transforms"
    if not first.is_cpu:
        return f"it runs on CPUs, not on {first.device.type}"
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "its kernels are no operators that could be traced"
    if first.dtype != torch.float32:
        return f"its kernels compute in float32, not in {first.dtype}"
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    if is_in_torch_dispatch_mode() or not _are_plain(tensors):
        return "it takes plain tensors only, with nothing that watches operators"
    if first.numel() < FEW or not all(map(Tensor.numel, tensors)):
        return f"a map of {first.numel()} numbers is too small to compile kernels for"
    if operation == "global_self_attention_map":
        reason = _refuses_map(*arguments, **settings)
    elif operation == "content_attention" and is_differentiated(*tensors):
        reason = "its content attention has no gradient"
    else:
        values = tensors[2 if operation == "content_attention" else 1]
        reason = _refuses_size(first.shape[1:3], (first.shape[4], values.shape[4]))
    return unavailable() if reason is None else reason


def _refuses_map(
    x: Tensor,
    weight: Tensor,
    rel_column: Tensor | None,
    rel_row: Tensor | None,
    norm: Norm | Tensor | None,
    *,
    finish: Tensor | None = None,
    num_heads: int,
    dim_key: int,
    content: bool,
    **others: int | None,
) -> str | None:
    if not content and rel_column is None and rel_row is None:
        return "there is nothing to attend by"
    dim_out = weight.shape[0] - dim_key * (2 if content else 1)
    if (reason := _refuses_size(x.shape[2:], (dim_key // num_heads, dim_out // num_heads))) is not None:
        return reason
    fixed = [] if finish is None else [finish]
    if rel_column is not None and rel_row is not None and norm is not None:
        if isinstance(norm, Tensor):
            fixed.append(norm)
        elif type(norm) is not nn.BatchNorm2d or norm.training or norm.running_mean is None:
            return f"it computes whole modules with a batch norm in evaluation, not with {type(norm).__name__} as it is"
        elif norm._forward_hooks or norm._forward_pre_hooks:
            return "the norm has hooks, which a kernel would pass by"
        elif norm.num_features != dim_out:
            return f"the norm is for {norm.num_features} channels"
        else:
            fixed += [one for one in tensors_of(norm) if one is not None]
    if any(one.dtype != torch.float32 or not one.is_cpu for one in fixed) or not _are_plain(fixed):
        return "it takes norms of plain tensors in float32 on the CPU only"
    tables = [table for table in (rel_column, rel_row) if table is not None]
    if is_differentiated(x, weight, *tables, *fixed):
        return "its whole modules have no gradient"
    return None


def _refuses_size(size: Sequence[int], widths: Sequence[int]) -> str | None:
    """Of a map (height, width), and heads with so many channels of keys and of values."""
    if max(size) > LONGEST:
        return f"its kernels take maps of up to {LONGEST} x {LONGEST} pixels, not {size[0]} x {size[1]}"
    if max(widths) > WIDEST:
        return f"its kernels take heads of up to {WIDEST} channels, not {max(widths)}"
    return None


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are what lies in their memory, and no more: no subclasses, no tangents of derivatives."""
    for tensor in tensors:
        if type(tensor) not in PLAIN or tensor.layout != torch.strided or tensor.is_neg():
            return False
    return not have_tangents(tensors)


BACKEND = Backend("native", content_attention, positional_attention, refuses, attention_map)
