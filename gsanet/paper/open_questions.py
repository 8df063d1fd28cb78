"""What the paper leaves open, answered by the runs of the matrix that stand for none of its tables."""

from dataclasses import dataclass

from gsanet.paper.matrix import matrix
from gsanet.paper.results import Results
from gsanet.paper.tables import Measured, measured_run

BASELINE = "gsa38"
# In the order of the matrix.
QUESTIONS = {
    "gsa38-query-softmax": "softmax on the queries of content attention (the paper: one point less)",
    "gsa38-unscaled-tables": "embeddings of relative positions of variance 1 / k, not 1 / (k L)",
    "gsa38-norm-qkv": "batch normalisation of q, k and v",
    "gsa38-reach-3": "positional attention that sees 3 pixels to each side",
    "gsa38-reach-7": "7 pixels",
    "gsa38-reach-15": "15 pixels",
    "gsa50-normed-column": "content attention and columns, with a batch norm behind the columns",
    "gsa50-normed-row": "content attention and rows, with a batch norm behind the rows",
}
# What a change is compared with, if not with the network above.
OTHER_BASELINES = {"gsa50-normed-column": "gsa50-content-column", "gsa50-normed-row": "gsa50-content-row"}


@dataclass(frozen=True)
class Answer:
    """One change; None where there is no run.

    Args:
        run: Its name.
        what: The change, in words.
        measured: What was found.
        difference: Of its accuracy from that of the network without the change.
        against: The run of that network.
    """

    run: str
    what: str
    measured: Measured | None
    difference: float | None
    against: str


def answers(results: Results) -> list[Answer]:
    """The network itself first, then with each change."""
    rows = [Answer(BASELINE, f"{matrix()[BASELINE].network} as it is", measured_run(results, BASELINE), None, "")]
    for name, what in QUESTIONS.items():
        against = OTHER_BASELINES.get(name, BASELINE)
        found, base = (measured_run(results, each) for each in (name, against))
        rows.append(Answer(name, what, found, found.top1 - base.top1 if found and base else None, against))
    return rows
