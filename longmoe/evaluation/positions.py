"""Does a longer context lower the loss? Loss by position, and the gain on the same last tokens, over documents that are long enough."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from longmoe.evaluation.models import ScoreTokens
from longmoe.evaluation.statistics import Z95
from longmoe.evaluation.text import Losses

TAIL = 1024
"""Last tokens of a document's beginning that every context is scored on, and the shortest context."""


@dataclass(frozen=True)
class ContextGain:
    """One context: `context` tokens before the tail; nll is the tail's mean in nats a token; gain is the nll with the shortest context minus this one's,
    mean over `documents`, with the half-width of its 95 % interval over documents (NaN for one document)."""

    context: int
    nll: float
    gain: float
    half_width: float
    documents: int


def position_edges(length: int) -> tuple[int, ...]:
    """0, then powers of two up to `length`, which is the last edge."""
    powers = [2**i for i in range(length.bit_length())]
    return (0, *[edge for edge in powers if edge < length], length)


def long_documents(documents: Iterable[np.ndarray], length: int, most: int) -> np.ndarray:
    """int32 [documents, length]: the first `length` tokens of the first `most` documents that have as many."""
    found = []
    for tokens in documents:
        if len(found) == most:
            break
        if len(tokens) >= length:
            found.append(np.asarray(tokens[:length], np.int32))
    return np.stack(found) if found else np.zeros((0, length), np.int32)


def score_documents(score: ScoreTokens, documents: np.ndarray, *, first: int, batch_size: int = 1) -> Losses:
    """Losses of every token of `documents` int32 [R, T], each row one document, the token `first` (end of document) before its first.

    `loss_by_position(losses, position_edges(T))` gives the curve: every bin is a mean over the same documents.
    """
    if not len(documents):
        raise ValueError(f"documents: got none of {documents.shape[1]} tokens, wanted at least one")
    inputs = np.concatenate([np.full((len(documents), 1), first, np.int32), documents[:, :-1]], axis=1)
    nll = np.concatenate([score(inputs[i:i + batch_size], documents[i:i + batch_size]).nll for i in range(0, len(documents), batch_size)])
    return Losses(nll=nll, targets=documents, segment_ids=np.ones_like(documents), weights=np.ones(documents.shape, np.float32))


def context_gain(score: ScoreTokens, documents: np.ndarray, *, first: int, contexts: Sequence[int] | None = None, tail: int = TAIL,
                 batch_size: int = 1) -> list[ContextGain]:
    """How much the loss of the last `tail` tokens of documents int32 [R, T] falls as more of what comes before them is given, shortest context first.

    first: the token (end of document) before every context, which then begins as a document does. contexts: tokens before the tail; None takes tail, 2 tail,
    4 tail, ... and all T - tail. Every context scores the same tokens of the same documents, so that a difference is the context's. ValueError where a
    context does not fit.
    """
    rows, length = documents.shape
    longest = length - tail
    if tail < 1 or longest < 1:
        raise ValueError(f"tail: got {tail}, wanted from 1 to {length - 1}, less than the documents' {length} tokens")
    if not rows:
        raise ValueError(f"documents: got none of {length} tokens, wanted at least one")
    if contexts is None:
        contexts = [*(tail * 2**i for i in range(max(0, math.ceil(math.log2(longest / tail))))), longest]
    contexts = sorted(set(contexts))
    if not 1 <= contexts[0] or contexts[-1] > longest:
        raise ValueError(f"contexts: got {contexts}, wanted from 1 to {longest} tokens before the tail of documents of {length}")
    of_context = []
    for context in contexts:
        losses = score_documents(score, documents[:, longest - context:], first=first, batch_size=batch_size)
        of_context.append(losses.nll[:, -tail:].mean(axis=1, dtype=np.float64))
    return [_gain(context, of_context[0], nll) for context, nll in zip(contexts, of_context)]


def _gain(context: int, shortest: np.ndarray, nll: np.ndarray) -> ContextGain:
    """Both [documents]."""
    gains, n = shortest - nll, len(nll)
    half = Z95 * float(gains.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return ContextGain(context, float(nll.mean()), float(gains.mean()), half, n)
