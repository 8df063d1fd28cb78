"""Local relation: `kernels/relation.cu`."""

import torch
from torch import Tensor

from gsanet.functional.fused import arguments
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.calls.parts import sum_parts
from gsanet.functional.fused.calls.tensors import shape_of
from gsanet.functional.fused.plan import Launch
from gsanet.functional.fused.plan.relation import plan_relation

NUMBERS_OF_A_MARK = 4


def local_relation(q: Tensor, k: Tensor, prior: Tensor, v: Tensor, out: Tensor, window: int, stride: int) -> None:
    """As `relate_by_products`, to `out`; all tensors are dense."""
    plan = _plan("relation_forward", q, v, window, stride, out)
    launching.start(plan, _arguments(q, k, prior, v, out), v)


def local_relation_gradient(
    d_out: Tensor, q: Tensor, k: Tensor, prior: Tensor, v: Tensor, window: int, stride: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, prior and v; all tensors are dense."""
    d_q, d_k, d_v = (torch.empty_like(one) for one in (q, k, v))
    values = _arguments(q, k, prior, v, d_out)
    marks = q.new_empty(*q.shape, NUMBERS_OF_A_MARK)
    values.d_queries, values.marks = d_q.data_ptr(), marks.data_ptr()
    launching.start(_plan("relation_queries", q, v, window, stride, d_out), values, v)
    plan = _plan("relation_neighbours", v, v, window, stride, d_out, d_v)
    partial = prior.new_empty(plan.grid[0], *prior.shape)
    values.d_keys, values.d_values, values.partial = d_k.data_ptr(), d_v.data_ptr(), partial.data_ptr()
    launching.start(plan, values, v)
    return d_q, d_k, sum_parts(partial, prior), d_v


def _plan(entry: str, walked: Tensor, v: Tensor, window: int, stride: int, *others: Tensor) -> Launch:
    pixels = walked.shape[:3].numel()
    return plan_relation(launching.machine_for(v), entry, shape_of(v, v, *others), pixels, window, stride)


def _arguments(q: Tensor, k: Tensor, prior: Tensor, v: Tensor, out: Tensor) -> arguments.Relation:
    return arguments.Relation(
        queries=q.data_ptr(),
        keys=k.data_ptr(),
        prior=prior.data_ptr(),
        values=v.data_ptr(),
        out=out.data_ptr(),
        inner_height=q.shape[1],
        inner_width=q.shape[2],
        outer_height=k.shape[1],
        outer_width=k.shape[2],
        images=q.shape[0],
        heads=q.shape[3],
    )
