"""A corpus on disk: a tokenizer, and for each split one flat token file, document offsets and document names.

    tokenizer.json
    meta.json               name, source, licences, what it was built from, counts, dtype, size and SHA-256 of every file, fingerprint
    train/  heldout/        tokens.npy (uint16 or uint32), offsets.npy (int64 [documents + 1]), documents.json (names),
                            weights.npy (float32, of each token as a target) where they are not all 1

Every document ends with the end-of-document token. Arrays are memory-mapped, so a folder may be larger than memory.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longmoe.data.tokenizer import Tokenizer

SPLITS = ("train", "heldout")
_FORMAT = 1
_OPTIONAL_FILES = tuple(f"{s}/weights.npy" for s in SPLITS)
_FILES = ("tokenizer.json",) + tuple(f"{s}/{f}" for s in SPLITS for f in ("tokens.npy", "offsets.npy", "documents.json"))


@dataclass(frozen=True)
class Split:
    """One split. `tokens` [total] uint16 or uint32, `offsets` [documents + 1] int64, `names` one string a document, `weights` float32 [total] or None."""

    tokens: np.ndarray
    offsets: np.ndarray
    names: Sequence[str]
    eos_id: int
    num_bytes: int
    weights: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """The document's tokens, the end-of-document token last."""
        return self.tokens[self.offsets[index]:self.offsets[index + 1]]

    def document_weights(self, index: int) -> np.ndarray | None:
        """float32, of each of the document's tokens as a target; None where all are 1."""
        return None if self.weights is None else self.weights[self.offsets[index]:self.offsets[index + 1]]

    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class TokenFolder:
    """An opened folder: `meta` (the JSON file), `train` and `heldout`."""

    path: Path
    meta: Mapping[str, Any]
    train: Split
    heldout: Split

    def __repr__(self) -> str:
        return f"TokenFolder({self.path}, {self.vocab_size} ids, {len(self.train.tokens)} + {len(self.heldout.tokens)} tokens)"

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


class EncodedDocument(NamedTuple):
    """What `write_token_folder` takes: ids with the end-of-document token last, float32 weights or None for all 1, and the bytes of the text."""

    name: str
    tokens: Sequence[int] | np.ndarray
    weights: np.ndarray | None
    num_bytes: int


def write_token_folder(path: str | Path, tokenizer: Tokenizer, splits: Mapping[str, Iterable[EncodedDocument]], *,
                       name: str, source: str, licences: Sequence[str], built_from: Sequence[Mapping[str, Any]] = ()) -> TokenFolder:
    """Writes the documents of `splits` ("train" and "heldout"), read once and one by one; replaces a folder that is there.

    It is written beside its place and renamed, so that a crash leaves the old one or none, never half of one. `built_from` goes into meta.json.
    ValueError for a split without documents, and for a place taken by something else than a token folder.
    """
    path = Path(path)
    if path.exists() and not (path / "meta.json").is_file():
        raise ValueError(f"path: got {str(path)!r}, which exists and is no token folder, wanted a new place or a token folder to replace")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        tokenizer.save(scratch / "tokenizer.json")
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        counts = {split: _write_split(scratch / split, splits[split], dtype) for split in SPLITS}
        written = [*_FILES, *(f for f in _OPTIONAL_FILES if (scratch / f).exists())]
        files = {f: {"bytes": (scratch / f).stat().st_size, "sha256": _sha256(scratch / f)} for f in written}
        meta = {"format": _FORMAT, "name": name, "source": source, "licences": list(licences), "built_from": [dict(b) for b in built_from],
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


def read_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a folder, checked as `read_token_folder` does; the documents are not touched."""
    path = Path(path)
    meta = _read_meta(path)
    _check_file(path, "tokenizer.json", meta["files"]["tokenizer.json"], verify=True)
    return Tokenizer.load(path / "tokenizer.json")


def _write_split(folder: Path, documents: Iterable[EncodedDocument], dtype: type) -> dict[str, int]:
    """Tokens go to the disk as they come: only offsets and names are held in memory."""
    folder.mkdir()
    offsets, names, num_bytes, masked = [0], [], 0, False
    with open(folder / "tokens.raw", "wb") as tokens, open(folder / "weights.raw", "wb") as weights:
        for document in documents:
            tokens.write(np.asarray(document.tokens, dtype).tobytes())
            own = np.ones(len(document.tokens), np.float32) if document.weights is None else np.asarray(document.weights, np.float32)
            weights.write(own.tobytes())
            masked = masked or bool(np.any(own != 1.0))
            offsets.append(offsets[-1] + len(document.tokens))
            names.append(document.name)
            num_bytes += document.num_bytes
    if not names:
        raise ValueError(f"splits: got no document for {folder.name!r}, wanted at least one; documents are held out by a hash of their name, so add some")
    _raw_to_npy(folder / "tokens", np.dtype(dtype), offsets[-1])
    if masked:
        _raw_to_npy(folder / "weights", np.dtype(np.float32), offsets[-1])
    (folder / "weights.raw").unlink(missing_ok=True)
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
    (folder / "documents.json").write_text(json.dumps(names, indent=0))
    return {"documents": len(names), "tokens": offsets[-1], "bytes": num_bytes}


def _raw_to_npy(file: Path, dtype: np.dtype, size: int) -> None:
    """file.raw -> file.npy, whose header needs the size first."""
    raw = file.with_suffix(".raw")
    with open(raw, "rb") as source, open(file.with_suffix(".npy"), "wb") as target:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (size,)}
        np.lib.format.write_array_header_1_0(target, header)
        shutil.copyfileobj(source, target, 1 << 22)
    raw.unlink()


def _read_meta(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ValueError(f"path: got {str(path)!r}, which is no folder; wanted a token folder "
                         f"(`longmoe data build {path}` makes one)")
    if not (path / "meta.json").is_file():
        raise ValueError(f"path: {path} holds no meta.json, so it is no token folder; "
                         f"`longmoe data build OUT --text {path}` makes one from a folder of text files")
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
    weights = np.load(path / name / "weights.npy", mmap_mode="r") if f"{name}/weights.npy" in meta["files"] else None
    if weights is not None and (weights.shape != tokens.shape or weights.dtype != np.float32):
        raise _damaged(path, f"{name}/weights.npy holds {weights.shape} {weights.dtype}, wanted float32 for each of {len(tokens)} tokens")
    return Split(tokens, offsets, names, meta["eos_id"], counts["bytes"], weights)


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"path: the token folder {path} is damaged or mixed from two: {what}; delete it and build it again")


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fingerprint(files: Mapping[str, Mapping[str, Any]]) -> str:
    return hashlib.sha256(json.dumps({f: facts["sha256"] for f, facts in files.items()}, sort_keys=True).encode()).hexdigest()
