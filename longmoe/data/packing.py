"""Documents -> rows for training. NumPy, with a state of plain integers.

The rule. A stored token is a target exactly once an epoch; its input is the token before it in the document, or the
end-of-document token before the first. A row holds pieces of documents one after another, each under its own segment id.
A document that does not fit in what is left of a row is cut there and goes on at the start of the same lane's next row,
where the model starts it from an empty state; its first input there is the true token before the cut. A source may ask
for whole documents: those that fit in a row begin the lane's next row instead, and what is left of this one is padding.

Lanes. Rows are dealt to the lanes in turn, and a lane that has finished its document takes the mixture's next one.
With one lane, rows follow in reading order. With many, a batch mixes many documents, neighbouring batches differ, and a very
long document takes no more than its lane's share of any stretch of training.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from longmoe.data.mixture import Mixture
from longmoe.data.sources import Document

PADDING_SOURCE = -1


@dataclasses.dataclass
class _Piece:
    """The rest of a document, from token `offset` on."""

    source: int
    index: int
    offset: int
    document: Document


class Packer:
    """Fills batches of rows from `mixture`; `state()` and `restore()` give and take everything that both remember.

    A mixture without end pads a row in front of a whole document alone; at the end of a single pass, what is left of the last rows is padding.
    """

    def __init__(self, mixture: Mixture, *, sequence_length: int, batch_size: int, num_lanes: int):
        if num_lanes < 1:
            raise ValueError(f"num_lanes: got {num_lanes}, wanted at least 1")
        self._mixture, self._length, self._rows = mixture, sequence_length, batch_size
        self._eos_id = mixture.sources[0].documents.eos_id
        sizes = [len(source.documents) for source in mixture.sources]
        self._first_ids = np.cumsum([0, *sizes])
        if self._first_ids[-1] >= 2**31:
            raise ValueError(f"sources: got {self._first_ids[-1]:,} documents in all, wanted less than 2**31, which source_ids can hold")
        self._tokens = [0] * len(sizes)                                 # targets given out, by source
        self._waiting: list[_Piece] = []                                # pieces that no lane holds yet
        self._lanes: list[_Piece | None] = [None] * num_lanes
        self._turn = 0                                                  # the lane of the next row

    def state(self) -> dict[str, Any]:
        """JSON-plain.

        sources: name -> the mixture's state and the tokens given out. lanes: each lane's [source, document, offset], None if idle.
        waiting: as lanes, for documents that a loader with more lanes left open. turn: the lane of the next row.
        """
        names = [source.name for source in self._mixture.sources]
        plain = lambda piece: piece and [names[piece.source], piece.index, piece.offset]
        cursors = self._mixture.state()
        return {"sources": {name: {**cursors[name], "tokens": count} for name, count in zip(names, self._tokens)},
                "lanes": [plain(piece) for piece in self._lanes], "waiting": [plain(piece) for piece in self._waiting], "turn": self._turn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes a state of the same sources. Weights, rows, their length and the number of lanes may differ: open documents are finished."""
        self._mixture.restore(state["sources"])
        names = [source.name for source in self._mixture.sources]
        self._tokens = [int(state["sources"].get(name, {"tokens": 0})["tokens"]) for name in names]
        pieces = [piece and self._open(names.index(piece[0]), int(piece[1]), int(piece[2])) for piece in [*state["lanes"], *state["waiting"]]]
        count = len(self._lanes)
        self._lanes = [*pieces[:count], *[None] * (count - len(pieces))]
        self._waiting = [piece for piece in pieces[count:] if piece]
        self._turn = int(state["turn"]) % count

    def _open(self, source: int, index: int, offset: int) -> _Piece:
        documents = self._mixture.sources[source].documents
        document = documents.document(index) if 0 <= index < len(documents) else None
        if document is None or not 0 <= offset < len(document.tokens):
            raise ValueError(f"state: got document {index} at token {offset}, which source {self._mixture.sources[source].name!r} of {len(documents)} "
                             "documents does not have; the state belongs to other data")
        return _Piece(source, index, offset, document)

    def locate(self, source_id: int) -> tuple[str, str]:
        """(source, document) by name, of a number in a batch's source_ids."""
        source = int(np.searchsorted(self._first_ids, source_id, side="right")) - 1
        found = self._mixture.sources[source]
        return found.name, found.documents.document_name(source_id - int(self._first_ids[source]))

    def next_batch(self) -> dict[str, np.ndarray] | None:
        """tokens, targets, segment_ids, source_ids int32 and loss_weights float32, all [B, T]; None when no document is left.

        segment_ids count 1, 2, ... along a row, 0 is padding; source_ids number the documents of all sources in the order they are listed
        (`locate` names them), -1 for padding; loss_weights are the documents' own, 0 for padding.
        """
        shape = (self._rows, self._length)
        batch = {"tokens": np.full(shape, self._eos_id, np.int32), "targets": np.full(shape, self._eos_id, np.int32),
                 "loss_weights": np.zeros(shape, np.float32), "segment_ids": np.zeros(shape, np.int32),
                 "source_ids": np.full(shape, PADDING_SOURCE, np.int32)}
        for row in range(self._rows):
            lane = self._next_lane()
            if lane is not None:
                self._fill_row({name: array[row] for name, array in batch.items()}, lane)
        return batch if batch["segment_ids"].any() else None

    def _next_lane(self) -> int | None:
        for _ in self._lanes:
            lane, self._turn = self._turn, (self._turn + 1) % len(self._lanes)
            self._lanes[lane] = self._lanes[lane] or self._take()
            if self._lanes[lane] is not None:
                return lane
        return None

    def _fill_row(self, row: dict[str, np.ndarray], lane: int) -> None:
        filled, segment = 0, 0
        while filled < self._length:
            piece = self._lanes[lane] or self._take()
            if piece is None:
                return
            stored, weights = piece.document
            if filled and not piece.offset and self._mixture.sources[piece.source].whole and self._length - filled < len(stored) <= self._length:
                self._lanes[lane] = piece
                return
            offset, count = piece.offset, min(self._length - filled, len(stored) - piece.offset)
            here, segment = slice(filled, filled + count), segment + 1
            row["targets"][here] = stored[offset:offset + count]
            row["tokens"][here] = _inputs(stored, offset, count, self._eos_id)
            row["loss_weights"][here] = 1.0 if weights is None else weights[offset:offset + count]
            row["segment_ids"][here], row["source_ids"][here] = segment, self._first_ids[piece.source] + piece.index
            filled += count
            self._tokens[piece.source] += count
            piece.offset += count
            self._lanes[lane] = piece if piece.offset < len(stored) else None

    def _take(self) -> _Piece | None:
        if self._waiting:
            return self._waiting.pop(0)
        found = self._mixture.take()
        return found and _Piece(found[0], found[1], 0, found[2])


def _inputs(stored: np.ndarray, offset: int, count: int, eos_id: int) -> np.ndarray:
    if offset:
        return stored[offset - 1:offset + count - 1]
    return np.concatenate([[eos_id], stored[:count - 1]])
