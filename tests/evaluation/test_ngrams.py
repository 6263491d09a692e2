import dataclasses
from pathlib import Path

import numpy as np
import pytest

from longmoe.data.token_folder import Split, TokenFolder
from longmoe.data.tokenizer import Tokenizer
from longmoe.evaluation.ngrams import bigram_nll, bits_per_byte, ngram_baselines, unigram_nll

VOCAB = 8


def split_of(tokens) -> Split:
    return Split(np.asarray(tokens, np.uint16), np.array([0, len(tokens)]), ["a"], 0, len(tokens))


def test_bits_per_byte():
    assert bits_per_byte(8 * np.log(2.0), 4) == pytest.approx(2.0)


def test_unigram_probabilities():
    nll = unigram_nll(split_of([1, 1, 2, 0]), VOCAB)
    np.testing.assert_allclose(np.exp(-nll), np.array([2, 3, 2, 1, 1, 1, 1, 1]) / 12)


def test_bigram_is_a_distribution_after_every_context_seen_or_not():
    train = split_of(np.random.default_rng(0).integers(0, 5, 200))
    for context in range(VOCAB):
        pairs = np.array([[context, token] for token in range(VOCAB)]).ravel()
        nll = bigram_nll(train, split_of(pairs), VOCAB)[1::2]
        assert np.exp(-nll).sum() == pytest.approx(1.0) and (np.exp(-nll) > 0).all()


def test_bigram_reaches_the_entropy_of_a_markov_chain():
    """A chain that moves on by 1 with probability 0.9 and else anywhere: entropy is known, the unigram can only say log 8."""
    rng = np.random.default_rng(0)

    def draw(count):
        steps = np.where(rng.random(count) < 0.9, 1, rng.integers(0, VOCAB, count))
        return split_of(np.cumsum(steps) % VOCAB)

    train, heldout = draw(40_000), draw(100_000)
    p = np.full(VOCAB, 0.1 / VOCAB)
    p[1] += 0.9
    entropy = -(p * np.log(p)).sum()
    assert bigram_nll(train, heldout, VOCAB).mean() == pytest.approx(entropy, rel=0.05)
    assert unigram_nll(train, VOCAB)[heldout.tokens].mean() == pytest.approx(np.log(VOCAB), rel=0.01)


def test_baselines_are_scored_on_the_tokens_that_a_model_is_scored_on(tmp_path):
    """All of them, or those with a weight; the first `num_tokens` of these."""
    rng = np.random.default_rng(0)
    tokenizer = Tokenizer.of_bytes()
    train, plain = split_of(rng.integers(0, 100, 300)), split_of(rng.integers(0, 100, 40))
    tokenizer.save(tmp_path / "tokenizer.json")
    mask = np.arange(40) % 3 == 0
    unigram, bigram = unigram_nll(train, tokenizer.vocab_size)[plain.tokens], bigram_nll(train, plain, tokenizer.vocab_size)
    for weights, count, scored in ((None, None, slice(None)), (None, 10, slice(10)), (mask, None, mask), (mask, 5, np.flatnonzero(mask)[:5])):
        heldout = dataclasses.replace(plain, weights=None if weights is None else weights.astype(np.float32))
        folder = TokenFolder(Path(tmp_path), {"vocab_size": tokenizer.vocab_size}, train, heldout)
        found = ngram_baselines(folder, count)
        np.testing.assert_allclose([b.nats_per_token for b in found], [unigram[scored].mean(), bigram[scored].mean()])
        size = tokenizer.bytes_per_token()[plain.tokens[scored]].sum()
        np.testing.assert_allclose([b.bits_per_byte for b in found], [bits_per_byte(nll[scored].sum(), size) for nll in (unigram, bigram)])
