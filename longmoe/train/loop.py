"""`fit`: from a config to a trained model in a run directory; the same call again resumes."""
import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from longmoe.configs import TrainConfig
from longmoe.data.loader import make_loader
from longmoe.parallel.mesh import make_mesh
from longmoe.train import startup
from longmoe.train.checkpoints import Checkpoints, complete_steps, delete_checkpoints
from longmoe.train.metrics import MetricsFile, ProgressDisplay, open_log
from longmoe.train.monitor import Monitor
from longmoe.train.run_files import GrowingFiles, RunPaths, is_local, only_writer, replace_text, write_run_json
from longmoe.train.signals import StopSignals
from longmoe.train.stages import Measure, Stage, StageRecord, asked, stages_of
from longmoe.train.state import TrainState, abstract_train_state, lowered_init
from longmoe.train.step import KEYS, make_train_step


class Fitted(NamedTuple):
    """What `fit` returns."""
    state: TrainState
    paths: RunPaths

    def __repr__(self) -> str:
        """Not of every array: a notebook shows the last value of a cell."""
        return f"Fitted(step {int(self.state.step)}, {self.paths.root})"


def fit(cfg: TrainConfig, run_dir: epath.PathLike, *, fresh: bool = False, resume_from: int | None = None, measure: Measure | None = None) -> Fitted:
    """Trains for cfg.steps steps and returns the final state and the run's paths.

    run_dir is a local folder or any path that `etils.epath` takes. One with a checkpoint of the same config is continued from its newest complete one, data,
    balancer state and random keys included; resume_from names an older one that was kept, and drops the checkpoints and metrics of later steps; fresh=True
    deletes what earlier runs wrote there and starts anew.

    cfg.stages are trained one after another, each with a compiled step of its own; stages.json holds what each was made of. measure gives the figures
    that their gates ask for (`longmoe.measure_gate` is one).

    SIGTERM, or SIGINT once, saves after the step that runs and raises Stopped, a SystemExit with status 0 (in the main thread only).
    Raises ValueError for a checkpoint of another config, a damaged one, data that changed, or a folder where another process trains; OSError for a
    checkpoint that cannot be written; RuntimeError after cfg.max_skipped_steps steps in a row whose gradients were not finite (skipped_batches.json then
    holds their source ids), or when a stage missed its gate.
    """
    if fresh and resume_from is not None:
        raise ValueError(f"resume_from: got {resume_from} with fresh=True, wanted one of the two: fresh deletes every checkpoint")
    paths = RunPaths(epath.Path(run_dir))
    paths.root.mkdir(parents=True, exist_ok=True)
    with StopSignals() as signals, only_writer(paths.root):
        if fresh:
            _delete(paths)
        return _fit_stages(cfg, paths, signals, resume_from, measure)


def _fit_stages(cfg: TrainConfig, paths: RunPaths, signals: StopSignals, resume_from: int | None, measure: Measure | None) -> Fitted:
    stages, record = stages_of(cfg), StageRecord(paths)
    gated = [stage.index for stage in stages if asked(stage)]
    if gated and measure is None:
        raise ValueError(f"measure: got None with gates at the end of stages {gated}, wanted a function that measures them, such as longmoe.measure_gate")
    reached = max(complete_steps(paths.checkpoints), default=0) if resume_from is None else resume_from
    for stage in stages:
        if stage is not stages[-1] and (stage.end < reached or stage.end == reached and record.passed(stage)):
            continue
        fitted, data_state = _fit(stage, paths, signals, resume_from)
        resume_from = None
        if signals.received:
            break
        if cfg.stages and not record.passed(stage):
            record.end(stage, data_state, measure(stage.config, fitted.state, asked(stage)) if asked(stage) else {})
        if stage is not stages[-1]:
            del fitted                                                  # the next stage reads it from the checkpoint, onto its own mesh
    return fitted


def _fit(stage: Stage, paths: RunPaths, signals: StopSignals, resume_from: int | None) -> tuple[Fitted, dict[str, Any]]:
    """Trains to the end of a stage -> what was fitted, and the data's position."""
    cfg = stage.config
    with GrowingFiles(paths) as files:
        log = open_log(files.log)
        if not is_local(paths.root):
            log.info("%s cannot be appended to: metrics.jsonl and log.txt grow in %s and are copied at each checkpoint", paths.root, files.log.parent)
        if not signals.in_main_thread:
            log.info("not in the main thread: SIGTERM and SIGINT will not save the run's state")
        if signals.ignored:
            log.info("this process ignores %s, as whatever started it asked: it will neither stop nor save the run", " and ".join(signals.ignored))
        with Checkpoints(paths.checkpoints, cfg.checkpoint) as checkpoints:
            mesh = make_mesh(cfg.mesh)
            start, make_state, data_state = _begin(cfg, checkpoints, mesh, resume_from)
            # Whatever refuses the saved data does so before anything is dropped.
            loader = make_loader(cfg.data, seed=cfg.seed, state=data_state, vocab_size=cfg.model.vocab_size)
            later = [step for step in checkpoints.steps() if step > start]
            if later:
                log.info("resuming from step %d as asked: dropping the checkpoints of steps %s and the metrics of later steps", start, later)
                checkpoints.drop_after(start)
            write_run_json(paths, cfg, mesh)
            recorder = _Recorder(stage, paths, files, mesh.devices.flatten().tolist(), start)
            shown = ProgressDisplay(recorder.run_name, stage.end, start)
            for change in checkpoints.changes(start, cfg) if start else ():
                shown.note(change)
            if start < stage.end:
                state, data_state = _train(stage, recorder, checkpoints, signals, mesh, start, make_state, loader)
            else:
                state = make_state()
                if stage.end == cfg.steps:
                    shown.note(f"step {start} of {cfg.steps} is done already; more steps go on from there")
            recorder.close()
    return Fitted(state, paths), data_state or {}


def _begin(cfg: TrainConfig, checkpoints: Checkpoints, mesh: jax.sharding.Mesh,
           resume_from: int | None) -> tuple[int, Callable[[], TrainState], dict[str, Any] | None]:
    """(step, a function that gives the state, data state) that training goes on from. A saved state is read here, whatever is wrong with it is said now."""
    steps = checkpoints.steps()
    if resume_from is None and not steps:
        key = jax.random.key(cfg.seed)
        lowered = lowered_init(cfg, mesh, key)
        return 0, lambda: lowered.compile()(key), None
    step = steps[-1] if resume_from is None else resume_from
    state, data_state = checkpoints.restore(step, abstract_train_state(cfg, mesh), cfg)
    logging.getLogger("longmoe").info("resumed at step %d", step)
    return int(state.step), lambda: state, data_state


def state_and_step(cfg: TrainConfig, mesh: jax.sharding.Mesh, make_state: Callable[[], TrainState]) -> tuple[TrainState, jax.stages.Compiled]:
    """The state, and the step: compiled while a first state is made, for either can take most of a minute on a GPU."""
    shape = (cfg.data.batch_size, cfg.data.sequence_length)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.float32 if name == "loss_weights" else jnp.int32) for name in KEYS}
    with ThreadPoolExecutor(1, thread_name_prefix="longmoe-state") as beside:
        state = beside.submit(make_state)
        step = make_train_step(cfg, mesh).lower(abstract_train_state(cfg, mesh), batch).compile()
        return state.result(), step


class _Pending(NamedTuple):
    """A step that was dispatched and whose metrics are still on the device."""
    step: int
    metrics: dict[str, jax.Array]
    tokens: int
    source_ids: np.ndarray


def _train(stage: Stage, recorder: "_Recorder", checkpoints: Checkpoints, signals: StopSignals, mesh: jax.sharding.Mesh, start: int,
           make_state: Callable[[], TrainState],
           loader: Iterator[tuple[dict[str, np.ndarray], dict[str, Any]]]) -> tuple[TrainState, dict[str, Any] | None]:
    """-> the state, and the data's position after its last step (None: no step was taken)."""
    cfg, applied = stage.config, None
    with ProgressDisplay(recorder.run_name, stage.end, start) as progress, recorder.monitor:
        batch, data_state = next(loader)
        recorder.start(startup.before_compiling(cfg, mesh), progress)
        if start:
            progress.note(f"resumed at step {start}")
        progress.say("compiling")
        began = time.monotonic()
        state, step_fn = state_and_step(cfg, mesh, make_state)
        recorder.start(startup.after_compiling(step_fn, time.monotonic() - began), progress)
        if signals.received:
            progress.note(f"{signals.received.name}: stopped before the first step, with nothing to save")
            return state, applied
        progress.begin()
        recorder.monitor.start()
        pending: _Pending | None = None
        for step in range(start + 1, stage.end + 1):
            state, metrics = step_fn(state, {name: batch[name] for name in KEYS})
            applied = data_state
            previous, pending = pending, _Pending(step, metrics, int(np.sum(batch["segment_ids"] > 0)), batch["source_ids"])
            if step < stage.end and not signals.received:
                batch, data_state = next(loader)
            # The device is at work on this step: the metrics of the one before are ready.
            if previous is not None:
                recorder.record(previous, progress)
            stopping = signals.received
            if step % cfg.checkpoint.every == 0 or step == stage.end or stopping:
                recorder.record(pending, progress)
                pending = None
                recorder.publish()
                checkpoints.save(step, state, applied, cfg)
            if stopping or step == stage.end:
                text = f"{stopping.name}: saved step {step} of {cfg.steps}; the same command resumes" if stopping else f"saved step {step} of {cfg.steps}"
                logging.getLogger("longmoe").info("%s", text)
                progress.note(text)
            if stopping:
                break
    return state, applied


class _Recorder:
    """Writes steps down and stops a run that no longer learns."""

    def __init__(self, stage: Stage, paths: RunPaths, files: GrowingFiles, devices: list[jax.Device], step: int):
        self._cfg, self._end, self._paths, self._files = stage.config, stage.end, paths, files
        self.monitor = Monitor(stage.config, paths.root, devices, step)
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
        logged = bool(step.step % self._cfg.log_every == 0 or step.step == self._end or metrics["skipped"])
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
    for path in (paths.run_json, paths.metrics, paths.log, paths.skipped_batches, paths.stages):
        path.unlink(missing_ok=True)
    if paths.evaluations.exists():
        paths.evaluations.rmtree()
