"""ResNets in which other systems' attention modules take the place of the 3x3 convolutions, or stand beside them.

Each is a line of settings of the ResNet that the GSA networks are (see `gsanet.models.gsa_resnet`), from the system's
own paper. Beside it: the parameters and operations that Table 3 prints, and what had to be chosen.
"""

from dataclasses import replace
from typing import Any

from gsanet.layers import AttentionAugmentedConv, LocalRelation, PositionSensitiveAttention, StandAloneAttention
from gsanet.models.gsa_resnet import RESNET50, RESNET101, ResNetSettings, register_networks

__all__ = ["NETWORKS"]

AA = {"attention": AttentionAugmentedConv, "groups": (2, 3, 4), "first_group": {"downsample": 2}}
LR = {
    "attention": LocalRelation,
    "widths": (104, 200, 400, 800),
    "outer": (256, 512, 1024, 2048),
    "stem": "relation/2+maxpool",
}

# Name: settings, and what differs in timm's pretrained_cfg.
NETWORKS: dict[str, tuple[ResNetSettings, dict[str, Any]]] = {
    "aa_resnet50": (replace(RESNET50, **AA), {}),
    "aa_resnet101": (replace(RESNET101, **AA), {}),
    "lr_resnet50": (replace(RESNET50, **LR), {}),
    "lr_resnet101": (replace(RESNET101, **LR), {}),
    "sasa_resnet50": (replace(RESNET50, attention=StandAloneAttention, stem="attention/4"), {}),
    "axial_deeplab_s": (replace(RESNET50, attention=PositionSensitiveAttention, expansion=2, stem_width=32), {}),
}

register_networks(__name__, NETWORKS)
