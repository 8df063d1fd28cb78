"""Why a count is not the one that the paper prints: a sentence or two for each such network."""

from gsanet.paper import m_resnet50

NOTES = {"gsa_m_resnet50": m_resnet50.NOTE}
