"""How well networks hold up when the images that they are evaluated on are changed."""

from gsanet.stress.changes import CHANGES, Change
from gsanet.stress.measure import Accuracy, Stressed, choose_changes, load_any, measure, open_images

__all__ = ["CHANGES", "Accuracy", "Change", "Stressed", "choose_changes", "load_any", "measure", "open_images"]
