"""Random access to the raw records of a source: text files, JSON lines, Parquet, ArrayRecord, a saved Hugging Face dataset.

A record is a string, or a mapping of which one field is the content. Nothing is tokenised here. Libraries that only one kind needs are
imported when a source of that kind is opened.
"""

import fnmatch
import gzip
import importlib
import json
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from longmoe.configs import SourceConfig

TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".c", ".h", ".rs", ".toml", ".json", ".html", ".tex")
SKIPPED_FOLDERS = ("__pycache__", ".git")
WHOLE_RECORD = "*"
_BLOCK = 1 << 20
_INSTALL = {"grain": "grain", "zstandard": 'longmoe[data]', "pyarrow.parquet": 'longmoe[data]', "datasets": 'longmoe[data]'}


class Undecodable(Exception):
    """Raised by `read` for a record that is not UTF-8; such records are left out and counted."""


class Records(Protocol):
    """`left_out` counts, by reason, what was passed over when the source was listed."""

    left_out: Counter[str]

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Names the record inside its source: a file's relative path, with the line or row number where a file holds many."""

    def read(self, index: int) -> Any:
        """The record. May be called from several threads at a time. Raises Undecodable, ValueError for one that is damaged."""


def open_records(source: SourceConfig) -> Records:
    """The records of a source that is no token folder. ValueError names the file that is missing, damaged or lacks the field."""
    root = Path(source.path)
    if not root.exists():
        raise ValueError(f"path: got {source.path!r}, which does not exist; wanted the files of source {source.label!r}")
    if source.kind == "text":
        return TextFiles(root, source.suffixes or TEXT_SUFFIXES)
    if source.kind == "hugging_face":
        return HuggingFaceRows(root, content_field(source))
    kinds: dict[str, tuple[Callable[..., Records], tuple[str, ...]]] = {
        "jsonl": (JsonLines, (".jsonl", ".jsonl.gz", ".jsonl.zst")), "parquet": (ParquetRows, (".parquet",)),
        "array_record": (ArrayRecords, (".array_record", ".arrayrecord"))}
    make, suffixes = kinds[source.kind]
    files, left_out = find_files(root, source.suffixes or suffixes)
    return make(files, content_field(source), left_out)


def content_field(source: SourceConfig) -> str:
    """The field that holds the content; "*" is the whole record."""
    return source.field or source.content


def require(module: str, purpose: str) -> Any:
    """Imports a library that not every installation has. ValueError says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ValueError(f"{package}: it is not installed, wanted for {purpose}; pip install \"{_INSTALL[module]}\", or build a token folder where it is "
                         f"installed (longmoe data build) and train from that ({error})") from error


def find_files(root: Path, suffixes: Sequence[str], skipped_folders: Iterable[str] = SKIPPED_FOLDERS) -> tuple[list[tuple[str, Path]], Counter[str]]:
    """([(path under `root` with forward slashes, file)] in order of the path, counts of what was left out).

    `skipped_folders` are names or patterns with `*`. Links to folders are not followed (a loop of links would never end), links to files are;
    links that lead nowhere, other suffixes and whatever is no plain file are left out. A `root` that is a file is taken whatever its name.
    """
    if root.is_file():
        return [(root.name, root)], Counter()
    if not root.is_dir():
        raise ValueError(f"folder: got {str(root)!r}, which is no folder; wanted one that holds files ending in {', '.join(suffixes)}")
    skipped, files, left_out = list(skipped_folders), [], Counter()
    for here, folders, names in os.walk(root, onerror=_unlistable):
        kept = [f for f in folders if not any(fnmatch.fnmatch(f, pattern) for pattern in skipped)]
        left_out["skipped folder"] += len(folders) - len(kept)
        left_out["link to a folder"] += sum(Path(here, f).is_symlink() for f in kept)
        folders[:] = kept
        for name in names:
            file = Path(here, name)
            reason = _why_not(file, suffixes)
            if reason:
                left_out[reason] += 1
            else:
                files.append((file.relative_to(root).as_posix(), file))
    if not files:
        raise ValueError(f"folder: {root} holds no file ending in {', '.join(suffixes)} (left out: {describe_left_out(left_out)}); "
                         "wanted at least one, or other suffixes for this source")
    return sorted(files), +left_out


def _why_not(file: Path, suffixes: Sequence[str]) -> str:
    if not file.name.endswith(tuple(suffixes)):
        return "other suffix"
    try:
        return "" if file.is_file() else "broken link" if file.is_symlink() else "no plain file"
    except OSError:   # a link to itself
        return "broken link"


def _unlistable(error: OSError) -> None:
    raise ValueError(f"folder: {error.filename} cannot be listed ({error.strerror}); give access to it or leave it out") from error


def describe_left_out(left_out: Counter[str]) -> str:
    """`3 empty, 1 not UTF-8`, or `nothing`."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()) if count) or "nothing"


class TextFiles:
    """One document a file, UTF-8; Windows line ends become line feeds."""

    def __init__(self, root: Path, suffixes: Sequence[str] = TEXT_SUFFIXES, skipped_folders: Iterable[str] = SKIPPED_FOLDERS):
        self._files, self.left_out = find_files(root, suffixes, skipped_folders)

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        return self._files[index][0]

    def read(self, index: int) -> str:
        file = self._files[index][1]
        try:
            return file.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise Undecodable(str(file)) from error
        except OSError as error:
            raise ValueError(f"path: {file} cannot be read ({error.strerror})") from error


class JsonLines:
    """One JSON value a line. Compressed files are unpacked once, into a temporary file without a name; blank lines are left out."""

    def __init__(self, files: Sequence[tuple[str, Path]], field: str, left_out: Counter[str]):
        self._files, self.left_out, self._field = list(files), left_out, field
        self._unpacked: BinaryIO | None = None
        starts, sizes, owners, lines = [], [], [], []
        for number, (_, file) in enumerate(self._files):
            base = self._unpacked.tell() if _is_packed(file) and self._unpacked else 0
            for line_number, start, size, blank in self._lines(file):
                if blank:
                    self.left_out["blank line"] += 1
                    continue
                starts.append(base + start), sizes.append(size), owners.append(number), lines.append(line_number)
        self._starts, self._sizes, self._owners, self._line_numbers = (np.array(a, np.int64) for a in (starts, sizes, owners, lines))

    def _lines(self, file: Path) -> Iterator[tuple[int, int, int, bool]]:
        """(number from 1, first byte, bytes, blank) of every line; a packed file is appended to the temporary one on the way."""
        if _is_packed(file) and self._unpacked is None:
            self._unpacked = tempfile.TemporaryFile()
        start = 0
        for number, line in enumerate(_read_lines(file), start=1):
            if _is_packed(file):
                self._unpacked.write(line)
            yield number, start, len(line), not line.strip()
            start += len(line)
        if _is_packed(file):
            self._unpacked.flush()

    def __len__(self) -> int:
        return len(self._starts)

    def name(self, index: int) -> str:
        return f"{self._files[self._owners[index]][0]}:{self._line_numbers[index]}"

    def read(self, index: int) -> Any:
        start, size, file = int(self._starts[index]), int(self._sizes[index]), self._files[self._owners[index]][1]
        if _is_packed(file):
            line = os.pread(self._unpacked.fileno(), size, start)
        else:
            try:
                with open(file, "rb") as stream:
                    stream.seek(start)
                    line = stream.read(size)
            except OSError as error:
                raise ValueError(f"path: {file} cannot be read ({error.strerror})") from error
        return parse_json(line, f"{file}:{self._line_numbers[index]}")


def parse_json(data: bytes, where: str) -> Any:
    """ValueError with the place for bytes that are no JSON, Undecodable for bytes that are no UTF-8."""
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Undecodable(where) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: got {data[:40]!r}..., which is no JSON ({error}); wanted one JSON value") from error


def _is_packed(file: Path) -> bool:
    return file.suffix in (".gz", ".zst")


def _read_lines(file: Path) -> Iterator[bytes]:
    try:
        if file.suffix == ".zst":
            yield from _split_lines(_zst_blocks(file))
        else:
            with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as stream:
                yield from stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"path: {file} is damaged or was cut short ({error}); fetch or write it again") from error
    except OSError as error:
        raise ValueError(f"path: {file} cannot be read ({error})") from error


def _zst_blocks(file: Path) -> Iterator[bytes]:
    zstandard = require("zstandard", f"reading {file}")
    unpacker, inside = zstandard.ZstdDecompressor().decompressobj(), False
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            while block:
                try:
                    yield unpacker.decompress(block)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from error
                inside, block = not unpacker.eof, unpacker.unused_data
                if not inside:
                    unpacker = zstandard.ZstdDecompressor().decompressobj()
    if inside:   # the library itself takes a frame that stops early for the end
        raise EOFError("the last frame is not complete")


def _split_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []   # of a line that has not ended
    for block in blocks:
        *whole, rest = block.split(b"\n")
        for line in whole:
            yield b"".join([*parts, line, b"\n"])
            parts = []
        parts.append(rest)
    if any(parts):
        yield b"".join(parts)


class _Shards:
    """Rows of several files under one index."""

    def __init__(self, files: Sequence[tuple[str, Path]], sizes: Sequence[int], left_out: Counter[str]):
        self._files, self._ends, self.left_out = list(files), np.cumsum(sizes, dtype=np.int64), left_out

    def __len__(self) -> int:
        return int(self._ends[-1])

    def name(self, index: int) -> str:
        shard, row = self._locate(index)
        return f"{self._files[shard][0]}:{row}"

    def _locate(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - (int(self._ends[shard - 1]) if shard else 0)


class ParquetRows(_Shards):
    """Rows of Parquet files. The content's column is held in memory, as Arrow."""

    def __init__(self, files: Sequence[tuple[str, Path]], field: str, left_out: Counter[str]):
        parquet = require("pyarrow.parquet", "sources of kind parquet")
        self._field = field
        self._tables = [self._read_table(parquet, file) for _, file in files]
        super().__init__(files, [len(table) for table in self._tables], left_out)

    def _read_table(self, parquet: Any, file: Path) -> Any:
        try:
            names = parquet.read_schema(file).names
            if self._field == WHOLE_RECORD or self._field in names:
                with parquet.ParquetFile(file) as opened:
                    return opened.read(columns=None if self._field == WHOLE_RECORD else [self._field])
        except (OSError, EOFError, ValueError) as error:   # the library's own errors are among these
            raise ValueError(f"path: {file} cannot be read as Parquet ({error})") from error
        raise _no_field(str(file), self._field, names)

    def read(self, index: int) -> Any:
        shard, row = self._locate(index)
        return self._tables[shard].slice(row, 1).to_pylist()[0]


class ArrayRecords(_Shards):
    """Records of ArrayRecord files, read by Grain: each is a JSON object in UTF-8, or plain text where the field is "*"."""

    def __init__(self, files: Sequence[tuple[str, Path]], field: str, left_out: Counter[str]):
        grain = require("grain", "sources of kind array_record")
        self._field, self._shards = field, []
        for _, file in files:
            try:
                self._shards.append(grain.sources.ArrayRecordDataSource(str(file)))
            except (RuntimeError, OSError) as error:
                raise ValueError(f"path: {file} cannot be read as ArrayRecord ({error})") from error
        super().__init__(files, [len(shard) for shard in self._shards], left_out)

    def read(self, index: int) -> Any:
        shard, row = self._locate(index)
        data, where = self._shards[shard][row], f"{self._files[shard][1]}:{row}"
        if self._field != WHOLE_RECORD:
            return parse_json(data, where)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Undecodable(where) from error


class HuggingFaceRows:
    """Rows of a dataset that `Dataset.save_to_disk` wrote (one split, no DatasetDict)."""

    def __init__(self, root: Path, field: str):
        datasets = require("datasets", "sources of kind hugging_face")
        try:
            found = datasets.load_from_disk(str(root))
        except (OSError, ValueError) as error:
            raise ValueError(f"path: {root} cannot be read as a saved Hugging Face dataset ({error})") from error
        if isinstance(found, datasets.DatasetDict):
            raise ValueError(f"path: {root} holds the splits {', '.join(found)}, wanted one dataset; "
                             f"name the folder of a split, as in {root / next(iter(found))}")
        if field != WHOLE_RECORD and field not in found.column_names:
            raise _no_field(str(root), field, found.column_names)
        self._rows = found.with_format(None) if field == WHOLE_RECORD else found.with_format(None).select_columns([field])
        self.left_out: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, index: int) -> str:
        return f"row:{index}"

    def read(self, index: int) -> Any:
        return self._rows[index]


def content_of(record: Any, field: str, where: str) -> Any:
    """The content of a record; ValueError when a mapping lacks the field."""
    if field == WHOLE_RECORD or isinstance(record, str):
        return record
    if not isinstance(record, dict):
        raise ValueError(f"{where}: got {type(record).__name__}, wanted an object with the field {field!r}, or field \"*\" for the whole record")
    if field not in record:
        raise _no_field(where, field, record)
    return record[field]


def _no_field(where: str, field: str, names: Iterable[str]) -> ValueError:
    return ValueError(f"{where}: got the fields {', '.join(map(repr, names)) or '(none)'}, wanted {field!r}; set the source's field")
