"""Sources of a run: every kind as tokenised documents behind one protocol, each with a fingerprint.

A document is a pure function of its source and index: no order, no randomness, no state here.
"""

import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from longmoe.configs import DataConfig, SourceConfig
from longmoe.data.chat import CHAT_TOKENS, check_messages, encode_messages, has_chat_tokens
from longmoe.data.hashing import is_held_out
from longmoe.data.records import Records, Undecodable, content_field, content_of, describe_left_out, open_records
from longmoe.data.token_folder import SPLITS, Split, TokenFolder, read_token_folder, read_tokenizer
from longmoe.data.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_TEMPLATE_VERSION = "chat 1"


class Document(NamedTuple):
    """tokens [n] integers, the end-of-document token last; weights float32 [n], of each token as a target, None where all are 1."""

    tokens: np.ndarray
    weights: np.ndarray | None = None


class Documents(Protocol):
    """One split of a source. `fingerprint` changes with any token, name or place of a document."""

    fingerprint: str
    eos_id: int

    def __len__(self) -> int: ...

    def document(self, index: int) -> Document:
        """May be called from several threads at a time."""

    def document_name(self, index: int) -> str: ...


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened source: its documents, and what reports say about it."""

    name: str
    kind: str
    weight: float
    licence: str
    documents: Documents
    tokenizer: Tokenizer
    left_out: Mapping[str, int]
    whole: bool = False
    """A document that a row can hold is not cut."""


class FolderDocuments:
    """A split of a token folder."""

    def __init__(self, split: Split, fingerprint: str):
        self._split, self.fingerprint, self.eos_id = split, fingerprint, split.eos_id

    def __len__(self) -> int:
        return len(self._split)

    def document(self, index: int) -> Document:
        return Document(self._split.document(index), self._split.document_weights(index))

    def document_name(self, index: int) -> str:
        return self._split.names[index]


class Contents:
    """The contents of a source's records: which are kept, in order, and a fingerprint of them. Reads everything once.

    Left out and counted: what is empty, exact copies of an earlier record, and what is not UTF-8; of conversations also those in which the
    assistant says nothing. A record without the field, or one that is damaged, is an error.
    """

    def __init__(self, config: SourceConfig, records: Records, *, spelled_out: bool = False):
        self._config, self._records = config, records
        self.left_out = Counter(records.left_out)
        self.kept: list[int] = []
        self._digests: list[bytes] = []
        seen: set[bytes] = set()
        for index in range(len(records)):
            reason, digest = self._examine(index, spelled_out)
            if not reason and digest in seen:
                reason = "copy of an earlier one"
            if reason:
                self.left_out[reason] += 1
                continue
            seen.add(digest)
            self.kept.append(index), self._digests.append(digest)
        if not self.kept:
            raise ValueError(f"path: {config.path} gives no document (left out: {describe_left_out(self.left_out)}); wanted at least one")
        if +self.left_out:
            _log.info("%s: left out %s", config.label, describe_left_out(self.left_out))

    def __len__(self) -> int:
        return len(self.kept)

    def name(self, position: int) -> str:
        return self._records.name(self.kept[position])

    def content(self, position: int) -> Any:
        """A string, or a list of messages. ValueError when it is no longer what it was when the source was opened."""
        content = self._content(self.kept[position])
        if _digest(content) != self._digests[position]:
            raise ValueError(f"path: {self._config.path}: {self.name(position)} has changed since the source was opened; leave the files of a run as they are")
        return content

    def fingerprint(self, positions: Sequence[int], *more: str) -> str:
        """SHA-256 over the names and contents of the documents at `positions`, and `more`."""
        found = hashlib.sha256(json.dumps([self._config.content, *more]).encode())
        for position in positions:
            found.update(len(self.name(position)).to_bytes(8, "big") + self.name(position).encode("utf-8", "surrogateescape") + self._digests[position])
        return found.hexdigest()

    def _content(self, index: int) -> Any:
        return content_of(self._records.read(index), content_field(self._config), f"{self._config.path}: {self._records.name(index)}")

    def _examine(self, index: int, spelled_out: bool) -> tuple[str, bytes]:
        where = f"{self._config.path}: {self._records.name(index)}"
        try:
            content = self._content(index)
            if self._config.content == "messages" and content:
                check_messages(content, where, spelled_out=spelled_out)
                if not any(m["role"] == "assistant" for m in content):
                    return "nothing by the assistant", b""
                return "", _digest(content)
            if content is None or content == [] or isinstance(content, str) and not content.strip():
                return "empty", b""
            if not isinstance(content, str):
                raise ValueError(f"{where}: got {type(content).__name__} in the field {content_field(self._config)!r}, wanted text")
            return "", _digest(content)
        except (Undecodable, UnicodeEncodeError):
            return "not UTF-8", b""


def _digest(content: Any) -> bytes:
    """SHA-256 of a text or of a conversation. UnicodeEncodeError for half a surrogate pair, which JSON can spell and no UTF-8 holds."""
    text = content if isinstance(content, str) else json.dumps([[m["role"], m["content"]] for m in content], ensure_ascii=False)
    return hashlib.sha256(text.encode()).digest()


class RecordDocuments:
    """The documents of one split of text or conversations, tokenised whenever they are read."""

    def __init__(self, contents: Contents, messages: bool, tokenizer: Tokenizer, split: str):
        self._contents, self._messages, self._tokenizer, self.eos_id = contents, messages, tokenizer, tokenizer.eos_id
        self._positions = [i for i in range(len(contents)) if is_held_out(contents.name(i)) == (split == "heldout")]
        self.fingerprint = contents.fingerprint(self._positions, tokenizer.fingerprint, _TEMPLATE_VERSION)

    def __len__(self) -> int:
        return len(self._positions)

    def document(self, index: int) -> Document:
        return encode_content(self._tokenizer, self._contents.content(self._positions[index]), self._messages)

    def document_name(self, index: int) -> str:
        return self._contents.name(self._positions[index])


def encode_content(tokenizer: Tokenizer, content: Any, messages: bool) -> Document:
    """A text or a conversation as a document."""
    if messages:
        return Document(*encode_messages(tokenizer, content))
    return Document(np.array([*tokenizer.encode(content), tokenizer.eos_id], np.int64))


def source_configs(config: DataConfig) -> tuple[SourceConfig, ...]:
    """The config's sources; `path` is one token folder, named corpus."""
    if not (config.sources or config.path):
        raise ValueError("sources: got none and no path, wanted one of the two")
    return config.sources or (SourceConfig(path=config.path, name="corpus"),)


def open_sources(config: DataConfig, split: str) -> tuple[Source, ...]:
    """Opens and checks every source of task text. A source of which nothing is held out takes no part in "heldout", if another does.

    ValueError names what is wrong, and in which source.
    """
    if split not in SPLITS:
        raise ValueError(f"split: got {split!r}, wanted one of {', '.join(SPLITS)}")
    wanted = source_configs(config)
    folders = {c.label: read_token_folder(c.path) for c in wanted if c.kind == "token_folder"}
    tokenizer = _common_tokenizer(config, wanted, {name: folder.tokenizer for name, folder in folders.items()})
    sources = tuple(_open(c, folders.get(c.label), tokenizer, split) for c in wanted)
    empty = [source.name for source in sources if not len(source.documents)]
    if split == "heldout" and empty and len(empty) < len(sources):
        _log.warning("nothing of %s is held out: it takes no part in the held-out pass", ", ".join(empty))
        return tuple(source for source in sources if len(source.documents))
    if empty:
        raise ValueError(f"sources: {', '.join(empty)} has no document in the split {split!r} (documents are held out by a hash of their name); "
                         "wanted at least one, so add documents to it")
    return sources


def open_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that `open_sources` gives every source, without reading a document: raw sources need not be there.

    ValueError as there, for token folders whose tokenizer is missing or damaged, and where there is none or more than one vocabulary.
    """
    wanted = source_configs(config)
    return _common_tokenizer(config, wanted, {c.label: read_tokenizer(c.path) for c in wanted if c.kind == "token_folder"})


def load_tokenizer(name: str) -> Tokenizer:
    """"bytes" (with the chat tokens), a `tokenizer.json`, or a folder that holds one."""
    if name == "bytes":
        return Tokenizer.of_bytes(CHAT_TOKENS)
    path = Path(name)
    return Tokenizer.load(path / "tokenizer.json" if path.is_dir() else path)


def _open(config: SourceConfig, folder: TokenFolder | None, tokenizer: Tokenizer, split: str) -> Source:
    about = {"name": config.label, "kind": config.kind, "weight": config.weight, "tokenizer": tokenizer, "whole": config.whole}
    if folder is not None:
        licence = config.licence or ", ".join(folder.meta["licences"])
        return Source(**about, licence=licence, documents=FolderDocuments(folder.split(split), folder.fingerprint), left_out={})
    messages = config.content == "messages"
    contents = Contents(config, open_records(config), spelled_out=messages and not has_chat_tokens(tokenizer))
    return Source(**about, licence=config.licence, documents=RecordDocuments(contents, messages, tokenizer, split), left_out=+contents.left_out)


def _common_tokenizer(config: DataConfig, sources: Sequence[SourceConfig], folders: Mapping[str, Tokenizer]) -> Tokenizer:
    """The one tokenizer of all sources, of which `folders` are token folders with their own."""
    of = dict(_tokenizers(config, folders))
    if not of:
        names = ", ".join(source.label for source in sources)
        raise ValueError(f"tokenizer: got nothing, wanted \"bytes\", a tokenizer.json or a token folder, to read {names} with")
    (first, chosen), *others = of.items()
    for name, tokenizer in others:
        if tokenizer.fingerprint != chosen.fingerprint:
            raise ValueError(f"tokenizer: {first} ({chosen.vocab_size} tokens) and {name} ({tokenizer.vocab_size} tokens) have different vocabularies, "
                             "wanted one for all sources; build the token folders again with the same tokenizer (longmoe data build --tokenizer)")
    return chosen


def _tokenizers(config: DataConfig, folders: Mapping[str, Tokenizer]) -> Iterator[tuple[str, Tokenizer]]:
    if config.tokenizer:
        yield f"data.tokenizer={config.tokenizer}", load_tokenizer(config.tokenizer)
    for name, tokenizer in folders.items():
        yield f"source {name}", tokenizer
