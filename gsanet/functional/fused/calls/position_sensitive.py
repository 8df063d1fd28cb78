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
    projected, tables, content = _movable(projected), tables.contiguous(), content.contiguous()
    values = _arguments(projected, tables, out=out, content=content)
    launching.start(_plan(projected, "position_sensitive_forward"), values, projected)


def position_sensitive_gradient(
    d_out: Tensor, projected: Tensor, tables: Tensor, content: Tensor, d_projected: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the tables and of the factors; that of `projected` goes to the last argument."""
    d_out, projected = _movable(d_out), _movable(projected)
    tables, content = tables.contiguous(), content.contiguous()
    plan = _plan(projected, "position_sensitive_backward")
    partial = content.new_empty(plan.grid[0], *tables.shape)
    d_content = content.new_empty(plan.grid[0], *content.shape)
    values = _arguments(projected, tables, out=d_out, d_projected=d_projected, content=content, partial=partial)
    values.d_content = d_content.data_ptr()
    launching.start(plan, values, projected)
    return sum_parts(partial, tables), sum_parts(d_content, content)


def position_sensitive_sums(projected: Tensor, table: Tensor) -> Tensor:
    """As `gsanet.functional.position_sensitive.sum_scores`."""
    projected, table = _movable(projected), table.contiguous()
    plan = _plan(projected, "position_sensitive_sums")
    partial = projected.new_empty(plan.grid[0], 2, 3, projected.shape[3], dtype=torch.float32)
    launching.start(plan, _arguments(projected, table, partial=partial), projected)
    return sum_parts(partial, partial[0])


def position_sensitive_sums_gradient(
    d_sums: Tensor, projected: Tensor, table: Tensor, d_projected: Tensor, d_table: Tensor
) -> Tensor:
    """The gradient of the table's q | k, like the last argument; that of the map's goes to the one before it."""
    projected, table, d_sums = _movable(projected), table.contiguous(), d_sums.contiguous()
    plan = _plan(projected, "position_sensitive_sums_gradient")
    partial = d_sums.new_empty(plan.grid[0] * projected.shape[3], *d_table.shape)
    values = _arguments(projected, table, d_projected=d_projected, d_sums=d_sums, partial=partial)
    launching.start(plan, values, projected)
    return sum_parts(partial, d_table)


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


def _arguments(projected: Tensor, tables: Tensor, **others: Tensor) -> arguments.PositionSensitive:
    """`others` are named as the kernels' arguments are: maps, and what is contiguous."""
    images, length, lines, heads, _ = projected.shape
    bundles = bundles_of(lines, length)
    values = arguments.PositionSensitive(
        projected=arguments.line_map(projected, "column"),
        tables=tables.data_ptr(),
        lines=lines,
        bundles=bundles,
        total=images * bundles,
        heads=heads,
    )
    for name, tensor in others.items():
        is_map = name in ("out", "d_projected")
        setattr(values, name, arguments.line_map(tensor, "column") if is_map else tensor.data_ptr())
    return values
