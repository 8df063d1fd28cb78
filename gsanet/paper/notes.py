"""Why a count is not the one that the paper prints: a sentence or two for each such network.

The paper's figures for other systems are those systems' own. Where their papers count multiply-adds, Table 3 prints
twice the rounded number, so that its last digit is only good to 0.2 G.
"""

from gsanet.paper import m_resnet50

_AUGMENTED = (
    "The paper on attention augmentation leaves open how the fractions of the channels are rounded and where a stride "
    "is taken. Channels of a head are rounded to the nearest number here and a stride is taken before attention, which "
    "gives the printed parameters; no reading was found that also gives the printed operations."
)

NOTES = {
    "gsa_m_resnet50": m_resnet50.NOTE,
    "aa_resnet50": _AUGMENTED,
    "aa_resnet101": _AUGMENTED,
    "lr_resnet50": (
        "The printed parameters are those without batch normalisation's. Blocks are 100, 200, 400 and 800 channels "
        "wide inside; eight channels share a weight and do not divide 100, so that the first are 104 here."
    ),
    "lr_resnet101": (
        "LR-Net-50's widths with the blocks of ResNet-101; both printed figures would need blocks about 3 % wider, of "
        "which the paper on local relations says nothing."
    ),
    "san19_patchwise": (
        "Their own paper prints 3.3 G multiply-adds; counted here are 3.1 G. With norms, ReLUs and shortcuts, which "
        "are not counted for any network here, they would be 3.2 G."
    ),
    "axial_deeplab_s": (
        "Counted are 2.8 G multiply-adds, the figure of their own paper, and twice the rounded figure is the printed "
        "one. Widths, stem and tables as long as each map needs are those of the authors' code; tables for lines of "
        "224 pixels in every layer would make it 12.4 M, but nothing says that they were so long."
    ),
}
