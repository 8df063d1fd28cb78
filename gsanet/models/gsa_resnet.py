"""GSA networks, Section 3.2: ResNets in which attention modules take the place of the 3x3 convolutions.

The ResNet is timm's `ByobNet`; a network here is a line of settings, `NETWORKS`, that becomes a `ByoModelCfg`. The
settings and the arguments of the attention module are all options of `timm.create_model`:

    timm.create_model("gsa_resnet50", groups=(2, 3, 4), stem="3x3/1", content=False, img_size=(160, 96))
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import numpy as np
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import BatchNormAct2d, ConvNormAct, make_divisible
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg, SelfAttnBlock
from torch import nn

from gsanet.functional.checks import check_counts, check_rate, check_size, check_whole
from gsanet.layers import AxialAttention, GlobalSelfAttention, LocalRelation
from gsanet.layers.attention import Attention
from gsanet.layers.batch_norm import CompiledBatchNormAct2d
from gsanet.layers.block_convolution import PLAIN, BlockConv2d
from gsanet.layers.relative import RelativeTables
from gsanet.layers.residual_block import convert_blocks
from gsanet.layers.stand_alone_attention import AttentionStem
from gsanet.models.checked import CheckedNetwork, check_depths, check_features
from gsanet.models.described import with_shipped
from gsanet.models.fit import fit_pretrained
from gsanet.models.stem import PooledStem
from gsanet.words import suggest

__all__ = ["NETWORKS", "GSAResNet", "ResNetSettings"]

Stem = Literal["7x7/2+maxpool", "7x7/2", "3x3/1", "attention/4", "relation/2+maxpool"]
STEM_STRIDES: dict[str, int] = {
    "7x7/2+maxpool": 4,
    "7x7/2": 2,
    "3x3/1": 1,
    "attention/4": 4,
    "relation/2+maxpool": 4,
}
FIRST_CONVOLUTIONS: dict[str, str] = {
    "7x7/2+maxpool": "stem.conv1.conv",
    "7x7/2": "stem.conv",
    "3x3/1": "stem.conv",
    "attention/4": "stem.qkv",
    "relation/2+maxpool": "stem.conv1.0.conv",
}
Size = tuple[int, int]


@dataclass(frozen=True)
class ResNetSettings:
    """What makes one network of the family different from another.

    Args:
        depths: Residual blocks in each group.
        widths: Inner channels of the blocks of each group: those of the attention module or the 3x3 convolution.
        expansion: Outer channels of a block are this many times the inner ones.
        outer: Outer channels of the blocks of each group, where they are no such multiple.
        width: A factor on all widths, the stem's too; results are rounded to multiples of 8.
        groups: The residual groups, counted from 1, that use attention; the others convolve. None: all.
        attention: The class of the attention module.
        first_group: Arguments of the attention module in the first group that uses attention.
        stem: `"7x7/2+maxpool"` is ResNet's; `"7x7/2"` has no max-pool and `"3x3/1"` no stride, for small images.
            `"attention/4"` is that of stand-alone self-attention and `"relation/2+maxpool"` that of LR-Net.
        stem_width: Channels of the stem.
    """

    depths: tuple[int, ...] = (3, 4, 6, 3)
    widths: tuple[int, ...] = (64, 128, 256, 512)
    expansion: int = 4
    outer: tuple[int, ...] | None = None
    width: float = 1.0
    groups: tuple[int, ...] | None = None
    attention: type[nn.Module] = GlobalSelfAttention
    first_group: Mapping[str, Any] = field(default_factory=dict)
    stem: Stem = "7x7/2+maxpool"
    stem_width: int = 64

    def __post_init__(self) -> None:
        check_depths(self.depths, len(self.widths))
        if any(width < 8 or width % 8 for width in self.widths):
            raise ValueError(f"widths must be multiples of 8, got {self.widths}")
        if self.width <= 0:
            raise ValueError(f"width must be a positive factor, got {self.width}")
        if self.stem not in get_args(Stem):
            raise ValueError(f"stem must be one of {', '.join(map(repr, get_args(Stem)))}, got {self.stem!r}")
        if self.expansion < 1:
            raise ValueError(f"expansion must be 1 or more, got {self.expansion}")
        if isinstance(self.groups, int):
            raise ValueError(f"groups must be several numbers, such as (2, 3, 4), got {self.groups}")
        if not set(self.attention_groups) <= set(range(1, len(self.depths) + 1)):
            raise ValueError(f"groups must be among 1 to {len(self.depths)}, got {self.groups}")

    @property
    def attention_groups(self) -> tuple[int, ...]:
        """The residual groups that use attention."""
        return tuple(range(1, len(self.depths) + 1)) if self.groups is None else tuple(self.groups)

    @property
    def num_features(self) -> int:
        """How many feature maps `features_only` gives: one a group, and one of the stem if it pools."""
        return len(self.depths) + ("maxpool" in self.stem)

    def map_sizes(self, img_size: int | Size, output_stride: int = 32) -> list[Size]:
        """The size of the map that enters each residual group, and last the one that leaves the network."""
        total = STEM_STRIDES[self.stem]
        sizes = [_reduce(check_size("img_size", img_size), total)]
        for group in range(1, len(self.depths) + 1):
            stride = 1 if group == 1 or total >= output_stride else 2
            total *= stride
            sizes.append(_reduce(sizes[-1], stride))
        return sizes

    def to_byo(self, img_size: int | Size, output_stride: int, attention_kwargs: dict[str, Any]) -> ByoModelCfg:
        """The network as timm's configuration."""
        sizes = self.map_sizes(img_size, output_stride)
        stages: list[tuple[ByoBlockCfg, ...]] = []
        for index, (depth, width) in enumerate(zip(self.depths, self.widths, strict=False)):
            inner = make_divisible(width * self.width, 8)
            outer = inner * self.expansion
            if self.outer is not None:
                outer = make_divisible(self.outer[index] * self.width, 8)
            block = ByoBlockCfg(type="bottle", d=depth, c=outer, s=1 if index == 0 else 2, br=inner / outer)
            if index + 1 not in self.attention_groups:
                stages.append((block,))
                continue
            own = {} if index + 1 != min(self.attention_groups) else {**self.first_group, **attention_kwargs}
            block = replace(block, self_attn_kwargs=own or None)
            # Only the first block of a group sees the larger map: its module pools after attending.
            first = replace(block, type="self_attn", d=1, block_kwargs={"feat_size": sizes[index]})
            rest = replace(block, type="self_attn", d=depth - 1, block_kwargs={"feat_size": sizes[index + 1]})
            stages.append((first, rest))
        return ByoModelCfg(
            blocks=tuple(stages),
            stem_type={"attention/4": "3x3", "relation/2+maxpool": "7x7"}.get(self.stem, self.stem[:3]),
            stem_pool="maxpool" if "maxpool" in self.stem else "",
            stem_chs=make_divisible(self.stem_width * self.width, 8),
            self_attn_layer=self.attention if self.attention_groups else None,
            self_attn_kwargs=attention_kwargs,
        )


def _reduce(size: Size, stride: int) -> Size:
    """What strided convolutions and pooling leave of a map: rounded up."""
    return -(-size[0] // stride), -(-size[1] // stride)


class GSAResNet(CheckedNetwork):
    """A ResNet whose residual groups attend or convolve.

    Args:
        cfg: The settings.
        img_size: The image size that the tables of relative positions are made for. Smaller images work as they are.
        output_stride: Total stride of the network; attention needs no dilation to keep a larger map.
        conv_init: How convolutions start: `he`, as in timm and torchvision, or `pytorch`, that library's own default,
            whose smaller weights learn faster behind batch norms (docs/initialisation.md).
        kwargs: Fields of `ResNetSettings` and arguments of the attention module, over those of `cfg`; the rest are
            timm's: `num_classes`, `in_chans`, `drop_rate`, `drop_path_rate`, `global_pool`, `zero_init_last`, ...
    """

    stem: Any

    def __init__(
        self,
        cfg: ResNetSettings,
        img_size: int | Size | None = None,
        output_stride: int = 32,
        conv_init: Literal["he", "pytorch"] = "he",
        **kwargs: Any,
    ):
        if conv_init not in ("he", "pytorch"):
            raise ValueError(f"conv_init must be he or pytorch, got {conv_init!r}")
        settings = replace(cfg, **take(kwargs, [field.name for field in fields(cfg)]))
        if settings.attention is AxialAttention and not kwargs.get("content", True):
            # Table 2: axial attention without content is the GSA module's own positional attention.
            settings = replace(settings, attention=GlobalSelfAttention)
        attention_kwargs = take(kwargs, _options(settings.attention))
        check_options(kwargs, [*_options(settings.attention), *(field.name for field in fields(cfg))])
        byo = settings.to_byo(224 if img_size is None else img_size, output_stride, attention_kwargs)
        # timm's stems have a stride of 2, or 4 with a max-pool. Where ours has another, what timm counts from it is
        # scaled.
        timms_stride, stride = 4 if byo.stem_pool else 2, STEM_STRIDES[settings.stem]
        super().__init__(byo, output_stride=output_stride * timms_stride // stride, **kwargs)
        for info in self.feature_info:
            info["reduction"] = info["reduction"] * stride // timms_stride
        factory: dict[str, Any] = {name: kwargs.get(name) for name in ("device", "dtype")}
        self._make_stem(settings.stem, byo.stem_chs, factory)
        for block in self.modules():
            if isinstance(block, SelfAttnBlock) and getattr(block.self_attn, "normalised", False):
                block.post_attn = nn.ReLU(inplace=True)
        CompiledBatchNormAct2d.convert(self)
        convert_blocks(self)
        if conv_init == "pytorch":
            _start_as_pytorch_does(self)
        self.settings = settings
        self.output_stride = output_stride
        self.img_size = None if img_size is None else check_size("img_size", img_size)

    def _make_stem(self, stem: Stem, channels: int, factory: dict[str, Any]) -> None:
        """Put what timm has no stem for, or a slower one, in the place of its own."""
        if stem == "7x7/2+maxpool":
            self.stem.conv1.conv = BlockConv2d.take_over(self.stem.conv1.conv)
            self.stem = PooledStem(self.stem)
        elif stem == "7x7/2":
            self.stem.conv = BlockConv2d.take_over(self.stem.conv)
        elif stem == "3x3/1":
            self.stem.conv.stride = (1, 1)
        elif stem == "attention/4":
            self.stem = AttentionStem(self.in_chans, channels, **factory)
        elif stem == "relation/2+maxpool":
            self.stem.conv1 = nn.Sequential(
                ConvNormAct(self.in_chans, channels, 1, **factory),
                # The convolution is its channel transformation.
                LocalRelation(channels, stride=2, transform=False, **factory),
                BatchNormAct2d(channels, **factory),
            )

    def set_input_size(self, img_size: int | Size) -> None:
        """Make the tables of relative positions fit another image size (see `RelativeTables.resize_tables`)."""
        sizes = self.settings.map_sizes(img_size, self.output_stride)
        super().set_input_size(img_size)
        for index, stage in enumerate(self.stages):
            for number, block in enumerate(stage):
                for module in block.modules():
                    if isinstance(module, RelativeTables):
                        module.resize_tables(sizes[index] if number == 0 else sizes[index + 1])


def _start_as_pytorch_does(model: nn.Module) -> None:
    """Initialise the convolutions anew; those inside an attention module are that module's own affair."""
    for module in model.children():
        if isinstance(module, nn.Conv2d) and type(module) in PLAIN:
            module.reset_parameters()
        elif not isinstance(module, Attention):
            _start_as_pytorch_does(module)


def _options(attention: type[nn.Module]) -> list[str]:
    """The arguments of an attention module that are the user's to choose; the network sets the others."""
    given = {"self", "dim", "dim_out", "feat_size", "stride", "device", "dtype"}
    names: list[str] = []
    for kind in attention.__mro__:
        parameters = inspect.signature(kind).parameters.values()
        names += [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):  # which go to the class that it inherits from
            break
    return [name for name in dict.fromkeys(names) if name not in given]


def check_options(kwargs: dict[str, Any], taken: list[str]) -> None:
    """Refuse options that timm's network does not know, the nearest of all named, and numbers that it cannot have."""
    timms = {*inspect.signature(ByobNet.__init__).parameters, *(field.name for field in fields(ByoModelCfg))}
    timms -= {"self", "cfg", "kwargs", "blocks"}
    for name in kwargs:
        if name not in timms:
            raise TypeError(f"unknown option {name!r} of a network: {suggest(name, sorted({*timms, *taken}))}")
    check_counts(in_chans=kwargs.get("in_chans", 3))
    if (classes := check_whole("num_classes", kwargs.get("num_classes", 0))) < 0:
        raise ValueError(f"num_classes must be 0, for no classifier, or more, got {classes}")
    for name in ("drop_rate", "drop_path_rate"):
        check_rate(name, kwargs.get(name, 0.0))


def take(kwargs: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Remove the named ones from `kwargs` and return them."""
    return {name: kwargs.pop(name) for name in names if name in kwargs}


def network_cfg(settings: ResNetSettings, differences: dict[str, Any]) -> dict[str, Any]:
    """What timm's pretrained_cfg says of a network."""
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "fixed_input_size": bool(settings.attention_groups),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": FIRST_CONVOLUTIONS[settings.stem],
        "classifier": "head.fc",
        "license": "apache-2.0",
        **differences,
    }


RESNET26 = ResNetSettings(depths=(1, 2, 4, 1))
RESNET38 = ResNetSettings(depths=(2, 3, 5, 2))
RESNET50 = ResNetSettings()
RESNET101 = ResNetSettings(depths=(3, 4, 23, 3))
# "Halving the number of input and output channels of all residual blocks and then scaling the number of filters in
# every layer by a factor of 1.125" (Table 3): inner 64 -> 72, outer 256 -> 128 -> 144.
M_RESNET50 = ResNetSettings(widths=(72, 144, 288, 576), expansion=2)
# For 32x32 images: three groups on maps of 32, 16 and 8; wide attention between narrow outer maps.
RESNET26_TINY = ResNetSettings(depths=(2, 3, 3), widths=(64, 128, 256), expansion=2, stem="3x3/1")
# Under 3 M parameters and 6 MB in 16 bits, for weights that come with the package. It convolves in the first group, as
# the paper's most accurate networks do (Table 5).
RESNET35_TINY = ResNetSettings(
    depths=(2, 4, 5), widths=(40, 128, 256), outer=(96, 256, 496), groups=(2, 3), stem="3x3/1"
)
CIFAR = {
    "num_classes": 100,
    "input_size": (3, 32, 32),
    "pool_size": (8, 8),
    "crop_pct": 1.0,
    "mean": (0.5071, 0.4866, 0.4409),
    "std": (0.2673, 0.2564, 0.2762),
}

# Name: settings, and what differs in timm's pretrained_cfg.
NETWORKS: dict[str, tuple[ResNetSettings, dict[str, Any]]] = {
    "gsa_resnet26": (RESNET26, {}),
    "gsa_resnet38": (RESNET38, {}),
    "gsa_resnet50": (RESNET50, {}),
    "gsa_resnet101": (RESNET101, {}),
    "gsa_m_resnet50": (M_RESNET50, {}),
    "gsa_resnet26_tiny": (RESNET26_TINY, CIFAR),
    "gsa_resnet35_tiny": (RESNET35_TINY, CIFAR),
    "axial_resnet50": (replace(RESNET50, attention=AxialAttention), {}),
    "conv_resnet26": (replace(RESNET26, groups=()), {}),
    "conv_resnet38": (replace(RESNET38, groups=()), {}),
    "conv_resnet50": (replace(RESNET50, groups=()), {}),
    "conv_resnet101": (replace(RESNET101, groups=()), {}),
    "conv_resnet26_tiny": (replace(RESNET26_TINY, groups=()), CIFAR),
    "conv_resnet35_tiny": (replace(RESNET35_TINY, groups=()), CIFAR),
}

default_cfgs = generate_default_cfgs(with_shipped({name: network_cfg(*network) for name, network in NETWORKS.items()}))


# Arguments that timm gives an entry point, and that make no difference to the network.
NO_OPTIONS = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


def _plain(value: Any) -> Any:
    """An option without lists, as which JSON stores tuples, and without numpy's numbers, which JSON does not store."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    return tuple(_plain(each) for each in value) if type(value) in (list, tuple) else value


def entry_point(
    name: str, settings: Any, module: str, network: type[CheckedNetwork] = GSAResNet
) -> Callable[..., nn.Module]:
    """The function behind a name, registered with timm as one of the module's."""

    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        kwargs = {option: _plain(value) for option, value in kwargs.items()}
        chosen = {field.name: kwargs[field.name] for field in fields(settings) if field.name in kwargs}
        features = range(replace(settings, **chosen).num_features)
        if "stem" in chosen:
            overlay = {"first_conv": FIRST_CONVOLUTIONS[chosen["stem"]], **(kwargs.get("pretrained_cfg_overlay") or {})}
            kwargs = {**kwargs, "pretrained_cfg_overlay": overlay}
        model = build_model_with_cfg(
            network,
            name,
            pretrained,
            model_cfg=settings,
            pretrained_filter_fn=fit_pretrained,
            feature_cfg={"flatten_sequential": True, "out_indices": tuple(features)},
            **kwargs,
        )
        if kwargs.get("features_only"):
            check_features(model, kwargs.get("in_chans", 3))
        # What makes the same network again; `gsanet.save_pretrained` writes it beside the weights.
        model.model_args = {option: value for option, value in kwargs.items() if option not in NO_OPTIONS}
        return model

    create.__name__ = create.__qualname__ = name
    create.__module__ = module
    create.__doc__ = f"`{name}`: options as in `{network.__name__}`."
    return register_model(create)


for _name, (_settings, _) in NETWORKS.items():
    globals()[_name] = entry_point(_name, _settings, __name__)
