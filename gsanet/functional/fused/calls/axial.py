"""Softmax attention along lines by content and position: `kernels/axial.cu`."""

import math

import torch
from torch import Tensor

from gsanet.functional.fused import arguments
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.calls.parts import sum_parts
from gsanet.functional.fused.calls.tensors import shape_of, side_by_side
from gsanet.functional.fused.plan import Launch, Shape
from gsanet.functional.fused.plan.axial import plan_axial
from gsanet.functional.fused.plan.softmax_lines import bundles_of


def axial_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, out: Tensor) -> None:
    """Attention along dimension 1, to `out`.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        table: Embeddings of exactly the offsets of a line, (2 * length - 1, k).
        out: Where the result goes, like v.
    """
    q, k, v = (side_by_side(one) for one in (q, k, v))
    table = table.contiguous()
    values = _arguments(q, k, v, table, out)
    launching.start(_plan(shape_of(q, v, k, out), q, "axial_forward"), values, q)


def axial_attention_gradient(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, d_q: Tensor, d_k: Tensor, d_v: Tensor
) -> Tensor:
    """The gradient of the table; those of q, k and v go to the last three."""
    d_out, q, k, v = (side_by_side(one) for one in (d_out, q, k, v))
    table = table.contiguous()
    plan = _plan(shape_of(q, v, k, d_out, d_q, d_k, d_v), q, "axial_backward")
    partial = q.new_empty(math.prod(plan.grid), *table.shape, dtype=torch.float32)
    values = _arguments(q, k, v, table, d_out)
    values.d_queries, values.d_keys, values.d_values = (arguments.line_map(one, "column") for one in (d_q, d_k, d_v))
    values.partial = partial.data_ptr()
    launching.start(plan, values, q)
    return sum_parts(partial, table)


def _plan(shape: Shape, q: Tensor, entry: str) -> Launch:
    images, length, lines = q.shape[:3]
    return plan_axial(launching.machine_for(q), shape, length, lines, images, entry)


def _arguments(q: Tensor, k: Tensor, v: Tensor, table: Tensor, out: Tensor) -> arguments.Axial:
    images, length, lines = q.shape[:3]
    bundles = bundles_of(lines, length)
    scale = q.shape[4] ** -0.5
    queries, keys, values, results = (arguments.line_map(one, "column") for one in (q, k, v, out))
    return arguments.Axial(
        queries=queries,
        keys=keys,
        values=values,
        out=results,
        table=table.data_ptr(),
        lines=lines,
        bundles=bundles,
        total=images * bundles,
        factor=scale / math.log(2),
        scale=scale,
    )
