"""Checkpoints: the train state, the data's position and the config of one step, through Orbax. The only file that knows Orbax."""
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from longmoe.configs import CheckpointConfig, ModelConfig, OptimConfig, TrainConfig
from longmoe.train.state import TrainState

IDENTITY: Mapping[str, type] = {"model": ModelConfig, "optim": OptimConfig}
"""Parts of the config that a checkpoint's arrays and their meaning depend on: another value is another run."""


class Checkpoints:
    """The checkpoints of one run directory. Use as a context manager."""

    def __init__(self, directory: Path, config: CheckpointConfig):
        options = ocp.CheckpointManagerOptions(max_to_keep=config.keep, enable_async_checkpointing=False)
        self._directory = directory
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, data_state: Mapping[str, Any], cfg: TrainConfig) -> None:
        """Returns when the checkpoint is complete: the caller may donate the state then."""
        record = {"data": dict(data_state), "config": json.loads(json.dumps(dataclasses.asdict(cfg)))}
        self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(_plain(state)), record=ocp.args.JsonSave(record)))
        self._manager.wait_until_finished()

    def restore(self, step: int, like: TrainState, cfg: TrainConfig) -> tuple[TrainState, dict[str, Any]]:
        """(state, data state) of a step, laid out as `like` (shapes with shardings). ValueError says how the config differs, where it does."""
        record = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
        _check_same(record["config"], cfg, self._directory / str(step))
        restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(_plain(like))))["state"]
        return restored.replace(rng=jax.random.wrap_key_data(restored.rng)), record["data"]


def _plain(state: TrainState) -> TrainState:
    """The state with its key as integers, which is how it is stored."""
    if isinstance(state.rng, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(state.rng.shape, state.rng.dtype))
        return state.replace(rng=jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=state.rng.sharding))
    return state.replace(rng=jax.random.key_data(state.rng))


def _check_same(saved: Mapping[str, Any], cfg: TrainConfig, path: Path) -> None:
    wanted = json.loads(json.dumps(dataclasses.asdict(cfg)))
    differences = [f"{name}: saved {old!r}, now {new!r}" for part in IDENTITY for name, old, new in _differences(saved[part], wanted[part], part)]
    if differences:
        raise ValueError(f"{path}: this checkpoint is from another config ({'; '.join(differences)}); "
                         "use the config that the run began with, another run directory, or start afresh")


def _differences(old: Any, new: Any, name: str) -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [found for key in sorted(set(old) | set(new)) for found in _differences(old.get(key), new.get(key), f"{name}.{key}")]
    return [] if old == new else [(name, old, new)]
