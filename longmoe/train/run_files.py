"""The files of a run: where they are, what run.json says, and writes that a crash cannot leave half done.

A run directory is any path that `etils.epath` takes. metrics.jsonl and log.txt grow line by line, which object stores (gs://, s3://) cannot do: there they
are kept in a local folder and copied over before each checkpoint and at the end.
"""
import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from etils import epath

import pallas_kernels
from longmoe.configs import TrainConfig, to_json

PACKAGES = ("longmoe", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class RunPaths:
    """Where a run keeps its files."""
    root: epath.Path

    @property
    def run_json(self) -> epath.Path:
        return self.root / "run.json"

    @property
    def metrics(self) -> epath.Path:
        return self.root / "metrics.jsonl"

    @property
    def log(self) -> epath.Path:
        return self.root / "log.txt"

    @property
    def checkpoints(self) -> epath.Path:
        return self.root / "checkpoints"

    @property
    def stages(self) -> epath.Path:
        return self.root / "stages.json"

    @property
    def evaluations(self) -> epath.Path:
        """Folder of what was measured on its checkpoints."""
        return self.root / "evaluations"

    @property
    def skipped_batches(self) -> epath.Path:
        return self.root / "skipped_batches.json"


class GrowingFiles:
    """metrics.jsonl and log.txt while a run writes them: in the run directory itself, or in a local folder if that is an object store.

    `metrics` and `log` are local paths. Use as a context manager.
    """

    def __init__(self, paths: RunPaths):
        self._copies: dict[Path, epath.Path] = {}
        folder = Path(os.fspath(paths.root)) if is_local(paths.root) else Path(tempfile.mkdtemp(prefix="longmoe-"))
        self.metrics, self.log = folder / paths.metrics.name, folder / paths.log.name
        if not is_local(paths.root):
            self._copies = {self.metrics: paths.metrics, self.log: paths.log}
        for here, there in self._copies.items():
            if there.exists():
                here.write_text(there.read_text())

    def __enter__(self) -> "GrowingFiles":
        return self

    def __exit__(self, *exception: object) -> None:
        self.publish()
        for here in self._copies:
            shutil.rmtree(here.parent, ignore_errors=True)

    def publish(self) -> None:
        """Copies both to an object store; nothing to do for a local run directory."""
        for here, there in self._copies.items():
            if here.exists():
                there.write_text(here.read_text())


@contextlib.contextmanager
def only_writer(root: epath.Path) -> Iterator[None]:
    """Holds a local run directory against a second process, which would delete checkpoints under the first one's hands.

    The lock goes with the process, however it ends. ValueError when another one holds it. Object stores have no locks.
    """
    if not is_local(root):
        yield
        return
    # A record lock (not flock): worker processes of the data do not inherit it, so it cannot outlive a run that was killed.
    with open(root / "lock", "w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"run_dir: got {root}, where another process is training; wait for it, end it, or use another folder") from error
        except OSError as error:
            logging.getLogger("longmoe").warning("%s: this file system has no locks (%s); do not start a second run there", root, error)
        yield


def is_local(path: epath.PathLike) -> bool:
    """Whether `path` is on a file system of this machine, where files can be appended to, synced and renamed."""
    return "://" not in os.fspath(path)


def replace_text(path: epath.PathLike, text: str) -> None:
    """Writes a file so that a crash at any moment, of the machine too, leaves the old contents or the new ones, whole."""
    path = epath.Path(path)
    if not is_local(path):                                              # an object appears whole or not at all
        path.write_text(text)
        return
    scratch = path.parent / f"{path.name}.tmp"
    scratch.write_text(text)
    sync(scratch)
    os.replace(scratch, path)
    sync(path.parent)


def sync(path: epath.PathLike) -> None:
    """Has the operating system write a local file or folder to its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_run_json(paths: RunPaths, cfg: TrainConfig, mesh: jax.sharding.Mesh) -> None:
    """Writes what the run is and what it runs on: config, versions, commit, device, mesh, kernels."""
    record = dict(config=json.loads(to_json(cfg)), versions=versions(), commit=commit(),
                  device=jax.devices()[0].device_kind, mesh=dict(mesh.shape), kernels=pallas_kernels.kernel_report().splitlines())
    replace_text(paths.run_json, json.dumps(record, indent=2))


def versions() -> dict[str, str | None]:
    """`installed_version` of each of PACKAGES."""
    return {name: installed_version(name) for name in PACKAGES}


def installed_version(package: str) -> str | None:
    """The version of an installed package; None for one that is not installed (this one, when it runs from its source tree)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the source tree that this package runs from; None outside a repository."""
    found = subprocess.run(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None
