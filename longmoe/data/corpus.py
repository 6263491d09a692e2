"""Token folders from text: of any sources, or of the standard library, which needs no download.

Whole documents are held out, chosen by a hash of their name. The tokenizer is trained on the training part alone.
"""

import dataclasses
import logging
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longmoe.configs import SourceConfig
from longmoe.data.chat import CHAT_TOKENS, has_chat_tokens
from longmoe.data.hashing import is_held_out, text_key
from longmoe.data.records import TextFiles, open_records
from longmoe.data.sources import Contents, encode_content
from longmoe.data.token_folder import SPLITS, EncodedDocument, TokenFolder, read_token_folder, write_token_folder
from longmoe.data.tokenizer import Tokenizer

TOKENIZER_BYTES = 64 * 2**20
"""Text that a tokenizer is trained on at most; past that, a sample of whole documents."""
_ENCODED_AT_A_TIME = 4 * 2**20   # characters: enough for all cores, and little memory
_STDLIB_SKIPPED = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload", "_bundled", "config-*")
_log = logging.getLogger(__name__)


class _Texts:
    """(name, text) pairs in memory, as records."""

    def __init__(self, documents: Sequence[tuple[str, str]]):
        self._documents, self.left_out = documents, Counter()

    def __len__(self) -> int:
        return len(self._documents)

    def name(self, index: int) -> str:
        return self._documents[index][0]

    def read(self, index: int) -> str:
        return self._documents[index][1]


@dataclasses.dataclass(frozen=True)
class _Part:
    """One source on its way into a folder; `prefix` keeps the names of several sources apart."""

    config: SourceConfig
    contents: Contents
    prefix: str

    @property
    def messages(self) -> bool:
        return self.config.content == "messages"

    def positions(self, split: str) -> list[int]:
        return [i for i in range(len(self.contents)) if is_held_out(self.contents.name(i)) == (split == "heldout")]

    def texts(self, position: int) -> list[str]:
        content = self.contents.content(position)
        return [m["content"] for m in content] if self.messages else [content]


def stdlib_contents() -> Contents:
    """The running interpreter's standard library in Python, tests and installed packages left out: about 12 MB by many hands."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return Contents(SourceConfig(kind="text", path=str(root)), TextFiles(root, (".py",), _STDLIB_SKIPPED))


def build_token_folder(out: str | Path, sources: Sequence[SourceConfig], *, vocab_size: int = 4096, tokenizer: Tokenizer | None = None,
                       name: str = "") -> TokenFolder:
    """Reads `sources`, trains a tokenizer of `vocab_size` unless one is given, and writes the token folder `out`.

    With several sources, each document's name is put under its source's. Weights of sources play no part: a folder holds each document once.
    """
    built = [source.label for source in sources if source.kind == "token_folder"]
    if built or not sources:
        raise ValueError(f"sources: got {', '.join(built) or 'none'}{' of kind token_folder' if built else ''}, wanted text; "
                         "a token folder is mixed with others by listing it in data.sources")
    spelled_out = tokenizer is not None and not has_chat_tokens(tokenizer)
    parts = [_Part(source, Contents(source, open_records(source), spelled_out=spelled_out), f"{source.label}/" if len(sources) > 1 else "")
             for source in sources]
    licences = list(dict.fromkeys(source.licence for source in sources if source.licence))
    return _build(out, parts, tokenizer, vocab_size=vocab_size, name=name or "+".join(source.label for source in sources),
                  source=", ".join(source.path for source in sources), licences=licences)


def build_corpus(out: str | Path, documents: Sequence[tuple[str, str]], *, vocab_size: int, name: str, source: str,
                 licences: Sequence[str]) -> TokenFolder:
    """A token folder of (name, text) pairs that are in memory."""
    part = _Part(SourceConfig(kind="text", path=source, name=name), Contents(SourceConfig(kind="text", path=source, name=name), _Texts(documents)), "")
    return _build(out, [part], None, vocab_size=vocab_size, name=name, source=source, licences=licences)


def build_stdlib_corpus(out: str | Path, vocab_size: int = 4096, tokenizer: Tokenizer | None = None) -> TokenFolder:
    """The standard library of the running interpreter as a token folder (about 10 s on 2 cores), with a tokenizer of its own unless one is given."""
    version, implementation = platform.python_version(), platform.python_implementation()
    part = _Part(SourceConfig(kind="text", path=sysconfig.get_paths()["stdlib"], name="stdlib", licence="PSF-2.0"), stdlib_contents(), "")
    return _build(out, [part], tokenizer, vocab_size=vocab_size, name=f"python-{version}-stdlib",
                  source=f"the standard library of {implementation} {version}", licences=["PSF-2.0"])


def default_corpus(vocab_size: int = 4096) -> TokenFolder:
    """The standard-library corpus in the user's cache folder ($XDG_CACHE_HOME or ~/.cache), built on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "longmoe" / f"python-{platform.python_version()}-stdlib-{vocab_size}"
    if not path.exists():
        _log.warning("no data.path given: building the standard-library corpus in %s", path)
        build_stdlib_corpus(path, vocab_size)
    return read_token_folder(path)


def _build(out: str | Path, parts: Sequence[_Part], tokenizer: Tokenizer | None, *, vocab_size: int, name: str, source: str,
           licences: Sequence[str]) -> TokenFolder:
    if tokenizer is None:
        _log.info("training a tokenizer of %d tokens", vocab_size)
        special = CHAT_TOKENS if any(part.messages for part in parts) else ()
        tokenizer = Tokenizer.train(_training_texts(parts), vocab_size, special)
    built_from = [{"name": part.config.label, "kind": part.config.kind, "licence": part.config.licence, "documents": len(part.contents),
                   "left_out": dict(+part.contents.left_out)} for part in parts]
    splits = {split: _encoded(parts, split, tokenizer) for split in SPLITS}
    return write_token_folder(out, tokenizer, splits, name=name, source=source, licences=licences, built_from=built_from)


def _training_texts(parts: Sequence[_Part]) -> Iterator[str]:
    """Texts of the training split, at most TOKENIZER_BYTES: documents in the order of a hash of their name, so that a sample is one of all."""
    chosen = [(text_key(part.prefix + part.contents.name(i)), number, i) for number, part in enumerate(parts) for i in part.positions("train")]
    size = 0
    for _, number, position in sorted(chosen):
        for text in parts[number].texts(position):
            size += len(text.encode())
            yield text
        if size >= TOKENIZER_BYTES:
            _log.info("the tokenizer is trained on a sample of %d bytes", size)
            return


def _encoded(parts: Sequence[_Part], split: str, tokenizer: Tokenizer) -> Iterator[EncodedDocument]:
    for part in parts:
        _log.info("encoding %s, %s", part.config.label, split)
        waiting: list[tuple[str, Any]] = []
        size = 0
        for position in part.positions(split):
            waiting.append((part.prefix + part.contents.name(position), part.contents.content(position)))
            size += len(waiting[-1][1]) if not part.messages else sum(len(m["content"]) for m in waiting[-1][1])
            if size >= _ENCODED_AT_A_TIME:
                yield from _encode(waiting, part.messages, tokenizer)
                waiting, size = [], 0
        yield from _encode(waiting, part.messages, tokenizer)


def _encode(named: Sequence[tuple[str, Any]], messages: bool, tokenizer: Tokenizer) -> Iterator[EncodedDocument]:
    if messages:
        for name, content in named:
            document = encode_content(tokenizer, content, messages)
            yield EncodedDocument(name, document.tokens, document.weights, sum(len(m["content"].encode()) for m in content))
        return
    for (name, text), ids in zip(named, tokenizer.encode_batch([text for _, text in named]), strict=True):
        yield EncodedDocument(name, np.array([*ids, tokenizer.eos_id], np.int64), None, len(text.encode()))
