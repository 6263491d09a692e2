"""Folders of safetensors files, read and written tensor by tensor.

The format is safetensors' own (8 bytes of header length, a JSON header, the data without holes); `safetensors.safe_open` reads what is written here. Kept
here are the parts that its numpy interface leaves out: bfloat16, the names of tensors that a truncated file has lost, memory-mapped pages that are given back
after use, and writing without holding a whole file in memory.
"""
import dataclasses
import json
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16),
          "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "U8": np.dtype(np.uint8)}
"""safetensors' names of the dtypes that are read and written."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 64
"""Bytes that a host buffer starts at a multiple of where JAX uses it as it lies."""
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor of a file."""
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, from the start of the file."""
    stop: int


@dataclasses.dataclass(frozen=True)
class Folder:
    """What a folder's headers say, and what is wrong with its files."""
    tensors: dict[str, Stored]
    problems: list[str]
    """One line a damaged or absent file, with the names of the tensors that are lost."""


def read_folder(path: Path) -> Folder:
    """Reads the headers of the files that the index names, or of all *.safetensors where there is none. No tensor is read.

    Raises ValueError where the folder holds no such file.
    """
    index = path / INDEX
    weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    files = sorted({path / name for name in weight_map.values()} or path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"path: got {path}, which holds no *.safetensors file, wanted a checkpoint's folder")
    tensors: dict[str, Stored] = {}
    problems = []
    for file in files:
        promised = sorted(name for name, of in weight_map.items() if path / of == file)
        held, trouble = _read_header(file, promised)
        problems += trouble
        twice = sorted(set(held) & set(tensors))
        problems += [f"{file.name}: holds again what {tensors[name].file.name} holds: {name}" for name in twice]
        tensors |= held
    return Folder(tensors, problems)


def _read_header(file: Path, promised: Sequence[str]) -> tuple[dict[str, Stored], list[str]]:
    """The file's whole tensors, and a line for what is wrong. `promised`: names that the index puts into this file, for a file that cannot say so itself."""
    lost = f"; its tensors are lost: {', '.join(promised)}" if promised else ""
    if not file.is_file():
        return {}, [f"{file.name}: no such file{lost}"]
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or size < 8 + length:
            return {}, [f"{file.name}: truncated inside its header, {size} bytes of at least {8 + length}{lost}"]
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            return {}, [f"{file.name}: the header is not JSON ({error}){lost}"]
    header.pop("__metadata__", None)
    held, problems = {}, []
    for name, entry in header.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        held[name] = Stored(file, entry["dtype"], tuple(entry["shape"]), start, stop)
        wanted = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize if entry["dtype"] in DTYPES else stop - start
        if stop - start != wanted:
            problems.append(f"{file.name}: {name} takes {stop - start} bytes, wanted {wanted} for {entry['dtype']}{entry['shape']}")
    cut = [name for name, tensor in held.items() if tensor.stop > size]
    if cut:
        end = max(tensor.stop for tensor in held.values())
        problems.append(f"{file.name}: truncated, {size} bytes of {end}; cut off: {', '.join(cut)}")
    return held, problems


class Reader:
    """Views of stored tensors in memory-mapped files. Use as a context manager; a view is good until the next `view` of any tensor."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._used: list[tuple[mmap.mmap, int, int]] = []

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *exception: object) -> None:
        # A view that is still alive keeps its own map open; dropping the references closes the others.
        self._maps.clear(), self._used.clear()

    def view(self, *tensors: Stored) -> list[np.ndarray]:
        """Read-only arrays of the tensors. Pages of the tensors viewed before are given back: they would count as this process's memory."""
        for memory, start, stop in self._used:
            first = start - start % mmap.PAGESIZE
            if hasattr(mmap, "MADV_DONTNEED"):
                memory.madvise(mmap.MADV_DONTNEED, first, stop - first)
        self._used = [(self._map(tensor.file), tensor.start, tensor.stop) for tensor in tensors if tensor.stop > tensor.start]
        return [np.frombuffer(self._map(t.file), DTYPES[t.dtype], math.prod(t.shape), t.start).reshape(t.shape) for t in tensors]

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that JAX takes over on a CPU without copying it (`jax.device_put(x, may_alias=True)`)."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start:start + size].view(dtype).reshape(shape)


def copy_bits(source: np.ndarray, target: np.ndarray) -> None:
    """target[...] = source, cast where the dtypes differ."""
    if source.dtype == target.dtype:
        # As integers: numpy moves bfloat16 element by element otherwise.
        bits = np.dtype(f"u{source.dtype.itemsize}")
        source, target = source.view(bits), target.view(bits)
    target[...] = source


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor to be written; `make` is called when its turn comes."""
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(folder: Path, entries: Sequence[Entry], max_shard_bytes: int) -> None:
    """model.safetensors, or numbered shards with an index where the entries exceed max_shard_bytes. The same entries give the same bytes."""
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.size
    if len(shards) == 1:
        _write_file(folder / SINGLE, shards[0])
        return
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards):
        _write_file(folder / name, shard)
    index = {"metadata": {"total_size": sum(entry.size for entry in entries)},
             "weight_map": {entry.name: name for name, shard in zip(names, shards) for entry in shard}}
    write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _write_file(file: Path, entries: Sequence[Entry]) -> None:
    # Widest dtype first, so that each tensor starts at a multiple of its item size.
    entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [offset, offset + entry.size]}
        offset += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            array = np.ascontiguousarray(entry.make())
            if array.dtype != entry.dtype or array.size != math.prod(entry.shape):
                raise ValueError(f"{entry.name}: got {array.dtype}{list(array.shape)}, wanted {entry.dtype}{list(entry.shape)}")
            stream.write(array.reshape(-1).view(np.uint8).data)
        stream.flush()
        os.fsync(stream.fileno())


def write_text(file: Path, text: str) -> None:
    """Writes a text file and waits until it is on the disk."""
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into that takes the place of `path` when the block ends well, and vanishes when it does not.

    Raises ValueError where `path` is there already and is not an empty folder.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"path: got {path}, which exists, wanted a new or an empty folder; choose another name or remove it first")
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    partial = path.absolute().parent / f".{path.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
