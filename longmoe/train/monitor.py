"""What watches a run: throughput, alerts, optional sinks and the index of runs, behind one object that the loop talks to."""
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from longmoe.configs import TrainConfig
from longmoe.train.alerts import Alerts
from longmoe.train.run_files import is_local
from longmoe.train.run_index import write_run_index
from longmoe.train.sinks import Sink, by_name, open_sinks
from longmoe.train.throughput import Throughput

INDEX_SECONDS = 60.0
"""Seconds between updates of the index while a run goes on."""
log = logging.getLogger("longmoe")


class Monitor:
    """Use as a context manager, around the steps. Works on the host with metrics that the loop has fetched anyhow.

    Raises ValueError, before the first step, for a sink whose package is missing.
    """

    def __init__(self, cfg: TrainConfig, run_dir: epath.Path, devices: Sequence[Any], step: int):
        """devices: those of the mesh; step: the one that the run goes on after. The index is kept for local run directories only."""
        self._cfg, self._run_dir = cfg, run_dir
        self._throughput = Throughput(cfg, devices)
        self._alerts = Alerts(cfg.log.alerts, run_dir.name)
        self._step = step
        self._sinks: list[Sink] = []
        self._indexed = -INDEX_SECONDS

    def __enter__(self) -> "Monitor":
        self._sinks = open_sinks(self._cfg, self._run_dir, self._step)
        self._index()
        self._alerts.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        self._alerts.__exit__(kind, value, trace)
        for sink in self._sinks:
            sink.close()
        self._indexed = -INDEX_SECONDS
        self._index()

    def start(self) -> None:
        """Compilation is over: time counts from here."""
        self._throughput.start()
        self._alerts.start()

    def measure(self, tokens: int) -> dict[str, float]:
        """Throughput of the step that ended now."""
        return self._throughput.step(tokens)

    def memory(self) -> dict[str, int]:
        """Device memory, for a logged step."""
        return self._throughput.memory()

    def observe(self, step: int, metrics: Mapping[str, Any], logged: bool) -> None:
        """Looks at a step's metrics, and passes them on where the step is logged."""
        self._alerts.check(step, metrics)
        if logged:
            figures = by_name(metrics) if self._sinks else {}
            for sink in self._sinks:
                sink.write(step, figures)
            self._index()

    def _index(self) -> None:
        if not self._cfg.log.run_index or not is_local(self._run_dir) or time.monotonic() - self._indexed < INDEX_SECONDS:
            return
        self._indexed = time.monotonic()
        folder = Path(self._run_dir).absolute().parent
        try:
            written = write_run_index(folder)
        except OSError as error:
            log.warning("the index of runs could not be written (%s); log.run_index=False leaves it out", error)
            return
        if written is None:
            log.warning("%s is not an index of runs: left as it is; log.run_index=False leaves the index out", folder / "index.html")
