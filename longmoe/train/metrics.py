"""What a run writes while it trains: metrics.jsonl, log.txt and the progress display."""
import importlib.util
import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from longmoe.train.run_files import replace_text

CLOCK = ("tokens_per_second", "step_seconds", "elapsed_seconds")
"""Figures of a line that come from the clock: two runs that agree to the bit differ in these alone (and in mfu, where there is one)."""
LOAD_EVERY = 10
"""Steps between lines that carry expert_load: it is [MoE layers, E] numbers, the others are scalars and one number a layer."""


class MetricsFile:
    """metrics.jsonl: one JSON object a logged step, in the order of the steps, flushed line by line.

    Opened at `step` it drops lines of later steps, which a resumed run takes again.
    """

    def __init__(self, path: Path, step: int = 0):
        kept = [line for line in read_lines(path) if line["step"] <= step]
        replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        line = {"step": step} | {name: _plain(value) for name, value in metrics.items()}
        if step % LOAD_EVERY and step != 1:
            line.pop("expert_load", None)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl; a last line that was cut off while it was written is left out. Missing file: none."""
    lines = path.read_text().splitlines() if path.exists() else []
    objects = []
    for number, line in enumerate(lines, 1):
        try:
            objects.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}: line {number} is not JSON ({error}); the file was changed by something else than a run") from error
    return objects


def _plain(value: Any) -> Any:
    """JSON without NaN or infinity, which JSON has no word for: they become strings."""
    value = np.asarray(value)
    if value.ndim:
        return [_plain(x) for x in value]
    number = value.item()
    return number if not isinstance(number, float) or math.isfinite(number) else str(number)


def open_log(path: Path) -> logging.Logger:
    """Logger "longmoe", also writing to `path`, as does the kernels' logger, which says what was chosen and why; one file at a time."""
    loggers = [logging.getLogger(name) for name in ("longmoe", "pallas_kernels")]
    for handler in [handler for logger in loggers for handler in logger.handlers if isinstance(handler, logging.FileHandler)]:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    # absl, which Orbax imports, hangs a plain handler on the root that prints what the root's own level would hold back: every line of the run twice.
    for handler in logging.root.handlers:
        if type(handler) is logging.StreamHandler and _as_loud_as_root not in handler.filters:
            handler.addFilter(_as_loud_as_root)
    return loggers[0]


def _as_loud_as_root(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.root.level or record.name.split(".")[0] not in ("longmoe", "pallas_kernels")


class ProgressDisplay:
    """A live bar where there is a terminal or a notebook with ipywidgets, otherwise a plain line now and then. Use as a context manager."""

    PLAIN_SECONDS = 10.0

    def __init__(self, name: str, total: int, start: int = 0):
        self._name, self._total, self._start, self._step = name, total, start, start
        self._console = Console(stderr=True)
        if self._console.is_jupyter and not importlib.util.find_spec("ipywidgets"):
            # A bar in a notebook is a widget. Without those rich would warn at each run, and what a terminal shows floods the output: ipykernel says it is one.
            self._console = Console(stderr=True, force_jupyter=False, force_terminal=False)
        self._live = self._console.is_terminal or self._console.is_jupyter
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"),
                   TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, disable=not self._live)
        self._task = self._bar.add_task(name, total=total, completed=start, state="")
        self._began = self._said = time.monotonic()

    def __enter__(self) -> "ProgressDisplay":
        self._bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.__exit__(kind, value, trace)

    def begin(self) -> None:
        """Time counts from here: called when compilation is over."""
        self._began = self._said = time.monotonic()
        self._bar.reset(self._task, completed=self._start, state="")

    def say(self, text: str) -> None:
        """What the run is at before its first step, such as "compiling"."""
        if self._live:
            self._bar.update(self._task, state=text)
            self._bar.refresh()
        else:
            print(f"{self._name}: {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line that stays above the bar."""
        if self._live:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(f"{self._name}: {text}", file=sys.stderr, flush=True)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """After each step of training."""
        self.advance(step, f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s")

    def advance(self, step: int, state: str) -> None:
        """After a step, `state` in words beside the bar."""
        self._step = step
        self._bar.update(self._task, completed=step, state=state)
        now = time.monotonic()
        if not self._live and (now - self._said >= self.PLAIN_SECONDS or step == self._total):
            remaining = (now - self._began) / max(1, step - self._start) * (self._total - step)
            print(f"{self._name}: step {step}/{self._total}  {state}  eta {remaining:.0f} s", file=sys.stderr, flush=True)
            self._said = now
