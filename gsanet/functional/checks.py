"""What is refused before any arithmetic: one sentence each, naming the value and what would be right."""

import operator
from contextlib import suppress
from numbers import Real
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import Tensor


def check_maps(q: Tensor, v: Tensor, k: Tensor | None = None) -> None:
    """Check that q, k and v are maps (batch, x, y, head, channel) that belong together."""
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if tensor is None and name == "k":
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must hold floating-point numbers, got {tensor.dtype}")
        if tensor.dim() != 5:
            raise ValueError(
                f"{name} must have the five dimensions (batch, x, y, head, channel), got {tuple(tensor.shape)}"
            )
    check_pixels("q", q, *q.shape[1:3])
    if k is not None and k.shape != q.shape:
        raise ValueError(f"k must have q's shape {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.shape[:4] != q.shape[:4]:
        raise ValueError(f"v must agree with q in (batch, x, y, head) = {tuple(q.shape[:4])}, got {tuple(v.shape[:4])}")


def check_pixels(name: str, x: Tensor, height: int, width: int) -> None:
    """Check that a map has pixels to attend to; a batch may be empty."""
    if height == 0 or width == 0:
        raise ValueError(f"{name} must have at least one pixel, got {tuple(x.shape)}")


def check_table(name: str, rel: Tensor, width: int) -> None:
    """Check a table of relative position embeddings, (2 * length - 1, k)."""
    if not isinstance(rel, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(rel).__name__}")
    if rel.dim() != 2 or rel.shape[0] % 2 == 0 or rel.shape[1] != width:
        raise ValueError(
            f"{name} must have shape (2 * length - 1, {width}), an odd number of rows around offset 0 "
            f"and one column for each channel of q, got {tuple(rel.shape)}"
        )


def check_axis(axis: str) -> None:
    """Check the name of an axis."""
    if axis not in ("column", "row"):
        raise ValueError(f"axis must be 'column' or 'row', got {axis!r}")


def check_whole(name: str, value: Any, wanted: str = "a whole number") -> int:
    """Check a whole number of any type, numpy's for one, and give it as Python's own; bool is no number here."""
    if type(value) is int:  # nearly always
        return value
    if not isinstance(value, bool):
        if isinstance(value, int | torch.SymInt):
            return value  # type: ignore[return-value]  # a symbol of torch.export stays one
        with suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} must be {wanted}, got {value!r}")


def check_size(name: str, size: Any) -> tuple[int, int]:
    """Check the (height, width) of a map or an image, or one number for both, and give both."""
    try:
        height, width = (check_whole(name, length) for length in to_2tuple(size))
    except (TypeError, ValueError):
        height = width = 0
    if min(height, width) < 1:
        raise ValueError(f"{name} must be one or two positive whole numbers (height, width), got {size!r}")
    return height, width


def check_reach(reach: int | None) -> int | None:
    """Check the largest offset attended to, and give it."""
    if reach is None:
        return None
    reach = check_whole("reach", reach, "a whole number of pixels or None")
    if reach < 0:
        raise ValueError(f"reach must be 0 or more, or None for the whole map, got {reach}")
    return reach


def check_counts(**counts: int) -> list[int]:
    """Check what is counted from 1, given by name, and give the numbers."""
    numbers = [check_whole(name, value) for name, value in counts.items()]
    for name, number in zip(counts, numbers, strict=True):
        if number < 1:
            raise ValueError(f"{name} must be 1 or more, got {number}")
    return numbers


def check_rate(name: str, rate: float) -> None:
    """Check the share of what is dropped at random in training: all of it would leave nothing."""
    if not isinstance(rate, Real) or isinstance(rate, bool) or not 0 <= rate < 1:
        raise ValueError(f"{name} must be a share from 0 to below 1, got {rate!r}")


def check_heads(num_heads: int, **channels: int) -> list[int]:
    """Check that the heads divide the channels, given by name, and give all numbers."""
    heads, *numbers = check_counts(num_heads=num_heads, **channels)
    for name, number in zip(channels, numbers, strict=True):
        _check_divided(name, number, heads)
    return [heads, *numbers]


def _check_divided(name: str, channels: int, heads: int) -> None:
    if channels % heads:
        raise ValueError(f"{name} must be divisible by the number of heads, got {channels} for {heads} heads")


def check_half_heads(num_heads: int, dim_out: int) -> list[int]:
    """Check that the heads divide the channels, and halves of heads too; gives both numbers."""
    heads, channels = check_counts(num_heads=num_heads, dim_out=dim_out)
    if channels % (2 * heads):
        raise ValueError(f"dim_out must be divisible by twice the number of heads, got {channels} for {heads}")
    return [heads, channels]


def check_share(share: int, dim_out: int) -> list[int]:
    """Check that the output is made of groups of channels that share a weight; gives both numbers."""
    share, channels = check_counts(share=share, dim_out=dim_out)
    if channels % share:
        raise ValueError(f"dim_out must be divisible by the channels that share a weight, got {channels} for {share}")
    return [share, channels]


def check_same_kind(**tensors: Tensor) -> None:
    """Check that all tensors of a call have one dtype and one device."""
    first, *others = tensors.values()
    if all(one.dtype == first.dtype and one.device == first.device for one in others):
        return
    for attribute in ("dtype", "device"):
        kinds = {name: getattr(tensor, attribute) for name, tensor in tensors.items()}
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
            raise TypeError(f"all tensors must have the same {attribute}, got {listed}")


def check_feature_map(x: Tensor, channels: int) -> None:
    """Check a feature map, or images: (batch, channels, height, width), floating-point numbers."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"the input must be a tensor, got {type(x).__name__}")
    if x.dim() != 4:
        hint = ": a single one needs a batch dimension, x[None]" if x.dim() == 3 else ""
        raise ValueError(f"the input must be a map (batch, {channels}, height, width), got {tuple(x.shape)}{hint}")
    if x.shape[1] != channels:
        hint = ": they come second, x.permute(0, 3, 1, 2)" if x.shape[3] == channels else ""
        raise ValueError(f"the input must have {channels} channels, got {x.shape[1]} in {tuple(x.shape)}{hint}")
    if not x.is_floating_point():
        raise TypeError(
            f"the input must hold floating-point numbers, got {x.dtype}: bytes of an image are divided by 255 and "
            "normalised first"
        )
    check_pixels("the input", x, *x.shape[2:])


def check_projection(weight: Tensor, dim_key: int, num_heads: int, content: bool) -> tuple[int, int]:
    """Check the stacked 1x1 convolutions of q, of k with content attention, and of v; gives num_heads and dim_key."""
    num_heads, dim_key = check_heads(num_heads, dim_key=dim_key)
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a tensor, got {type(weight).__name__}")
    parts = 2 if content else 1
    if weight.dim() != 2 or weight.shape[0] <= parts * dim_key:
        raise ValueError(
            f"weight must have shape ({parts} * dim_key + dim_out, channels), more than {parts * dim_key} rows for "
            f"dim_key {dim_key}, got {tuple(weight.shape)}"
        )
    _check_divided("dim_out", weight.shape[0] - parts * dim_key, num_heads)
    return num_heads, dim_key


def check_scale_and_shift(name: str, values: Tensor, channels: int) -> None:
    """Check the scale and shift of each channel."""
    if values.shape != (2, channels):
        raise ValueError(
            f"{name} must hold a scale and a shift for each channel, (2, {channels}), got {tuple(values.shape)}"
        )
    if values.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} must be float32 or float64, whatever the map is, got {values.dtype}")


def check_window(window: int) -> int:
    """Check the size of a window around a pixel, which needs a middle, and give it."""
    window = check_whole("window", window)
    if window < 1 or window % 2 == 0:
        raise ValueError(f"window must be an odd number of pixels, got {window}")
    return window
