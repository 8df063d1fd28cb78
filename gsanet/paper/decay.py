"""What weight decay does: networks of the tables as they are, and with the recipe's own decay, a fifth as strong."""

from dataclasses import dataclass

from gsanet.paper.matrix import matrix
from gsanet.paper.results import Results, Run

SUFFIX = "-light"


@dataclass(frozen=True)
class Decayed:
    """One network under both; None where there is no run.

    Args:
        name: Of the run that stands in tables.
        network: What is trained.
        chosen: With the weight decay of the tables.
        light: With the recipe's.
    """

    name: str
    network: str
    chosen: Run | None
    light: Run | None

    @property
    def gained(self) -> float | None:
        """Points of top-1 by the stronger weight decay."""
        return self.chosen.top1 - self.light.top1 if self.chosen and self.light else None


def decayed(results: Results) -> list[Decayed]:
    """All networks that were trained with both, in the order of the matrix."""
    runs = {run.run: run for run in results.runs}
    return [
        Decayed(name.removesuffix(SUFFIX), str(light.network), runs.get(name.removesuffix(SUFFIX)), runs.get(name))
        for name, light in matrix().items()
        if name.endswith(SUFFIX)
    ]
