"""Networks for inference: batch norms become part of what they follow, at the same results to rounding error."""

from gsanet.inference.attention import InferenceSelfAttention
from gsanet.inference.fuse import fuse_for_inference

__all__ = ["InferenceSelfAttention", "fuse_for_inference"]
