"""What kernels ask of tensors: where they are, and how they are laid out."""

from torch import Tensor

from gsanet.functional.fused.plan import Shape


def side_by_side(x: Tensor) -> Tensor:
    """The map itself if the channels of each pixel lie side by side, else a copy."""
    return x if x.stride(4) == 1 and x.stride(3) == x.shape[4] else x.contiguous()


def shape_of(q: Tensor, v: Tensor, *others: Tensor) -> Shape:
    """The shape of a layer; `others` are further maps that its kernels move."""
    access = 16 // q.element_size()
    vector = all(
        tensor.shape[-1] % access == 0
        and tensor.data_ptr() % 16 == 0
        and all(
            stride % access == 0 for stride, size in zip(tensor.stride()[:3], tensor.shape, strict=False) if size > 1
        )
        for tensor in (q, v, *others)
    )
    return Shape(q.dtype, q.shape[3], q.shape[4], v.shape[4], vector)


def like_map(x: Tensor, channels: tuple[int, ...]) -> Tensor:
    """A dense map (batch, x, y, *channels), its pixels in the order of another: if that is transposed, it is too."""
    batch, length, lines = x.shape[:3]
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, lines, length, *channels).transpose(1, 2)
    return x.new_empty(batch, length, lines, *channels)


def pixels(x: Tensor) -> Tensor:
    """(batch, channels, height, width) as (pixels, channels): a view of a channels-last map."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def to_map(rows: Tensor, like: Tensor) -> Tensor:
    """(pixels, channels) as a channels-last map, (batch, channels, height, width) of the size of another."""
    batch, _, height, width = like.shape
    return rows.view(batch, height, width, rows.shape[1]).permute(0, 3, 1, 2)


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor begins."""
    return None if tensor is None else tensor.data_ptr()
