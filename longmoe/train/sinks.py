"""Where a logged step's figures go beside metrics.jsonl: TensorBoard and Weights & Biases, both optional and loaded when a config asks for them."""
import importlib
import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from longmoe.configs import TrainConfig, to_json


class Sink(Protocol):
    """Takes a logged step's figures, by name."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_sinks(cfg: TrainConfig, run_dir: Path, step: int) -> list[Sink]:
    """The sinks that cfg.log asks for, for a run that goes on after `step`. ValueError names a package that is missing."""
    sinks: list[Sink] = []
    if cfg.log.tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard", step))
    if cfg.log.wandb_project:
        sinks.append(WandbSink(cfg, run_dir, step))
    return sinks


class TensorBoardSink:
    """Event files in `folder`. A resumed run begins another file, which hides what an earlier one holds of the steps that it takes again."""

    def __init__(self, folder: Path, step: int = 0):
        # The package's own writer: neither TensorFlow nor PyTorch is needed.
        load = lambda name: _load(name, "LogConfig.tensorboard")
        self._event = load("tensorboard.compat.proto.event_pb2")
        self._summary = load("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = load("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(folder))
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._writer.add_event(self._event.Event(step=step + 1, wall_time=time.time(), session_log=start))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._writer.add_event(self._event.Event(step=step, wall_time=time.time(), summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run, named like the run's folder; a resumed run goes on in the same one, whose id is in wandb_run_id."""

    def __init__(self, cfg: TrainConfig, run_dir: Path, step: int = 0):
        wandb = _load("wandb", "LogConfig.wandb_project")
        kept = run_dir / "wandb_run_id"
        if step == 0 or not kept.exists():
            kept.write_text(uuid.uuid4().hex)
        self._run = wandb.init(project=cfg.log.wandb_project, name=run_dir.name, id=kept.read_text(), resume="allow", dir=str(run_dir),
                               config=json.loads(to_json(cfg)))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def by_name(metrics: Mapping[str, Any]) -> dict[str, float]:
    """A number a name: scalars as they are, one number a layer as `name/layer`; arrays of more dimensions (expert_load) are left out."""
    figures = {}
    for name, value in metrics.items():
        value = np.asarray(value)
        if value.ndim == 0:
            figures[name] = float(value)
        elif value.ndim == 1:
            figures |= {f"{name}/{layer}": float(x) for layer, x in enumerate(value)}
    return figures


def _load(module: str, field: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ValueError(f"{field}: got a request for {package}, wanted that package installed ({error}); pip install \"longmoe[log]\", or leave "
                         f"{field} at its default") from error
