"""Pictures of attention: exact weights from a GSA module's own tensors, and how they lie on the image."""

from gsanet.explain.branches import Balance, balance
from gsanet.explain.image import ImageExplanation, choose_module, explain_image
from gsanet.explain.maps import Explanation, Reading, explain, explain_module, gsa_modules, read_module

__all__ = [
    "Balance",
    "Explanation",
    "ImageExplanation",
    "Reading",
    "balance",
    "choose_module",
    "explain",
    "explain_image",
    "explain_module",
    "gsa_modules",
    "read_module",
]
