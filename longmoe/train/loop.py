"""`fit`: from a config to a trained model in a run directory; the same call again resumes."""
import dataclasses
import importlib.metadata
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import pallas_kernels
from longmoe.configs import TrainConfig, to_json
from longmoe.data.loader import make_loader
from longmoe.parallel.mesh import make_mesh
from longmoe.train.checkpoints import Checkpoints
from longmoe.train.metrics import MetricsFile, ProgressDisplay, open_log
from longmoe.train.monitor import Monitor
from longmoe.train.state import TrainState, abstract_train_state, init_train_state
from longmoe.train.step import KEYS, make_train_step

PACKAGES = ("longmoe", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class RunPaths:
    """Where a run keeps its files."""
    root: Path

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.root / "log.txt"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def skipped_batches(self) -> Path:
        return self.root / "skipped_batches.json"


class Fitted(NamedTuple):
    """What `fit` returns."""
    state: TrainState
    paths: RunPaths


def fit(cfg: TrainConfig, run_dir: str, *, fresh: bool = False) -> Fitted:
    """Trains for cfg.steps steps and returns the final state and the run's paths.

    A run directory with a checkpoint of the same config is continued from it, data, balancer state and random keys included; fresh=True deletes what
    earlier runs wrote there and starts anew. Raises ValueError for a checkpoint of another config, RuntimeError after cfg.max_skipped_steps steps in a row
    whose gradients were not finite (skipped_batches.json then holds their source ids).
    """
    paths = RunPaths(Path(run_dir))
    if fresh:
        _delete(paths)
    paths.root.mkdir(parents=True, exist_ok=True)
    log = open_log(paths.log)
    mesh = make_mesh(cfg.mesh)
    with Checkpoints(paths.checkpoints, cfg.checkpoint) as checkpoints:
        latest = checkpoints.latest()
        if latest is None:
            state, data_state = init_train_state(cfg, mesh, jax.random.key(cfg.seed)), None
        else:
            state, data_state = checkpoints.restore(latest, abstract_train_state(cfg, mesh), cfg)
            log.info("resumed at step %d", latest)
        _write_run_json(paths, cfg, mesh)
        loader = make_loader(cfg.data, seed=cfg.seed, state=data_state, vocab_size=cfg.model.vocab_size)
        if int(state.step) < cfg.steps:
            state = _train(cfg, paths, checkpoints, mesh, state, loader)
    return Fitted(state, paths)


class _Pending(NamedTuple):
    """A step that was dispatched and whose metrics are still on the device."""
    step: int
    metrics: dict[str, jax.Array]
    tokens: int
    source_ids: np.ndarray


def _train(cfg: TrainConfig, paths: RunPaths, checkpoints: Checkpoints, mesh: jax.sharding.Mesh, state: TrainState,
           loader: Iterator[tuple[dict[str, np.ndarray], dict[str, Any]]]) -> TrainState:
    start = int(state.step)
    monitor = Monitor(cfg, paths.root, mesh.devices.flatten().tolist(), start)
    recorder = _Recorder(cfg, paths, start, monitor)
    with ProgressDisplay(paths.root.name, cfg.steps, start) as progress, monitor:
        batch, data_state = next(loader)
        progress.say("compiling")
        began = time.monotonic()
        step_fn = make_train_step(cfg, mesh).lower(state, {name: batch[name] for name in KEYS}).compile()
        progress.say(f"compiled in {time.monotonic() - began:.1f} s")
        progress.begin()
        monitor.start()
        pending: _Pending | None = None
        for step in range(start + 1, cfg.steps + 1):
            state, metrics = step_fn(state, {name: batch[name] for name in KEYS})
            applied = data_state
            previous, pending = pending, _Pending(step, metrics, int(np.sum(batch["segment_ids"] > 0)), batch["source_ids"])
            if step < cfg.steps:
                batch, data_state = next(loader)
            # The device is at work on this step: the metrics of the one before are ready.
            if previous is not None:
                recorder.record(previous, progress)
            if step % cfg.checkpoint.every == 0 or step == cfg.steps:
                recorder.record(pending, progress)
                pending = None
                checkpoints.save(step, state, applied, cfg)
    recorder.close()
    return state


class _Recorder:
    """Writes steps down and stops a run that no longer learns."""

    def __init__(self, cfg: TrainConfig, paths: RunPaths, step: int, monitor: Monitor):
        self._cfg, self._paths, self._monitor = cfg, paths, monitor
        self._file = MetricsFile(paths.metrics, step)
        self._skipped: list[_Pending] = []

    def record(self, step: _Pending, progress: ProgressDisplay) -> None:
        metrics = jax.device_get(step.metrics)
        metrics |= self._monitor.measure(step.tokens)
        logged = bool(step.step % self._cfg.log_every == 0 or step.step == self._cfg.steps or metrics["skipped"])
        if logged:
            metrics |= self._monitor.memory()
            self._file.write(step.step, metrics)
        self._monitor.observe(step.step, metrics, logged)
        progress.update(step.step, float(metrics["loss"]), metrics["tokens_per_second"])
        self._skipped = [*self._skipped, step] if metrics["skipped"] else []
        if len(self._skipped) >= self._cfg.max_skipped_steps:
            self._stop()

    def _stop(self) -> None:
        rows = [{"step": step.step, "source_ids": sorted({int(i) for i in step.source_ids.ravel()})} for step in self._skipped]
        self._paths.skipped_batches.write_text(json.dumps(rows))
        raise RuntimeError(f"steps {rows[0]['step']} to {rows[-1]['step']}: gradients were not finite {len(rows)} times in a row; the source ids of these "
                           f"batches are in {self._paths.skipped_batches}. Lower optim.learning_rate or look at those documents")

    def close(self) -> None:
        self._file.close()


def _delete(paths: RunPaths) -> None:
    for path in (paths.run_json, paths.metrics, paths.log, paths.skipped_batches):
        path.unlink(missing_ok=True)
    if paths.checkpoints.exists():
        shutil.rmtree(paths.checkpoints)


def _write_run_json(paths: RunPaths, cfg: TrainConfig, mesh: jax.sharding.Mesh) -> None:
    record = dict(config=json.loads(to_json(cfg)), versions={name: installed_version(name) for name in PACKAGES}, commit=_commit(),
                  device=jax.devices()[0].device_kind, mesh=dict(mesh.shape), kernels=pallas_kernels.kernel_report().splitlines())
    paths.run_json.write_text(json.dumps(record, indent=2))


def installed_version(package: str) -> str | None:
    """The version of an installed package; None for one that is not installed (this one, when it runs from its source tree)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree that this package runs from; None outside a repository."""
    found = subprocess.run(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None
