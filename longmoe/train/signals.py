"""Signals that end a run early and lose nothing: SIGTERM (how Slurm and the clouds announce preemption) and SIGINT (Ctrl-C)."""
import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any


class Stopped(SystemExit):
    """Raised by `fit` after a signal, when the run's state is saved: an uncaught one ends the process with status 0. The same call resumes."""

    def __init__(self, received: signal.Signals):
        super().__init__(0)
        self.received = received


class StopSignals:
    """While entered, SIGTERM and SIGINT only set `received`, for the loop to see after the step that runs; a second SIGINT interrupts at once.

    Leaving raises Stopped if a signal came and nothing else was raised. A signal that the process ignores stays ignored. Python has signal handlers in its
    main thread only: in another thread nothing is installed and the process's own handlers stand; `in_main_thread` is False then.
    """

    def __init__(self) -> None:
        self.in_main_thread = threading.current_thread() is threading.main_thread()
        self._process = os.getpid()
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def ignored(self) -> list[str]:
        """Names of those that the process ignores; shells start background jobs (`command &`) of scripts so that they ignore SIGINT."""
        return [number.name for number in (signal.SIGTERM, signal.SIGINT) if self.in_main_thread and number not in self._previous]

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGTERM, signal.SIGINT) if self.in_main_thread else ():
            if signal.getsignal(number) != signal.SIG_IGN:
                # None means a handler that was not installed from Python and cannot be put back.
                self._previous[number] = signal.signal(number, self._receive) or signal.SIG_DFL
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if kind is None and self.received is not None:
            raise Stopped(self.received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A process forked from the run (a data worker): the run decides when it ends, which it may do by SIGTERM.
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if self.received is None:
            self.received = signal.Signals(number)
            if signal.SIGINT in self._previous:
                signal.signal(signal.SIGINT, self._previous[signal.SIGINT])
            # Not through logging or print: their buffers may be in the middle of a write.
            with contextlib.suppress(OSError):                          # standard error may be closed
                after = "; SIGINT now interrupts at once" if signal.SIGINT in self._previous else ""
                os.write(2, f"\n{self.received.name}: stopping, the steps that run are finished and saved first{after}\n".encode())
