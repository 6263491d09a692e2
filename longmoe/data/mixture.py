"""Which document comes next: per-source cursors and epochs, and the mix.

The mix is by tokens. Each source holds a credit; a document of n tokens adds n times its weight to every source's credit, and takes n times
the sum of all weights from the credit of the source it came from. The next document is one of the source with the most credit. Credits and
weights are integers, so the choice is exact on every machine; it stays within a document's length of the weights, and new weights hold from
the next document on: what was drawn under the old ones is not made up for.

Within a source, epoch e takes the documents in the order `permutation(documents, seed, source's name, e)`. Neither the weights, nor the
other sources, nor how far anything was read ahead has a say in that order; a source begins its next epoch when its last document is taken.
"""

import functools
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from longmoe.data.hashing import permutation, text_key
from longmoe.data.sources import Document, Source

_WEIGHT_UNITS = 1 << 20
_READ_AHEAD = 8


class Mixture:
    """`take()` gives the documents of a run one after another; `state()` and `restore()` are its cursors.

    With `repeat` the sources are mixed, shuffled and repeated without end. Without it there is one pass: source after source, each in its
    own order. `workers` threads a source read and tokenise ahead; the state holds what was taken, so they leave no trace in it.
    """

    def __init__(self, sources: Sequence[Source], *, seed: int, repeat: bool, workers: int = 0):
        self.sources = tuple(sources)
        self._repeat = repeat
        self._weights = _integer_weights([source.weight for source in sources])
        self._credits = [0] * len(sources)
        self._cursors = [_Cursor(source, seed if repeat else None, workers) for source in sources]

    def take(self) -> tuple[int, int, Document] | None:
        """(source, index, document); None when a single pass is over."""
        source = self._next_source()
        if source is None:
            return None
        index, document = self._cursors[source].take()
        if self._repeat:
            count = len(document.tokens)
            self._credits = [credit + count * weight for credit, weight in zip(self._credits, self._weights)]
            self._credits[source] -= count * sum(self._weights)
        return source, index, document

    def _next_source(self) -> int | None:
        if self._repeat:
            return max((i for i, weight in enumerate(self._weights) if weight), key=lambda i: (self._credits[i], -i))
        return next((i for i, cursor in enumerate(self._cursors) if cursor.epoch == 0), None)

    def state(self) -> dict[str, dict[str, Any]]:
        """Source name -> fingerprint, epoch, next (place in the epoch's order) and credit, JSON-plain."""
        return {source.name: {"fingerprint": source.documents.fingerprint, "epoch": cursor.epoch, "next": cursor.next, "credit": credit}
                for source, cursor, credit in zip(self.sources, self._cursors, self._credits)}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Goes on from a state. Weights may differ, and sources may be added; ValueError for one that is gone or holds other documents."""
        names = [source.name for source in self.sources]
        gone = sorted(set(state) - set(names))
        if gone:
            raise ValueError(f"state: it was saved with the sources {', '.join(state)}, this loader lacks {', '.join(gone)}; list every source of the run, "
                             "with weight 0 those that shall give no further document")
        for i, name in enumerate(names):
            if name not in state:
                continue
            saved, documents = state[name], self.sources[i].documents
            if saved["fingerprint"] != documents.fingerprint:
                raise ValueError(f"state: source {name!r} was saved with fingerprint {saved['fingerprint'][:12]}, it has {documents.fingerprint[:12]} now: its "
                                 "documents have changed; bring the old ones back, list the new ones under another name, or start a fresh run")
            if not 0 <= int(saved["next"]) <= len(documents):
                raise ValueError(f"state: source {name!r} is at document {saved['next']} of its order, but has {len(documents)}; "
                                 "the state belongs to other data")
            self._cursors[i].move(int(saved["epoch"]), int(saved["next"]))
            self._credits[i] = int(saved["credit"])


class _Cursor:
    """One source's place in its epochs, and the stream of documents from there."""

    def __init__(self, source: Source, seed: int | None, workers: int):
        self._documents, self._workers = source.documents, workers
        self._order = _Order(source.documents, seed, text_key(source.name))
        self.move(0, 0)

    def move(self, epoch: int, place: int) -> None:
        self.epoch, self.next = epoch, place
        self._stream: Iterator[tuple[int, Document]] | None = None   # opened by the first document: a source of weight 0 reads nothing

    def take(self) -> tuple[int, Document]:
        if self._stream is None:
            self._stream = _stream(self._order, self.epoch * len(self._documents) + self.next, self._workers)
        found = next(self._stream)
        self.next += 1
        if self.next == len(self._documents):
            self.epoch, self.next = self.epoch + 1, 0
        return found


class _Order:
    """All documents of a source in all epochs as one sequence without end; seed None is one pass in the source's own order."""

    def __init__(self, documents: Any, seed: int | None, key: int):
        self._documents, self._seed = documents, seed
        # Threads ask for the end of one epoch and the start of the next at the same time.
        self._permutation = functools.lru_cache(maxsize=2)(lambda epoch: permutation(len(documents), seed, key, epoch))

    def __len__(self) -> int:
        return len(self._documents) if self._seed is None else sys.maxsize

    def __getitem__(self, position: int) -> tuple[int, Document]:
        epoch, place = divmod(position, len(self._documents))
        index = place if self._seed is None else int(self._permutation(epoch)[place])
        return index, self._documents.document(index)


class _From:
    """The rest of a sequence."""

    def __init__(self, sequence: _Order, start: int):
        self._sequence, self._start = sequence, start

    def __len__(self) -> int:
        return len(self._sequence) - self._start

    def __getitem__(self, position: int) -> tuple[int, Document]:
        return self._sequence[self._start + position]


def _stream(order: _Order, start: int, workers: int) -> Iterator[tuple[int, Document]]:
    if not workers:
        return (order[position] for position in range(start, len(order)))
    try:
        grain = importlib.import_module("grain")
    except ImportError as error:
        raise ValueError(f"workers: got {workers}, but Grain, whose threads they are, is not installed; pip install grain, or set data.workers to 0") from error
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=_READ_AHEAD * workers)
    return iter(grain.MapDataset.source(_From(order, start)).to_iter_dataset(options))


def _integer_weights(weights: Sequence[float]) -> list[int]:
    total = float(np.sum(weights))
    return [max(1, round(_WEIGHT_UNITS * weight / total)) if weight > 0 else 0 for weight in weights]
