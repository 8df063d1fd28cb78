"""ResNets in which other systems' attention modules take the place of the 3x3 convolutions, or stand beside them.

Each is a line of settings of the ResNet that the GSA networks are (see `gsanet.models.gsa_resnet`), from the system's
own paper. Beside it: the parameters and operations that Table 3 prints, and what had to be chosen.
"""

from dataclasses import replace
from typing import Any

from timm.models import generate_default_cfgs

from gsanet.layers import AttentionAugmentedConv, LocalRelation, PositionSensitiveAttention, StandAloneAttention
from gsanet.models.described import with_shipped
from gsanet.models.gsa_resnet import RESNET50, RESNET101, ResNetSettings, entry_point, network_cfg

__all__ = ["NETWORKS"]

# Table 3: 25.8 M, 8.3 G, and 45.4 M, 16.1 G for 101 layers. Counted: 25.8 M, 8.4 G; 45.4 M, 16.3 G. The last three
# stages attend, and the first of them does so over a map of half the resolution. Open are the rounding of the fractions
# and where a stride is taken; with fractions rounded down it is 25.8 M, 8.4 G too. The operations remain unexplained.
AA_RESNET50 = replace(RESNET50, attention=AttentionAugmentedConv, groups=(2, 3, 4), first_group={"downsample": 2})
# Table 3: 23.3 M, 8.6 G, and 42.0 M, 16.0 G for 101 layers. Counted: 23.4 M, 8.6 G; 40.8 M, 15.6 G. LR-Net widens the
# blocks inside to 100, 200, 400 and 800 channels; 8, which share a weight, do not divide 100: the first is 104. Without
# the parameters of batch norms 23.4 M are 23.3 M. For 101 layers both printed figures would need blocks that are about
# 3 % wider.
LR_RESNET50 = replace(
    RESNET50,
    attention=LocalRelation,
    widths=(104, 200, 400, 800),
    outer=(256, 512, 1024, 2048),
    stem="relation/2+maxpool",
)
# Table 3: 18.0 M, 7.2 G. Counted: 18.0 M, 7.2 G with the attention stem; with `stem="7x7/2+maxpool"` 18.0 M, 7.0 G.
SASA_RESNET50 = replace(RESNET50, attention=StandAloneAttention, stem="attention/4")
# Table 3: 12.4 M, 5.6 G. Counted: 11.6 M, 5.7 G, which are 2.8 G multiply-adds; twice the rounded figure is the printed
# one. Widths, the stem's too, and tables as long as each map needs are those of the authors' code. Tables for lines of
# 224 pixels, the image's, in every layer would make it 12.4 M; nothing says that they were so long.
AXIAL_DEEPLAB_S = replace(RESNET50, attention=PositionSensitiveAttention, expansion=2, stem_width=32)

# Name: settings, and what differs in timm's pretrained_cfg.
NETWORKS: dict[str, tuple[ResNetSettings, dict[str, Any]]] = {
    "aa_resnet50": (AA_RESNET50, {}),
    "aa_resnet101": (replace(AA_RESNET50, depths=RESNET101.depths), {}),
    "lr_resnet50": (LR_RESNET50, {}),
    "lr_resnet101": (replace(LR_RESNET50, depths=RESNET101.depths), {}),
    "sasa_resnet50": (SASA_RESNET50, {}),
    "axial_deeplab_s": (AXIAL_DEEPLAB_S, {}),
}

default_cfgs = generate_default_cfgs(with_shipped({name: network_cfg(*network) for name, network in NETWORKS.items()}))

for _name, (_settings, _) in NETWORKS.items():
    globals()[_name] = entry_point(_name, _settings, __name__)
