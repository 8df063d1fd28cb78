"""Attention along one axis: `kernels/line_forward.cu`, `line_backward.cu` and `line_backward_pieces.cu`."""

from typing import NamedTuple

import torch
from torch import Tensor

from gsanet.functional.backends import Axis
from gsanet.functional.fused import arguments
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.calls.parts import sum_parts
from gsanet.functional.fused.calls.tensors import pointer, shape_of
from gsanet.functional.fused.plan import plan_line


class Attended(NamedTuple):
    """The output of a line layer, and the sums of its channels, (blocks, 2, channels), if they were asked for."""

    out: Tensor
    statistics: Tensor | None


def attend(
    q: Tensor,
    v: Tensor,
    rel: Tensor,
    axis: Axis,
    *,
    norm: Tensor | None = None,
    context: Tensor | None = None,
    finish: Tensor | None = None,
    centre: Tensor | None = None,
    pool: bool = False,
    early_table: bool = False,
) -> Attended:
    """Positional attention along one axis.

    Args:
        q: Queries.
        v: Values.
        rel: Embeddings of all offsets on the line, (2 * length - 1, k).
        axis: The axis.
        norm: Scale and shift of the values, (2 or more, channels) in float32.
        context: Context vectors of content attention, turned, from `context_vectors`: its output is added.
        finish: Scale and shift of the output, before a ReLU, (2, channels) in float32.
        centre: The sums of the output's channels are taken about these, (channels) in float32.
        pool: Average 2 x 2 pixels.
        early_table: `rel` is older than the kernel before this one, which is one of ours: it is read at once.
    """
    batch, height, width, heads, _ = q.shape
    length, across = (height, width) if axis == "column" else (width, height)
    size = (height // 2, width // 2) if pool else (height, width)
    out = q.new_empty(batch, *size, heads, v.shape[4])
    plan = plan_line(
        launching.machine_for(q),
        shape_of(q, v, out),
        length,
        across,
        batch,
        backward=False,
        norm_values=norm is not None,
        content=context is not None,
        pool=pool,
        finish=finish is not None,
        statistics=centre is not None,
        early_table=early_table,
    )
    assert plan is not None
    statistics = None
    if centre is not None:
        statistics = q.new_empty(plan.grid[0], 2, heads * v.shape[4], dtype=torch.float32)
    values = arguments.LineForward(
        queries=arguments.line_map(q, axis),
        values=arguments.line_map(v, axis),
        out=arguments.line_map(out, axis),
        rel=rel.data_ptr(),
        norm=pointer(norm),
        context=pointer(context),
        finish=pointer(finish),
        centre=pointer(centre),
        statistics=pointer(statistics),
        lines_per_image=across,
        total_lines=batch * across,
        heads=heads,
    )
    launching.start(plan, values, q)
    return Attended(out, statistics)


class ContentGradient(NamedTuple):
    """What a line layer's gradient needs for that of the keys and values in content attention."""

    keys: Tensor
    d_keys: Tensor  # written
    gradient: Tensor
    gradient_turned: Tensor
    key_max: Tensor
    key_offset: Tensor


class AttendedGradient(NamedTuple):
    """The gradients of a line layer; `statistics` as in `Attended`."""

    d_rel: Tensor
    statistics: Tensor | None


def attend_gradient(
    q: Tensor,
    v: Tensor,
    rel: Tensor,
    d_out: Tensor,
    axis: Axis,
    d_queries: Tensor,
    d_values: Tensor,
    *,
    accumulate: bool = False,
    norm: Tensor | None = None,
    moments: Tensor | None = None,
    coefficients: Tensor | None = None,
    normalised: Tensor | None = None,
    context: Tensor | None = None,
    content: ContentGradient | None = None,
    pool: bool = False,
) -> AttendedGradient:
    """The gradients of positional attention along one axis.

    Args:
        q: Queries.
        v: Values.
        rel: Embeddings, as in `attend`.
        d_out: Gradient of the output.
        axis: The axis.
        d_queries: Where the gradient of q goes.
        d_values: Where the gradient of v goes.
        accumulate: The gradient of q is added to what is there.
        norm: As in `attend`.
        moments: Mean and 1 / standard deviation of the values, (2, channels): asks for the sums of d_values, and of
            d_values times the normalised values.
        coefficients: (3 or more, channels), a, b and c: the gradient of the output is a * d_out + b * normalised + c.
        normalised: The input of the batch norm whose output `d_out` is the gradient of; with `coefficients`.
        context: Context vectors: d_out @ context^T is added to the gradient of q.
        content: Adds content attention's gradient to that of v, and gives that of the keys.
        pool: The output was pooled.
    """
    batch, height, width, heads, _ = q.shape
    length, across = (height, width) if axis == "column" else (width, height)
    maps = [d_out, d_queries, d_values]
    if normalised is not None:
        maps.append(normalised)
    if content is not None:
        maps += [content.keys, content.d_keys]
    plan = plan_line(
        launching.machine_for(q),
        shape_of(q, v, *maps),
        length,
        across,
        batch,
        backward=True,
        norm_values=norm is not None,
        norm_gradient=coefficients is not None,
        pool=pool,
        content_queries=context is not None,
        content_keys=content is not None,
        accumulate=accumulate,
        statistics=moments is not None,
    )
    assert plan is not None
    parts = q.new_empty(plan.grid[0] * plan.grid[1], *rel.shape, dtype=torch.float32)
    statistics = None
    if moments is not None:
        statistics = q.new_empty(plan.grid[0], 2, heads * v.shape[4], dtype=torch.float32)
    values = arguments.LineBackward(
        queries=arguments.line_map(q, axis),
        values=arguments.line_map(v, axis),
        gradient=arguments.line_map(d_out, axis),
        d_queries=arguments.line_map(d_queries, axis),
        d_values=arguments.line_map(d_values, axis),
        rel=rel.data_ptr(),
        d_rel=parts.data_ptr(),
        norm=pointer(norm if coefficients is None else coefficients),
        context=pointer(context),
        moments=pointer(moments),
        statistics=pointer(statistics),
        lines_per_image=across,
        total_lines=batch * across,
        heads=heads,
        length=length,
    )
    if normalised is not None:
        values.second = arguments.line_map(normalised, axis)
    if content is not None:
        values.keys = arguments.line_map(content.keys, axis)
        values.d_keys = arguments.line_map(content.d_keys, axis)
        values.d_context = content.gradient.data_ptr()
        values.d_context_turned = content.gradient_turned.data_ptr()
        values.key_max = content.key_max.data_ptr()
        values.key_offset = content.key_offset.data_ptr()
    launching.start(plan, values, q)
    return AttendedGradient(sum_parts(parts, rel), statistics)
