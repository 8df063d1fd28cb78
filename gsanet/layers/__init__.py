"""Attention modules, one a file: GSA, and the systems it is compared with."""

from gsanet.layers.attention_augmented_conv import AttentionAugmentedConv
from gsanet.layers.axial_attention import AxialAttention
from gsanet.layers.global_self_attention import GlobalSelfAttention
from gsanet.layers.local_relation import LocalRelation
from gsanet.layers.position_sensitive_attention import PositionSensitiveAttention
from gsanet.layers.stand_alone_attention import AttentionStem, StandAloneAttention
from gsanet.layers.vector_attention import PairwiseAttention, PatchwiseAttention

__all__ = [
    "AttentionAugmentedConv",
    "AttentionStem",
    "AxialAttention",
    "GlobalSelfAttention",
    "LocalRelation",
    "PairwiseAttention",
    "PatchwiseAttention",
    "PositionSensitiveAttention",
    "StandAloneAttention",
]
