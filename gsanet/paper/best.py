"""Past the paper: the best GSA networks on CIFAR-100, each against a ResNet of its depth under the same recipe."""

from dataclasses import dataclass

from gsanet.paper.printed import printed_table
from gsanet.paper.results import Results
from gsanet.paper.tables import Measured, measured_run

# How they were made, and the runs of the matrix: GSA first, then its rival.
PAIRS = {
    "from scratch": ("best-gsa38", "best-conv38"),
    "from Tiny-ImageNet weights": ("best-tuned-gsa50", "best-tuned-conv50"),
}


@dataclass(frozen=True)
class Pair:
    """A GSA network and its rival; None where there is no run."""

    how: str
    names: tuple[str, str]
    gsa: Measured | None
    conv: Measured | None

    @property
    def difference(self) -> float | None:
        """Points of top-1 that GSA is ahead."""
        return self.gsa.top1 - self.conv.top1 if self.gsa and self.conv else None


def pairs(results: Results) -> list[Pair]:
    """All pairs, with what was measured."""
    return [Pair(how, names, *(measured_run(results, name) for name in names)) for how, names in PAIRS.items()]


def paper_best() -> tuple[str, float]:
    """The paper's GSA-ResNet-50, from ImageNet weights: its row, and its accuracy on CIFAR-100."""
    row = next(row for row in printed_table(6).rows if row.network.model == "gsa_resnet50")
    accuracy = row.number("cifar100_top1")
    assert accuracy is not None
    return row.name, accuracy
