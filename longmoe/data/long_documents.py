"""Long documents out of short ones, the same on every machine: whole folders, texts with planted facts, traces of an agent's work.

    documents = planted_documents(Filling(texts, tokenizer), seed=0, questions=4, length=lambda draws: 65_536)
    write_long_documents("long.jsonl", itertools.islice(documents, 100), tokenizer)
"""

import dataclasses
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from longmoe.data.draws import Draws
from longmoe.data.records import SKIPPED_FOLDERS, TEXT_SUFFIXES, TextFiles, Undecodable
from longmoe.data.tokenizer import Tokenizer

CHUNK = 400
"""Characters of filling that stay together, about; a chunk ends with a line."""
WOVEN = 4
"""Documents whose chunks take turns, each in its own order, so that neighbouring text is not all about one thing."""
_TOCTREE = re.compile(r"^([ \t]*)\.\. toctree::.*\n((?:\1[ \t]+.*\n?|[ \t]*\n)+)", re.MULTILINE)


class Turn(NamedTuple):
    """Consecutive text of one role. In documents that are no conversation, assistant's text is what a question asks for and user's all else."""
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Evidence(NamedTuple):
    """What an answer rests on: turn and character in it where it stands, and the turn that gives the answer."""
    turn: int
    character: int
    answer: int


@dataclasses.dataclass(frozen=True)
class LongDocument:
    name: str
    turns: tuple[Turn, ...]
    evidence: tuple[Evidence, ...] = ()
    joint: str = ""
    """What stands between turns in the text."""

    @property
    def text(self) -> str:
        """All of it, answers too."""
        return self.joint.join(turn.content for turn in self.turns)

    def distances(self, tokenizer: Tokenizer) -> tuple[int, list[int]]:
        """(tokens of the text, tokens from each piece of evidence to its answer), each turn and piece counted by itself."""
        cuts = sorted({0, *(starts := list(self._starts())), *(starts[e.turn] + e.character for e in self.evidence), len(self.text)})
        pieces = tokenizer.encode_batch([self.text[a:b] for a, b in itertools.pairwise(cuts)])
        at = dict(zip(cuts, itertools.accumulate(map(len, pieces), initial=0)))
        return at[len(self.text)], [at[starts[e.answer]] - at[starts[e.turn] + e.character] for e in self.evidence]

    def _starts(self) -> Iterator[int]:
        return itertools.accumulate((len(turn.content) + len(self.joint) for turn in self.turns[:-1]), initial=0)


def folder_documents(root: str | Path, *, suffixes: Sequence[str] = TEXT_SUFFIXES, depth: Literal[0, 1] = 1,
                     order: Literal["path", "toctree"] = "path", skipped_folders: Iterable[str] = SKIPPED_FOLDERS) -> Iterator[LongDocument]:
    """Each folder in `root` as one document (depth 0: all of `root` as one), as a repository or a manual is read: a line with each file's path, then the file.

    order: files by path, or as the toctrees of the folder's index.rst name them, with the files that none names behind. Files that are not UTF-8 or end in
    another suffix are left out. ValueError for a folder without files.
    """
    root = Path(root)
    found = TextFiles(root, suffixes, skipped_folders)
    of_folder: dict[str, list[int]] = {}
    for i in range(len(found)):
        of_folder.setdefault(found.name(i).partition("/")[0] if depth and "/" in found.name(i) else "", []).append(i)
    for folder, files in of_folder.items():
        texts = {}
        for i in files:
            try:
                texts[found.name(i)] = found.read(i)
            except Undecodable:
                continue
        names = [*_toctree(texts, f"{folder}/index" if folder else "index")] if order == "toctree" else []
        text = "".join(f"# {name}\n{texts[name].rstrip()}\n" for name in dict.fromkeys([*names, *texts]))
        if text:
            yield LongDocument(folder or root.name, (Turn("user", text),))


def _toctree(texts: dict[str, str], page: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Names of the files that a page's toctrees lead to, the page first, depth first."""
    name = next((page + suffix for suffix in (".rst", ".txt", ".md", "") if page + suffix in texts), None)
    if name is None or name in seen:
        return
    yield name
    folder = name.rpartition("/")[0]
    for _, body in _TOCTREE.findall(texts[name]):
        for line in filter(None, map(str.strip, body.splitlines())):
            entry = line[line.rfind("<") + 1:-1] if line.endswith(">") else line
            if not entry.startswith(":"):
                target = entry.lstrip("/") if entry.startswith("/") or not folder else f"{folder}/{entry}"
                yield from _toctree(texts, target.removesuffix(".rst"), seen | {name})


def log_uniform(least: int, most: int) -> Callable[[Draws], int]:
    """(draws) -> the whole part of a number that is log-uniform from least to most."""
    low, high = math.log(least), math.log(most)
    return lambda draws: max(least, int(math.exp(low + (high - low) * float(draws.uniform(1)[0]))))


class Filling:
    """Short texts as an endless supply of chunks: in an order of the draws, WOVEN texts at a time, their chunks taking turns.

    `tokens`: those of all texts.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer):
        cut = [chunks for text in texts if (chunks := list(_chunks(text)))]
        if not cut:
            raise ValueError(f"texts: got {len(texts)} without a character, wanted at least one text")
        sizes = iter(map(len, tokenizer.encode_batch([chunk for chunks in cut for chunk in chunks])))
        self._chunks = [[(chunk, next(sizes)) for chunk in chunks] for chunks in cut]
        self.tokens = sum(size for chunks in self._chunks for _, size in chunks)

    def take(self, draws: Draws, tokens: int) -> list[str]:
        """Chunks of `tokens` in all, the last one over it or not; texts come again when there are too few."""
        taken, total = [], 0
        while total < tokens:
            order = draws.permutation(len(self._chunks)).tolist()
            for start in range(0, len(order), WOVEN):
                woven = itertools.zip_longest(*(self._chunks[i] for i in order[start:start + WOVEN]))
                for chunk, size in filter(None, itertools.chain.from_iterable(woven)):
                    taken.append(chunk)
                    total += size
                    if total >= tokens:
                        return taken
        return taken


def _chunks(text: str) -> Iterator[str]:
    chunk = ""
    for line in text.splitlines(keepends=True):
        chunk += line if line.endswith("\n") else line + "\n"
        if len(chunk) >= CHUNK:
            yield chunk
            chunk = ""
    if chunk.strip():
        yield chunk


@dataclasses.dataclass
class Summary:
    """What was written. `distances` counts pieces of evidence by the power of two at or below their tokens to the answer."""
    documents: int = 0
    tokens: int = 0
    longest: int = 0
    left_out: int = 0
    distances: Counter[int] = dataclasses.field(default_factory=Counter)


def write_long_documents(out: str | Path, documents: Iterable[LongDocument], tokenizer: Tokenizer, *, form: Literal["text", "messages"] = "text",
                         least_tokens: int = 0) -> Summary:
    """Writes JSON lines: name, tokens, evidence_distances, and `text` or `messages` (then only answers are targets). Shorter documents are left out."""
    summary = Summary()
    with open(out, "w", encoding="utf-8") as file:
        for document in documents:
            tokens, distances = document.distances(tokenizer)
            if tokens < least_tokens:
                summary.left_out += 1
                continue
            content: Any = document.text if form == "text" else [turn._asdict() for turn in document.turns]
            file.write(json.dumps({"name": document.name, "tokens": tokens, "evidence_distances": distances, form: content}, ensure_ascii=False) + "\n")
            summary.documents += 1
            summary.tokens += tokens
            summary.longest = max(summary.longest, tokens)
            summary.distances.update(1 << (distance.bit_length() - 1) for distance in distances if distance)
    return summary
