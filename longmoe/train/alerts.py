"""Alerts: a command or a webhook that hears of skipped steps, stalls, uneven experts and a run that stopped. Nothing here stops training."""
import datetime
import json
import logging
import queue
import shlex
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

import numpy as np

from longmoe.configs import AlertConfig

log = logging.getLogger("longmoe")


class Alerts:
    """Sends alerts from a thread of its own, at most one of a kind in `every_seconds`. Use as a context manager; leaving it waits for what is being sent.

    An alert is a JSON object: run, kind ("skipped", "max_violation", "stall" or "stopped"), step, text, time (UTC), suppressed (alerts of the kind since
    the last one that was sent).
    """

    def __init__(self, config: AlertConfig, run: str):
        self._config, self._run = config, run
        self._sent: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}
        self._lock = threading.Lock()
        self._queue: queue.Queue[bytes | None] = queue.Queue()
        self._step, self._beat = 0, time.monotonic()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "Alerts":
        if self._config.command or self._config.webhook:
            self._threads.append(threading.Thread(target=self._deliver, name="alerts", daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self.send("stopped", self._step, f"the run stopped: {kind.__name__}: {value}")
        self._closing.set()
        self._queue.put(None)
        # A command and a webhook, and an alert that was already on its way.
        deadline = time.monotonic() + 4 * self._config.timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("alerts: %s did not end in time; alerts may be lost", thread.name)

    def start(self) -> None:
        """Compilation is over: the watchdog counts from here."""
        self._beat = time.monotonic()
        if self._threads and self._config.stall_seconds is not None:
            self._threads.append(threading.Thread(target=self._watch, name="watchdog", daemon=True))
            self._threads[-1].start()

    def beat(self, step: int) -> None:
        """A step has ended: the watchdog starts counting anew."""
        self._step, self._beat = step, time.monotonic()

    def check(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Looks at a step's metrics (on the host)."""
        self.beat(step)
        if self._config.on_skipped and metrics["skipped"]:
            self.send("skipped", step, f"step {step} was skipped: its gradients were not finite (loss {float(metrics['loss'])})")
        limit, violation = self._config.max_violation, np.asarray(metrics["max_violation"])
        if limit is not None and violation.size and violation.max() > limit:
            self.send("max_violation", step, f"MaxVio {violation.max():.2f} in MoE layer {violation.argmax()} at step {step} is above {limit}")

    def send(self, kind: str, step: int, text: str) -> None:
        """Queues an alert unless one of its kind was queued within every_seconds. Returns at once."""
        if not self._threads:
            return
        with self._lock:
            now = time.monotonic()
            if now - self._sent.get(kind, -np.inf) < self._config.every_seconds:
                self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
                return
            self._sent[kind] = now
            suppressed = self._suppressed.pop(kind, 0)
        record = dict(run=self._run, kind=kind, step=step, text=f"{self._run}: {text}", suppressed=suppressed,
                      time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
        self._queue.put(json.dumps(record).encode())

    def _watch(self) -> None:
        limit = self._config.stall_seconds
        while not self._closing.wait(min(1.0, limit / 4)):
            idle = time.monotonic() - self._beat
            if idle > limit:
                self.send("stall", self._step, f"no step has ended for {idle:.0f} s, the last was step {self._step}")

    def _deliver(self) -> None:
        while (body := self._queue.get()) is not None:
            for name, target, deliver in (("command", self._config.command, _run_command), ("webhook", self._config.webhook, _post)):
                if target:
                    try:
                        deliver(target, body, self._config.timeout_seconds)
                    except (OSError, ValueError, subprocess.SubprocessError) as error:
                        log.warning("alerts: the %s failed (%s); the alert was %s", name, error, body.decode())


def _run_command(command: str, body: bytes, timeout: float) -> None:
    subprocess.run(shlex.split(command), input=body, timeout=timeout, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _post(address: str, body: bytes, timeout: float) -> None:
    request = urllib.request.Request(address, data=body, headers={"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=timeout):
        pass
