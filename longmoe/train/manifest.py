"""The manifest of a checkpoint: size and SHA-256 of every file of its folder. Orbax loads a file with a flipped byte without a word.

A checkpoint is complete when its manifest is there: it is written last, in one piece, and is the first file to go when a checkpoint is deleted. So a folder
without one was cut off while it was saved or deleted, and a folder that differs from its manifest was damaged.
"""
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etils import epath

from longmoe.train.run_files import is_local, replace_text, sync

NAME = "manifest.json"
_FORMAT = 1
_CHUNK = 1 << 20
_THREADS = 8
"""hashlib and file systems work outside the interpreter's lock."""


def is_complete(folder: epath.Path) -> bool:
    return (folder / NAME).exists()


def write_manifest(folder: epath.Path, step: int) -> None:
    """Makes the checkpoint of `step` in `folder` complete. Its files reach the disk before the manifest does."""
    files, folders = _contents(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        if is_local(folder):
            list(pool.map(sync, [folder / name for name in (*files, *folders)]))
        digests = list(pool.map(lambda name: _sha256(folder / name), files))
    facts = {name: {"bytes": (folder / name).stat().length, "sha256": digest} for name, digest in zip(files, digests)}
    replace_text(folder / NAME, json.dumps({"format": _FORMAT, "step": step, "files": facts}, indent=1))


def damage(folder: epath.Path, step: int, parts: Collection[str] | None = None) -> list[str]:
    """What differs between a complete checkpoint and its manifest, one sentence a file; empty when nothing does.

    `parts` names the top-level entries whose contents are compared (None: all); names and sizes of all files always are.
    """
    try:
        manifest = json.loads((folder / NAME).read_text())
        facts: Mapping[str, Any] = manifest["files"]
        found = [] if manifest["format"] == _FORMAT else [f"{NAME} has format {manifest['format']}, wanted {_FORMAT}"]
        found += [] if manifest["step"] == step else [f"{NAME} is that of step {manifest['step']}, wanted {step}"]
        sizes = {name: entry["bytes"] for name, entry in facts.items()}
        digests = {name: entry["sha256"] for name, entry in facts.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        size = (folder / NAME).stat().length
        return [f"{NAME} ({size} bytes) cannot be read ({type(error).__name__}: {error})"]
    files = set(_contents(folder)[0])
    found += [f"{name} is missing" for name in sorted(set(facts) - files)]
    found += [f"{name} is not in {NAME}" for name in sorted(files - set(facts))]
    here = sorted(files & set(facts))
    lengths = {name: (folder / name).stat().length for name in here}
    found += [f"{name} has {lengths[name]} bytes, {NAME} says {sizes[name]}" for name in here if lengths[name] != sizes[name]]
    compared = [name for name in here if lengths[name] == sizes[name] and (parts is None or name.split("/")[0] in parts)]
    with ThreadPoolExecutor(_THREADS) as pool:
        now = pool.map(lambda name: _sha256(folder / name), compared)
    return found + [f"the contents of {name} are not those that were saved (SHA-256 differs)" for name, digest in zip(compared, now)
                    if digest != digests[name]]


def _contents(folder: epath.Path, prefix: str = "") -> tuple[list[str], list[str]]:
    """Names below `folder`, relative to it: (files but the manifest, folders)."""
    files, folders = [], [prefix or os.curdir]
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            inner = _contents(path, f"{prefix}{path.name}/")
            files, folders = files + inner[0], folders + inner[1]
        elif f"{prefix}{path.name}" not in (NAME, f"{NAME}.tmp"):
            files.append(f"{prefix}{path.name}")
    return files, folders


def _sha256(path: epath.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()
