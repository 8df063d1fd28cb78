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
}


@dataclass(frozen=True)
class Answer:
    """One change: its accuracy, and how it differs from the network without it; None where there is no run."""

    run: str
    what: str
    measured: Measured | None
    difference: float | None


def answers(results: Results) -> list[Answer]:
    """The network itself first, then with each change."""
    measured = {name: measured_run(results, name) for name in (BASELINE, *QUESTIONS)}
    base = measured[BASELINE]
    rows = [Answer(BASELINE, f"{matrix()[BASELINE].network} as it is", base, None)]
    for name, what in QUESTIONS.items():
        found = measured[name]
        rows.append(Answer(name, what, found, found.top1 - base.top1 if found and base else None))
    return rows
