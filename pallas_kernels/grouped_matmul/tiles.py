"""Tile sizes of the GPU kernels."""
import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """How the forward product (and the gradient of lhs) is cut.

    rows, cols: result of one block; split: which of the two its two compute warpgroups share out. depth: contraction of one pipeline stage.
    cluster_along: None, or "rows"/"cols": pairs of blocks are neighbours in that direction, and the operand that they share is read once and multicast.
    """
    rows: int = 128
    cols: int = 256
    depth: int = 64
    stages: int = 4
    split: Literal["rows", "cols"] = "rows"
    band: int = 16
    cluster_along: Literal["rows", "cols"] | None = None
    out_slots: int = 2

    @property
    def cluster(self) -> int:
        return 2 if self.cluster_along else 1

    @property
    def item_rows(self) -> int:
        return self.rows * (2 if self.cluster_along == "rows" else 1)

    @property
    def item_cols(self) -> int:
        return self.cols * (2 if self.cluster_along == "cols" else 1)

    @property
    def warpgroup_rows(self) -> int:
        return self.rows // 2 if self.split == "rows" else self.rows

    @property
    def warpgroup_cols(self) -> int:
        return self.cols // 2 if self.split == "cols" else self.cols


@dataclasses.dataclass(frozen=True)
class WeightTiles:
    """How the gradient of rhs is cut. rows x cols: result of one block, part of one group's K x N; depth: rows of lhs and dout in one pipeline stage.
    lag: how many steps after its loads were issued a step is awaited and masked by the memory warpgroup; less than stages.
    """
    rows: int = 128
    cols: int = 256
    depth: int = 64
    stages: int = 4
    split: Literal["rows", "cols"] = "rows"
    band: int = 8
    out_slots: int = 2
    lag: int = 2

    @property
    def warpgroup_rows(self) -> int:
        return self.rows // 2 if self.split == "rows" else self.rows

    @property
    def warpgroup_cols(self) -> int:
        return self.cols // 2 if self.split == "cols" else self.cols
