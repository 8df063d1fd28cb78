"""The backend `native`: attention on a CPU in C++ kernels, compiled at first use by the compiler that is there.

Scores never leave the first cache. `compiler` is the way from source to a loaded library, `calls` has one function for
each kernel, `layer_ops` the two layers as operators, `module_ops` whole modules, `module` is these in evaluation,
`pointwise` 1x1 convolutions in inference, and `kernels` the source.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from gsanet.functional.backends import Axis, Backend, Norm, Operation, is_differentiated
from gsanet.functional.exporting import is_exporting
from gsanet.functional.fused.norms import applied_in_evaluation, in_float32, keep_statistics, uses_batch
from gsanet.functional.lean import fit_table
from gsanet.functional.native import calls, compiler, layer_ops, module, module_ops
from gsanet.functional.native.module import tensors_of
from gsanet.functional.pooling import average_pool
from gsanet.functional.transforms import have_tangents, is_transformed

FEW = 2**12  # numbers in a map, below which nothing is worth compiling for
# Pixels of a line, and channels of a head: a thread keeps a line of several heads in memory.
LONGEST, WIDEST = 2048, 128
PLAIN = (Tensor, nn.Parameter)


def content_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `gsanet.functional.content_attention`."""
    return layer_ops.content_attention(q, k, v)[0]


def positional_attention(q: Tensor, v: Tensor, rel: Tensor, axis: Axis, reach: int | None) -> Tensor:
    """As `gsanet.functional.positional_attention`."""
    return layer_ops.positional_attention(q, v, fit_table(rel, q.shape[1 if axis == "column" else 2], reach), axis)


def attention_map(
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
    reach: int | None,
    stride: int,
) -> Tensor:
    """As `gsanet.functional.global_self_attention_map`; the norm is a batch norm, or its scale and shift."""
    norm = norm if rel_column is not None and rel_row is not None else None
    settings = (num_heads, dim_key, content)
    if _uses_batch(norm) or _is_differentiated(x, weight, rel_column, rel_row, norm):
        assert isinstance(norm, nn.BatchNorm2d)
        applied = None if _uses_batch(norm) else applied_in_evaluation(norm)
        tables = _fit_tables(x, rel_column, rel_row, reach)
        out, _, _, applied, *_ = module_ops.attention_map(
            x, weight, *tables, *in_float32(norm), applied, *settings, norm.eps
        )
        keep_statistics(norm, applied, x.numel() // x.shape[1])
        return average_pool(out, stride)
    if torch.compiler.is_compiling():
        fixed = applied_in_evaluation(norm)[:2] if isinstance(norm, nn.BatchNorm2d) else norm
        tables = _fit_tables(x, rel_column, rel_row, reach)
        return module_ops.attention_map_inference(x, weight, *tables, fixed, finish, *settings, stride)
    return module.attention_map(
        x, weight, rel_column, rel_row, norm,
        finish=finish, num_heads=num_heads, dim_key=dim_key, content=content, reach=reach, stride=stride,
    )  # fmt: skip


def _fit_tables(x: Tensor, rel_column: Tensor | None, rel_row: Tensor | None, reach: int | None) -> list[Tensor | None]:
    """Both tables for exactly the lines of a map."""
    lengths = zip((rel_column, rel_row), x.shape[2:], strict=True)
    return [None if rel is None else fit_table(rel, length, reach) for rel, length in lengths]


def _uses_batch(norm: Norm | Tensor | None) -> bool:
    """Whether there is a batch norm, and it applies the statistics of the batch."""
    return isinstance(norm, nn.BatchNorm2d) and uses_batch(norm)


def _is_differentiated(
    x: Tensor, weight: Tensor, rel_column: Tensor | None, rel_row: Tensor | None, norm: Norm | Tensor | None
) -> bool:
    """As `is_differentiated`, of a whole module, in few calls."""
    if not torch.is_grad_enabled():
        return False
    tensors = [x, weight, rel_column, rel_row]
    if isinstance(norm, Tensor):
        tensors.append(norm)
    elif isinstance(norm, nn.BatchNorm2d):
        tensors += [norm.weight, norm.bias]
    for tensor in tensors:  # noqa: SIM110
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def refuses(operation: Operation, *arguments: Any, **settings: Any) -> str | None:
    """Why this backend cannot take a call, or None."""
    first = arguments[0]
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    if (reason := refuses_kind(first, tensors)) is not None:
        return reason
    if first.numel() < FEW or not all(map(Tensor.numel, tensors)):
        return f"a map of {first.numel()} numbers is too small to compile kernels for"
    if operation == "global_self_attention_map":
        reason = _refuses_map(*arguments, **settings)
    else:
        values = tensors[2 if operation == "content_attention" else 1]
        reason = _refuses_size(first.shape[1:3], (first.shape[4], values.shape[4]))
    return _unavailable() if reason is None else reason


def refuses_kind(first: Tensor, tensors: Sequence[Tensor]) -> str | None:
    """Why no kernel takes these tensors, of which the first stands for all in dtype and device, or None."""
    if is_transformed():
        return "its kernels take no part in torch.func's transforms"
    if not first.is_cpu:
        return f"it runs on CPUs, not on {first.device.type}"
    compiling = torch.compiler.is_compiling()
    if torch.jit.is_tracing() or (compiling and is_exporting()):
        return "exports have PyTorch's own operators"
    if first.dtype not in calls.ELEMENTS:
        return f"its kernels take float32 and bfloat16, not {first.dtype}"
    if (not compiling and is_in_torch_dispatch_mode()) or not _are_plain(tensors):
        return "it takes plain tensors only, with nothing that watches operators"
    return None


@torch.compiler.assume_constant_result
def _unavailable() -> str | None:
    """As `compiler.unavailable`, which torch.compile need not look into."""
    return compiler.unavailable()


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
    norm = norm if rel_column is not None and rel_row is not None else None
    if norm is not None:
        if isinstance(norm, Tensor):
            fixed.append(norm)
        elif type(norm) is not nn.BatchNorm2d:
            return f"it computes whole modules with a batch norm inside, not {type(norm).__name__}"
        elif x.shape[0] * x.shape[2] * x.shape[3] < 2 and _uses_batch(norm):
            return "there is nothing to normalise"
        elif norm._forward_hooks or norm._forward_pre_hooks:
            return "the norm has hooks, which a kernel would pass by"
        elif norm.num_features != dim_out:
            return f"the norm is for {norm.num_features} channels"
        else:
            fixed += [one for one in tensors_of(norm) if one is not None]
    if any([one.dtype not in calls.ELEMENTS or not one.is_cpu for one in fixed]) or not _are_plain(fixed):  # noqa: C419
        return "it takes norms of plain tensors in float32 or bfloat16 on the CPU only"
    if finish is not None and (_uses_batch(norm) or is_differentiated(finish)):
        return "its scale, shift and ReLU behind a module are for evaluation"
    if not _is_differentiated(x, weight, rel_column, rel_row, norm):
        return None
    if not isinstance(norm, nn.BatchNorm2d) or finish is not None:
        return "its whole modules have a gradient only with both axes, a batch norm between them, and nothing behind"
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
    if torch.compiler.is_compiling():  # and sees to that
        return True
    for tensor in tensors:
        if type(tensor) not in PLAIN or tensor.layout != torch.strided or tensor.is_neg():
            return False
    return not have_tangents(tensors)


BACKEND = Backend("native", content_attention, positional_attention, refuses, attention_map)
