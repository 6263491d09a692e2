"""`fit`: from a config to a trained model in a run directory; the same call again resumes."""
import json
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from longmoe.configs import TrainConfig
from longmoe.data.loader import make_loader
from longmoe.parallel.mesh import make_mesh
from longmoe.train import startup
from longmoe.train.checkpoints import Checkpoints, delete_checkpoints
from longmoe.train.metrics import MetricsFile, ProgressDisplay, open_log
from longmoe.train.monitor import Monitor
from longmoe.train.run_files import GrowingFiles, RunPaths, is_local, only_writer, replace_text, write_run_json
from longmoe.train.signals import StopSignals
from longmoe.train.state import TrainState, abstract_train_state, init_train_state
from longmoe.train.step import KEYS, make_train_step


class Fitted(NamedTuple):
    """What `fit` returns."""
    state: TrainState
    paths: RunPaths


def fit(cfg: TrainConfig, run_dir: epath.PathLike, *, fresh: bool = False, resume_from: int | None = None) -> Fitted:
    """Trains for cfg.steps steps and returns the final state and the run's paths.

    run_dir is a local folder or any path that `etils.epath` takes. One with a checkpoint of the same config is continued from its newest complete one, data,
    balancer state and random keys included; resume_from names an older one that was kept, and drops the checkpoints and metrics of later steps; fresh=True
    deletes what earlier runs wrote there and starts anew.

    SIGTERM, or SIGINT once, saves after the step that runs and raises Stopped, a SystemExit with status 0 (in the main thread only).
    Raises ValueError for a checkpoint of another config, a damaged one, data that changed, or a folder where another process trains; OSError for a
    checkpoint that cannot be written; RuntimeError after cfg.max_skipped_steps steps in a row whose gradients were not finite (skipped_batches.json then
    holds their source ids).
    """
    if fresh and resume_from is not None:
        raise ValueError(f"resume_from: got {resume_from} with fresh=True, wanted one of the two: fresh deletes every checkpoint")
    paths = RunPaths(epath.Path(run_dir))
    paths.root.mkdir(parents=True, exist_ok=True)
    with StopSignals() as signals, only_writer(paths.root):
        if fresh:
            _delete(paths)
        return _fit(cfg, paths, signals, resume_from)


def _fit(cfg: TrainConfig, paths: RunPaths, signals: StopSignals, resume_from: int | None) -> Fitted:
    with GrowingFiles(paths) as files:
        log = open_log(files.log)
        if not is_local(paths.root):
            log.info("%s cannot be appended to: metrics.jsonl and log.txt grow in %s and are copied at each checkpoint", paths.root, files.log.parent)
        if not signals.in_main_thread:
            log.info("not in the main thread: SIGTERM and SIGINT will not save the run's state")
        with Checkpoints(paths.checkpoints, cfg.checkpoint) as checkpoints:
            mesh = make_mesh(cfg.mesh)
            state, data_state = _begin(cfg, checkpoints, mesh, resume_from)
            # Whatever refuses the saved data does so before anything is dropped.
            loader = make_loader(cfg.data, seed=cfg.seed, state=data_state, vocab_size=cfg.model.vocab_size)
            start = int(state.step)
            later = [step for step in checkpoints.steps() if step > start]
            if later:
                log.info("resuming from step %d as asked: dropping the checkpoints of steps %s and the metrics of later steps", start, later)
                checkpoints.drop_after(start)
            write_run_json(paths, cfg, mesh)
            recorder = _Recorder(cfg, paths, files, mesh.devices.flatten().tolist(), start)
            if start < cfg.steps:
                state = _train(cfg, recorder, checkpoints, signals, mesh, state, loader)
            recorder.close()
    return Fitted(state, paths)


def _begin(cfg: TrainConfig, checkpoints: Checkpoints, mesh: jax.sharding.Mesh, resume_from: int | None) -> tuple[TrainState, dict[str, Any] | None]:
    """(state, data state) that training goes on from."""
    steps = checkpoints.steps()
    if resume_from is None and not steps:
        return init_train_state(cfg, mesh, jax.random.key(cfg.seed)), None
    step = steps[-1] if resume_from is None else resume_from
    restored = checkpoints.restore(step, abstract_train_state(cfg, mesh), cfg)
    logging.getLogger("longmoe").info("resumed at step %d", step)
    return restored


class _Pending(NamedTuple):
    """A step that was dispatched and whose metrics are still on the device."""
    step: int
    metrics: dict[str, jax.Array]
    tokens: int
    source_ids: np.ndarray


def _train(cfg: TrainConfig, recorder: "_Recorder", checkpoints: Checkpoints, signals: StopSignals, mesh: jax.sharding.Mesh, state: TrainState,
           loader: Iterator[tuple[dict[str, np.ndarray], dict[str, Any]]]) -> TrainState:
    start = int(state.step)
    with ProgressDisplay(recorder.run_name, cfg.steps, start) as progress, recorder.monitor:
        batch, data_state = next(loader)
        recorder.start(startup.before_compiling(cfg, mesh), progress)
        progress.say("compiling")
        began = time.monotonic()
        step_fn = make_train_step(cfg, mesh).lower(state, {name: batch[name] for name in KEYS}).compile()
        recorder.start(startup.after_compiling(step_fn, time.monotonic() - began), progress)
        if signals.received:                                            # before the first step: there is nothing to save
            return state
        progress.begin()
        recorder.monitor.start()
        pending: _Pending | None = None
        for step in range(start + 1, cfg.steps + 1):
            state, metrics = step_fn(state, {name: batch[name] for name in KEYS})
            applied = data_state
            previous, pending = pending, _Pending(step, metrics, int(np.sum(batch["segment_ids"] > 0)), batch["source_ids"])
            if step < cfg.steps and not signals.received:
                batch, data_state = next(loader)
            # The device is at work on this step: the metrics of the one before are ready.
            if previous is not None:
                recorder.record(previous, progress)
            stopping = signals.received
            if step % cfg.checkpoint.every == 0 or step == cfg.steps or stopping:
                recorder.record(pending, progress)
                pending = None
                recorder.publish()
                checkpoints.save(step, state, applied, cfg)
            if stopping:
                logging.getLogger("longmoe").info("%s: saved step %d of %d; the same command resumes", stopping.name, step, cfg.steps)
                break
    return state


class _Recorder:
    """Writes steps down and stops a run that no longer learns."""

    def __init__(self, cfg: TrainConfig, paths: RunPaths, files: GrowingFiles, devices: list[jax.Device], step: int):
        self._cfg, self._paths, self._files = cfg, paths, files
        self.monitor = Monitor(cfg, paths.root, devices, step)
        self._file = MetricsFile(files.metrics, step)
        self._skipped: list[_Pending] = []

    @property
    def run_name(self) -> str:
        return self._paths.root.name

    def start(self, report: startup.Startup, progress: ProgressDisplay) -> None:
        """Says what the run starts with, in the log, on the console and in run.json."""
        startup.log(report.lines)
        for line in report.lines:
            progress.note(line)
        if report.record:
            replace_text(self._paths.run_json, json.dumps(json.loads(self._paths.run_json.read_text()) | report.record, indent=2))

    def record(self, step: _Pending, progress: ProgressDisplay) -> None:
        metrics = jax.device_get(step.metrics)
        metrics |= self.monitor.measure(step.tokens)
        logged = bool(step.step % self._cfg.log_every == 0 or step.step == self._cfg.steps or metrics["skipped"])
        if logged:
            metrics |= self.monitor.memory()
            self._file.write(step.step, metrics)
        self.monitor.observe(step.step, metrics, logged)
        progress.update(step.step, float(metrics["loss"]), metrics["tokens_per_second"])
        self._skipped = [*self._skipped, step] if metrics["skipped"] else []
        if len(self._skipped) >= self._cfg.max_skipped_steps:
            self._stop()

    def _stop(self) -> None:
        rows = [{"step": step.step, "source_ids": sorted({int(i) for i in step.source_ids.ravel()})} for step in self._skipped]
        self._paths.skipped_batches.write_text(json.dumps(rows))
        raise RuntimeError(f"steps {rows[0]['step']} to {rows[-1]['step']}: gradients were not finite {len(rows)} times in a row; the source ids of these "
                           f"batches are in {self._paths.skipped_batches}. Lower optim.learning_rate or look at those documents")

    def publish(self) -> None:
        """What was written so far is where the run directory is, before a checkpoint that it belongs to."""
        self._files.publish()

    def close(self) -> None:
        self._file.close()


def _delete(paths: RunPaths) -> None:
    # Checkpoints first: what the other files say of a run without any is overwritten.
    delete_checkpoints(paths.checkpoints)
    for path in (paths.run_json, paths.metrics, paths.log, paths.skipped_batches):
        path.unlink(missing_ok=True)
