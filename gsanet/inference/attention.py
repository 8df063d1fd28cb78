"""The GSA module of networks for inference, its norms folded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gsanet.functional import global_self_attention_map
from gsanet.functional.attention import scale_and_shift
from gsanet.functional.backends import BACKENDS, may_use
from gsanet.functional.checks import check_feature_map
from gsanet.functional.lean import fit_table
from gsanet.layers import GlobalSelfAttention
from gsanet.layers.relative import RelativeTables

__all__ = ["InferenceSelfAttention", "fixed_scale_and_shift"]


class InferenceSelfAttention(RelativeTables):
    """A GSA module with fixed norms: its own, and one behind it with its activation. Made by `fuse_for_inference`.

    `weight` is the projection, (2 * dim_key + dim_out, dim). The norm between column and row is `norm`, and the one
    behind the module `finish`: scale and shift of each channel, (2, dim_out), in float32 whatever the module is
    converted to, or in float64 in a module of that.

    Args:
        attention: The module; its norm, if it has one, is a batch norm.
        norm: The batch norm behind it, or None.
        activation: What follows that, or None.
    """

    label = GlobalSelfAttention.label
    properties = GlobalSelfAttention.properties
    norm: Tensor | None
    finish: Tensor | None

    def __init__(
        self, attention: GlobalSelfAttention, norm: nn.Module | None = None, activation: nn.Module | None = None
    ):
        super().__init__(
            attention.feat_size,
            attention.dim_key // attention.num_heads,
            column=attention.rel_column is not None,
            row=attention.rel_row is not None,
            reach=attention.reach,
            keep_reach=attention.keep_reach,
            device="meta",  # nothing is stored before it is known
        )
        self.dim, self.dim_out, self.dim_key = attention.dim, attention.dim_out, attention.dim_key
        self.stride, self.num_heads, self.content = attention.stride, attention.num_heads, attention.content
        weight = attention.qkv.weight
        self.weight = nn.Parameter(weight.detach().flatten(1).contiguous(), requires_grad=False)
        for name in ("rel_column", "rel_row"):
            if (table := getattr(attention, name)) is not None:
                setattr(self, name, nn.Parameter(table.detach().contiguous(), requires_grad=False))
        dtype = torch.promote_types(weight.dtype, torch.float32)
        for name, folded in {"norm": attention.norm, "finish": norm}.items():
            values = None if folded is None else torch.stack(fixed_scale_and_shift(folded)).to(weight.device, dtype)
            self.register_buffer(name, values)
        # With a ReLU all of it is one kernel's work.
        self.ends_in_relu = norm is not None and type(activation) is nn.ReLU
        self.activation = activation if activation is not None and not self.ends_in_relu else nn.Identity()
        self._fitted: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to (batch, dim_out, height / stride, width / stride), channels-last."""
        check_feature_map(x, self.dim)
        self.check_size(x)
        out = global_self_attention_map(
            x,
            self.weight,
            self._fit("rel_column", x.shape[2]),
            self._fit("rel_row", x.shape[3]),
            self.norm,
            finish=self.finish if self.ends_in_relu else None,
            num_heads=self.num_heads,
            dim_key=self.dim_key,
            content=self.content,
            stride=self.stride,
        )
        if self.finish is not None and not self.ends_in_relu:
            out = scale_and_shift(out, self.finish)
        return self.activation(out)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None] | None:
        """Weight, both tables, `norm` and `finish`, if the kernels of a GPU take all of the module for a map like x."""
        if self.rel_column is None or self.rel_row is None or self.norm is None or not may_use("fused"):
            return None
        if (self.finish is not None and not self.ends_in_relu) or type(self.activation) is not nn.Identity:
            return None
        self.check_size(x)
        column, row = self._fit("rel_column", x.shape[2]), self._fit("rel_row", x.shape[3])
        assert column is not None
        assert row is not None
        refused = BACKENDS["fused"].refuses(
            "global_self_attention_map",
            *(x, self.weight, column, row, self.norm),
            finish=self.finish,
            num_heads=self.num_heads,
            dim_key=self.dim_key,
            content=self.content,
            reach=None,
            stride=self.stride,
        )
        return None if refused is not None else (self.weight, column, row, self.norm, self.finish)

    def _fit(self, name: str, length: int) -> Tensor | None:
        """A table with exactly the offsets of a line; one that needs zeros around it is kept."""
        table: Tensor | None = getattr(self, name)
        if table is None:
            return None
        furthest = len(table) // 2 if self.reach is None else min(self.reach, len(table) // 2)
        if furthest >= length - 1 or torch.compiler.is_compiling():
            return fit_table(table, length, self.reach)  # a view, or the compiler's to fuse
        source, fitted = self._fitted.get((name, length), (None, None))
        if fitted is None or source is not table:
            with torch.inference_mode(False), torch.no_grad():
                fitted = fit_table(table, length, self.reach)
            if not (table.is_cuda and torch.cuda.is_current_stream_capturing()):  # else it is the graph's own memory
                self._fitted[name, length] = table, fitted
        return fitted

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: getattr(self, name) for name in ("norm", "finish")}
        super()._apply(fn, recurse)
        self._fitted.clear()
        for name, values in before.items():
            if values is not None and (after := getattr(self, name)).dtype not in (torch.float32, torch.float64):
                setattr(self, name, values.to(after.device, torch.float32))
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._fitted.clear()

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        behind = "" if self.finish is None else ", norm and ReLU behind it" if self.ends_in_relu else ", norm behind it"
        return (
            f"{self.dim}, {self.dim_out}, num_heads={self.num_heads}, dim_key={self.dim_key}, stride={self.stride}, "
            f"{super().extra_repr()}{behind}"
        )


def fixed_scale_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    """What a batch norm with running statistics does to each channel, in float64."""
    scale = torch.rsqrt(norm.running_var.double() + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().double()
