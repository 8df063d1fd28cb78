"""Table 1 of the paper, with its marks computed: from gradients, shuffled pixels, moved objects and the network."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gsanet.layers.attention import Attention, Combination
from gsanet.models import create_model, list_models
from gsanet.paper import properties
from gsanet.paper.placement import placement
from gsanet.paper.printed import CHECK, PrintedRow, printed_table

MARKS = ("global", "content", "positional", "combination")

# The convolutional network of the same depth. SAN has a layout of its own: its groups hold no spatial convolution.
TWIN = "conv_resnet50"

COMBINATIONS = {
    "Few attention modules are inserted in between residual blocks": Combination.INSERTED,
    "Attention modules are added at the end": Combination.AT_THE_END,
    "Convolution layers are augmented with attention modules in parallel": Combination.IN_PARALLEL,
    "Convolution layers are replaced by attention modules": Combination.REPLACES,
}

# Why a measured mark is not the printed one.
FINDINGS = {
    ("ccnet_resnet50", "positional"): (
        "Criss-cross attention holds no embedding of positions, which is what the paper's empty cell says, but it is "
        "not blind to them: a pixel's row and column decide whom it meets, and through whom the second pass reaches "
        "the others. Shuffling pixels changes its output; shuffling whole rows and whole columns does not."
    ),
}


# What the marks do not say.
REMARKS = {
    "cgnl_resnet50": (
        "Its group normalisation has the groups of its kernel and undoes the factor that attention computes, all but "
        "the sign: other pixels reach an output mainly through the mean and the variance."
    ),
    "videobert_resnet50": (
        "Its attention is among the frames of a clip, and that is where it was measured: the pixels of a frame are "
        "averaged before it, and do not attend to each other."
    ),
}


@dataclass(frozen=True)
class Table1Row:
    """One system.

    Args:
        name: The row in the paper's words.
        network: The network here.
        module: The class of its attention modules; empty if there is no such network here.
        printed: The paper's marks: global, content, positional, combination.
        measured: Ours; None where there is no such network here.
        where: What `combination` was read off.
        shuffle: What just shuffles the output: `pixels`, `lines` (whole rows and columns), or `nothing`.
        shift_error: Relative error of moving an object by a pixel.
        differences: The marks that differ, and why.
        remark: What the marks do not say.
    """

    name: str
    network: str
    module: str
    printed: dict[str, bool | str]
    measured: dict[str, bool | str] | None
    where: str
    shuffle: str
    shift_error: float | None
    differences: dict[str, str]
    remark: str

    @property
    def commutes_with(self) -> list[str]:
        """What may be done to the input and is then just done to the output, exactly."""
        if self.shuffle == "pixels":  # of which all others are special cases
            return ["shuffling"]
        moves = self.shift_error is not None and self.shift_error < 1e-6
        return ["lines"] * (self.shuffle == "lines") + ["moves"] * moves


def networks() -> list[tuple[PrintedRow, str]]:
    """The systems: rows of the table, and the networks that they are here. SAN has two kinds of attention."""
    pairs = []
    for row in printed_table(1).rows:
        name = row.network.model
        if name.endswith("_patchwise"):
            pairs.append((row, name.replace("_patchwise", "_pairwise")))
        pairs.append((row, name))
    return pairs


def table1() -> Iterator[Table1Row]:
    """Measure the systems of Table 1 one after the other, a second or two each."""
    for row, name in networks():
        yield measure(row, name)


def measure(row: PrintedRow, name: str) -> Table1Row:
    """One row, printed and measured on the network of this name."""
    printed: dict[str, bool | str] = {mark: row.cells[mark] == CHECK for mark in MARKS[:3]}
    printed["combination"] = COMBINATIONS[row.cells["combination"]].value
    if name not in list_models():
        return Table1Row(row.name, name, "", printed, None, "", "", None, {}, "")
    kind = attention_of(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _measure(row.name, name, kind, printed)


def _measure(row: str, name: str, kind: type[Attention], printed: dict[str, bool | str]) -> Table1Row:
    module = properties.small_module(kind)
    x = torch.randn(1, 16, 9, 8, dtype=torch.float64)
    # Large enough for a window of 7x7 around an object in the middle.
    large_module = properties.small_module(kind, feat_size=(21, 18))
    large = torch.randn(1, 16, 21, 18, dtype=torch.float64)
    placed = placement(name, TWIN)
    measured: dict[str, bool | str] = {
        "global": properties.sees_everything(module, x),
        "content": properties.depends_on_content(module, x),
        "positional": properties.depends_on_order(module, x),
        "combination": placed.combination.value,
    }
    shuffle = "nothing"
    if properties.commutes_with_shuffling(module, x):
        shuffle = "pixels"
    elif properties.commutes_with_shuffling_lines(module, x):
        shuffle = "lines"
    return Table1Row(
        name=row,
        network=name,
        module=kind.__name__,
        printed=printed,
        measured=measured,
        where=str(placed),
        shuffle=shuffle,
        shift_error=properties.shift_error(large_module, large),
        differences={
            mark: FINDINGS.get((name, mark), "not explained yet") for mark in MARKS if printed[mark] != measured[mark]
        },
        remark=REMARKS.get(name, ""),
    )


def attention_of(model: str) -> type[Attention]:
    """The class of a network's attention modules; if its stem has one of its own, that of the others."""
    with torch.device("meta"):
        network = create_model(model)
    kinds = Counter(type(module) for module in network.modules() if isinstance(module, Attention))
    return kinds.most_common(1)[0][0]
