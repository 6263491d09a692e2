"""Unigram and bigram baselines, counted on the training split and scored on the tokens that the model is scored on.

A model that does not beat the unigram has learned nothing; one that does not beat the bigram makes no use of context beyond one token.
"""

from dataclasses import dataclass

import numpy as np

from longmoe.data.token_folder import Split, TokenFolder

_DISCOUNT = 0.75


@dataclass(frozen=True)
class Baseline:
    """Mean negative log-likelihood of the held-out tokens, in nats a token and in bits a byte of text."""

    name: str
    nats_per_token: float
    bits_per_byte: float


def bits_per_byte(total_nats: float, num_bytes: int) -> float:
    """Nats over a text of `num_bytes` bytes as bits a byte."""
    return float(total_nats / np.log(2.0) / num_bytes)


def ngram_baselines(folder: TokenFolder, num_tokens: int | None = None) -> tuple[Baseline, Baseline]:
    """(unigram, bigram) on the first `num_tokens` held-out tokens in order that a model is scored on, None = all.

    Every token with a weight above 0 counts once, end-of-document tokens too; those also stand before a document's first token.
    """
    heldout = folder.heldout
    scored = (np.arange(len(heldout.tokens)) if heldout.weights is None else np.flatnonzero(heldout.weights))[:num_tokens]
    targets = _pairs(heldout)[1][scored]
    num_bytes = int(folder.tokenizer.bytes_per_token()[targets].sum(dtype=np.int64))
    unigram = unigram_nll(folder.train, folder.vocab_size)[targets]
    bigram = bigram_nll(folder.train, heldout, folder.vocab_size)[scored]
    return _baseline("unigram", unigram, num_bytes), _baseline("bigram", bigram, num_bytes)


def unigram_nll(train: Split, vocab_size: int) -> np.ndarray:
    """float64 [vocab_size]: -log probability of each token, add-one smoothed."""
    counts = np.bincount(_pairs(train)[1], minlength=vocab_size) + 1.0
    return -np.log(counts / counts.sum())


def bigram_nll(train: Split, heldout: Split, vocab_size: int) -> np.ndarray:
    """float64 [held-out tokens]: -log p(token | token before), interpolated Kneser-Ney with discount 0.75.

    p(b | a) = max(c(a, b) - d, 0) / c(a) + d n(a) / c(a) q(b), where n(a) counts the kinds of token seen after a and q(b)
    is the share of kinds of pair that end in b (Kneser and Ney, 1995, interpolated).
    """
    before, after = _pairs(train)
    pairs, counts = np.unique(before * vocab_size + after, return_counts=True)
    total = np.bincount(before, minlength=vocab_size)
    kinds = np.bincount(pairs // vocab_size, minlength=vocab_size)
    ending = np.bincount(pairs % vocab_size, minlength=vocab_size) + 0.5   # no token is impossible
    back_off = ending / ending.sum()

    a, b = _pairs(heldout)
    code = a * vocab_size + b
    place = np.minimum(np.searchsorted(pairs, code), len(pairs) - 1)
    seen = np.where(pairs[place] == code, counts[place], 0)
    context = np.maximum(total[a], 1)
    p = np.maximum(seen - _DISCOUNT, 0) / context + _DISCOUNT * kinds[a] / context * back_off[b]
    return -np.log(np.where(total[a] > 0, p, back_off[b]))


def _baseline(name: str, nll: np.ndarray, num_bytes: int) -> Baseline:
    return Baseline(name, float(nll.mean()), bits_per_byte(float(nll.sum()), num_bytes))


def _pairs(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """(token before, token), int64. Documents end with the end-of-document token, so that it also stands before each first token."""
    after = np.asarray(split.tokens).astype(np.int64)
    return np.concatenate([[split.eos_id], after[:-1]]), after
