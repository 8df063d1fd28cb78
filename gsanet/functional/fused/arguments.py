"""The kernels' arguments as they lie in memory: each structure here mirrors the one of the same file in `kernels`."""

from ctypes import Structure, c_float, c_int, c_longlong, c_void_p
from typing import Any

from torch import Tensor

from gsanet.functional.backends import Axis


class Map(Structure):
    """A map in global memory: `Map` of `kernels/tiles.cuh`."""

    _fields_ = (("data", c_void_p), ("batch", c_longlong), ("line", c_int), ("pixel", c_int))


def _structure(name: str, **fields: Any) -> type[Structure]:
    return type(name, (Structure,), {"_fields_": list(fields.items())})


LineForward: Any = _structure(
    "LineForward",
    queries=Map, values=Map, out=Map,
    rel=c_void_p, norm=c_void_p, context=c_void_p, finish=c_void_p, centre=c_void_p, statistics=c_void_p,
    lines_per_image=c_int, total_lines=c_int, heads=c_int,
)  # fmt: skip

LineBackward: Any = _structure(
    "LineBackward",
    queries=Map, values=Map, gradient=Map, second=Map, keys=Map, d_queries=Map, d_values=Map, d_keys=Map,
    rel=c_void_p, d_rel=c_void_p, norm=c_void_p, d_context=c_void_p, d_context_turned=c_void_p,
    key_max=c_void_p, key_offset=c_void_p, moments=c_void_p, statistics=c_void_p,
    lines_per_image=c_int, total_lines=c_int, heads=c_int, length=c_int, context=c_void_p,
)  # fmt: skip

Context: Any = _structure(
    "Context",
    left=Map, right=Map,
    partial=c_void_p, maxima=c_void_p, sums=c_void_p, context=c_void_p, turned=c_void_p,
    gradient=c_void_p, gradient_turned=c_void_p, key_max=c_void_p, key_inverse=c_void_p, key_offset=c_void_p,
    pixels=c_int, width=c_int, pieces=c_int, heads=c_int,
)  # fmt: skip

Projection: Any = _structure(
    "Projection",
    x=Map, weight=c_void_p, projected=c_void_p,
    partial=c_void_p, maxima=c_void_p, sums=c_void_p, context=c_void_p, turned=c_void_p,
    key_max=c_void_p, key_inverse=c_void_p,
    pixels=c_int, pieces=c_int, items=c_int,
)  # fmt: skip

Product: Any = _structure(
    "Product",
    x=Map, weight=c_void_p, bias=c_void_p, residual=c_void_p, out=c_void_p,
    pixels=c_int, height=c_int, width=c_int, columns=c_int,
)  # fmt: skip

Norm: Any = _structure(
    "Norm",
    partial=c_void_p, centre=c_void_p, weight=c_void_p, bias=c_void_p, applied=c_void_p, coefficients=c_void_p,
    blocks=c_int, channels=c_int, count=c_float, epsilon=c_float, fixed=c_int,
    running_mean=c_void_p, running_variance=c_void_p, batches=c_void_p, share=c_float,
)  # fmt: skip

Table: Any = _structure("Table", partial=c_void_p, out=c_void_p, blocks=c_int, columns=c_int)

ChannelSums: Any = _structure(
    "ChannelSums",
    x=c_void_p, centre=c_void_p, partial=c_void_p, rows=c_longlong, channels=c_int, groups=c_int,
)  # fmt: skip

NormSums: Any = _structure(
    "NormSums",
    x=c_void_p, d_out=c_void_p, applied=c_void_p, partial=c_void_p, rows=c_longlong, channels=c_int, groups=c_int,
)  # fmt: skip

PixelProducts: Any = _structure(
    "PixelProducts",
    x=c_void_p, y=c_void_p, partial=c_void_p, weight=c_void_p, out=c_void_p,
    x_stride=c_int, y_stride=c_int, pixels=c_int, columns=c_int, rows=c_int,
)  # fmt: skip

PixelProductsSum: Any = _structure(
    "PixelProductsSum",
    partial=c_void_p, products=c_void_p, sums=c_void_p, blocks=c_int, columns=c_int, rows=c_int,
)  # fmt: skip

ChannelMap: Any = _structure(
    "ChannelMap",
    first=c_void_p, second=c_void_p, weight=c_void_p, second_weight=c_void_p,
    level=c_void_p, addend=c_void_p, mask=c_void_p, out=c_void_p,
    first_stride=c_int, second_stride=c_int, pixels=c_int,
)  # fmt: skip

NormPool: Any = _structure(
    "NormPool",
    x=c_void_p, applied=c_void_p, coefficients=c_void_p, out=c_void_p, peak=c_void_p, place=c_void_p,
    d_out=c_void_p, d_x=c_void_p, partial=c_void_p,
    images=c_int, height=c_int, width=c_int, channels=c_int, strip=c_int, groups=c_int,
)  # fmt: skip

Axial: Any = _structure(
    "Axial",
    queries=Map, keys=Map, values=Map, out=Map, d_queries=Map, d_keys=Map, d_values=Map,
    table=c_void_p, partial=c_void_p, lines=c_int, bundles=c_int, total=c_int, factor=c_float, scale=c_float,
)  # fmt: skip

PositionSensitive: Any = _structure(
    "PositionSensitive",
    projected=Map, out=Map, d_projected=Map,
    tables=c_void_p, content=c_void_p, d_sums=c_void_p, partial=c_void_p, d_content=c_void_p,
    lines=c_int, bundles=c_int, total=c_int, heads=c_int,
)  # fmt: skip


class Field(Structure):
    """A map in global memory and its size: `Field` of `kernels/local.cu`."""

    _fields_ = (
        ("data", c_void_p), ("batch", c_longlong), ("row", c_int), ("column", c_int),
        ("height", c_int), ("width", c_int),
    )  # fmt: skip


Local: Any = _structure(
    "Local",
    inner=Field, outer=Field, weights=c_void_p, images=c_int, heads=c_int, stride=c_int, padding=c_int,
)  # fmt: skip

Relation: Any = _structure(
    "Relation",
    queries=c_void_p, keys=c_void_p, prior=c_void_p, values=c_void_p, out=c_void_p,
    d_queries=c_void_p, d_keys=c_void_p, d_values=c_void_p, marks=c_void_p, partial=c_void_p,
    inner_height=c_int, inner_width=c_int, outer_height=c_int, outer_width=c_int, images=c_int, heads=c_int,
)  # fmt: skip


def field(tensor: Tensor) -> Field:
    """A map (batch, x, y, head, channel) whose channels lie side by side."""
    return Field(tensor.data_ptr(), *tensor.stride()[:3], *tensor.shape[1:3])


def line_map(tensor: Tensor, axis: Axis) -> Map:
    """A map (batch, x, y, ...) with its lines along an axis."""
    batch, x, y = tensor.stride()[:3]
    line, pixel = (y, x) if axis == "column" else (x, y)
    return Map(tensor.data_ptr(), batch, line, pixel)


def pixel_map(tensor: Tensor) -> Map:
    """A map (batch, x, y, ...) as one line of pixels for each image: rows must follow each other."""
    # A dimension of length 1 may have any stride.
    return Map(tensor.data_ptr(), tensor.stride(0), 0, tensor.stride(2 if tensor.shape[2] > 1 else 1))
