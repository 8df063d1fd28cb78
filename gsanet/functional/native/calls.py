"""One function for each kernel: tensors to its arguments. Each structure mirrors the one of the kernel's file."""

from ctypes import Structure, byref, c_float, c_int, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsanet.functional.backends import Axis
from gsanet.functional.native.compiler import library

SHARES = 32  # of the lines of a batch, each with a gradient of the embeddings that one thread makes


class Map(Structure):
    """A map in memory, seen as lines: `Map` of `kernels/lanes.h`."""

    _fields_ = (("data", c_void_p), ("image", c_int64), ("line", c_int64), ("pixel", c_int64))


class Lines(Structure):
    """The arguments of `kernels/lines.cpp`."""

    _fields_ = (
        ("queries", Map), ("values", Map), ("out", Map),
        ("embeddings", c_void_p), ("context", c_void_p),
        ("images", c_int), ("lines", c_int), ("length", c_int), ("heads", c_int), ("key", c_int), ("value", c_int),
        ("threads", c_int),
    )  # fmt: skip


class LineGradient(Structure):
    """The arguments of `kernels/line_gradient.cpp`."""

    _fields_ = (
        ("queries", Map), ("values", Map), ("gradient", Map), ("d_queries", Map), ("d_values", Map),
        ("embeddings", c_void_p), ("d_embeddings", c_void_p),
        ("images", c_int), ("lines", c_int), ("length", c_int), ("heads", c_int), ("key", c_int), ("value", c_int),
        ("shares", c_int), ("threads", c_int),
    )  # fmt: skip


class Context(Structure):
    """The arguments of `kernels/context.cpp`."""

    _fields_ = (
        ("keys", c_void_p), ("values", c_void_p), ("out", c_void_p),
        ("keys_image", c_int64), ("keys_pixel", c_int64), ("values_image", c_int64), ("values_pixel", c_int64),
        ("images", c_int), ("pixels", c_int), ("heads", c_int), ("key", c_int), ("value", c_int), ("threads", c_int),
    )  # fmt: skip


class FixedNorm(NamedTuple):
    """A norm with fixed statistics, of each channel: scale * (x - mean) / sqrt(variance + epsilon) + shift.

    Its tensors are contiguous; without a scale it is 1, and without the others 0.
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
        ("out", c_void_p), ("out_image", c_int64), ("out_line", c_int64), ("out_pixel", c_int64),
        ("content", c_int), ("images", c_int), ("lines", c_int), ("length", c_int), ("channels", c_int),
        ("heads", c_int), ("key", c_int), ("value", c_int), ("threads", c_int),
    )  # fmt: skip


def attend(
    q: Tensor,
    v: Tensor,
    rel: Tensor | None,
    axis: Axis,
    out: Tensor,
    *,
    context: Tensor | None = None,
) -> Tensor:
    """Positional attention along an axis, and what may come with it.

    Args:
        q: Queries, (batch, x, y, head, k), as all maps here: the channels of a pixel lie side by side.
        v: Values, (batch, x, y, head, v).
        rel: Embeddings of exactly the offsets of a line, (2 * length - 1, k), contiguous; or None: the context alone.
        axis: The axis.
        out: Where the output goes, (batch, x, y, head, v).
        context: Context vectors, (batch, head, k, v): queries times these are added.
    """
    batch, height, width, heads, key = q.shape
    lines, length = (width, height) if axis == "column" else (height, width)
    arguments = Lines(
        *(_lines(tensor, axis) for tensor in (q, v, out)),
        _pointer(rel), _pointer(context),
        batch, lines, length, heads, key, v.shape[4], torch.get_num_threads(),
    )  # fmt: skip
    library().attend_along_lines(byref(arguments))
    return out


def attend_gradient(q: Tensor, v: Tensor, rel: Tensor, axis: Axis, d_out: Tensor, d_q: Tensor, d_v: Tensor) -> Tensor:
    """Write the gradients of q and v for that of the output of `attend`; returns the embeddings'."""
    batch, height, width, heads, key = q.shape
    lines, length = (width, height) if axis == "column" else (height, width)
    shares = rel.new_empty(min(SHARES, batch * lines), *rel.shape)
    arguments = LineGradient(
        *(_lines(tensor, axis) for tensor in (q, v, d_out, d_q, d_v)), rel.data_ptr(), shares.data_ptr(),
        batch, lines, length, heads, key, v.shape[4], len(shares), torch.get_num_threads(),
    )  # fmt: skip
    library().differentiate_along_lines(byref(arguments))
    return shares.sum(dim=0)


def context_vectors(k: Tensor, v: Tensor) -> Tensor:
    """Softmax of k over (x, y), times v: (batch, head, k, v)."""
    batch, height, width, heads, key = k.shape
    k, v = k.flatten(1, 2), v.flatten(1, 2)
    out = k.new_empty(batch, heads, key, v.shape[3])
    arguments = Context(
        k.data_ptr(), v.data_ptr(), out.data_ptr(), *k.stride()[:2], *v.stride()[:2],
        batch, height * width, heads, key, v.shape[3], torch.get_num_threads(),
    )  # fmt: skip
    library().context_vectors(byref(arguments))
    return out


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
        weight: Rows for queries, keys (if there is content attention) and values, each (head, channel), contiguous.
        along: Embeddings for attention along the lines, as `rel` of `attend`.
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
        out.data_ptr(), out_image, out_line, out_pixel,
        content, batch, lines, length, channels, heads, key, dim_out // heads, torch.get_num_threads(),
    )  # fmt: skip
    library().attend_as_module(byref(arguments))


def side_by_side(x: Tensor) -> Tensor:
    """A map whose pixels' channels lie side by side, head behind head: itself, or a copy."""
    heads, width = x.shape[3:]
    fits = (width == 1 or x.stride(4) == 1) and (heads == 1 or x.stride(3) == width)
    return x if fits else x.contiguous()


def _lines(tensor: Tensor, axis: Axis) -> Map:
    image, x, y = tensor.stride()[:3]
    line, pixel = (y, x) if axis == "column" else (x, y)
    return Map(tensor.data_ptr(), image, line, pixel)


def _norm(norm: FixedNorm | None) -> NormArguments:
    if norm is None:
        return NormArguments()
    scale, shift, mean, variance, epsilon = norm
    return NormArguments(_pointer(scale), _pointer(shift), _pointer(mean), _pointer(variance), epsilon, True)


def _pointer(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.data_ptr()
