"""Parameters and operations of every network of the paper, counted and set beside what the paper prints."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from gsanet.models import count_flops, count_parameters, create_model
from gsanet.paper import m_resnet50

# How each network of `printed.json` is made here.
MADE_BY: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet-38, convolution": ("conv_resnet38", {}),
    "ResNet-38, GSA": ("gsa_resnet38", {}),
    "ResNet-50, convolution": ("conv_resnet50", {}),
    "ResNet-50, GSA": ("gsa_resnet50", {}),
    "ResNet-101, convolution": ("conv_resnet101", {}),
    "ResNet-101, GSA": ("gsa_resnet101", {}),
    "ResNet-50, axial content and positional": ("axial_resnet50", {}),
    "ResNet-50, only axial positional": ("gsa_resnet50", {"content": False}),
    "M-ResNet-50, GSA": ("gsa_m_resnet50", {}),
}

NOTES = {"M-ResNet-50, GSA": m_resnet50.NOTE}


@dataclass(frozen=True)
class StructureRow:
    """One network: what was counted, and the figures of the paper as it prints them."""

    network: str
    table: int
    model: str
    options: dict[str, Any]
    params: int
    flops: int
    printed_params_m: str
    printed_flops_g: str
    note: str

    @property
    def params_match(self) -> bool:
        """Whether the count, rounded as the paper rounds, is the printed one."""
        return f"{self.params / 1e6:.1f}" == self.printed_params_m

    @property
    def flops_match(self) -> bool:
        """Whether the count, rounded as the paper rounds, is the printed one."""
        return f"{self.flops / 1e9:.1f}" == self.printed_flops_g

    @property
    def matches(self) -> bool:
        """Whether both do."""
        return self.params_match and self.flops_match

    @property
    def made_by(self) -> str:
        """The model's name and options, as one types them."""
        return ", ".join([self.model, *(f"{name}={value}" for name, value in self.options.items())])


def printed() -> dict[str, Any]:
    """The figures that the paper prints."""
    return json.loads(files("gsanet.paper").joinpath("printed.json").read_text())


def structure() -> Iterator[StructureRow]:
    """Count the networks one after the other, at 224x224 with 1000 classes."""
    for row in printed()["structure"]:
        name, options = MADE_BY[row["network"]]
        model = create_model(name, **options)
        yield StructureRow(
            network=row["network"],
            table=row["table"],
            model=name,
            options=options,
            params=count_parameters(model),
            flops=count_flops(model),
            printed_params_m=row["params_m"],
            printed_flops_g=row["flops_g"],
            note=NOTES.get(row["network"], ""),
        )
