"""Tensors in, tensors out: one function for each kernel, which plans, allocates and launches.

Maps are (batch, x, y, head, channel) with the channels of a pixel side by side; those without heads are contiguous. All
results are new tensors unless an argument says otherwise; those that a kernel writes whole are not initialised.
"""

import threading
from collections.abc import Callable
from ctypes import Structure
from typing import NamedTuple

import torch
from torch import Tensor

from gsanet.functional.backends import Axis
from gsanet.functional.fused import arguments
from gsanet.functional.fused.compiler import architecture_of, compile_all, load_kernel
from gsanet.functional.fused.plan import (
    Launch,
    Machine,
    Shape,
    machine_of,
    plan_context,
    plan_line,
    plan_norm,
    plan_pixel_products,
    plan_pool,
    plan_product,
    plan_projection,
    plan_sums,
    plan_table,
)


def launch(plan: Launch, values: Structure, device: torch.device) -> None:
    """Start a kernel on the current stream."""
    kernel = load_kernel(plan.kernel, device, plan.carveout)
    stream = torch.cuda.current_stream(device).cuda_stream
    kernel.launch((*plan.grid, 1), plan.threads, plan.shared_bytes, values, stream)


def machine(device: torch.device) -> Machine:
    """The GPU that plans are made for."""
    return machine_of(device)


def compile_ahead(device: torch.device, run: Callable[[], object]) -> None:
    """Compile all kernels that a function of meta tensors would launch on a device, many at a time."""
    plans: list[Launch] = []
    with _recording:
        _recorders.append((device, plans))
        try:
            run()
        finally:
            _recorders.pop()
    compile_all((plan.kernel for plan in plans), architecture_of(device))


_recording = threading.Lock()
_recorders: list[tuple[torch.device, list[Launch]]] = []


def _launch(plan: Launch, values: Structure, tensor: Tensor) -> None:
    if tensor.is_meta:
        _recorders[-1][1].append(plan)
    else:
        launch(plan, values, tensor.device)


def _machine(tensor: Tensor) -> Machine:
    return machine(_recorders[-1][0] if tensor.is_meta else tensor.device)


def side_by_side(x: Tensor) -> Tensor:
    """The map itself if the channels of each pixel lie side by side, else a copy."""
    return x if x.stride(4) == 1 and x.stride(3) == x.shape[4] else x.contiguous()


def shape_of(q: Tensor, v: Tensor, *others: Tensor) -> Shape:
    """The shape of a layer; `others` are further maps that its kernels move."""
    access = 16 // q.element_size()
    vector = all(
        tensor.shape[-1] % access == 0
        and tensor.data_ptr() % 16 == 0
        and all(stride % access == 0 for stride in tensor.stride()[:3])
        for tensor in (q, v, *others)
    )
    return Shape(q.dtype, q.shape[3], q.shape[4], v.shape[4], vector)


class Attended(NamedTuple):
    """The output of a line layer, and the sums of its channels, (blocks, 2, channels), if they were asked for."""

    out: Tensor
    statistics: Tensor | None


def attend(
    q: Tensor,
    v: Tensor,
    rel: Tensor,
    axis: Axis,
    *,
    norm: Tensor | None = None,
    context: Tensor | None = None,
    finish: Tensor | None = None,
    centre: Tensor | None = None,
    pool: bool = False,
    early_table: bool = False,
) -> Attended:
    """Positional attention along one axis.

    Args:
        q: Queries.
        v: Values.
        rel: Embeddings of all offsets on the line, (2 * length - 1, k).
        axis: The axis.
        norm: Scale and shift of the values, (2 or more, channels) in float32.
        context: Context vectors of content attention, turned, from `context_vectors`: its output is added.
        finish: Scale and shift of the output, before a ReLU, (2, channels) in float32.
        centre: The sums of the output's channels are taken about these, (channels) in float32.
        pool: Average 2 x 2 pixels.
        early_table: `rel` is older than the kernel before this one, which is one of ours: it is read at once.
    """
    batch, height, width, heads, _ = q.shape
    length, across = (height, width) if axis == "column" else (width, height)
    size = (height // 2, width // 2) if pool else (height, width)
    out = q.new_empty(batch, *size, heads, v.shape[4])
    plan = plan_line(
        _machine(q),
        shape_of(q, v, out),
        length,
        across,
        batch,
        backward=False,
        norm_values=norm is not None,
        content=context is not None,
        pool=pool,
        finish=finish is not None,
        statistics=centre is not None,
        early_table=early_table,
    )
    assert plan is not None
    statistics = None
    if centre is not None:
        statistics = q.new_empty(plan.grid[0], 2, heads * v.shape[4], dtype=torch.float32)
    values = arguments.LineForward(
        queries=arguments.line_map(q, axis),
        values=arguments.line_map(v, axis),
        out=arguments.line_map(out, axis),
        rel=rel.data_ptr(),
        norm=_pointer(norm),
        context=_pointer(context),
        finish=_pointer(finish),
        centre=_pointer(centre),
        statistics=_pointer(statistics),
        lines_per_image=across,
        total_lines=batch * across,
        heads=heads,
    )
    _launch(plan, values, q)
    return Attended(out, statistics)


class ContentGradient(NamedTuple):
    """What a line layer's gradient needs for that of the keys and values in content attention."""

    keys: Tensor
    d_keys: Tensor  # written
    gradient: Tensor
    gradient_turned: Tensor
    key_max: Tensor
    key_offset: Tensor


class AttendedGradient(NamedTuple):
    """The gradients of a line layer; `statistics` as in `Attended`."""

    d_rel: Tensor
    statistics: Tensor | None


def attend_gradient(
    q: Tensor,
    v: Tensor,
    rel: Tensor,
    d_out: Tensor,
    axis: Axis,
    d_queries: Tensor,
    d_values: Tensor,
    *,
    accumulate: bool = False,
    norm: Tensor | None = None,
    moments: Tensor | None = None,
    coefficients: Tensor | None = None,
    normalised: Tensor | None = None,
    context: Tensor | None = None,
    content: ContentGradient | None = None,
    pool: bool = False,
) -> AttendedGradient:
    """The gradients of positional attention along one axis.

    Args:
        q: Queries.
        v: Values.
        rel: Embeddings, as in `attend`.
        d_out: Gradient of the output.
        axis: The axis.
        d_queries: Where the gradient of q goes.
        d_values: Where the gradient of v goes.
        accumulate: The gradient of q is added to what is there.
        norm: As in `attend`.
        moments: Mean and 1 / standard deviation of the values, (2, channels): asks for the sums of d_values, and of
            d_values times the normalised values.
        coefficients: (3 or more, channels), a, b and c: the gradient of the output is a * d_out + b * normalised + c.
        normalised: The input of the batch norm whose output `d_out` is the gradient of; with `coefficients`.
        context: Context vectors: d_out @ context^T is added to the gradient of q.
        content: Adds content attention's gradient to that of v, and gives that of the keys.
        pool: The output was pooled.
    """
    batch, height, width, heads, _ = q.shape
    length, across = (height, width) if axis == "column" else (width, height)
    maps = [d_out, d_queries, d_values]
    if normalised is not None:
        maps.append(normalised)
    if content is not None:
        maps += [content.keys, content.d_keys]
    plan = plan_line(
        _machine(q),
        shape_of(q, v, *maps),
        length,
        across,
        batch,
        backward=True,
        norm_values=norm is not None,
        norm_gradient=coefficients is not None,
        pool=pool,
        content_queries=context is not None,
        content_keys=content is not None,
        accumulate=accumulate,
        statistics=moments is not None,
    )
    assert plan is not None
    parts = q.new_empty(plan.grid[0] * plan.grid[1], *rel.shape, dtype=torch.float32)
    statistics = None
    if moments is not None:
        statistics = q.new_empty(plan.grid[0], 2, heads * v.shape[4], dtype=torch.float32)
    values = arguments.LineBackward(
        queries=arguments.line_map(q, axis),
        values=arguments.line_map(v, axis),
        gradient=arguments.line_map(d_out, axis),
        d_queries=arguments.line_map(d_queries, axis),
        d_values=arguments.line_map(d_values, axis),
        rel=rel.data_ptr(),
        d_rel=parts.data_ptr(),
        norm=_pointer(norm if coefficients is None else coefficients),
        context=_pointer(context),
        moments=_pointer(moments),
        statistics=_pointer(statistics),
        lines_per_image=across,
        total_lines=batch * across,
        heads=heads,
        length=length,
    )
    if normalised is not None:
        values.second = arguments.line_map(normalised, axis)
    if content is not None:
        values.keys = arguments.line_map(content.keys, axis)
        values.d_keys = arguments.line_map(content.d_keys, axis)
        values.d_context = content.gradient.data_ptr()
        values.d_context_turned = content.gradient_turned.data_ptr()
        values.key_max = content.key_max.data_ptr()
        values.key_offset = content.key_offset.data_ptr()
    _launch(plan, values, q)
    return AttendedGradient(_sum_table(parts, rel), statistics)


def _sum_table(parts: Tensor, like: Tensor) -> Tensor:
    """The gradient of a table from its parts, (blocks, offsets, channels) in float32."""
    out = torch.empty_like(like)
    values = arguments.Table(partial=parts.data_ptr(), out=out.data_ptr(), blocks=parts.shape[0], columns=out.numel())
    _launch(plan_table(like.dtype, out.numel()), values, parts)
    return out


class ContextVectors(NamedTuple):
    """Context vectors, (batch, head, ...) packed as products read them, the same turned, and the keys' softmax."""

    context: Tensor
    turned: Tensor
    key_max: Tensor  # batch, head, k
    key_inverse: Tensor  # 1 / sum


def empty_context(q: Tensor, v: Tensor) -> ContextVectors:
    """Tensors of the right shapes."""
    shape = Shape(q.dtype, q.shape[3], q.shape[4], v.shape[4], vector=True)
    key, value = shape.padded(shape.key), shape.padded(shape.value)
    batch, heads = q.shape[0], q.shape[3]
    return ContextVectors(
        q.new_empty(batch, heads, key * value),
        q.new_empty(batch, heads, key * value),
        q.new_empty(batch, heads, shape.key, dtype=torch.float32),
        q.new_empty(batch, heads, shape.key, dtype=torch.float32),
    )


def unpacked(context: Tensor, key: int, value: int) -> Tensor:
    """Context vectors or their gradient, not turned, as (batch, head, k, v): see `kernels/fragments.cuh`."""
    shape = Shape(context.dtype, 1, key, value, vector=True)
    keys, values = shape.padded(key), shape.padded(value)
    depth = 16 if shape.size == 2 and values % 16 == 0 else 8
    if shape.size == 4:
        parts = context.view(*context.shape[:2], keys // 8, values // 8, 8, 4, 2).permute(0, 1, 2, 4, 3, 6, 5)
    else:
        parts = context.view(*context.shape[:2], keys // 8, values // depth, 8, 4, depth // 8, 2)
        parts = parts.permute(0, 1, 2, 4, 3, 6, 5, 7)
    return parts.reshape(*context.shape[:2], keys, values)[..., :key, :value]


def context_vectors(k: Tensor, v: Tensor) -> ContextVectors:
    """softmax(k)^T v over the pixels of each image."""
    result = empty_context(k, v)
    _sum_over_pixels(
        k, v, softmax=True, pool=False,
        context=result.context, turned=result.turned, key_max=result.key_max, key_inverse=result.key_inverse,
    )  # fmt: skip
    return result


def context_gradient(
    q: Tensor, d_out: Tensor, vectors: ContextVectors, pool: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the context vectors divided by the softmax's sums, turned too, and what the softmax subtracts."""
    gradient, turned = torch.empty_like(vectors.context), torch.empty_like(vectors.turned)
    offset = torch.empty_like(vectors.key_max)
    _sum_over_pixels(
        q, d_out, softmax=False, pool=pool,
        context=vectors.context, key_inverse=vectors.key_inverse,
        gradient=gradient, gradient_turned=turned, key_offset=offset,
    )  # fmt: skip
    return gradient, turned, offset


def content_gradient(
    q: Tensor, k: Tensor, d_k: Tensor, d_out: Tensor, vectors: ContextVectors, pool: bool
) -> ContentGradient:
    """What a line layer's gradient needs to write `d_k` and to add content attention's share to that of the values."""
    gradient, turned, offset = context_gradient(q, d_out, vectors, pool)
    return ContentGradient(k, d_k, gradient, turned, vectors.key_max, offset)


def _sum_over_pixels(left: Tensor, right: Tensor, *, softmax: bool, pool: bool, **tensors: Tensor) -> None:
    batch, height, width, heads, _ = left.shape
    shape = shape_of(left, right)
    plans = plan_context(_machine(left), shape, height * width, batch, softmax=softmax, pool=pool)
    pieces = plans[0].grid[0] // batch
    if pieces > 1:
        tensors |= _pieces(left, shape, batch * pieces, softmax)
    values = arguments.Context(
        left=arguments.pixel_map(left),
        right=arguments.pixel_map(right),
        pixels=height * width,
        width=width,
        pieces=pieces,
        heads=heads,
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    )
    for plan in plans:
        _launch(plan, values, left)


def _pieces(like: Tensor, shape: Shape, pieces: int, softmax: bool) -> dict[str, Tensor]:
    """What is left of so many pieces of images until they are combined."""

    def empty(*size: int) -> Tensor:
        return like.new_empty(pieces, shape.heads, *size, dtype=torch.float32)

    partial = {"partial": empty(shape.key, shape.value)}
    return partial | {"maxima": empty(shape.key), "sums": empty(shape.key)} if softmax else partial


class Projected(NamedTuple):
    """q and v, and the context vectors."""

    q: Tensor
    v: Tensor
    vectors: ContextVectors


def project_with_context(x: Tensor, weight: Tensor, heads: int) -> Projected | None:
    """The projections of a map, and softmax(k)^T v over the pixels of each image, in one kernel that does not write k.

    Args:
        x: (batch, x, y, channel), channels side by side and pixels one after the other, at one distance.
        weight: The projections of q, k and v, stacked, each with as many channels as x.
        heads: Number of heads.

    Returns:
        The results, or None where one kernel is not the plan.
    """
    batch, height, width, channels = x.shape
    weight = weight.contiguous()
    like = x.unflatten(3, (heads, -1))
    shape = shape_of(like, like, weight.view(1, 1, 3 * channels, heads, -1))
    plan = plan_projection(_machine(x), shape, height * width, batch)
    if plan is None:
        return None
    projected = x.new_empty(batch, height, width, 2, heads, shape.key)
    q, v = projected.unbind(3)
    vectors = empty_context(q, v)
    tensors = vectors._asdict() | {"weight": weight, "projected": projected}
    if plan.pieces > 1:
        tensors |= _pieces(x, shape, batch * plan.left, softmax=True)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    first, *others = plan.launches
    _launch(
        first,
        arguments.Projection(
            x=arguments.pixel_map(x),
            pixels=height * width,
            pieces=plan.pieces,
            items=batch * plan.pieces,
            **addresses,
        ),
        x,
    )
    del addresses["weight"], addresses["projected"]
    for other in others:
        _launch(other, arguments.Context(pieces=plan.left, heads=heads, **addresses), x)
    return Projected(q, v, vectors)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    relu: bool = False,
    stride: tuple[int, int] = (1, 1),
    early_weight: bool = False,
) -> Tensor | None:
    """For each pixel of a map x @ weight^T + bias + residual, and a ReLU: a 1x1 convolution.

    Args:
        x: (batch, x, y, channel).
        weight: (columns, channels).
        bias: (columns).
        residual: Of the output's shape.
        relu: Whether a ReLU follows.
        stride: Of pixels, down and along.
        early_weight: `weight` and `bias` are older than the kernel before this one, which is one of ours: they are read
            at once.

    Returns:
        (batch, x, y, columns), or None where this kernel is not the plan.
    """
    x = x[:, :: stride[0], :: stride[1]]
    batch, height, width, channels = x.shape
    columns = weight.shape[0]
    others = [tensor for tensor in (weight, bias, residual) if tensor is not None]
    if not all(other.is_contiguous() and other.data_ptr() % 16 == 0 and other.dtype == x.dtype for other in others):
        return None
    strides = _strides(x)
    if x.data_ptr() % 16 or any(distance % 8 for distance in strides[:3]) or strides[3] != 1:
        return None
    plan = plan_product(
        _machine(x),
        x.dtype,
        batch * height * width,
        channels,
        columns,
        bias=bias is not None,
        residual=residual is not None,
        relu=relu,
        strided=strides[1] != width * strides[2] or strides[0] != height * strides[1],
        early_weight=early_weight,
    )
    if plan is None:
        return None
    out = x.new_empty(batch, height, width, columns)
    values = arguments.Product(
        x=arguments.Map(x.data_ptr(), *strides[:3]),
        weight=weight.data_ptr(),
        bias=_pointer(bias),
        residual=_pointer(residual),
        out=out.data_ptr(),
        pixels=batch * height * width,
        height=height,
        width=width,
        columns=columns,
    )
    _launch(plan, values, x)
    return out


def _strides(x: Tensor) -> tuple[int, int, int, int]:
    """Of a map (batch, x, y, channel): where a dimension has length 1, as if what is inside of it followed itself."""
    batch, height, width, channels = x.shape
    inner = x.stride(3) if channels > 1 else 1
    pixel = x.stride(2) if width > 1 else channels
    line = x.stride(1) if height > 1 else width * pixel
    return x.stride(0) if batch > 1 else height * line, line, pixel, inner


def norm_statistics(
    statistics: Tensor, centre: Tensor, weight: Tensor | None, bias: Tensor | None, count: int, epsilon: float
) -> Tensor:
    """Of a batch norm: scale, shift, mean, 1 / standard deviation and variance, (5, channels)."""
    applied = torch.empty(5, statistics.shape[2], dtype=torch.float32, device=statistics.device)
    values = arguments.Norm(
        partial=statistics.data_ptr(),
        centre=centre.data_ptr(),
        weight=_pointer(weight),
        bias=_pointer(bias),
        applied=applied.data_ptr(),
        blocks=statistics.shape[0],
        channels=statistics.shape[2],
        count=count,
        epsilon=epsilon,
    )
    _launch(plan_norm(statistics.shape[2], "norm_statistics"), values, statistics)
    return applied


def norm_gradient(statistics: Tensor, applied: Tensor, count: int, fixed: bool) -> Tensor:
    """Of a batch norm: a, b and c of dx = a * dy + b * x + c, gradient of the weight, of the bias; (5, channels)."""
    coefficients = torch.empty_like(applied)
    values = arguments.Norm(
        partial=statistics.data_ptr(),
        applied=applied.data_ptr(),
        coefficients=coefficients.data_ptr(),
        blocks=statistics.shape[0],
        channels=statistics.shape[2],
        count=count,
        fixed=fixed,
    )
    _launch(plan_norm(statistics.shape[2], "norm_gradient"), values, statistics)
    return coefficients


def channel_sums(x: Tensor, centre: Tensor) -> Tensor:
    """Of a map (batch, x, y, channel): sums of x - centre and of its square for each channel, (blocks, 2, channels)."""
    rows, channels = x.shape[:3].numel(), x.shape[3]
    plan, groups = plan_sums(_machine(x), x.dtype, rows, channels, "channel_sums")
    partial = x.new_empty(plan.grid[0], 2, channels, dtype=torch.float32)
    values = arguments.ChannelSums(
        x=x.data_ptr(),
        centre=centre.data_ptr(),
        partial=partial.data_ptr(),
        rows=rows,
        channels=channels,
        groups=groups,
    )
    _launch(plan, values, x)
    return partial


class PixelProducts(NamedTuple):
    """Sums over pixels, in float32: of products, (channels of y, channels of x), and of the channels of y."""

    products: Tensor
    sums: Tensor


def pixel_products(x: Tensor, y: Tensor) -> PixelProducts | None:
    """y^T x and the sums of y over pixels, in one pass over both maps; over one, if `x is y`.

    Args:
        x: (pixels, channels), of 16 bits.
        y: The same, perhaps with other channels.

    Returns:
        The sums, or None where these kernels are not the plan: for channels that are not in `CUTS` of
        `plan/pixel_products.py`, other dtypes, and maps whose pixels do not begin at multiples of 16 bytes.
    """
    maps = (x, y)
    if any(one.stride(1) != 1 or one.stride(0) % 8 or one.data_ptr() % 16 or one.dtype != x.dtype for one in maps):
        return None
    (pixels, columns), rows = x.shape, y.shape[1]
    plan = plan_pixel_products(_machine(x), x.dtype, pixels, columns, rows, x is y)
    if plan is None:
        return None
    partial = x.new_empty(plan.pieces, rows * columns + rows, dtype=torch.float32)
    found = PixelProducts(x.new_empty(rows, columns, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32))
    shape = {"partial": partial.data_ptr(), "columns": columns, "rows": rows}
    first, total = plan.launches
    values = arguments.PixelProducts(
        x=x.data_ptr(), y=y.data_ptr(), x_stride=x.stride(0), y_stride=y.stride(0), pixels=pixels, **shape
    )
    _launch(first, values, x)
    values = arguments.PixelProductsSum(
        products=found.products.data_ptr(), sums=found.sums.data_ptr(), blocks=plan.pieces, **shape
    )
    _launch(total, values, x)
    return found


class Pooled(NamedTuple):
    """The output of `norm_pool`; with a norm the raw value that it comes from and that one's place in the window."""

    out: Tensor
    peak: Tensor | None
    place: Tensor | None


def norm_pool(x: Tensor, applied: Tensor | None) -> Pooled:
    """Max pooling of 3 x 3 pixels, stride 2, padding 1.

    Args:
        x: (batch, x, y, channel).
        applied: Of the batch norm before it, from `norm_statistics`, which a ReLU follows; None for neither.
    """
    batch, height, width, channels = x.shape
    out = x.new_empty(batch, -(-height // 2), -(-width // 2), channels)
    peak = None if applied is None else torch.empty_like(out)
    place = None if applied is None else torch.empty_like(out, dtype=torch.uint8)
    plan, strip = plan_pool(_machine(x), x.dtype, *x.shape, "norm_pool", applied is not None)
    values = arguments.NormPool(
        **_of_map(x),
        applied=_pointer(applied),
        out=out.data_ptr(),
        peak=_pointer(peak),
        place=_pointer(place),
        strip=strip,
    )
    _launch(plan, values, x)
    return Pooled(out, peak, place)


def norm_pool_sums(x: Tensor, d_out: Tensor, peak: Tensor, applied: Tensor) -> Tensor:
    """The sums that `norm_gradient` takes, of the batch norm before a ReLU and max pooling; `x` only for its shape."""
    rows, channels = d_out.shape[:3].numel(), d_out.shape[3]
    plan, groups = plan_sums(_machine(d_out), d_out.dtype, rows, channels, "norm_pool_sums")
    partial = d_out.new_empty(plan.grid[0], 2, channels, dtype=torch.float32)
    values = arguments.NormPool(
        **_of_map(x),
        applied=applied.data_ptr(),
        peak=peak.data_ptr(),
        d_out=d_out.data_ptr(),
        partial=partial.data_ptr(),
        groups=groups,
    )
    _launch(plan, values, d_out)
    return partial


def norm_pool_gradient(x: Tensor, d_out: Tensor, place: Tensor, coefficients: Tensor) -> Tensor:
    """The gradient of the input of a batch norm, ReLU and max pooling; `coefficients` are those of `norm_gradient`."""
    d_x = torch.empty_like(x)
    plan, strip = plan_pool(_machine(x), x.dtype, *x.shape, "norm_pool_gradient", norm=True)
    values = arguments.NormPool(
        **_of_map(x),
        coefficients=coefficients.data_ptr(),
        place=place.data_ptr(),
        d_out=d_out.data_ptr(),
        d_x=d_x.data_ptr(),
        strip=strip,
    )
    _launch(plan, values, x)
    return d_x


def _of_map(x: Tensor) -> dict[str, int]:
    images, height, width, channels = x.shape
    return {"x": x.data_ptr(), "images": images, "height": height, "width": width, "channels": channels}


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
