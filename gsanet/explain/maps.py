"""Where a pixel of a GSA module takes its output from: exact weights, read from the module's own tensors.

The output of a GSA module at one pixel is a sum over the values v of all pixels. The weights of that sum are not
estimated here; they are the terms of equations 1 and 2, so that weights times values give the output back
(`Explanation.reconstruct`). Indices are the paper's: x down a column, y along a row, n head, i and j the pixel attended
to, k and v channels. docs/explain.md has the equations.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gsanet.functional.attention import split_heads
from gsanet.functional.lean import fit_table
from gsanet.layers import GlobalSelfAttention

Array = NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class Explanation:
    """The weights with which one output pixel of one module takes from all pixels, each head on its own.

    Attributes:
        module: The module's name in its network.
        pixel: (x, y), down and along, of the module's map before it is pooled.
        size: Height and width of that map.
        values: v, (head, height, width, v).
        content: What content attention takes from each pixel, (head, height, width); None where it is off.
        column: What the column layer's output at (x, j) takes from pixel (i, j), [n, j, i], (head, width, height);
            None where it is off.
        row: What the row layer takes from pixel (x, j) of the normalised column output, [n, j], (head, width); None
            where it is off.
        scale: The norm between the two as a factor of each channel, (head, v); one where there is none.
        shift: What that norm adds to each channel, (head, v); zero where there is none.
        output: The module's own output at the pixel, (head, v).
    """

    module: str
    pixel: tuple[int, int]
    size: tuple[int, int]
    values: Array
    content: Array | None
    column: Array | None
    row: Array | None
    scale: Array
    shift: Array
    output: Array

    @property
    def positional(self) -> Array | None:
        """What positional attention takes from each pixel, (head, height, width): column times row, not scaled."""
        x, y = self.pixel
        if self.column is not None and self.row is not None:
            return self.row[:, None, :] * self.column.transpose(0, 2, 1)
        if self.column is None and self.row is None:
            return None
        weights = np.zeros(self.values.shape[:3], self.values.dtype)
        if self.column is not None:
            weights[:, :, y] = self.column[:, y]
        elif self.row is not None:
            weights[:, x] = self.row
        return weights

    @property
    def scaled_positional(self) -> Array | None:
        """`positional` times the norm's scale, averaged over the channels of each head: comparable with `content`."""
        return None if self.positional is None else self.positional * self.scale.mean(1)[:, None, None]

    @property
    def total(self) -> Array:
        """`content` plus `scaled_positional`, whichever of them is on."""
        parts = [part for part in (self.content, self.scaled_positional) if part is not None]
        return np.sum(parts, axis=0)

    def reconstruct(self) -> Array:
        """The output at the pixel, (head, v), from weights times values."""
        out = np.zeros_like(self.shift)
        if self.content is not None:
            out = out + np.einsum("nij,nijv->nv", self.content, self.values)
        if self.positional is not None:
            out = out + self.scale * np.einsum("nij,nijv->nv", self.positional, self.values)
            if self.row is not None:
                out = out + self.shift * self.row.sum(1)[:, None]
        return out

    @property
    def error(self) -> float:
        """How far `reconstruct` is from the module's own output, as a share of its largest channel."""
        return float(np.abs(self.reconstruct() - self.output).max() / max(np.abs(self.output).max(), 1e-30))

    def arrays(self) -> dict[str, NDArray]:
        """Everything by name, for `numpy.savez`; what is off is left out."""
        found = {
            **{name: getattr(self, name) for name in ("content", "column", "row", "positional", "total")},
            **{name: getattr(self, name) for name in ("values", "scale", "shift", "output", "pixel", "size", "module")},
        }
        return {name: np.asarray(value) for name, value in found.items() if value is not None}


def gsa_modules(model: nn.Module) -> dict[str, GlobalSelfAttention]:
    """The GSA modules of a network by name, in the order of the network."""
    return {name: module for name, module in model.named_modules() if isinstance(module, GlobalSelfAttention)}


def explain(
    model: nn.Module,
    image: Tensor,
    at: tuple[float, float],
    module: str,
    dtype: torch.dtype = torch.float64,
) -> Explanation:
    """Explain what a module of a network does for one place of an image.

    Args:
        model: The network; it is run once in evaluation mode, and left as it was.
        image: The network's input, (1, channels, height, width).
        at: The place, down and along, in pixels of that input: (3.5, 0.5) is the middle of the pixel (3, 0).
        module: The name of a GSA module, one of `gsa_modules(model)`.
        dtype: In which the weights are computed.
    """
    modules = gsa_modules(model)
    if module not in modules:
        raise ValueError(f"{module!r} is no GSA module of the network: {', '.join(modules) or 'it has none'}")
    x = _input_of(model, modules[module], image)
    pixel = map_pixel(at, (image.shape[2], image.shape[3]), (x.shape[2], x.shape[3]))
    return explain_module(modules[module], x, pixel, module, dtype)


def map_pixel(at: tuple[float, float], size: tuple[int, int], map_size: tuple[int, int]) -> tuple[int, int]:
    """The pixel of a map that covers a place of the image that the map was made from."""
    down, along = at
    if not (0 <= down < size[0] and 0 <= along < size[1]):
        raise ValueError(f"{at} lies outside of the image of {size[0]}x{size[1]}")
    return int(down * map_size[0] / size[0]), int(along * map_size[1] / size[1])


def explain_module(
    module: GlobalSelfAttention,
    x: Tensor,
    pixel: tuple[int, int],
    name: str = "",
    dtype: torch.dtype = torch.float64,
) -> Explanation:
    """Explain one output pixel of a GSA module, in evaluation mode.

    Args:
        module: It is not changed. The norm between column and row has to scale and shift each channel and nothing else,
            as batch norm does with its running statistics.
        x: The module's input, (1, dim, height, width).
        pixel: (x, y), down and along, on the map of the input's size.
        name: What to call the module.
        dtype: In which the weights are computed.
    """
    return read_module(module, x, name, dtype).at(pixel)


@dataclass(frozen=True, eq=False)
class Reading:
    """What a GSA module makes of one image, from which the weights of any of its pixels are quickly read.

    Attributes:
        module: The module's name in its network.
        q: (x, y, head, k).
        k_hat: k after its softmax over all pixels, (x, y, head, k); None without content attention.
        rel_column: R of each offset from -(height - 1) to height - 1, (2 * height - 1, k), zero out of reach; None
            without the column layer.
        rel_row: The same along the row.
        values: As `Explanation.values`; so are `scale` and `shift`.
        scale: See `values`.
        shift: See `values`.
        output: The module's own output before it pools, (x, y, head, v).
    """

    module: str
    q: Tensor
    k_hat: Tensor | None
    rel_column: Tensor | None
    rel_row: Tensor | None
    values: Array
    scale: Array
    shift: Array
    output: Array

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the module's map."""
        return self.q.shape[0], self.q.shape[1]

    def at(self, pixel: tuple[int, int]) -> Explanation:
        """The weights of the pixel (x, y), down and along."""
        (height, width), (x, y) = self.size, pixel
        if not (0 <= x < height and 0 <= y < width):
            raise ValueError(f"pixel must lie on the map of {height}x{width}, got {pixel}")
        query = self.q[x, y]  # head, k
        content = column = row = None
        if self.k_hat is not None:
            content = _array(torch.einsum("nk,ijnk->nij", query, self.k_hat))
        if self.rel_column is not None:
            column = _array(torch.einsum("jnk,ik->nji", self.q[x], _offsets(self.rel_column, height, x)))
        if self.rel_row is not None:
            row = _array(torch.einsum("nk,jk->nj", query, _offsets(self.rel_row, width, y)))
        found = content, column, row, self.scale, self.shift, self.output[x, y]
        return Explanation(self.module, pixel, self.size, self.values, *found)


@torch.no_grad()
def read_module(module: GlobalSelfAttention, x: Tensor, name: str = "", dtype: torch.dtype = torch.float64) -> Reading:
    """Do once for an image what all pixels of a module share; see `explain_module` for the arguments."""
    if x.dim() != 4 or x.shape[0] != 1:
        raise ValueError(f"x must be the map of one image, (1, {module.dim}, height, width), got {tuple(x.shape)}")
    height, width = x.shape[2:]
    own = copy.deepcopy(module).to(dtype).eval().requires_grad_(False)
    own.stride = 1  # the weights are those of a pixel before pooling
    x = x.to(dtype)
    heads = own.num_heads
    scale, shift = (_array(values.view(heads, -1)) for values in _scale_and_shift(own, x))
    output = own(x)[0].permute(1, 2, 0).unflatten(-1, (heads, -1))

    maps = split_heads(own.qkv(x).permute(0, 2, 3, 1), heads, own.dim_key, own.content)
    q, k, v = (None if each is None else each[0] for each in maps)  # x, y, head, channel
    assert q is not None
    assert v is not None
    return Reading(
        name,
        q.contiguous(),  # not a part of the projection, which would be kept with it
        None if k is None else k.flatten(0, 1).softmax(0).view_as(k),
        None if own.rel_column is None else fit_table(own.rel_column, height, own.reach),
        None if own.rel_row is None else fit_table(own.rel_row, width, own.reach),
        _array(v.permute(2, 0, 1, 3)),
        scale,
        shift,
        _array(output),
    )


def _offsets(table: Tensor, length: int, position: int) -> Tensor:
    """R[i - position] for each i of a line, (length, k), from the embeddings of all its offsets."""
    return table[length - 1 - position : 2 * length - 1 - position]


def _scale_and_shift(module: GlobalSelfAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the norm does to each channel, found by asking it; a norm that does anything else is refused.

    Asking works for all kinds of batch norm, whatever they call their statistics.
    """
    if module.norm is None:
        return x.new_ones(module.dim_out), x.new_zeros(module.dim_out)
    zeros = x.new_zeros(1, module.dim_out, *x.shape[2:])
    shift = module.norm(zeros)[0, :, 0, 0]
    scale = module.norm(zeros + 1)[0, :, 0, 0] - shift
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(zeros.shape, generator=generator, dtype=x.dtype).to(x.device)
    expected = probe * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)
    tolerance = 1e3 * torch.finfo(x.dtype).eps
    if not torch.allclose(module.norm(probe), expected, tolerance, tolerance * float(expected.abs().max())):
        raise ValueError(
            f"the norm between column and row, {type(module.norm).__name__}, is not a fixed scale and shift of each "
            "channel: only with batch norm and its running statistics are there weights to show"
        )
    return scale, shift


@contextmanager
def recorded_inputs(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """What enters each of these modules while the network runs, by name."""
    seen: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(lambda _, inputs: seen.update({name: inputs[0].detach().clone()}))

    hooks = [record(name, module) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _input_of(model: nn.Module, module: nn.Module, image: Tensor) -> Tensor:
    """What enters a module when the network sees an image."""
    modes = {each: each.training for each in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), recorded_inputs({"": module}) as seen:
            model(image)
    finally:
        for each, training in modes.items():
            each.training = training
    return seen[""]


def _array(tensor: Tensor) -> Array:
    return tensor.cpu().contiguous().numpy()
