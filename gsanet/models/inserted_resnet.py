"""ResNets with attention beside their convolutions: inserted between residual blocks, or added at the end.

The first and second rows of the paper's Table 1. Where a network has its modules is a line of `NETWORKS`; all of it is
open to `timm.create_model`, as are the arguments of the module:

    timm.create_model("nonlocal_resnet50", after={3: (3, 6)}, dim_inner=128)
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from timm.layers import ClassifierHead, register_notrace_module
from timm.models import generate_default_cfgs
from torch import Tensor, fx, nn

from gsanet.layers import CompactNonLocal, DETRTransformer, DoubleAttention, EfficientAttention, NonLocal
from gsanet.layers.criss_cross import CrissCrossHead
from gsanet.layers.video_transformer import VideoTransformer
from gsanet.models.described import with_shipped
from gsanet.models.gsa_resnet import GSAResNet, ResNetSettings, Size, entry_point, network_cfg, take

__all__ = ["NETWORKS", "ClipResNet", "InsertedResNet", "InsertedSettings"]


@dataclass(frozen=True)
class InsertedSettings(ResNetSettings):
    """A convolutional ResNet, and where attention joins it; the other fields are those of `ResNetSettings`.

    Args:
        module: The class of what is inserted, or added at the end.
        after: The residual blocks after which it is inserted: the numbers of the blocks for each residual group, all
            counted from 1. Empty: once, after the last group.
    """

    groups: tuple[int, ...] | None = ()
    module: type[nn.Module] = NonLocal
    after: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for group, blocks in self.after.items():
            if not 1 <= group <= len(self.depths):
                raise ValueError(f"after must name residual groups from 1 to {len(self.depths)}, got {group}")
            if not all(1 <= block <= self.depths[group - 1] for block in blocks):
                raise ValueError(
                    f"after must name blocks that exist: group {group} has {self.depths[group - 1]}, got {blocks}"
                )

    @property
    def channels(self) -> tuple[int, ...]:
        """Outer channels of each residual group."""
        return tuple(blocks[0].c for blocks in self.to_byo(224, 32, {}).blocks)

    def make_module(self, group: int, kwargs: dict[str, Any]) -> Any:
        """A module for the map of a residual group, with those arguments that it knows."""
        known = inspect.signature(self.module.__init__).parameters
        channels = self.channels[group - 1]
        module: Any = self.module(channels, **{name: value for name, value in kwargs.items() if name in known})
        if self.after and getattr(module, "dim_out", channels) != channels:
            raise ValueError(
                f"{self.module.__name__} makes {module.dim_out} channels of {channels}: it goes at the end"
            )
        return module

    def without_module(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments without those of the module that timm's network does not know."""
        own = inspect.signature(self.module.__init__).parameters.keys() - {"device", "dtype", "zero_init_last"}
        return {name: value for name, value in kwargs.items() if name not in own}


class InsertedResNet(GSAResNet):
    """A ResNet with a few attention modules between its residual blocks, or one after them.

    Args:
        cfg: The settings.
        img_size: Accepted as by every network here; these take images of any size.
        output_stride: Total stride of the network.
        kwargs: Fields of `InsertedSettings` and arguments of the module, over those of `cfg`; the rest are timm's.
    """

    def __init__(
        self,
        cfg: InsertedSettings,
        img_size: int | Size | None = None,
        output_stride: int = 32,
        **kwargs: Any,
    ):
        settings = replace(cfg, **take(kwargs, [f.name for f in fields(cfg)]))
        others = settings.without_module(kwargs)
        at_the_end: Any = None
        if not settings.after:
            # timm makes head and feature_info fit a last convolution of so many channels, whose place this takes.
            at_the_end = settings.make_module(len(settings.depths), kwargs)
            others["num_features"] = getattr(at_the_end, "dim_out", settings.channels[-1])
        super().__init__(settings, img_size, output_stride, **others)
        if at_the_end is not None:
            self.final_conv = at_the_end
        for group, blocks in settings.after.items():
            for block in sorted(blocks, reverse=True):  # from the last, so that the numbers before it stay as they are
                self.stages[group - 1].insert(block, settings.make_module(group, kwargs))


class ClipResNet(GSAResNet):
    """A ResNet for the frames of a clip, and a transformer over their pooled vectors.

    It takes clips (batch, time, channels, height, width) and images (batch, channels, height, width), which are clips
    of one frame. Features and intermediates are those of the frames' ResNet, (batch * time, channels, height, width).

    Args:
        cfg: The settings.
        img_size: Accepted as by every network here; this one takes frames of any size.
        output_stride: Total stride of the ResNet.
        kwargs: Fields of `InsertedSettings` and arguments of the transformer, over those of `cfg`; the rest are timm's.
    """

    def __init__(
        self,
        cfg: InsertedSettings,
        img_size: int | Size | None = None,
        output_stride: int = 32,
        **kwargs: Any,
    ):
        settings = replace(cfg, **take(kwargs, [f.name for f in fields(cfg)]))
        super().__init__(settings, img_size, output_stride, **settings.without_module(kwargs))
        transformer = settings.make_module(len(settings.depths), kwargs)
        self.head: ClassifierHead = ClipHead(transformer, self.head)
        self.head_hidden_size = transformer.dim_out

    def forward_features(self, x: Tensor) -> Tensor:
        """The last map of each frame, (batch * time, channels, height, width)."""
        return super().forward_features(_to_frames(x, self.in_chans))

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As timm's, of each frame."""
        return super().forward_intermediates(_to_frames(x, self.in_chans), *args, **kwargs)

    def forward_head(self, x: Tensor, pre_logits: bool = False, frames: int = 1) -> Tensor:
        """From the frames' maps to the clips' logits; `frames` of them make a clip."""
        return self.head(x, pre_logits, frames)

    def forward(self, x: Tensor) -> Tensor:
        """From a clip (batch, time, channels, height, width), or an image, to logits."""
        return self.forward_head(self.forward_features(x), frames=_count_frames(x))


@fx.wrap  # one step for torch.fx, as is the next: whether it is given a clip is no part of a trace
def _to_frames(x: Tensor, channels: int) -> Tensor:
    """The frames of all clips, (batch * time, channels, height, width); images as they are."""
    if not isinstance(x, Tensor):
        raise TypeError(f"the input must be a tensor, got {type(x).__name__}")
    if x.dim() not in (4, 5) or x.shape[-3] != channels:
        raise ValueError(
            f"the input must be a clip (batch, time, {channels}, height, width) or an image "
            f"(batch, {channels}, height, width), got {tuple(x.shape)}"
        )
    if x.dim() == 5 and x.shape[1] == 0:
        raise ValueError(f"a clip needs at least one frame, got {tuple(x.shape)}")
    return x.flatten(0, 1) if x.dim() == 5 else x


@fx.wrap
def _count_frames(x: Tensor) -> int:
    """Frames of a clip; an image is one."""
    return x.shape[1] if x.dim() == 5 else 1


@register_notrace_module  # it depends on the values of shapes
class ClipHead(ClassifierHead):
    """A classifier of clips: pools each frame, lets the frames attend to each other, reads the class token.

    Args:
        transformer: The attention over frames.
        head: The classifier of images whose place it takes.
    """

    def __init__(self, transformer: VideoTransformer, head: ClassifierHead):
        weight = transformer.class_token
        super().__init__(
            transformer.dim_out,
            getattr(head.fc, "out_features", 0),
            head.global_pool.pool_type,
            head.drop.p,
            device=weight.device,
            dtype=weight.dtype,
        )
        self.transformer = transformer
        if isinstance(self.fc, nn.Linear):  # as timm starts its own
            nn.init.normal_(self.fc.weight, std=0.01)
            nn.init.zeros_(self.fc.bias)

    def reset(self, num_classes: int, pool_type: str | None = None, **options: Any) -> None:
        """As timm's; the classifier stays as wide as the transformer, whatever the maps are."""
        options.pop("in_features", None)  # timm gives it from version 1.0.31 on
        super().reset(num_classes, pool_type, **options)

    def forward(self, x: Tensor, pre_logits: bool = False, frames: int = 1) -> Tensor:
        """From maps (batch * frames, channels, height, width) to logits; without pooling the maps stay as they are."""
        x = self.global_pool(x)
        if x.dim() == 2:
            x = self.transformer.encode(x.unflatten(0, (-1, frames)))[:, 0]
        x = self.drop(x)
        return x if pre_logits else self.fc(x)


# Every other block of groups 2 and 3 (res3 and res4 in the papers): 2 and 3 modules.
FIVE_BLOCKS = {2: (2, 4), 3: (2, 4, 6)}

# Name: settings, and what differs in timm's pretrained_cfg.
NETWORKS: dict[str, tuple[InsertedSettings, dict[str, Any]]] = {
    "nonlocal_resnet50": (InsertedSettings(module=NonLocal, after=FIVE_BLOCKS), {}),
    # Inner widths of a half, as in the non-local block: the abstract promises over 40 % fewer parameters than
    # ResNet-152's 60.2 M, and these are 45 % fewer.
    "a2_resnet50": (InsertedSettings(module=DoubleAttention, after=FIVE_BLOCKS), {}),
    # The authors' one block, before the last of res4.
    "cgnl_resnet50": (InsertedSettings(module=CompactNonLocal, after={3: (5,)}), {}),
    # The released code has the module but not the network of which Table 3 prints 26.2 M and 9.9 G. Of modules at inner
    # widths of 1, 1/2, 1/4 and 1/8 of the map's, with 1 to 16 heads, in any number after the blocks of each group, two
    # arrangements give both figures: one at half the width after each of groups 1 and 2 with 4 or 8 heads, and two at
    # a quarter of it with 2 or 4. The first is the usual width, and 8 the number of heads in GSA.
    "ea_resnet50": (InsertedSettings(module=EfficientAttention, after={1: (3,), 2: (4,)}), {}),
    # CCNet segments, with a stride of 8 in all (`output_stride=8`); a class of the image needs no such large map.
    "ccnet_resnet50": (InsertedSettings(module=CrissCrossHead), {}),
    # DETR's decoder asks one query for each object; an image has one class, which the mean of the encoded map holds.
    "detr_resnet50": (InsertedSettings(module=DETRTransformer), {}),
    "videobert_resnet50": (InsertedSettings(module=VideoTransformer), {}),
}

default_cfgs = generate_default_cfgs(with_shipped({name: network_cfg(*network) for name, network in NETWORKS.items()}))

for _name, (_settings, _) in NETWORKS.items():
    _network = ClipResNet if _settings.module is VideoTransformer else InsertedResNet
    globals()[_name] = entry_point(_name, _settings, __name__, _network)
