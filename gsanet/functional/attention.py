"""Global self-attention as functions of tensors: Section 3.1 and Appendix B of the paper.

Maps are `(batch, x, y, head, channel)`, x down a column (height) and y along a row (width): a channels-last feature
map is this layout already. Each function checks its arguments, follows autocast, and hands over to a backend.
"""

from functools import partial

import torch
from torch import Tensor

from gsanet.functional import checks
from gsanet.functional.autocast import autocast_dtype, cast
from gsanet.functional.backends import Axis, Norm, select_backend, select_whole
from gsanet.functional.pooling import average_pool
from gsanet.functional.projection import project
from gsanet.functional.transforms import call_with_norms


def content_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to all pixels by content: equation 1, `F = Q (softmax(K^T) V)`.

    The softmax of k runs over x and y together; q is not normalised. Linear in the number of pixels.

    Args:
        q: Queries, (batch, x, y, head, k).
        k: Keys, (batch, x, y, head, k).
        v: Values, (batch, x, y, head, v).

    Returns:
        (batch, x, y, head, v).
    """
    checks.check_maps(q, v, k)
    if (dtype := autocast_dtype(q)) is not None:
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = cast(dtype, q, k, v)
            return content_attention(q, k, v)
    checks.check_same_kind(q=q, k=k, v=v)
    return select_backend("content_attention", q, k, v).content_attention(q, k, v)


def positional_attention(q: Tensor, v: Tensor, rel: Tensor, axis: Axis, reach: int | None = None) -> Tensor:
    """Attend along one axis by relative position: equation 2, `f = (q R^T) V`, without a softmax.

    Args:
        q: Queries, (batch, x, y, head, k).
        v: Values, (batch, x, y, head, v).
        rel: Relative position embeddings shared by the heads, (2 * length - 1, k): the middle row is offset 0, and row
            `length - 1 + r` is offset r = i - x from the attending pixel x to the pixel i attended to. Its length need
            not be the map's: offsets outside the table contribute nothing, and a smaller map uses its middle.
        axis: `"column"` attends along x, `"row"` along y.
        reach: Offsets with |r| > reach contribute nothing. The paper's L; None for the whole line.

    Returns:
        (batch, x, y, head, v).
    """
    checks.check_axis(axis)
    reach = checks.check_reach(reach)
    checks.check_maps(q, v)
    checks.check_table("rel", rel, q.shape[-1])
    if (dtype := autocast_dtype(q)) is not None:
        with torch.autocast(q.device.type, enabled=False):
            q, v, rel = cast(dtype, q, v, rel)
            return positional_attention(q, v, rel, axis, reach)
    checks.check_same_kind(q=q, v=v, rel=rel)
    return select_backend("positional_attention", q, v, rel).positional_attention(q, v, rel, axis, reach)


def global_self_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    rel_column: Tensor | None,
    rel_row: Tensor | None,
    norm: Norm | None = None,
    reach: int | None = None,
) -> Tensor:
    """The GSA operation: content attention plus column-then-row positional attention.

    Args:
        q: Queries, (batch, x, y, head, k).
        k: Keys, (batch, x, y, head, k), or None: no content attention.
        v: Values, (batch, x, y, head, v).
        rel_column: Embeddings of the offsets along x, (2 * height - 1, k), or None: no column attention.
        rel_row: Embeddings of the offsets along y, (2 * width - 1, k), or None: no row attention.
        norm: Called between column and row attention on the (batch, channels, x, y) map, or None.
        reach: The largest offset attended to, or None for all.

    Returns:
        (batch, x, y, head, v).
    """
    if k is None and rel_column is None and rel_row is None:
        raise ValueError("k, rel_column and rel_row are all None: give at least one of them")
    positional = None
    if rel_column is not None:
        positional = positional_attention(q, v, rel_column, "column", reach)
    if rel_row is not None:
        if positional is not None and norm is not None:
            positional = apply_norm(norm, positional)
        positional = positional_attention(q, v if positional is None else positional, rel_row, "row", reach)
    if k is None:
        assert positional is not None
        return positional
    content = content_attention(q, k, v)
    return content if positional is None else content + positional


def global_self_attention_map(
    x: Tensor,
    weight: Tensor,
    rel_column: Tensor | None,
    rel_row: Tensor | None,
    norm: Norm | Tensor | None = None,
    *,
    finish: Tensor | None = None,
    num_heads: int,
    dim_key: int,
    content: bool = True,
    reach: int | None = None,
    stride: int = 1,
) -> Tensor:
    """The whole GSA module as one function of a feature map: projection, attention, pooling.

    It is one call so that a backend may fuse all of it.

    Args:
        x: The feature map, (batch, channels, height, width). Channels-last is read and written without a copy.
        weight: The 1x1 convolutions of q, k and v, stacked in this order, (2 * dim_key + dim_out, channels);
            without content attention there is no k, (dim_key + dim_out, channels).
        rel_column: As in `global_self_attention`.
        rel_row: As in `global_self_attention`.
        norm: As in `global_self_attention`; or, of a batch norm with fixed statistics, the scale and shift of each
            channel, (2, dim_out) in float32, or in float64 for a map of that.
        finish: Scale and shift of each output channel, as for `norm`, and a ReLU, after the pooling; None for neither.
        num_heads: Number of heads; divides dim_key and dim_out.
        dim_key: Channels of q, and of k.
        content: Whether content attention is on.
        reach: As in `global_self_attention`.
        stride: Average pooling of stride x stride pixels after the attention; the last window may be cut by the border.

    Returns:
        (batch, dim_out, ceil(height / stride), ceil(width / stride)), channels-last.
    """
    num_heads, dim_key = checks.check_projection(weight, dim_key, num_heads, content)
    checks.check_feature_map(x, weight.shape[1])
    (stride,) = checks.check_counts(stride=stride)
    reach = checks.check_reach(reach)
    keys = dim_key if content else 0
    for name, values in {"norm": norm, "finish": finish}.items():
        if isinstance(values, Tensor):
            checks.check_scale_and_shift(name, values, weight.shape[0] - dim_key - keys)
    maps: tuple[Tensor, ...] = (x, weight)
    tables = {"rel_column": rel_column, "rel_row": rel_row}
    if (dtype := autocast_dtype(x)) is not None:
        maps = cast(dtype, *maps)
        tables = {name: None if rel is None else rel.to(dtype) for name, rel in tables.items()}
    wholes = (*maps, *tables.values())
    settings = {
        "finish": finish,
        "num_heads": num_heads,
        "dim_key": dim_key,
        "content": content,
        "reach": reach,
        "stride": stride,
    }
    if (whole := select_whole(*wholes, norm, **settings)) is not None:
        # Layer by layer each function checks its own.
        given = {name: rel for name, rel in tables.items() if rel is not None}
        for name, rel in given.items():
            checks.check_table(name, rel, dim_key // num_heads)
        checks.check_same_kind(x=maps[0], weight=maps[1], **given)
        if dtype is None:
            return whole(*wholes, norm, **settings)
        with torch.autocast(x.device.type, enabled=False):
            return whole(*wholes, norm, **settings)
    checks.check_same_kind(x=maps[0], weight=maps[1])
    if isinstance(norm, Tensor):
        norm = partial(scale_and_shift, values=norm)
    projected = project(x, weight)
    out = attend_projected(
        projected,
        rel_column,
        rel_row,
        norm,
        num_heads=num_heads,
        dim_key=dim_key,
        content=content,
        reach=reach,
        stride=stride,
    )
    return out if finish is None else scale_and_shift(out, finish).relu_()


def attend_projected(
    projected: Tensor,
    rel_column: Tensor | None,
    rel_row: Tensor | None,
    norm: Norm | None,
    *,
    num_heads: int,
    dim_key: int,
    content: bool,
    reach: int | None,
    stride: int,
) -> Tensor:
    """What `global_self_attention_map` does with the projection, (batch, x, y, q | k | v): attention, then pooling."""
    q, k, v = split_heads(projected, num_heads, dim_key, content)
    out = global_self_attention(q, k, v, rel_column, rel_row, norm, reach)
    return average_pool(to_feature_map(out), stride)


def split_heads(projected: Tensor, num_heads: int, dim_key: int, content: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """From the projection (batch, x, y, q | k | v) to q, k and v, (batch, x, y, head, channel) each.

    Without content attention there is no k.
    """
    keys = dim_key if content else 0
    q, k, v = (
        part.unflatten(-1, (num_heads, part.shape[-1] // num_heads))
        for part in projected.split((dim_key, keys, projected.shape[-1] - dim_key - keys), dim=-1)
    )
    return q, k if content else None, v


def scale_and_shift(x: Tensor, values: Tensor) -> Tensor:
    """A map (batch, channels, x, y) times values[0], plus values[1], computed in the wider dtype and given in x's."""
    scale, shift = values[:, :, None, None]
    return torch.addcmul(shift, x, scale).to(x.dtype)


def to_feature_map(x: Tensor) -> Tensor:
    """(batch, x, y, head, v) as (batch, channels, x, y) in channels-last memory."""
    return x.flatten(3).permute(0, 3, 1, 2)


def apply_norm(norm: Norm, x: Tensor) -> Tensor:
    """A norm of feature maps on a map (batch, x, y, head, v)."""
    heads = x.shape[3:]
    return call_with_norms(norm, to_feature_map(x)).permute(0, 2, 3, 1).unflatten(-1, heads)
