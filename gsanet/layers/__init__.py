"""Attention modules, one a file: GSA, and the systems it is compared with."""

from gsanet.layers.axial_attention import AxialAttention
from gsanet.layers.global_self_attention import GlobalSelfAttention

__all__ = ["AxialAttention", "GlobalSelfAttention"]
