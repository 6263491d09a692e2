"""The stages of a run: each as a config of its own, what a gate asks, and the record that a run keeps of them (stages.json)."""
import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from longmoe.configs import GateConfig, TrainConfig
from longmoe.train.run_files import RunPaths, replace_text
from longmoe.train.state import TrainState

Measure = Callable[[TrainConfig, TrainState, tuple[str, ...]], Mapping[str, float]]
"""(config of the stage that ended, its state, thresholds asked for) -> {"loss", "short_loss", "needle"}, as far as they are needed."""


class Stage(NamedTuple):
    """One stage: steps begin + 1 to end of the run, under `config`, whose data and mesh are the stage's own."""
    index: int
    config: TrainConfig
    begin: int
    end: int


def stages_of(cfg: TrainConfig) -> list[Stage]:
    """The run's stages in order; a config without stages is one."""
    if not cfg.stages:
        return [Stage(0, cfg, 0, cfg.steps)]
    found, begin = [], 0
    for index, stage in enumerate(cfg.stages):
        rows = cfg.tokens_per_step // stage.sequence_length
        weights = dict(stage.weights)
        sources = tuple(dataclasses.replace(source, weight=weights.get(source.label, source.weight)) for source in cfg.data.sources)
        data = dataclasses.replace(cfg.data, sequence_length=stage.sequence_length, batch_size=rows, sources=sources)
        # Few long rows cannot be cut as often as many short ones.
        config = dataclasses.replace(cfg, data=data, mesh=stage.mesh or cfg.mesh, accumulation_steps=math.gcd(cfg.accumulation_steps, rows))
        end = begin + stage.tokens // cfg.tokens_per_step
        found.append(Stage(index, config, begin, end))
        begin = end
    return found


class StageRecord:
    """stages.json of a run: for each ended stage its steps, the tokens of every source, and what its gate measured."""

    def __init__(self, paths: RunPaths):
        self._path = paths.stages
        self._rows: list[dict[str, Any]] = json.loads(self._path.read_text()) if self._path.exists() else []

    def passed(self, stage: Stage) -> bool:
        """Whether this stage has ended before, under the same gate, and was let through."""
        row = self._row(stage)
        return row is not None and row["end"] == stage.end and row["gate"] == dataclasses.asdict(_gate(stage)) and not row["missed"]

    def end(self, stage: Stage, data_state: Mapping[str, Any], measured: Mapping[str, float]) -> None:
        """Writes the stage down. Raises RuntimeError where it missed its gate; the same call then measures again, under the gate of that time."""
        tokens = {name: source["tokens"] for name, source in data_state.get("packer", {}).get("sources", {}).items()}
        before = self._rows[stage.index - 1] if 0 < stage.index <= len(self._rows) else {"tokens_by_source": {}, "measured": {}}
        spent = {name: count - before["tokens_by_source"].get(name, 0) for name, count in tokens.items()}
        missed = _missed(_gate(stage), measured, before["measured"])
        row = dict(stage=stage.index, begin=stage.begin, end=stage.end, sequence_length=stage.config.data.sequence_length, rows=stage.config.data.batch_size,
                   weights={source.label: source.weight for source in stage.config.data.sources}, tokens_by_source=tokens, tokens_of_stage=spent,
                   measured=dict(measured), gate=dataclasses.asdict(_gate(stage)), missed=missed)
        self._rows = [*self._rows[:stage.index], row]
        replace_text(self._path, json.dumps(self._rows, indent=1) + "\n")
        logging.getLogger("longmoe").info("stage %d ended at step %d: rows of %d tokens, tokens by source %s, measured %s", stage.index, stage.end,
                                          row["sequence_length"], spent, row["measured"])
        if missed:
            raise RuntimeError(f"stage {stage.index} ended at step {stage.end} and missed its gate: {'; '.join(missed)}. Its checkpoint is kept: "
                               "give the stage more tokens, or change the gate, and start the same run again")

    def _row(self, stage: Stage) -> dict[str, Any] | None:
        return self._rows[stage.index] if stage.index < len(self._rows) else None


def _gate(stage: Stage) -> GateConfig:
    return stage.config.stages[stage.index].gate if stage.config.stages else GateConfig()


def asked(stage: Stage) -> tuple[str, ...]:
    """Thresholds of the stage's gate, and of the next one's that compares with this stage."""
    later = stage.config.stages[stage.index + 1].gate.asked if stage.index + 1 < len(stage.config.stages) else ()
    return tuple(dict.fromkeys((*_gate(stage).asked, *(name for name in later if name == "max_short_loss_rise"))))


def _missed(gate: GateConfig, measured: Mapping[str, float], before: Mapping[str, float]) -> list[str]:
    """What is not reached, in words. A figure that is not a number reaches nothing."""
    missed = []
    if gate.max_loss is not None and not measured["loss"] <= gate.max_loss:
        missed.append(f"loss {measured['loss']:.4f}, wanted at most {gate.max_loss}")
    if gate.max_short_loss_rise is not None and "short_loss" in before:
        rise = measured["short_loss"] / before["short_loss"] - 1
        if not rise <= gate.max_short_loss_rise:
            missed.append(f"short_loss rose by {rise:.4f}, wanted at most {gate.max_short_loss_rise}")
    if gate.min_needle is not None and not measured["needle"] >= gate.min_needle:
        missed.append(f"needle {measured['needle']:.4f}, wanted at least {gate.min_needle}")
    return missed
