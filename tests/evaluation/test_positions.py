"""Losses by position and the gain of context, on a scorer whose losses are known: ours is compared with the logits in test_text."""
import math

import numpy as np
import pytest

from longmoe.evaluation.models import TokenScores
from longmoe.evaluation.positions import context_gain, long_documents, position_edges, score_documents
from longmoe.evaluation.text import loss_by_position

DOCUMENTS = np.random.default_rng(0).integers(1, 50, (3, 64)).astype(np.int32)


def by_context(tokens: np.ndarray, targets: np.ndarray) -> TokenScores:
    """A loss of 10 nats less one for each doubling of the tokens read."""
    read = np.arange(1, tokens.shape[1] + 1)
    return TokenScores(np.broadcast_to(10 - np.log2(read), tokens.shape).astype(np.float32), np.zeros_like(targets))


def by_token(tokens: np.ndarray, targets: np.ndarray) -> TokenScores:
    """A loss that the target alone decides."""
    return TokenScores(targets.astype(np.float32), np.zeros_like(targets))


def test_edges():
    assert position_edges(8) == (0, 1, 2, 4, 8) and position_edges(10) == (0, 1, 2, 4, 8, 10) and position_edges(1) == (0, 1)


def test_documents_are_long_enough():
    found = long_documents([np.arange(5), np.arange(10), np.arange(3), np.arange(7), np.arange(9)], 7, 2)
    assert found.tolist() == [list(range(7))] * 2 and found.dtype == np.int32
    assert long_documents([np.arange(5)], 7, 2).shape == (0, 7)


def test_loss_by_position_reads_what_stands_before():
    losses = score_documents(by_context, DOCUMENTS, first=0, batch_size=2)
    edges = position_edges(64)
    expected = [np.mean(10 - np.log2(np.arange(a, b) + 1)) for a, b in zip(edges, edges[1:])]
    assert loss_by_position(losses, edges) == pytest.approx(expected, abs=1e-5)
    assert np.array_equal(score_documents(by_token, DOCUMENTS, first=0).nll, DOCUMENTS)
    with pytest.raises(ValueError, match="documents: got none of 64 tokens"):
        score_documents(by_token, DOCUMENTS[:0], first=0)


def test_gain_is_of_the_same_last_tokens():
    seen = []

    def score(tokens, targets):
        seen.append((tokens.shape[1], targets[:, -8:].tolist()))
        return by_token(tokens, targets)

    found = context_gain(score, DOCUMENTS, first=0, tail=8, batch_size=2)
    assert [gain.context for gain in found] == [8, 16, 32, 56] and all(gain.gain == gain.half_width == 0 for gain in found)
    assert all(last == DOCUMENTS[i:i + len(last), -8:].tolist() for (_, last), i in zip(seen, [0, 2] * 4))
    assert [width for width, _ in seen[::2]] == [16, 24, 40, 64]
    assert found[0].nll == pytest.approx(DOCUMENTS[:, -8:].mean())


def test_gain_grows_with_context():
    found = context_gain(by_context, DOCUMENTS, first=0, tail=8, contexts=[16, 56, 16])
    mean = lambda context: np.mean(10 - np.log2(np.arange(context + 1, context + 9)))
    assert [gain.context for gain in found] == [16, 56] and found[1].gain == pytest.approx(mean(16) - mean(56), abs=1e-5)
    assert found[1].documents == 3 and math.isnan(context_gain(by_context, DOCUMENTS[:1], first=0, tail=8)[1].half_width)


def test_the_interval_is_over_documents():
    def score(tokens, targets):      # the gain of a document is a tenth of its first token
        nll = by_context(tokens, targets).nll - 0.1 * DOCUMENTS[:, :1] * (tokens.shape[1] > 62)
        return TokenScores(nll, np.zeros_like(targets))

    gains = context_gain(score, DOCUMENTS, first=0, tail=8, contexts=[54, 56], batch_size=3)[1]
    assert gains.half_width == pytest.approx(1.96 * 0.1 * DOCUMENTS[:, 0].std(ddof=1) / math.sqrt(3), rel=1e-3)


@pytest.mark.parametrize("changes,message", [
    (dict(tail=64), "tail: got 64, wanted from 1 to 63"), (dict(tail=0), "tail: got 0"),
    (dict(tail=8, contexts=[57]), r"contexts: got \[57\], wanted from 1 to 56"),
    (dict(tail=8, contexts=[0, 8]), r"contexts: got \[0, 8\]")])
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        context_gain(by_token, DOCUMENTS, first=0, **changes)
    with pytest.raises(ValueError, match="documents: got none"):
        context_gain(by_token, DOCUMENTS[:0], first=0, tail=8)
