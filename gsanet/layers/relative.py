"""Tables of relative position embeddings, and how they follow the size of the map.

A smaller map uses the middle of the table, exactly. For a larger one the owner chooses: resize the tables
(`resize_tables`), or keep the trained reach (`keep_reach=True`): offsets outside the table then contribute nothing.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsanet.functional.checks import check_reach, check_size
from gsanet.layers.attention import Attention

TABLES = ("rel_column", "rel_row")  # the names of the parameters


class RelativeTables(Attention):
    """Base of the modules with learned embeddings of the offsets along a column and along a row.

    Args:
        feat_size: Height and width of the map, or one number for both. May be None if `reach` is given, or if there
            is no table.
        width: Channels of an embedding: those of one head.
        column: Whether there is a table for columns, `rel_column`.
        row: Whether there is a table for rows, `rel_row`.
        reach: The largest offset attended to, or None for all of the map.
        keep_reach: Accept maps larger than `feat_size`.
        reduction: The module attends over a map that is this many times smaller than its input, rounded up.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    rel_column: nn.Parameter | None
    rel_row: nn.Parameter | None

    def __init__(
        self,
        feat_size: int | tuple[int, int] | None,
        width: int,
        *,
        column: bool = True,
        row: bool = True,
        reach: int | None = None,
        keep_reach: bool = False,
        reduction: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if feat_size is None and reach is None and (column or row):
            raise ValueError(
                "feat_size is None: positional attention over the whole map needs the (height, width) it is made for, "
                "or a reach"
            )
        self.feat_size = None if feat_size is None else check_size("feat_size", feat_size)
        self.reach = check_reach(reach)
        self.keep_reach = keep_reach
        self.reduction = reduction
        for axis, (name, wanted) in enumerate({"rel_column": column, "rel_row": row}.items()):
            rows = self._rows(axis)
            table = nn.Parameter(torch.empty(rows, width, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(name, table)

    def _rows(self, axis: int) -> int:
        offsets = [] if self.reach is None else [self.reach]
        if self.feat_size is not None:
            offsets.append(-(-self.feat_size[axis] // self.reduction) - 1)
        return 2 * min(offsets, default=0) + 1

    @torch.no_grad()
    def resize_tables(self, feat_size: int | tuple[int, int]) -> None:
        """Make the tables fit another size of map.

        A longer table is the trained one stretched to the new length, for the same scene at a higher resolution, and
        scaled so that the sum over more pixels keeps its size; a shorter one is its middle. Optimizers made before
        this call hold the old tables: make them after it.
        """
        if feat_size is None:
            raise ValueError("feat_size is None: tables are resized to the (height, width) of a map")
        self.feat_size = check_size("feat_size", feat_size)
        for axis, name in enumerate(TABLES):
            table = getattr(self, name)
            if table is not None and table.shape[0] != self._rows(axis):
                resized = resize_table(table, self._rows(axis))
                setattr(self, name, nn.Parameter(resized, requires_grad=table.requires_grad))

    def check_size(self, x: Tensor) -> None:
        """Refuse, or mention once, a map (batch, channels, height, width) that is larger than the tables."""
        height, width = x.shape[-2:]
        for length, table in ((height, self.rel_column), (width, self.rel_row)):
            furthest = -(-length // self.reduction) - 1
            wanted = furthest if self.reach is None else min(furthest, self.reach)
            if table is not None and wanted > table.shape[0] // 2:
                break
        else:
            return
        made_for = "x".join(map(str, self.feat_size or ()))
        sizes = f"a map of {height}x{width} is larger than the {made_for} that the tables were made for"
        if not self.keep_reach:
            raise ValueError(
                f"{sizes}: call resize_tables(({height}, {width})) (for a network, create it with img_size or call "
                "set_input_size), or allow it with keep_reach=True"
            )
        if not torch.compiler.is_compiling():
            _mention_once(sizes)

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return f"feat_size={self.feat_size}, reach={self.reach}"


def resize_table(table: Tensor, rows: int) -> Tensor:
    """A table with another odd number of rows: stretched and scaled if longer, its middle if shorter."""
    old = table.shape[0]
    if rows <= old:
        start = (old - rows) // 2
        return table[start : start + rows].clone()
    stretched = F.interpolate(table.float().T[None], size=rows, mode="linear", align_corners=True)[0].T
    length_ratio = (old + 1) / (rows + 1)
    return (stretched * length_ratio).to(table.dtype).contiguous()


_mentioned = False


def _mention_once(sizes: str) -> None:
    global _mentioned
    if not _mentioned:
        _mentioned = True
        warnings.warn(f"{sizes}: offsets beyond the trained reach contribute nothing (said once)", stacklevel=4)
