"""Attention modules, one a file: GSA, and the systems it is compared with."""

from gsanet.layers.attention_augmented_conv import AttentionAugmentedConv
from gsanet.layers.axial_attention import AxialAttention
from gsanet.layers.compact_non_local import CompactNonLocal
from gsanet.layers.criss_cross import CrissCrossAttention
from gsanet.layers.detr_transformer import DETRTransformer
from gsanet.layers.double_attention import DoubleAttention
from gsanet.layers.efficient_attention import EfficientAttention
from gsanet.layers.global_self_attention import GlobalSelfAttention
from gsanet.layers.local_relation import LocalRelation
from gsanet.layers.non_local import NonLocal
from gsanet.layers.position_sensitive_attention import PositionSensitiveAttention
from gsanet.layers.stand_alone_attention import StandAloneAttention
from gsanet.layers.vector_attention import PairwiseAttention, PatchwiseAttention
from gsanet.layers.video_transformer import VideoTransformer

__all__ = [
    "AttentionAugmentedConv",
    "AxialAttention",
    "CompactNonLocal",
    "CrissCrossAttention",
    "DETRTransformer",
    "DoubleAttention",
    "EfficientAttention",
    "GlobalSelfAttention",
    "LocalRelation",
    "NonLocal",
    "PairwiseAttention",
    "PatchwiseAttention",
    "PositionSensitiveAttention",
    "StandAloneAttention",
    "VideoTransformer",
]
