"""One function for each kernel: tensors to its arguments. Each structure mirrors the one of the kernel's file."""

from collections.abc import Sequence
from ctypes import Structure, byref, c_float, c_int, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsanet.functional.backends import Axis
from gsanet.functional.native.compiler import library

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}  # `Element` of `kernels/numbers.h`
SHARES = 32  # of the lines of a batch, each with sums over its lines that one thread makes


class Map(Structure):
    """A map in memory, seen as lines: `Map` of `kernels/lanes.h`."""

    _fields_ = (("data", c_void_p), ("image", c_int64), ("line", c_int64), ("pixel", c_int64), ("element", c_int))


class Lines(Structure):
    """The arguments of `kernels/lines.cpp`."""

    _fields_ = (
        ("queries", Map), ("values", Map), ("out", Map),
        ("embeddings", c_void_p), ("context", c_void_p), ("norm", c_void_p), ("moments", c_void_p),
        ("images", c_int), ("lines", c_int), ("length", c_int), ("heads", c_int), ("key", c_int), ("value", c_int),
        ("shares", c_int), ("threads", c_int),
    )  # fmt: skip


class LineGradient(Structure):
    """The arguments of `kernels/line_gradient.cpp`."""

    _fields_ = (
        ("queries", Map), ("values", Map), ("gradient", Map), ("output", Map), ("d_queries", Map), ("d_values", Map),
        ("embeddings", c_void_p), ("d_embeddings", c_void_p),
        ("norm", c_void_p), ("d_norm", c_void_p), ("coefficients", c_void_p), ("add", c_int),
        ("images", c_int), ("lines", c_int), ("length", c_int), ("heads", c_int), ("key", c_int), ("value", c_int),
        ("shares", c_int), ("threads", c_int),
    )  # fmt: skip


class Context(Structure):
    """The arguments of `kernels/context.cpp`."""

    _fields_ = (
        ("keys", c_void_p), ("values", c_void_p), ("out", c_void_p), ("softmax", c_void_p),
        ("keys_image", c_int64), ("keys_pixel", c_int64), ("values_image", c_int64), ("values_pixel", c_int64),
        ("element", c_int), ("images", c_int), ("pixels", c_int), ("heads", c_int), ("key", c_int), ("value", c_int),
        ("threads", c_int),
    )  # fmt: skip


class Pixels(Structure):
    """A map in memory, seen as pixels: `Pixels` of `kernels/context_gradient.cpp`."""

    _fields_ = (("data", c_void_p), ("image", c_int64), ("pixel", c_int64))


class ContextGradient(Structure):
    """The arguments of `kernels/context_gradient.cpp`."""

    _fields_ = (
        ("queries", Pixels), ("keys", Pixels), ("values", Pixels), ("gradient", Pixels),
        ("d_queries", Pixels), ("d_keys", Pixels), ("d_values", Pixels),
        ("context", c_void_p), ("softmax", c_void_p), ("add", c_int),
        ("element", c_int), ("images", c_int), ("pixels", c_int), ("heads", c_int), ("key", c_int), ("value", c_int),
        ("threads", c_int),
    )  # fmt: skip


class FixedNorm(NamedTuple):
    """A norm with fixed statistics, of each channel: scale * (x - mean) / sqrt(variance + epsilon) + shift.

    Its tensors are contiguous and in float32; without a scale it is 1, and without the others 0.
    """

    scale: Tensor | None
    shift: Tensor | None
    mean: Tensor | None = None
    variance: Tensor | None = None
    epsilon: float = 0.0


class NormArguments(Structure):
    """`Norm` of `kernels/module.cpp`."""

    _fields_ = (
        ("scale", c_void_p), ("shift", c_void_p), ("mean", c_void_p), ("variance", c_void_p), ("epsilon", c_float),
        ("present", c_int),
    )  # fmt: skip


class Module(Structure):
    """The arguments of `kernels/module.cpp`."""

    _fields_ = (
        ("x", c_void_p), ("x_image", c_int64), ("x_line", c_int64), ("x_pixel", c_int64), ("x_channel", c_int64),
        ("weight", c_void_p), ("along", c_void_p), ("across", c_void_p),
        ("between", NormArguments), ("finish", NormArguments),
        ("out", c_void_p), ("out_image", c_int64), ("out_line", c_int64), ("out_pixel", c_int64), ("element", c_int),
        ("content", c_int), ("images", c_int), ("lines", c_int), ("length", c_int), ("channels", c_int),
        ("heads", c_int), ("key", c_int), ("value", c_int), ("threads", c_int),
    )  # fmt: skip


class Pointwise(Structure):
    """The arguments of `kernels/pointwise.cpp`."""

    _fields_ = (
        ("x", c_void_p), ("x_image", c_int64), ("x_row", c_int64), ("x_pixel", c_int64), ("x_channel", c_int64),
        ("weight", c_void_p), ("bias", c_void_p), ("residual", c_void_p), ("out", c_void_p), ("element", c_int),
        ("relu", c_int), ("images", c_int), ("rows", c_int), ("length", c_int), ("channels", c_int),
        ("outputs", c_int), ("threads", c_int),
    )  # fmt: skip


def attend(
    q: Tensor,
    v: Tensor,
    rel: Tensor | None,
    axis: Axis,
    out: Tensor,
    *,
    context: Tensor | None = None,
    norm: Tensor | None = None,
    moments: Tensor | None = None,
) -> Tensor:
    """Positional attention along an axis, and what may come with it.

    Args:
        q: Queries, (batch, x, y, head, k), as all maps here: the channels of a pixel lie side by side.
        v: Values, (batch, x, y, head, v).
        rel: Embeddings of exactly the offsets of a line, (2 * length - 1, k); or None: the context alone.
        axis: The axis.
        out: Where the output goes, (batch, x, y, head, v).
        context: Context vectors, (batch, head, k, v): queries times these are added.
        norm: Scales and shifts of the values' channels, as its first two rows, contiguous.
        moments: Memory from `empty_moments`, for what `join_moments` wants to know of the output.
    """
    batch, height, width, heads, key = q.shape
    lines, length = (width, height) if axis == "column" else (height, width)
    rel = None if rel is None else as_floats(rel)
    arguments = Lines(
        *(_lines(tensor, axis) for tensor in (q, v, out)),
        _pointer(rel), _pointer(context), _pointer(norm), _pointer(moments),
        batch, lines, length, heads, key, v.shape[4], 0 if moments is None else len(moments), torch.get_num_threads(),
    )  # fmt: skip
    library().attend_along_lines(byref(arguments))
    return out


def empty_moments(v: Tensor, axis: Axis) -> Tensor:
    """Memory for the moments of the output of `attend` for these values."""
    lines = v.shape[0] * v.shape[2 if axis == "column" else 1]
    return v.new_empty(min(SHARES, lines), 3, v.shape[3] * v.shape[4], dtype=torch.float64)


def join_moments(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel, in float32."""
    count, mean, squares = moments.unbind(dim=1)  # share, channel
    total = count.sum(dim=0)
    overall = (count * mean).sum(dim=0) / total
    variance = (squares + count * (mean - overall).square()).sum(dim=0) / total
    return overall.float(), variance.float()


class LineGradients(NamedTuple):
    """What `attend_gradient` gives beside the gradients of the maps."""

    d_rel: Tensor
    sums: Tensor  # with a norm: of the gradient behind it, and of that times what was normalised, (2, channels)


def attend_gradient(
    q: Tensor,
    v: Tensor,
    rel: Tensor,
    axis: Axis,
    d_out: Tensor,
    d_q: Tensor,
    d_v: Tensor,
    *,
    add: bool = False,
    norm: Tensor | None = None,
    out: Tensor | None = None,
    coefficients: Tensor | None = None,
) -> LineGradients:
    """Write the gradients of q and v for that of the output of `attend`.

    Args:
        q: As for `attend`.
        v: As for `attend`.
        rel: As for `attend`.
        axis: As for `attend`.
        d_out: The gradient of the output, or, with coefficients, of what a norm made of it.
        d_q: Where the gradient of q goes.
        d_v: Where the gradient of v goes; with a norm it is that of what the norm made of v.
        add: Whether to add to d_q.
        norm: Scale, shift, mean and 1 / standard deviation of a norm of the values, as its first four rows.
        out: The output, for coefficients.
        coefficients: (4, channels), contiguous: the gradient of the output is a * d_out + b * (out - c) + d.
    """
    assert norm is None or coefficients is None  # the kernel has memory for one of them
    batch, height, width, heads, key = q.shape
    value = v.shape[4]
    lines, length = (width, height) if axis == "column" else (height, width)
    embeddings = as_floats(rel)
    shares = embeddings.new_empty(min(SHARES, batch * lines), *rel.shape)
    sums = rel.new_empty(len(shares), 0 if norm is None else 2, heads * value, dtype=torch.float64)
    arguments = LineGradient(
        *(_lines(tensor, axis) for tensor in (q, v, d_out, d_out if out is None else out, d_q, d_v)),
        embeddings.data_ptr(), shares.data_ptr(),
        _pointer(norm), None if norm is None else sums.data_ptr(), _pointer(coefficients), add,
        batch, lines, length, heads, key, value, len(shares), torch.get_num_threads(),
    )  # fmt: skip
    library().differentiate_along_lines(byref(arguments))
    return LineGradients(shares.sum(dim=0).to(rel.dtype), sums.sum(dim=0).float())


class ContextVectors(NamedTuple):
    """Softmax of the keys over (x, y), times the values, and of the softmax what its gradient needs."""

    context: Tensor  # batch, head, k, v
    softmax: Tensor  # the largest keys, and 1 / sums of weights: (2, batch, head, k)


def context_vectors(k: Tensor, v: Tensor) -> ContextVectors:
    """Softmax of k over (x, y), times v."""
    batch, height, width, heads, key = k.shape
    k, v = k.flatten(1, 2), v.flatten(1, 2)
    vectors = empty_context(k, v)
    arguments = Context(
        k.data_ptr(), v.data_ptr(), vectors.context.data_ptr(), vectors.softmax.data_ptr(),
        *k.stride()[:2], *v.stride()[:2], ELEMENTS[k.dtype],
        batch, height * width, heads, key, v.shape[3], torch.get_num_threads(),
    )  # fmt: skip
    library().context_vectors(byref(arguments))
    return vectors


def empty_context(k: Tensor, v: Tensor) -> ContextVectors:
    """Memory for the context vectors of maps (batch, ..., head, channel)."""
    batch, heads, key = k.shape[0], *k.shape[-2:]
    return ContextVectors(
        k.new_empty(batch, heads, key, v.shape[-1], dtype=torch.float32),
        k.new_empty(2, batch, heads, key, dtype=torch.float32),
    )


def content_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    vectors: ContextVectors,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    *,
    add: bool = False,
) -> None:
    """Write the gradients of q, k and v for that of queries times context vectors; or add to those of q and v."""
    batch, height, width, heads, key = k.shape
    arguments = ContextGradient(
        *(_pixels(one) for one in (q, k, v, d_out, d_q, d_k, d_v)),
        vectors.context.data_ptr(), vectors.softmax.data_ptr(), add, ELEMENTS[k.dtype],
        batch, height * width, heads, key, v.shape[4], torch.get_num_threads(),
    )  # fmt: skip
    library().differentiate_context_vectors(byref(arguments))


def attend_as_module(
    x: Tensor,
    out: Tensor,
    heads: int,
    columns: bool,
    weight: Tensor,
    along: Tensor | None,
    across: Tensor | None,
    content: bool,
    between: FixedNorm | None,
    finish: FixedNorm | None,
) -> None:
    """A whole module in evaluation, without pooling.

    Args:
        x: The map, (batch, channel, x, y), of any strides.
        out: Where the output goes, (batch, channel, x, y); the channels of a pixel lie side by side.
        heads: Number of heads.
        columns: Whether lines are columns, and rows lie across them; or the other way round.
        weight: Rows for queries, keys (if there is content attention) and values, each (head, channel), contiguous and
            of the map's dtype.
        along: Embeddings for attention along the lines, as `rel` of `attend`, but in float32 and contiguous.
        across: Embeddings for attention across the lines, to the output of that along them or, without it, to values.
        content: Whether there is content attention, which is added to that across.
        between: A norm of the output of attention along the lines.
        finish: A norm of the module's output, behind which comes a ReLU.
    """
    batch, channels, length, lines = x.shape
    dim_out = out.shape[1]
    key = (weight.shape[0] - dim_out) // (heads * (2 if content else 1))
    image, channel, pixel, line = x.stride()
    out_image, _, out_pixel, out_line = out.stride()
    if not columns:
        lines, length, line, pixel, out_line, out_pixel = length, lines, pixel, line, out_pixel, out_line
    arguments = Module(
        x.data_ptr(), image, line, pixel, channel,
        weight.data_ptr(), _pointer(along), _pointer(across), _norm(between), _norm(finish),
        out.data_ptr(), out_image, out_line, out_pixel, ELEMENTS[x.dtype],
        content, batch, lines, length, channels, heads, key, dim_out // heads, torch.get_num_threads(),
    )  # fmt: skip
    library().attend_as_module(byref(arguments))


def convolve_pointwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    relu: bool,
    stride: Sequence[int],
) -> Tensor:
    """A 1x1 convolution with what comes behind it.

    Args:
        x: (batch, channel, x, y), of any strides.
        weight: (output, channel), contiguous.
        bias: (output,), contiguous; or None.
        residual: Added before the ReLU, of the output's shape and as it lies in memory; or None.
        out: Where the output goes, channels-last.
        relu: Whether a ReLU is the last of it.
        stride: Down and along.
    """
    batch, channels = x.shape[:2]
    outputs, height, width = out.shape[1:]
    image, channel, row, pixel = x.stride()
    arguments = Pointwise(
        x.data_ptr(), image, row * stride[0], pixel * stride[1], channel,
        weight.data_ptr(), _pointer(bias), _pointer(residual), out.data_ptr(), ELEMENTS[x.dtype],
        relu, batch, height, width, channels, outputs, torch.get_num_threads(),
    )  # fmt: skip
    library().convolve_pointwise(byref(arguments))
    return out


def as_floats(x: Tensor) -> Tensor:
    """What kernels take in float32 and contiguous, whatever maps are: a tensor itself, or a copy."""
    return (x if x.dtype == torch.float32 else x.float()).contiguous()


def side_by_side(x: Tensor) -> Tensor:
    """A map whose pixels' channels lie side by side, head behind head: itself, or a copy."""
    heads, width = x.shape[3:]
    fits = (width == 1 or x.stride(4) == 1) and (heads == 1 or x.stride(3) == width)
    return x if fits else x.contiguous()


def rows_in_order(x: Tensor) -> Tensor:
    """As `side_by_side`, and the rows of the map follow each other like its pixels."""
    x = side_by_side(x)
    return x if x.stride(1) == x.shape[2] * x.stride(2) else x.contiguous()


def _pixels(x: Tensor) -> Pixels:
    return Pixels(x.data_ptr(), x.stride(0), x.stride(2))


def _lines(tensor: Tensor, axis: Axis) -> Map:
    image, x, y = tensor.stride()[:3]
    line, pixel = (y, x) if axis == "column" else (x, y)
    return Map(tensor.data_ptr(), image, line, pixel, ELEMENTS[tensor.dtype])


def _norm(norm: FixedNorm | None) -> NormArguments:
    if norm is None:
        return NormArguments()
    scale, shift, mean, variance, epsilon = norm
    return NormArguments(_pointer(scale), _pointer(shift), _pointer(mean), _pointer(variance), epsilon, True)


def _pointer(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.data_ptr()
