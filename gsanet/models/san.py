"""SAN, the networks of "Exploring Self-Attention for Image Recognition" (Zhao et al., 2020), with their own layout.

A 1x1 convolution of the image, then five stages. A stage starts with a transition, 2x2 max-pooling and a 1x1
convolution to its width; its blocks are norm, ReLU, attention, norm, ReLU and a 1x1 convolution beside a plain
shortcut, and a norm and a ReLU end it. Attention works at a quarter of the width, and the window is 3x3 in the first
stage and 7x7 in the others.

timm's `ByobNet` holds it all together: the block here is one more type for it.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from timm.layers import BatchNormAct2d, ConvNormAct, DropPath
from timm.models import generate_default_cfgs
from timm.models.byobnet import ByoBlockCfg, ByoModelCfg, LayerFn, register_block
from torch import Tensor, nn

from gsanet.functional.checks import check_size
from gsanet.layers import PairwiseAttention, PatchwiseAttention
from gsanet.models.checked import CheckedNetwork, check_depths
from gsanet.models.described import with_shipped
from gsanet.models.gsa_resnet import RESNET50, Size, check_options, entry_point, network_cfg, take

__all__ = ["NETWORKS", "SAN", "SANSettings"]


@dataclass(frozen=True)
class SANSettings:
    """What makes one SAN different from another.

    Args:
        attention: The class of the attention module.
        depths: Blocks in each stage.
        widths: Channels of each stage.
        windows: Height and width of the attention window in each stage.
        stem_width: Channels of the stem.
    """

    attention: type[nn.Module]
    depths: tuple[int, ...] = (3, 3, 4, 6, 3)
    widths: tuple[int, ...] = (64, 256, 512, 1024, 2048)
    windows: tuple[int, ...] = (3, 7, 7, 7, 7)
    stem_width: int = 64

    def __post_init__(self) -> None:
        check_depths(self.depths, min(len(self.widths), len(self.windows)))
        if any(width < 32 or width % 32 for width in self.widths):
            raise ValueError(f"widths must be multiples of 32, got {self.widths}")

    @property
    def num_features(self) -> int:
        """How many feature maps `features_only` gives: one a stage, and the stem's."""
        return len(self.depths) + 1

    def to_byo(self) -> ByoModelCfg:
        """The network as timm's configuration."""
        stages = []
        for depth, width, window in zip(self.depths, self.widths, self.windows, strict=False):
            last = ByoBlockCfg("san", d=1, c=width, s=2, block_kwargs={"window": window, "last": True})
            others = replace(last, d=depth - 1, block_kwargs={"window": window})
            stages.append((others, last) if depth > 1 else (last,))
        return ByoModelCfg(
            blocks=tuple(stages),
            stem_type="3x3",
            stem_pool="",
            stem_chs=self.stem_width,
            self_attn_layer=self.attention,
        )


class SANBlock(nn.Module):
    """A residual block, behind the stage's transition if it is the first, and before its last norm if it is the last.

    Args:
        in_chs: Input channels.
        out_chs: Output channels.
        stride: Of the transition's max-pooling.
        window: Of the attention module.
        last: Whether the stage ends here.
        layers: timm's layer functions.
        drop_path_rate: Stochastic depth.
        device: Where the parameters are made.
        dtype: Of the parameters.
        others: What timm gives to all blocks, and this one has no use for.
    """

    def __init__(
        self,
        in_chs: int,
        out_chs: int,
        stride: int,
        window: int,
        layers: LayerFn,
        last: bool = False,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
        **others: Any,
    ):
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        transition: list[nn.Module] = []
        if stride > 1:
            transition.append(nn.MaxPool2d(stride, ceil_mode=True))
        if stride > 1 or in_chs != out_chs:
            transition.append(nn.Conv2d(in_chs, out_chs, 1, bias=False, **factory))
        self.transition = nn.Sequential(*transition)
        inner = out_chs // 4
        self.norm1 = BatchNormAct2d(out_chs, **factory)
        self.attention = layers.self_attn(out_chs, inner, window=window, dim_relation=out_chs // 16, **factory)
        self.norm2 = BatchNormAct2d(inner, **factory)
        self.conv = nn.Conv2d(inner, out_chs, 1, bias=False, **factory)
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate > 0 else nn.Identity()
        self.norm_last = BatchNormAct2d(out_chs, **factory) if last else nn.Identity()

    def init_weights(self, zero_init_last: bool = False) -> None:
        """Called by timm behind its own initialisation of convolutions. There is no last norm to start at zero."""
        self.attention.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, in_chs, height, width) to (batch, out_chs, height / stride, width / stride)."""
        x = self.transition(x)
        x = x + self.drop_path(self.conv(self.norm2(self.attention(self.norm1(x)))))
        return self.norm_last(x)


register_block("san", SANBlock)


class SAN(CheckedNetwork):
    """A SAN. Any image size works: no table depends on it.

    Args:
        cfg: The settings.
        img_size: Only remembered, for counting.
        output_stride: Total stride of the network.
        kwargs: Fields of `SANSettings`, over those of `cfg`; the rest are timm's: `num_classes`, `in_chans`, ...
    """

    def __init__(self, cfg: SANSettings, img_size: int | Size | None = None, output_stride: int = 32, **kwargs: Any):
        names = [field.name for field in fields(SANSettings)]
        settings = replace(cfg, **take(kwargs, names))
        check_options(kwargs, names)
        # timm's stem has a stride of 2, ours none: what timm counts from it is halved.
        super().__init__(settings.to_byo(), output_stride=2 * output_stride, **kwargs)
        factory: dict[str, Any] = {name: kwargs.get(name) for name in ("device", "dtype")}
        self.stem = ConvNormAct(self.in_chans, settings.stem_width, 1, **factory)
        for info in self.feature_info:
            info["reduction"] //= 2
        self.settings = settings
        self.output_stride = output_stride
        self.img_size = None if img_size is None else check_size("img_size", img_size)


# Table 3: 20.5 M, 6.6 G for patchwise attention. Counted: 20.5 M, 6.3 G; norms, ReLUs and shortcuts, which are not
# counted here, would make it 6.4 G. Without the first norm of gamma the parameters are 20.4 M.
NETWORKS = {
    "san19_pairwise": SANSettings(PairwiseAttention),
    "san19_patchwise": SANSettings(PatchwiseAttention),
}
DIFFERENCES = {"fixed_input_size": False, "first_conv": "stem.conv"}

default_cfgs = generate_default_cfgs(with_shipped({name: network_cfg(RESNET50, DIFFERENCES) for name in NETWORKS}))

for _name, _settings in NETWORKS.items():
    globals()[_name] = entry_point(_name, _settings, __name__, SAN)
