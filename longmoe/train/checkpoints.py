"""Checkpoints: the train state, the data's position and the config of one step, through Orbax. The only file that knows Orbax.

    checkpoints/STEP/model/         params and router_state: what evaluation, generation and export read
    checkpoints/STEP/training/      step, optimizer state, random key
    checkpoints/STEP/record/        JSON: config, data state, package versions
    checkpoints/STEP/manifest.json  written last (`longmoe.train.manifest`): a step without it is not complete
"""
import dataclasses
import errno
import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh

from longmoe.configs import CheckpointConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig, from_json
from longmoe.parallel.mesh import make_mesh
from longmoe.train import manifest
from longmoe.train.run_files import RunPaths, is_local, versions
from longmoe.train.state import TrainState, abstract_train_state

IDENTITY: Mapping[str, type] = {"model": ModelConfig, "optim": OptimConfig}
"""Parts of the config that a checkpoint's arrays and their meaning depend on: another value is another run."""
_log = logging.getLogger("longmoe")


class Loaded(NamedTuple):
    """What `load_checkpoint` returns."""
    config: TrainConfig
    variables: dict[str, Any]
    """{"params", "router_state"}, as `LongMoE(config.model).apply` takes them."""


def load_checkpoint(run_dir: epath.PathLike, step: int | None = None, *, mesh: Mesh | None = None) -> Loaded:
    """The config and the variables of a run's checkpoint, for evaluation, generation or export; the optimizer's files are not read.

    step: a step that was kept; None takes the newest complete one. mesh: where the variables go; None is the first device alone.
    Raises ValueError when there is no such checkpoint, or when it is damaged.
    """
    step = kept_step(run_dir, step)
    directory = _absolute(RunPaths(epath.Path(run_dir)).checkpoints)
    steps = complete_steps(directory)
    _check_whole(directory, step, steps, parts=("model", "record"))
    config = from_json(TrainConfig, json.dumps(_read(directory / str(step), record=ocp.args.JsonRestore())["record"]["config"]))
    like = abstract_train_state(config, make_mesh(MeshConfig(), jax.devices()[:1]) if mesh is None else mesh)
    return Loaded(config, _read(directory / str(step), model=ocp.args.StandardRestore(_parts(like)["model"]))["model"])


def kept_step(run_dir: epath.PathLike, step: int | None = None) -> int:
    """The newest step with a complete checkpoint, or `step` if it has one; ValueError where there is none, which lists those that there are."""
    directory = _absolute(RunPaths(epath.Path(run_dir)).checkpoints)
    steps = complete_steps(directory)
    if not steps:
        raise ValueError(f"run_dir: got {run_dir}, which has no complete checkpoint; wanted a folder that `longmoe train --run-dir` wrote")
    return steps[-1] if step is None else _one_of(step, steps, "step", directory)


class Checkpoints:
    """The checkpoints of one run directory, for the run that writes them. Use as a context manager.

    Opening removes what a save or a deletion that was cut off has left behind. Saving is synchronous: the next step takes over the state's memory.
    """

    def __init__(self, directory: epath.Path, config: CheckpointConfig):
        self._directory, self._config = _absolute(directory), config
        self._directory.mkdir(parents=True, exist_ok=True)
        _sweep(self._directory)
        # Orbax deletes nothing: it would do so as soon as its own save is over, before the manifest is there.
        options = ocp.CheckpointManagerOptions(max_to_keep=None, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()

    def steps(self) -> list[int]:
        """The complete steps, in order."""
        return complete_steps(self._directory)

    def save(self, step: int, state: TrainState, data_state: Mapping[str, Any], cfg: TrainConfig) -> None:
        """Returns when the checkpoint is complete, and older ones are gone as the config says: the caller may donate the state then.

        Raises OSError when it cannot be written; the checkpoints before it are untouched.
        """
        record = {"data": dict(data_state), "config": _plain_config(cfg), "versions": versions()}
        arguments = {name: ocp.args.StandardSave(part) for name, part in _parts(state).items()}
        before = self.steps()
        try:
            # force: the loop has decided that it is time to save.
            self._manager.save(step, args=ocp.args.Composite(**arguments, record=ocp.args.JsonSave(record)), force=True)
            self._manager.wait_until_finished()
            manifest.write_manifest(self._directory / str(step), step)
        except Exception as error:                                      # Orbax passes on tensorstore's errors, of several classes
            raise OSError(f"{self._directory / str(step)}: the checkpoint could not be written ({error}). Complete checkpoints: "
                          f"{_listed(before)}; make room or mend the file system, then the same command goes on from the newest") from error
        for old in self.steps()[:-self._config.keep]:
            if not self._config.keep_every or old % self._config.keep_every:
                self._discard(old)

    def restore(self, step: int, like: TrainState, cfg: TrainConfig) -> tuple[TrainState, dict[str, Any]]:
        """(state, data state) of a step, laid out as `like` (shapes with shardings), whatever mesh it was saved from.

        Raises ValueError when there is no such complete step, and says how the checkpoint is damaged or its config differs where that is so. Differences that
        a run may have (mesh, data, schedule, versions) are logged.
        """
        steps = self.steps()
        path = self._directory / str(_one_of(step, steps, "resume_from", self._directory))
        _check_whole(self._directory, step, steps)
        record = _read(path, record=ocp.args.JsonRestore())["record"]
        _check_same(record["config"], cfg, path)
        for change in _changes(step, record, {"config": _plain_config(cfg), "versions": versions(), "data": record["data"]}):
            _log.info("%s", change)
        parts = _read(path, **{name: ocp.args.StandardRestore(part) for name, part in _parts(like).items()})
        state = TrainState(**parts["model"], **parts["training"])
        return state.replace(rng=jax.random.wrap_key_data(state.rng)), record["data"]

    def changes(self, step: int, cfg: TrainConfig) -> list[str]:
        """What `cfg` has otherwise than the config that a complete step was saved with, a sentence each."""
        record = _read(self._directory / str(step), record=ocp.args.JsonRestore())["record"]
        return _changes(step, record["config"], _plain_config(cfg))

    def drop_after(self, step: int) -> None:
        """Deletes the complete checkpoints of later steps, the newest first."""
        for later in reversed([found for found in self.steps() if found > step]):
            self._discard(later)

    def _discard(self, step: int) -> None:
        # From here on the step is not complete, however far the deletion gets.
        (self._directory / str(step) / manifest.NAME).unlink()
        _remove(self._directory / str(step))
        self._manager.reload()


def complete_steps(directory: epath.Path) -> list[int]:
    """Steps under `directory` that have a manifest, in order; none when there is no such folder."""
    return sorted(int(path.name) for path in _step_folders(directory) if manifest.is_complete(path))


def delete_checkpoints(directory: epath.Path) -> None:
    """Deletes them all, the oldest first, so that cut off anywhere this leaves a run that resumes or starts over."""
    for path in sorted(_step_folders(directory), key=lambda path: int(path.name)):
        (path / manifest.NAME).unlink(missing_ok=True)
        path.rmtree()
    if directory.exists():
        directory.rmtree()


def _step_folders(directory: epath.Path) -> list[epath.Path]:
    return [path for path in directory.iterdir() if path.name.isdecimal()] if directory.exists() else []


def _sweep(directory: epath.Path) -> None:
    """Deletes steps without a manifest, where a complete step is. Where none is, kills leave at most one: it is put aside, not deleted, because it may also
    be a checkpoint that has lost its manifest on the way here; more of them surely have."""
    complete = complete_steps(directory)
    cut_off = sorted((path for path in _step_folders(directory) if not manifest.is_complete(path)), key=lambda path: int(path.name))
    if not complete and len(cut_off) > 1:
        raise ValueError(f"{directory}: got steps {', '.join(path.name for path in cut_off)} without {manifest.NAME}, wanted one in each; "
                         "put the manifests back, or delete the folder to start over")
    goal = f"step {complete[-1]}, the newest complete one" if complete else "the beginning"
    for path in (*cut_off, *(path for path in directory.iterdir() if re.match(r"\d+\.orbax-checkpoint-tmp", path.name))):
        _log.info("step %s is not complete, its save or its deletion was cut off: stepping over it to %s", path.name.split(".")[0], goal)
        if complete or path not in cut_off:
            _remove(path)
        else:
            aside = directory / f"without-manifest-{path.name}"
            if aside.exists():
                _remove(aside)
            path.rename(aside)
            _log.info("it was put aside as %s; delete it if this run was killed in its first save", aside)


def _remove(folder: epath.Path) -> None:
    # In the process whose save has just failed, Orbax's threads may still be writing into the folder.
    for _ in range(50):
        try:
            return folder.rmtree()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            time.sleep(0.1)
    folder.rmtree()


def _check_whole(directory: epath.Path, step: int, steps: list[int], parts: tuple[str, ...] | None = None) -> None:
    found = manifest.damage(directory / str(step), step, parts)
    if found:
        more, others = f"; and {len(found) - 5} more" if len(found) > 5 else "", _listed([other for other in steps if other != step])
        instead = f"take another step ({others})" if parts else f"resume from another step with --resume-from ({others}), or start over with --fresh"
        raise ValueError(f"{directory / str(step)}: this checkpoint is damaged: {'; '.join(found[:5])}{more}. Put the files back, or {instead}")


def _one_of(step: int, steps: list[int], name: str, directory: epath.Path) -> int:
    if step not in steps:
        raise ValueError(f"{name}: got {step}, wanted a complete checkpoint of {directory}: {_listed(steps)}")
    return step


def _listed(steps: list[int]) -> str:
    return f"steps {', '.join(map(str, steps))}" if steps else "there is none"


def _read(path: epath.Path, **arguments: Any) -> Any:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, args=ocp.args.Composite(**arguments))


def _parts(state: TrainState) -> dict[str, dict[str, Any]]:
    """The state as it is stored: what a model needs apart from what training needs, and the key as integers."""
    if isinstance(state.rng, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(state.rng.shape, state.rng.dtype))
        rng: Any = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=state.rng.sharding)
    else:
        rng = jax.random.key_data(state.rng)
    return {"model": {"params": state.params, "router_state": state.router_state},
            "training": {"step": state.step, "opt_state": state.opt_state, "rng": rng}}


def _plain_config(cfg: TrainConfig) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(cfg)))


def _absolute(path: epath.Path) -> epath.Path:
    return path.absolute() if is_local(path) else path


def _check_same(saved: Mapping[str, Any], cfg: TrainConfig, path: epath.Path) -> None:
    wanted = _plain_config(cfg)
    differences = [f"{name}: saved {old!r}, now {new!r}" for part in IDENTITY for name, old, new in _differences(saved[part], wanted[part], part)]
    if differences:
        raise ValueError(f"{path}: this checkpoint is from another config ({'; '.join(differences)}); "
                         "use the config that the run began with, another run directory, or start afresh")


def _changes(step: int, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [f"step {step} was saved with {name} {old!r}, this run has {new!r}" for name, old, new in _differences(saved, now, "")]


def _differences(old: Any, new: Any, name: str) -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [found for key in sorted(set(old) | set(new)) for found in _differences(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))]
    return [] if old == new else [(name, old, new)]
