"""Parameters and operations of every network of the paper, counted and set beside what the paper prints."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gsanet.models.registry import as_typed
from gsanet.paper.notes import NOTES
from gsanet.paper.printed import printed_tables
from gsanet.paper.tables import count

# The networks that the paper describes itself: a name for each, and the row of its tables that prints its size.
ROWS = {
    "ResNet-38, convolution": "table6: ResNet-38, Convolution",
    "ResNet-38, GSA": "table6: ResNet-38, GSA",
    "ResNet-50, convolution": "table6: ResNet-50, Convolution",
    "ResNet-50, GSA": "table6: ResNet-50, GSA",
    "ResNet-101, convolution": "table6: ResNet-101, Convolution",
    "ResNet-101, GSA": "table6: ResNet-101, GSA",
    "ResNet-50, axial content and positional": "table2: Axial content and positional attention",
    "ResNet-50, only axial positional": "table2: Only axial positional attention",
    "M-ResNet-50, GSA": "table3: M-ResNet-50, This work",
}


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
        return as_typed(self.model, self.options)


def structure() -> Iterator[StructureRow]:
    """Count the networks one after the other, at 224x224 with 1000 classes."""
    rows = {row.key: row for table in printed_tables().values() for row in table.rows}
    for network, key in ROWS.items():
        row = rows[key]
        counted = count(row.network)
        assert counted is not None
        yield StructureRow(
            network=network,
            table=row.table,
            model=row.network.model,
            options=row.network.kwargs,
            params=counted[0],
            flops=counted[1],
            printed_params_m=row.printed("params").removesuffix(" M"),
            printed_flops_g=row.printed("flops").removesuffix(" G"),
            note=NOTES.get(row.network.model, ""),
        )
