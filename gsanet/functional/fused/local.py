"""Local attention in kernels: the operators of `gsanet.functional.local` on an NVIDIA GPU."""

from typing import Literal

import torch
from torch import Tensor

from gsanet.functional.backends import may_use
from gsanet.functional.fused import arguments, calls
from gsanet.functional.fused.compiler import unavailable
from gsanet.functional.fused.plan import SCALARS, plan_local

WIDEST = 128  # channels of a head, of which a thread keeps all queries
LARGEST = 15  # pixels of a window's side

Entry = Literal["local_scores", "local_mix", "local_spread"]


def takes(window: int, *tensors: Tensor) -> bool:
    """Whether the kernels take these: of one dtype that they know, on a GPU that they run on."""
    first = tensors[0]
    alike = all(one.dtype == first.dtype and one.shape[3] == first.shape[3] and one.numel() for one in tensors)
    return (
        _runs_on_device(first)
        and first.dtype in SCALARS
        and alike
        and window <= LARGEST
        and tensors[-1].shape[4] <= WIDEST
        and may_use("fused")
    )


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
    plan = plan_local(entry, inner.dtype, written.shape[:4].numel(), channels, window, vector)
    values = arguments.Local(
        inner=arguments.field(inner),
        outer=arguments.field(outer),
        weights=weights.data_ptr(),
        images=images,
        heads=heads,
        stride=stride,
        padding=padding,
    )
    calls.launch(plan, values, inner.device)


def _runs_on_device(x: Tensor) -> bool:
    return x.is_cuda and unavailable(torch.device("cuda", x.device.index or 0)) is None
