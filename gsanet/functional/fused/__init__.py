"""The backend `fused`: attention in CUDA C++ kernels, compiled for the shape at hand when it is first met.

Nothing of the size of the scores is ever stored. `layer_ops` holds the operators of the two layers, `module_ops` and
`axis_ops` those of whole modules, with both positional axes and with one, `projection` what these share, `fitting`
which shapes the kernels take and `widths` how heads come to the widths of whole modules. `calls` has one function for
each kernel, `plan` how shapes are cut into blocks, `compiler` the way from source to launch, `kernels` the source.
Around attention, `norms` and `norm_ops` are the batch norms in training, `expansion` the ends of residual blocks,
`pointwise` and `block_ops` these blocks in inference.
"""

import torch
from torch import Tensor, nn

from gsanet.functional.backends import Axis, Backend, Norm, Operation, is_differentiated
from gsanet.functional.fused import available, axis_ops, fitting, layer_ops, module_ops
from gsanet.functional.fused.norms import applied_in_evaluation, centre_of, in_float32, keep_statistics, uses_batch
from gsanet.functional.fused.plan import LONGEST, SCALARS, WIDTHS
from gsanet.functional.fused.widths import narrow, widen, widened
from gsanet.functional.lean import fit_table
from gsanet.functional.transforms import is_transformed


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
    if rel_column is None or rel_row is None:
        axis, rel, length = ("row", rel_row, x.shape[3]) if rel_column is None else ("column", rel_column, x.shape[2])
        # Content attention alone has no embeddings; those of zero add nothing to it.
        rel = x.new_zeros(2 * length - 1, dim_key // num_heads) if rel is None else fit_table(rel, length, reach)
        return axis_ops.attention_map(x, weight, rel, finish, axis, num_heads, dim_key, content, stride)[0]
    rel_column, rel_row = (
        fit_table(rel, length, reach) for rel, length in zip((rel_column, rel_row), x.shape[2:], strict=True)
    )
    if isinstance(norm, Tensor):
        return module_ops.attention_map_inference(
            x, weight, rel_column, rel_row, norm, finish, num_heads, dim_key, content, stride
        )  # fmt: skip
    assert isinstance(norm, nn.BatchNorm2d)
    for tensor in (norm.weight, norm.running_mean):
        if tensor is not None and tensor.device != x.device:
            raise TypeError(f"the norm must be on the input's device, {x.device}, but it is on {tensor.device}")
    return _with_batch_norm(x, weight, rel_column, rel_row, norm, num_heads, dim_key, content, stride)


def _with_batch_norm(
    x: Tensor,
    weight: Tensor,
    rel_column: Tensor,
    rel_row: Tensor,
    norm: nn.BatchNorm2d,
    heads: int,
    dim_key: int,
    content: bool,
    stride: int,
) -> Tensor:
    """A module with both axes and the norm between them, of tables for exactly these lines."""
    key, value = dim_key // heads, norm.num_features // heads
    if (widened(key), widened(value)) != (key, value):
        parts = weight.split((*(dim_key,) * (2 if content else 1), norm.num_features))
        weight = torch.cat([widen(part, heads) for part in parts])
    norms = (*in_float32(norm), centre_of(norm, x))
    applied = None if uses_batch(norm) else widen(applied_in_evaluation(norm), heads, 1)
    out, _, used, *_ = module_ops.attention_map(
        x, weight, widen(rel_column, 1, 1), widen(rel_row, 1, 1),
        *(None if one is None else widen(one, heads) for one in norms), applied,
        heads, heads * widened(key), content, stride, norm.eps,
    )  # fmt: skip
    if widened(value) != value:
        used = narrow(used, heads, value)
        out = narrow(out.permute(0, 2, 3, 1), heads, value).permute(0, 3, 1, 2)
    keep_statistics(norm, used, x.numel() // x.shape[1])
    return out


def refuses(operation: Operation, *tensors: Tensor, **settings: object) -> str | None:
    """Why this backend cannot take a call, or None."""
    first = tensors[0]
    if is_transformed():
        return "its operators take no part in torch.func's transforms"
    if first.device.type != "cuda":
        return f"it runs on NVIDIA GPUs, not on {first.device.type}"
    if (reason := available.reason_against(first.device.index or 0)) is not None:
        return reason
    if first.dtype not in SCALARS:
        return f"its kernels take {', '.join(map(str, SCALARS))}, not {first.dtype}"
    if operation == "global_self_attention_map":
        return _refuses_map(*tensors, **settings)  # type: ignore[arg-type]
    q, v = first, tensors[2 if operation == "content_attention" else 1]
    for width in (q.shape[4], v.shape[4]):
        if not WIDTHS[0] <= width <= WIDTHS[-1]:  # torch.compile may have it as a symbol, which is in no range
            return f"its kernels take heads of {WIDTHS[0]} to {WIDTHS[-1]} channels, not {width}"
    if operation == "positional_attention":
        if max(q.shape[1:3]) > LONGEST:
            return f"its kernels take maps of up to {LONGEST} x {LONGEST} pixels, not {q.shape[1]} x {q.shape[2]}"
        shape = (*q.shape[1:], v.shape[4])
        for backward in (False, True) if is_differentiated(*tensors) else (False,):
            if not all(fitting.fits(q, shape, axis, backward=backward) for axis in ("column", "row")):
                return f"a line of {max(q.shape[1:3])} pixels with heads this wide does not fit into shared memory"
    return None


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
    reach: int | None,
    stride: int,
) -> str | None:
    if not content and rel_column is None and rel_row is None:
        return "there is nothing to attend by"
    height, width = x.shape[2:]
    if stride not in (1, 2) or (stride == 2 and (height % 2 or width % 2 or num_heads > 8)):
        return f"its kernel of the whole module pools 2 x 2 pixels of even maps, not by {stride} on {height} x {width}"
    dim_value = weight.shape[0] - dim_key * (2 if content else 1)
    shape = (height, width, num_heads, dim_key // num_heads, dim_value // num_heads)
    if rel_column is None or rel_row is None:
        tensors = [tensor for tensor in (x, weight, rel_column, rel_row) if tensor is not None]
        return _refuses_one_axis(tensors, "row" if rel_column is None else "column", finish, shape, content, stride)
    if isinstance(norm, Tensor):
        fixed = [norm] if finish is None else [norm, finish]
        return _refuses_lines([x, weight, rel_column, rel_row], fixed, shape, ("column", "row"), stride)
    if finish is not None:
        return "its kernel of the whole module has a last scale, shift and ReLU only where the norm is one too"
    if type(norm) is not nn.BatchNorm2d:
        return f"its kernel of the whole module has a batch norm inside, not {type(norm).__name__}"
    if norm.num_features != dim_value:
        return f"the norm is for {norm.num_features} channels, not {dim_value}"
    if norm._forward_hooks or norm._forward_pre_hooks:
        return "the norm has hooks, which a kernel would pass by"
    widths = shape[3:]
    wide = [widened(one) for one in widths]
    if min(widths) < WIDTHS[0] or num_heads * max(wide) > 1024:
        return f"its kernel of the whole module takes heads of {WIDTHS[0]} channels and more, in all up to 1024"
    if norm.eps == 0 and tuple(wide) != widths:
        return "heads whose channels are no multiple of 8 get zeros, which a norm with eps=0 cannot divide"
    if x.shape[0] == 0 or x.shape[0] * height * width < 2:
        return "there is nothing to normalise"
    if not fitting.fits_module(x, (height, width, num_heads, wide[0], wide[1]), stride):
        return f"a line of a map of {height} x {width} pixels does not fit into the memory or registers of its kernels"
    return None


def _refuses_one_axis(
    tensors: list[Tensor],
    axis: Axis,
    finish: Tensor | None,
    shape: tuple[int, int, int, int, int],
    content: bool,
    stride: int,
) -> str | None:
    if (reason := _refuses_lines(tensors, [] if finish is None else [finish], shape, (axis,), stride)) is not None:
        return reason
    gradient = {"backward": True, "pool": stride == 2, "content_keys": content}
    if is_differentiated(*tensors) and not fitting.fits(tensors[0], shape, axis, **gradient):
        return f"a {axis} of a map of {shape[0]} x {shape[1]} pixels does not fit into its kernel of the gradients"
    return None


def _refuses_lines(
    tensors: list[Tensor],
    fixed: list[Tensor],
    shape: tuple[int, int, int, int, int],
    axes: tuple[Axis, ...],
    stride: int,
) -> str | None:
    """Of the kernels of lines without statistics; `fixed` are scales and shifts, with which there is no gradient."""
    x = tensors[0]
    if fixed and is_differentiated(*tensors, *fixed):
        return "its kernels of a module with fixed norms have no gradient"
    if any(tensor.dtype != torch.float32 for tensor in fixed):
        return f"its kernels take scales and shifts in float32, not {', '.join(str(tensor.dtype) for tensor in fixed)}"
    height, width, _, *channels = shape
    if not WIDTHS[0] <= min(channels) <= max(channels) <= WIDTHS[-1]:
        return f"its kernels take heads of {WIDTHS[0]} to {WIDTHS[-1]} channels, not {channels[0]} and {channels[1]}"
    if x.numel() == 0:
        return "the map is empty"
    if max(height, width) > LONGEST:
        return f"its kernels take maps of up to {LONGEST} x {LONGEST} pixels, not {height} x {width}"
    for axis in axes:
        if not fitting.fits(x, shape, axis, backward=False, pool=axis == axes[-1] and stride == 2):
            return f"a line of a map of {height} x {width} pixels with heads this wide does not fit into shared memory"
    return None


BACKEND = Backend("fused", content_attention, positional_attention, refuses, attention_map)
