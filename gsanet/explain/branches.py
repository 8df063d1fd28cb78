"""What the branches of a network's GSA modules do, over many images: how large each is, and how far it looks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from gsanet.explain.maps import gsa_modules, recorded_inputs
from gsanet.functional import content_attention, global_self_attention
from gsanet.functional.attention import split_heads
from gsanet.functional.lean import fit_table
from gsanet.layers import GlobalSelfAttention

AT_ONCE = 8  # images: scores of all offsets are held


@dataclass(frozen=True)
class Balance:
    """Means over images, of one module; None of a branch that is off.

    Attributes:
        module: The module's name in its network.
        size: Height and width of its map before it is pooled.
        content: The size of content attention's output, the root of its mean square.
        positional: The same of positional attention's.
        seen: How many pixels the keys choose, as a share of all: 1 / Σ a² of a key's softmax a, from 1 / pixels, if it
            is one pixel, to 1, if all are alike; the mean over images, heads and channels. Where it is near 1 each
            context vector is the mean of the values, and content attention is pooling.
        column: How far the column layer looks, in pixels: the mean distance, weighted by the absolute scores.
        row: The same of the row layer.
    """

    module: str
    size: tuple[int, int]
    content: float | None
    positional: float | None
    seen: float | None
    column: float | None
    row: float | None

    @property
    def ratio(self) -> float | None:
        """How many times as large as positional attention content attention is."""
        return None if self.content is None or not self.positional else self.content / self.positional


def balance(model: nn.Module, images: Iterable[Tensor]) -> list[Balance]:
    """Measure all GSA modules of a network, in its order.

    Args:
        model: In evaluation mode.
        images: As its inputs, (channels, height, width) each and of one size.
    """
    modules = gsa_modules(model)
    if not modules:
        raise ValueError("the network has no GSA modules")
    if model.training:
        raise ValueError("the network is in training mode, where batch norms depend on the batch: call eval() first")
    sizes: dict[str, tuple[int, int]] = {}
    totals: dict[str, dict[str, Tensor]] = {name: {} for name in modules}
    count = 0
    device = next(model.parameters()).device
    for batch in _batches(images):
        with torch.inference_mode(), recorded_inputs(modules) as inputs:
            model(batch.to(device))
            for name, module in modules.items():
                sizes[name] = (inputs[name].shape[2], inputs[name].shape[3])
                for what, values in _measure(module, inputs[name].float()).items():
                    totals[name][what] = totals[name].get(what, 0) + values.double().sum()
        count += len(batch)
    if not count:
        raise ValueError("there are no images to measure with")
    return [_mean(name, sizes[name], total, count) for name, total in totals.items()]


def _batches(images: Iterable[Tensor]) -> Iterator[Tensor]:
    images = iter(images)
    while batch := list(islice(images, AT_ONCE)):
        yield torch.stack(batch)


def _mean(name: str, size: tuple[int, int], totals: dict[str, Tensor], count: int) -> Balance:
    means = {what: total.item() / count for what, total in totals.items()}
    sizes = {what: means[what] ** 0.5 if what in means else None for what in ("content", "positional")}
    return Balance(name, size, **sizes, **{what: means.get(what) for what in ("seen", "column", "row")})


def _measure(module: GlobalSelfAttention, x: Tensor) -> dict[str, Tensor]:
    """What `Balance` has the means of, of each image."""
    q, k, v = split_heads(module.qkv(x).permute(0, 2, 3, 1), module.num_heads, module.dim_key, module.content)
    found: dict[str, Tensor] = {}
    if k is not None:
        found["content"] = _square(content_attention(q, k, v))
        attention = k.flatten(1, 2).softmax(1)  # b, pixel, head, k
        found["seen"] = (1 / (attention.square().sum(1) * attention.shape[1])).mean((1, 2))
    column, row = (None if table is None else table.to(x.dtype) for table in (module.rel_column, module.rel_row))
    if column is not None or row is not None:
        found["positional"] = _square(global_self_attention(q, None, v, column, row, module.norm, module.reach))
    if column is not None:
        found["column"] = _distance(q, column, module.reach)
    if row is not None:
        found["row"] = _distance(q.transpose(1, 2), row, module.reach)
    return found


def _square(out: Tensor) -> Tensor:
    return out.square().flatten(1).mean(1)


def _distance(q: Tensor, rel: Tensor, reach: int | None) -> Tensor:
    """The mean distance of what pixels attend to along their first dimension, of each image.

    Args:
        q: (b, x, y, head, k).
        rel: (2 * length - 1, k) or shorter or longer, as the module holds it.
        reach: The module's.
    """
    length = q.shape[1]
    weights = torch.einsum("bxynk,rk->bxynr", q, fit_table(rel, length, reach)).abs().sum((2, 3))  # b, x, offset
    offsets = torch.arange(1 - length, length, device=q.device)
    attended = torch.arange(length, device=q.device)[:, None] + offsets  # x, offset
    weights = weights * ((attended >= 0) & (attended < length))
    return (weights * offsets.abs()).sum((1, 2)) / weights.sum((1, 2)).clamp(min=torch.finfo(q.dtype).tiny)
