"""Programs of a benchmark, compiled side by side in processes of their own: lowering holds Python's lock, and a compilation beside a timing would spoil it."""
import argparse
import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
from jax.experimental import serialize_executable


def add_processes(parser: argparse.ArgumentParser) -> None:
    """The flag --processes, by default two fewer than there are cores."""
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 1) - 2, 1), help="checks and compilations at a time")


def pool_of(processes: int) -> concurrent.futures.ProcessPoolExecutor:
    """Processes that share the GPU with this one; called before JAX looks for devices."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))


def _compiled(program: Callable[..., tuple[Callable, tuple]], job: tuple) -> Any:
    function, arguments = program(*job)
    return serialize_executable.serialize(jax.jit(function).lower(*arguments).compile())


class Programs:
    """program(*job) -> (function, shapes of its arguments) for each job; `programs[job]` is the compiled function, or raises what its compilation raised."""

    def __init__(self, pool: concurrent.futures.Executor, program: Callable[..., tuple[Callable, tuple]], jobs: Iterable[tuple[Hashable, ...]]):
        """program: a function of a module, since it runs in the pool's processes."""
        self._pending = {job: pool.submit(_compiled, program, job) for job in jobs}

    def wait(self) -> None:
        """Until nothing compiles any more."""
        concurrent.futures.wait(self._pending.values())

    def __getitem__(self, job: tuple[Hashable, ...]) -> Callable[..., Any]:
        return serialize_executable.deserialize_and_load(*self._pending[job].result())
