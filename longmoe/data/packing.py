"""Documents -> rows for training. NumPy, with a state of plain integers.

The rule. A stored token is a target exactly once an epoch; its input is the token before it in the document, or the
end-of-document token before the first. A row holds pieces of documents one after another, each under its own segment id.
A document that does not fit in what is left of a row is cut there and goes on at the start of the same lane's next row,
where the model starts it from an empty state; its first input there is the true token before the cut.

Lanes. Rows are dealt to the lanes in turn, and a lane that has finished its document takes the next one of the epoch's order.
With one lane, rows follow in reading order. With many, a batch mixes many documents, neighbouring batches differ, and a very
long document takes no more than its lane's share of any stretch of training.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from longmoe.data.token_folder import Split

PADDING_SOURCE = -1


class Packer:
    """Fills batches of rows from `split`; `state()` and `restore()` give and take everything that it remembers.

    order(epoch) -> int [documents], the order of that epoch. With `repeat` the epochs follow one another without end and
    no row is ever padded; without it there is one epoch, and what is left of the last rows is padding.
    """

    def __init__(self, split: Split, *, sequence_length: int, batch_size: int, num_lanes: int,
                 order: Callable[[int], np.ndarray], repeat: bool):
        if num_lanes < 1:
            raise ValueError(f"num_lanes: got {num_lanes}, wanted at least 1")
        self._split, self._length, self._rows = split, sequence_length, batch_size
        self._order_of, self._repeat = order, repeat
        self._epoch, self._next = 0, 0
        self._order = order(0)
        self._waiting: list[list[int]] = []                             # [document, offset] that no lane holds yet
        self._lanes: list[list[int] | None] = [None] * num_lanes
        self._turn = 0                                                  # the lane of the next row

    def state(self) -> dict[str, Any]:
        """JSON-plain: epoch, place in its order, the lane whose turn it is, and each lane's [document, offset] ([-1, 0] if idle)."""
        return {"epoch": self._epoch, "next": self._next, "turn": self._turn, "lanes": [list(lane or (-1, 0)) for lane in self._lanes],
                "waiting": [list(piece) for piece in self._waiting]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes a state of the same split. Rows, their length and the number of lanes may differ: open documents are finished."""
        pieces = [[int(d), int(offset)] for d, offset in [*state["lanes"], *state["waiting"]]]
        for document, offset in pieces:
            if document >= len(self._split) or (document >= 0 and not 0 <= offset < len(self._split.document(document))):
                raise ValueError(f"state: got document {document} at token {offset}, which this split of {len(self._split)} "
                                 "documents does not have; the state belongs to other data")
        self._epoch, self._next = int(state["epoch"]), int(state["next"])
        self._order = self._order_of(self._epoch)
        count = len(self._lanes)
        self._lanes = [piece if piece[0] >= 0 else None for piece in pieces[:count]]
        self._lanes += [None] * (count - len(self._lanes))
        self._waiting = [piece for piece in pieces[count:] if piece[0] >= 0]
        self._turn = int(state["turn"]) % count

    def next_batch(self) -> dict[str, np.ndarray] | None:
        """tokens, targets, segment_ids, source_ids int32 and loss_weights float32, all [B, T]; None when no document is left.

        segment_ids count 1, 2, ... along a row, 0 is padding; source_ids are document indices of the split, -1 for padding.
        """
        shape = (self._rows, self._length)
        batch = {"tokens": np.full(shape, self._split.eos_id, np.int32), "targets": np.full(shape, self._split.eos_id, np.int32),
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
            document, offset = piece
            stored = self._split.document(document)
            count = min(self._length - filled, len(stored) - offset)
            here, segment = slice(filled, filled + count), segment + 1
            row["targets"][here] = stored[offset:offset + count]
            row["tokens"][here] = _inputs(stored, offset, count, self._split.eos_id)
            row["loss_weights"][here], row["segment_ids"][here], row["source_ids"][here] = 1.0, segment, document
            filled += count
            self._lanes[lane] = [document, offset + count] if offset + count < len(stored) else None

    def _take(self) -> list[int] | None:
        if self._waiting:
            return self._waiting.pop(0)
        if self._next == len(self._order):
            if not self._repeat:
                return None
            self._epoch, self._next = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        self._next += 1
        return [int(self._order[self._next - 1]), 0]


def _inputs(stored: np.ndarray, offset: int, count: int, eos_id: int) -> np.ndarray:
    if offset:
        return stored[offset - 1:offset + count - 1]
    return np.concatenate([[eos_id], stored[:count - 1]])
