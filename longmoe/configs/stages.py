"""Staged training: row lengths, sources' weights and meshes that change while one run goes on."""
import dataclasses
from collections.abc import Mapping

from longmoe.configs.checks import check, positive
from longmoe.configs.mesh import MeshConfig


@dataclasses.dataclass(frozen=True)
class GateConfig:
    """What the model must reach at the end of a stage before the next one begins. None: not asked for."""
    max_loss: float | None = None
    """Largest held-out loss, nats a token, on rows of the stage's length."""
    max_short_loss_rise: float | None = None
    """Largest relative rise, over the stage, of the held-out loss on rows of the first stage's length: 0.005 is half a percent."""
    min_needle: float | None = None
    """Least score on the needle grid at the stage's length, all depths together."""

    def __post_init__(self) -> None:
        check(self.max_loss is None or self.max_loss > 0, f"GateConfig.max_loss: got {self.max_loss}, wanted None or a positive number")
        check(self.min_needle is None or 0 <= self.min_needle <= 1, f"GateConfig.min_needle: got {self.min_needle}, wanted None or a number in [0, 1]")

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the thresholds that are set."""
        return tuple(field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None)


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """A stretch of a run. Tokens a step stay what data.batch_size * data.sequence_length says; rows become fewer as they become longer.

    Parameters, optimizer, router state, random key and every source's cursor go on from stage to stage, and the learning rate's schedule is one for the run.
    """
    sequence_length: int
    """Tokens a row."""
    tokens: int
    """Tokens that the stage trains on: a multiple of the tokens of a step."""
    weights: tuple[tuple[str, float], ...] = ()
    """(source, its weight in this stage) pairs, or a mapping; a source that is not named keeps the weight of data.sources."""
    mesh: MeshConfig | None = None
    """Devices along each axis; None is the run's mesh."""
    gate: GateConfig = GateConfig()

    def __post_init__(self) -> None:
        positive(self, "sequence_length", "tokens")
        # Pairs, because a config is hashable.
        object.__setattr__(self, "weights", tuple(self.weights.items() if isinstance(self.weights, Mapping) else self.weights))
        for name, weight in self.weights:
            check(weight >= 0, f"StageConfig.weights: got {weight!r} for source {name!r}, wanted 0 or a positive number")
