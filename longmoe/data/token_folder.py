"""A corpus on disk: a tokenizer, and for each split one flat token file, document offsets and document names.

    tokenizer.json
    meta.json               name, source, licences, counts, dtype, size and SHA-256 of every file, fingerprint
    train/  heldout/        tokens.npy (uint16 or uint32), offsets.npy (int64 [documents + 1]), documents.json (names)

Every document ends with the end-of-document token. Arrays are memory-mapped, so a folder may be larger than memory.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from longmoe.data.tokenizer import Tokenizer

SPLITS = ("train", "heldout")
_FORMAT = 1
_FILES = ("tokenizer.json",) + tuple(f"{s}/{f}" for s in SPLITS for f in ("tokens.npy", "offsets.npy", "documents.json"))


@dataclass(frozen=True)
class Split:
    """One split. `tokens` [total] uint16 or uint32, `offsets` [documents + 1] int64, `names` one string a document."""

    tokens: np.ndarray
    offsets: np.ndarray
    names: Sequence[str]
    eos_id: int
    num_bytes: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """The document's tokens, the end-of-document token last."""
        return self.tokens[self.offsets[index]:self.offsets[index + 1]]

    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class TokenFolder:
    """An opened folder: `meta` (the JSON file), `train` and `heldout`."""

    path: Path
    meta: Mapping[str, Any]
    train: Split
    heldout: Split

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the contents of all files; a run that resumes compares it."""
        return self.meta["fingerprint"]

    @property
    def vocab_size(self) -> int:
        return self.meta["vocab_size"]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.path / "tokenizer.json")

    def split(self, name: str) -> Split:
        if name not in SPLITS:
            raise ValueError(f"split: got {name!r}, wanted one of {', '.join(SPLITS)}")
        return getattr(self, name)


def write_token_folder(path: str | Path, tokenizer: Tokenizer, splits: Mapping[str, Sequence[tuple[str, str]]], *,
                       name: str, source: str, licences: Sequence[str]) -> TokenFolder:
    """Encodes `splits` ({"train" | "heldout": [(document name, text)]}) and writes the folder; replaces one that is there.

    It is written beside its place and renamed, so that a crash leaves the old one or none, never half of one.
    """
    path = Path(path)
    for split in SPLITS:
        if not splits.get(split):
            raise ValueError(f"splits: got no document for {split!r}, wanted at least one; add text or change the share that is held out")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        tokenizer.save(scratch / "tokenizer.json")
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        counts = {split: _write_split(scratch / split, tokenizer, splits[split], dtype) for split in SPLITS}
        files = {f: {"bytes": (scratch / f).stat().st_size, "sha256": _sha256(scratch / f)} for f in _FILES}
        meta = {"format": _FORMAT, "name": name, "source": source, "licences": list(licences),
                "vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id, "dtype": np.dtype(dtype).name,
                "splits": counts, "files": files, "fingerprint": _fingerprint(files)}
        (scratch / "meta.json").write_text(json.dumps(meta, indent=1))
        if path.exists():
            shutil.rmtree(path)
        os.rename(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return read_token_folder(path)


def read_token_folder(path: str | Path, *, verify: bool = True) -> TokenFolder:
    """Opens a folder. `verify` checks the SHA-256 of every file (about a second a gigabyte).

    ValueError when the folder is missing, incomplete, damaged, or its files do not belong together: which file, and why.
    """
    path = Path(path)
    meta = _read_meta(path)
    for file, facts in meta["files"].items():
        _check_file(path, file, facts, verify)
    folder = TokenFolder(path, meta, *(_read_split(path, split, meta) for split in SPLITS))
    if folder.tokenizer.vocab_size != meta["vocab_size"] or folder.tokenizer.eos_id != meta["eos_id"]:
        raise _damaged(path, f"tokenizer.json has {folder.tokenizer.vocab_size} tokens, meta.json says {meta['vocab_size']}")
    return folder


def _write_split(folder: Path, tokenizer: Tokenizer, documents: Sequence[tuple[str, str]], dtype: type) -> dict[str, int]:
    folder.mkdir()
    ids = tokenizer.encode_batch([text for _, text in documents])
    flat = np.concatenate([np.array([*document, tokenizer.eos_id], dtype) for document in ids])
    np.save(folder / "tokens.npy", flat)
    np.save(folder / "offsets.npy", np.cumsum([0] + [len(d) + 1 for d in ids], dtype=np.int64))
    (folder / "documents.json").write_text(json.dumps([name for name, _ in documents], indent=0))
    return {"documents": len(documents), "tokens": len(flat), "bytes": sum(len(text.encode()) for _, text in documents)}


def _read_meta(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ValueError(f"path: got {str(path)!r}, which is no folder; wanted a token folder "
                         f"(`python -m longmoe.data.corpus {path}` makes one)")
    if not (path / "meta.json").is_file():
        raise ValueError(f"path: {path} holds no meta.json, so it is no token folder; "
                         f"`python -m longmoe.data.corpus OUT --text {path}` makes one from a folder of text files")
    try:
        meta = json.loads((path / "meta.json").read_text())
        if meta["format"] != _FORMAT:
            raise ValueError(f"path: {path} has format {meta['format']}, wanted {_FORMAT}; build the corpus again")
        missing = set(_FILES) - set(meta["files"])
        if missing or meta["fingerprint"] != _fingerprint(meta["files"]):
            what = f"does not list {', '.join(sorted(missing))}" if missing else "has a fingerprint that is not that of its files"
            raise _damaged(path, f"meta.json {what}")
        return meta
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise _damaged(path, f"meta.json cannot be read ({type(error).__name__}: {error})") from error


def _check_file(path: Path, file: str, facts: Mapping[str, Any], verify: bool) -> None:
    if not (path / file).is_file():
        raise _damaged(path, f"{file} is missing")
    size = (path / file).stat().st_size
    if size != facts["bytes"]:
        raise _damaged(path, f"{file} has {size} bytes, meta.json says {facts['bytes']}")
    if verify and _sha256(path / file) != facts["sha256"]:
        raise _damaged(path, f"the contents of {file} have changed since it was written (SHA-256 differs)")


def _read_split(path: Path, name: str, meta: Mapping[str, Any]) -> Split:
    tokens = np.load(path / name / "tokens.npy", mmap_mode="r")
    offsets = np.load(path / name / "offsets.npy")
    names = json.loads((path / name / "documents.json").read_text())
    counts = meta["splits"][name]
    if tokens.dtype.name != meta["dtype"] or len(tokens) != counts["tokens"] or int(offsets[-1]) != len(tokens) or offsets[0] != 0:
        raise _damaged(path, f"{name}/tokens.npy holds {len(tokens)} {tokens.dtype} tokens and offsets.npy ends at "
                             f"{int(offsets[-1])}; meta.json says {counts['tokens']} {meta['dtype']}")
    if not len(names) == len(offsets) - 1 == counts["documents"] or np.any(np.diff(offsets) <= 0):
        raise _damaged(path, f"{name}/ has {len(names)} names and {len(offsets) - 1} documents, "
                             f"meta.json says {counts['documents']}")
    return Split(tokens, offsets, names, meta["eos_id"], counts["bytes"])


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"path: the token folder {path} is damaged or mixed from two: {what}; delete it and build it again")


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fingerprint(files: Mapping[str, Mapping[str, Any]]) -> str:
    return hashlib.sha256(json.dumps({f: facts["sha256"] for f, facts in files.items()}, sort_keys=True).encode()).hexdigest()
