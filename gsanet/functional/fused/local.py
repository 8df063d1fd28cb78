"""Local attention in kernels: the operators of `gsanet.functional.local_ops` on an NVIDIA GPU."""

from typing import Literal

from torch import Tensor

from gsanet.functional.fused import arguments, available, calls
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.plan import plan_local

WIDEST = 128  # channels of a head, of which a thread keeps all queries
LARGEST = 15  # pixels of a window's side

Entry = Literal["local_scores", "local_mix", "local_spread"]


def takes(window: int, first: Tensor, second: Tensor, channels: int) -> bool:
    """Whether the kernels take two maps: on a GPU that they run on, of one kind. All else, mistakes too, is for loops.

    Args:
        window: Pixels of its side.
        first: Queries, or weights.
        second: What they are multiplied with.
        channels: What the first map should have.
    """
    alike = (first.dtype, first.device, first.shape[0], first.shape[3], first.shape[4]) == (
        second.dtype, second.device, second.shape[0], second.shape[3], channels,
    )  # fmt: skip
    fits = window <= LARGEST and second.shape[4] <= WIDEST
    return available.take(first) and alike and fits and bool(first.numel() and second.numel())


def local_scores(q: Tensor, k: Tensor, window: int, stride: int, padding: int) -> Tensor:
    """As the operator of this name, for what `takes` takes, as the others."""
    scores = q.new_empty(*q.shape[:4], window * window)
    _run("local_scores", calls.side_by_side(q), calls.side_by_side(k), scores, window, stride, padding)
    return scores


def local_mix(weights: Tensor, v: Tensor, window: int, stride: int, padding: int) -> Tensor:
    """As the operator of this name."""
    out = v.new_empty(*weights.shape[:4], v.shape[4])
    _run("local_mix", out, calls.side_by_side(v), weights.contiguous(), window, stride, padding)
    return out


def local_spread(weights: Tensor, q: Tensor, height: int, width: int, window: int, stride: int, padding: int) -> Tensor:
    """As the operator of this name."""
    out = q.new_empty(q.shape[0], height, width, *q.shape[3:])
    _run("local_spread", calls.side_by_side(q), out, weights.contiguous(), window, stride, padding)
    return out


def _run(entry: Entry, inner: Tensor, outer: Tensor, weights: Tensor, window: int, stride: int, padding: int) -> None:
    images, heads, channels = inner.shape[0], inner.shape[3], inner.shape[4]
    vector = calls.shape_of(inner, outer).vector
    written = outer if entry == "local_spread" else inner
    size = written.shape[0], written.shape[1], written.shape[2]
    plan = plan_local(entry, inner.dtype, size, heads, channels, window, vector)
    values = arguments.Local(
        inner=arguments.field(inner),
        outer=arguments.field(outer),
        weights=weights.data_ptr(),
        images=images,
        heads=heads,
        stride=stride,
        padding=padding,
    )
    launching.launch(plan, values, inner.device)
