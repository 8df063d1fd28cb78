"""Position-sensitive attention along lines: `kernels/position_sensitive.cu`."""

import torch
from torch import Tensor

from gsanet.functional.fused import arguments
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.calls.parts import sum_parts
from gsanet.functional.fused.plan import Launch
from gsanet.functional.fused.plan.position_sensitive import plan_position_sensitive
from gsanet.functional.fused.plan.softmax_lines import bundles_of


def position_sensitive_attention(projected: Tensor, tables: Tensor, content: Tensor, out: Tensor) -> None:
    """As `gsanet.functional.position_sensitive.attend_by_products`, to `out`.

    Args:
        projected: q | k | v of each head, (batch, x, y, head, channel).
        tables: The same for each offset, (head, 2 * length - 1, channel).
        content: Factors, (head), in float32.
        out: (batch, x, y, part, head, channel).
    """
    projected, tables = _movable(projected), tables.contiguous()
    values = _arguments(projected, tables, content, out)
    launching.start(_plan(projected, "position_sensitive_forward"), values, projected)


def position_sensitive_gradient(
    d_out: Tensor, projected: Tensor, tables: Tensor, content: Tensor, d_projected: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the tables and of the factors; that of `projected` goes to the last argument."""
    d_out, projected, tables = _movable(d_out), _movable(projected), tables.contiguous()
    plan = _plan(projected, "position_sensitive_backward")
    partial = content.new_empty(plan.grid[0], *tables.shape)
    d_content = content.new_empty(plan.grid[0], *content.shape)
    values = _arguments(projected, tables, content, d_out)
    values.d_projected = arguments.line_map(d_projected, "column")
    values.partial, values.d_content = partial.data_ptr(), d_content.data_ptr()
    launching.start(plan, values, projected)
    return sum_parts(partial, tables), sum_parts(d_content, content)


def _movable(x: Tensor) -> Tensor:
    """The map itself if all channels of a pixel lie side by side, and can be moved 16 bytes at a time; else a copy."""
    width, dense = 1, x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
    for size, stride in zip(reversed(x.shape[3:]), reversed(x.stride()[3:]), strict=True):
        dense, width = dense and stride == width, width * size
    return x if dense else x.clone(memory_format=torch.contiguous_format)


def _plan(projected: Tensor, entry: str) -> Launch:
    images, length, lines, heads, channels = projected.shape
    machine = launching.machine_for(projected)
    return plan_position_sensitive(machine, projected.dtype, heads, channels // 4, length, lines, images, entry)


def _arguments(projected: Tensor, tables: Tensor, content: Tensor, out: Tensor) -> arguments.PositionSensitive:
    images, length, lines, heads, _ = projected.shape
    bundles = bundles_of(lines, length)
    return arguments.PositionSensitive(
        projected=arguments.line_map(projected, "column"),
        out=arguments.line_map(out, "column"),
        tables=tables.data_ptr(),
        content=content.data_ptr(),
        lines=lines,
        bundles=bundles,
        total=images * bundles,
        heads=heads,
    )
