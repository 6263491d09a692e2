"""Tile sizes of the GPU kernels: a committed table of measured shapes, and a rule for the rest. Nothing is ever timed implicitly."""
import dataclasses
from typing import Literal

Operation = Literal["forward", "dlhs", "drhs"]
SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one block may have on Hopper; barriers take a little of it."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a product is cut.

    rows, cols: result of one block; split: which of the two its two compute warpgroups share out. depth: contraction of one pipeline stage.
    band: row tiles of a group that run over all columns before the next ones start. out_slots: strips of the result in flight, a warpgroup.
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
        """Rows of the result that a cluster works on at a time."""
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

    def shared_memory(self) -> int:
        """Bytes without barriers, for 16-bit operands."""
        return 2 * self.stages * self.depth * (self.rows + self.cols) + 2 * self.out_slots * self.warpgroup_rows * 128


class RowTiles(Tiles):
    """Of the forward product and the gradient of lhs. `split="rows"` also halves the grain: a warpgroup without rows of the group rests."""


@dataclasses.dataclass(frozen=True)
class WeightTiles(Tiles):
    """Of the gradient of rhs: rows x cols of one group's K x N; contraction is over rows of lhs and dout.

    lag: how many steps after its loads were issued a step is awaited and masked by the memory warpgroup. The compute warpgroups hold two stages, so
    it is at most stages - 2: the load that frees a stage must never wait for a mask that comes after it. depth: also the grain of a group's rows, a
    multiple of 32; 32 halves what is multiplied beside the group, but its shared-memory rows are 64 bytes long instead of 128.
    """
    band: int = 8
    lag: int = 2

    def __post_init__(self) -> None:
        if self.depth % 32:
            raise ValueError(f"depth: got {self.depth}, wanted a multiple of 32")
        if not 1 <= self.lag <= self.stages - 2:
            raise ValueError(f"lag: got {self.lag} with stages={self.stages}, wanted 1 to stages - 2 = {self.stages - 2}")


TABLE: dict[tuple[str, Operation, int, int, int], RowTiles | WeightTiles] = {
    ("NVIDIA H200", "forward", 12, 1024, 1024): RowTiles(stages=3, out_slots=4),
    ("NVIDIA H200", "dlhs", 12, 1024, 1024): RowTiles(stages=3, out_slots=4, cluster_along="rows", band=4),
    ("NVIDIA H200", "drhs", 12, 1024, 1024): WeightTiles(),
    ("NVIDIA H200", "forward", 10, 3584, 6144): RowTiles(rows=64, split="cols", band=32),
    ("NVIDIA H200", "dlhs", 10, 3584, 6144): RowTiles(stages=3, out_slots=4),
    ("NVIDIA H200", "drhs", 10, 3584, 6144): WeightTiles(cluster_along="rows", band=4),
    ("NVIDIA H200", "forward", 8, 2048, 1024): RowTiles(stages=3, out_slots=4, cluster_along="cols"),
    ("NVIDIA H200", "dlhs", 8, 2048, 1024): RowTiles(stages=3, out_slots=4, band=32),
    ("NVIDIA H200", "drhs", 8, 2048, 1024): WeightTiles(cluster_along="rows", band=4),
}
"""Measured choices (benchmarks/results/grouped_matmul_tiles.json):
(device kind, operation, log2 of average rows a group, K, N as in lhs [M, K] and rhs [G, K, N]) -> tiles."""

# Relative speed of a block that is so many columns wide: narrower ones load more for the same arithmetic.
_WIDTHS = {256: 1.0, 192: 0.95, 128: 0.85, 64: 0.55}


def choose_tiles(device: str, operation: Operation, *, rows: int, k: int, n: int, groups: int) -> RowTiles | WeightTiles:
    """Tiles for lhs [rows, k], rhs [groups, k, n], from the table or else by rule. Static facts only, so that the choice is the same in every run."""
    average = max(rows // groups, 1)
    if (tiles := TABLE.get((device, operation, average.bit_length() - 1, k, n))) is not None:
        return tiles
    width = block_width(k if operation == "dlhs" else n)
    if operation == "drhs":
        return WeightTiles(cols=width)
    if average < 64 and width % 128 == 0:
        # Most tiles hold one short group: reading fewer rows of lhs leaves room for another stage of weights, which are what is waited for.
        return RowTiles(rows=64, cols=width, split="cols", stages=5, out_slots=1)
    # A slot for each strip of a warpgroup's result: it never waits for a store, which was worth more than a fourth stage.
    return RowTiles(cols=width, stages=3, out_slots=4)


def block_width(n: int) -> int:
    """Columns of a block for a result of n: the best trade between width and columns computed past the end."""
    return min(_WIDTHS, key=lambda width: -(-n // width) * width / _WIDTHS[width])


_ROW_CANDIDATES = (
    RowTiles(cluster_along="rows", band=8),
    RowTiles(stages=3, out_slots=4),
    RowTiles(stages=3, out_slots=4, cluster_along="rows", band=8),
    RowTiles(stages=3, out_slots=4, cluster_along="rows", band=4),
    RowTiles(stages=3, out_slots=4, cluster_along="cols"),
    RowTiles(rows=64, split="cols", band=32),
    RowTiles(rows=64, split="cols", cluster_along="rows", band=16),
    RowTiles(rows=64, split="cols", cluster_along="cols", band=16),
    RowTiles(rows=256, cols=128, stages=3, band=8, cluster_along="cols"),
    RowTiles(stages=3, out_slots=4, band=32),
)
_WEIGHT_CANDIDATES = (
    WeightTiles(depth=32, stages=8, lag=3),
    WeightTiles(cluster_along="rows", band=4),
    WeightTiles(depth=32, stages=8, lag=3, cluster_along="rows", band=4),
    WeightTiles(lag=1),
    WeightTiles(band=16),
    WeightTiles(depth=32, stages=8, lag=2),
    WeightTiles(cluster_along="cols"),
    WeightTiles(rows=256, cols=128, stages=3, lag=1, band=4),
)


def candidates(operation: Operation, *, rows: int, k: int, n: int, groups: int) -> list[RowTiles | WeightTiles]:
    """Tiles worth timing for a shape, most promising first; the present choice is among them."""
    width = k if operation == "dlhs" else n
    chosen = choose_tiles("", operation, rows=rows, k=k, n=n, groups=groups)
    fits = lambda tiles: -(-width // tiles.item_cols) * tiles.item_cols <= 1.13 * width
    pool = _WEIGHT_CANDIDATES if operation == "drhs" else _ROW_CANDIDATES
    return [chosen, *(tiles for tiles in pool if tiles != chosen and fits(tiles))]
