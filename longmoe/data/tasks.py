"""Generated tasks. A batch is a pure function of (seed, split, step), so a step counter is the whole state."""

import numpy as np

from longmoe.data.hashing import random_bits

FILLER_ID = 0
_KEYS_A_PAIR = 4
_SPLIT_KEYS = {"train": 0, "heldout": 1}


def recall_vocab_size(num_pairs: int) -> int:
    """Token ids that associative recall uses: the filler, 4 num_pairs keys, then 4 num_pairs values."""
    return 1 + 2 * _KEYS_A_PAIR * num_pairs


def recall_length(num_pairs: int) -> int:
    """Positions of a row: the pairs take 2 each and the queries 1."""
    return 3 * num_pairs


def associative_recall(*, num_pairs: int, sequence_length: int, batch_size: int, seed: int, split: str, step: int) -> dict[str, np.ndarray]:
    """A batch of multi-query associative recall (Arora et al., 2023, "Zoology").

    A row is `key value` num_pairs times, then all its keys again in a random order; the target at a repeated key is the
    value that followed it. Keys and values are disjoint sets of ids, both drawn without repetition and paired at random in
    each row. The answers are not fed back, so nothing can be found by elimination: a guess among the row's own values is
    right with probability 1 / num_pairs.

    -> tokens, targets, segment_ids (1, then 0 for padding), source_ids (the row's number in the stream) int32 and
    loss_weights float32 (1 at the queries only), all [B, T]. ValueError when a row does not fit.
    """
    length = recall_length(num_pairs)
    if sequence_length < length:
        raise ValueError(f"sequence_length: got {sequence_length}, wanted at least 3 * num_pairs = {length}")
    alphabet = _KEYS_A_PAIR * num_pairs
    bits = random_bits(seed, _SPLIT_KEYS[split], step, shape=(batch_size, 2 * alphabet + num_pairs))
    shuffles = np.split(bits, [alphabet, 2 * alphabet], axis=1)
    keys, values, order = (np.argsort(b, axis=1, kind="stable")[:, :num_pairs] for b in shuffles)
    keys, values = 1 + keys, 1 + alphabet + values

    shape = (batch_size, sequence_length)
    tokens, targets = np.full(shape, FILLER_ID, np.int32), np.full(shape, FILLER_ID, np.int32)
    tokens[:, 0:2 * num_pairs:2], tokens[:, 1:2 * num_pairs:2] = keys, values
    queries = slice(2 * num_pairs, length)
    tokens[:, queries] = np.take_along_axis(keys, order, axis=1)
    targets[:, queries] = np.take_along_axis(values, order, axis=1)
    weights, segments = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    weights[:, queries], segments[:, :length] = 1.0, 1
    rows = (step * batch_size + np.arange(batch_size, dtype=np.int64)) % 2**31
    return {"tokens": tokens, "targets": targets, "loss_weights": weights, "segment_ids": segments,
            "source_ids": np.where(segments > 0, rows[:, None], -1).astype(np.int32)}
