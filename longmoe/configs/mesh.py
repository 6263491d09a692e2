"""How devices are arranged."""
import dataclasses

from longmoe.configs.checks import check


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1 (at most one axis) takes what the others leave."""
    data: int = 1
    """Replicates parameters, splits the batch."""
    fsdp: int = -1
    """Splits parameters and the batch."""
    expert: int = 1
    """Splits experts and the batch."""
    tensor: int = 1
    """Splits heads and hidden widths."""
    context: int = 1
    """Splits the sequence."""

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        check(all(size == -1 or size > 0 for size in sizes.values()), f"MeshConfig: got {sizes}, wanted positive sizes, or -1 on one axis")
        check(list(sizes.values()).count(-1) <= 1, f"MeshConfig: got {sizes}, wanted -1 on at most one axis")
