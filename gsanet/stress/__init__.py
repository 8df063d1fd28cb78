"""How well networks hold up: when images are changed, and when the arithmetic or the size of the numbers is."""

from gsanet.stress.changes import CHANGES, Change
from gsanet.stress.limits import Limits, Outputs, measure_limits, mix
from gsanet.stress.measure import Accuracy, Stressed, choose_changes, load_any, measure, open_images

__all__ = [
    "CHANGES",
    "Accuracy",
    "Change",
    "Limits",
    "Outputs",
    "Stressed",
    "choose_changes",
    "load_any",
    "measure",
    "measure_limits",
    "mix",
    "open_images",
]
