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

    A problem is `key value` n times, then all its keys again in a random order; the target at a repeated key is the value that
    followed it. Keys and values are disjoint sets of ids, both drawn without repetition in a row and paired at random. The
    answers are not fed back, so nothing can be found by elimination: a guess among the problem's own values is right with
    probability 1 / n.

    A held-out row is one problem of num_pairs pairs. Training rows take turns at num_pairs, half, a quarter, ... down to 2
    pairs a problem, as many problems as fill the row, each a segment: small ones teach the mechanism long before large ones
    alone would.

    -> tokens, targets, segment_ids (1, 2, ...; 0 for padding), source_ids (the row's number in the stream) int32 and
    loss_weights float32 (1 at the queries only), all [B, T]. ValueError when a row does not fit.
    """
    length = recall_length(num_pairs)
    if sequence_length < length:
        raise ValueError(f"sequence_length: got {sequence_length}, wanted at least 3 * num_pairs = {length}")
    alphabet = _KEYS_A_PAIR * num_pairs
    bits = random_bits(seed, _SPLIT_KEYS[split], step, shape=(batch_size, 2 * alphabet + num_pairs))
    key_bits, value_bits, order_bits = np.split(bits, [alphabet, 2 * alphabet], axis=1)
    keys, values = (np.argsort(b, axis=1, kind="stable")[:, :num_pairs] for b in (key_bits, value_bits))
    keys, values = 1 + keys, 1 + alphabet + values

    shape = (batch_size, sequence_length)
    tokens, targets = np.full(shape, FILLER_ID, np.int32), np.full(shape, FILLER_ID, np.int32)
    weights, segments = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    sizes = _problem_sizes(num_pairs) if split == "train" else [num_pairs]
    for turn, size in enumerate(sizes):
        rows = slice(turn, None, len(sizes))
        # [rows, problems, size] -> [rows, problems, 3 size] -> [rows, length]
        k, v, order = (x[rows].reshape(-1, num_pairs // size, size) for x in (keys, values, order_bits))
        order = np.argsort(order, axis=-1, kind="stable")
        pairs = np.stack([k, v], axis=-1).reshape(*k.shape[:2], 2 * size)
        flat = lambda *parts: np.concatenate(parts, axis=-1).reshape(-1, length)
        tokens[rows, :length] = flat(pairs, np.take_along_axis(k, order, axis=-1))
        targets[rows, :length] = flat(np.full_like(pairs, FILLER_ID), np.take_along_axis(v, order, axis=-1))
        weights[rows, :length] = flat(np.zeros(pairs.shape), np.ones(k.shape))
        segments[rows, :length] = 1 + np.arange(length) // (3 * size)
    numbers = (step * batch_size + np.arange(batch_size, dtype=np.int64)) % 2**31
    return {"tokens": tokens, "targets": targets, "loss_weights": weights, "segment_ids": segments,
            "source_ids": np.where(segments > 0, numbers[:, None], -1).astype(np.int32)}


def _problem_sizes(num_pairs: int) -> list[int]:
    """num_pairs, then its halves while they are whole and at least 2."""
    sizes = [num_pairs]
    while sizes[-1] % 2 == 0 and sizes[-1] > 2:
        sizes.append(sizes[-1] // 2)
    return sizes
