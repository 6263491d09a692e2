import dataclasses

import jax
import numpy as np
import pytest

import longmoe
from longmoe.data.token_folder import Split
from longmoe.evaluation import models
from longmoe.evaluation.recall import recall_score
from longmoe.evaluation.text import Losses, document_starts, evaluate_batches, loss_by_position, make_loss_function, mean_depth_weights, silence


@pytest.fixture(scope="module")
def tiny():
    """(config, variables) of a model with one KDA and one MLA layer."""
    cfg = dataclasses.replace(longmoe.presets.nano().model, vocab_size=64, num_layers=2, mla_every=2, use_final_mla=False)
    return cfg, longmoe.init_variables(cfg, jax.random.key(1))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    segments = np.array([[1] * 12 + [2] * 4, [1] * 10 + [0] * 6], np.int32)
    return {"tokens": rng.integers(0, 64, (2, 16), np.int32), "targets": rng.integers(0, 64, (2, 16), np.int32), "segment_ids": segments,
            "loss_weights": (segments > 0).astype(np.float32)}


@pytest.fixture(scope="module")
def logits(tiny, batch):
    cfg, variables = tiny
    run = jax.jit(lambda v, tokens, segments: longmoe.LongMoE(cfg).apply(v, tokens, segments).logits)
    return np.asarray(run(variables, batch["tokens"], batch["segment_ids"]), np.float64)


def test_scores_of_whole_rows_are_those_of_the_logits(tiny, batch, logits, monkeypatch):
    """In chunks of 7 positions of 16, which do not come out even. Each row's first document begins the row, so that its logits are the same."""
    monkeypatch.setattr(models, "SCORED_AT_ONCE", 7)
    score = models.make_score(*tiny)
    found = score(batch["tokens"], batch["targets"])
    nll = np.log(np.exp(logits).sum(axis=-1)) - np.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    first = batch["segment_ids"] == 1
    assert found.nll.shape == found.best.shape == (2, 16) and found.nll[first] == pytest.approx(nll[first], abs=1e-4)
    assert np.array_equal(found.best[first], np.argmax(logits, axis=-1)[first])
    with pytest.raises(ValueError, match="tokens: got id 64, wanted ids below the model's vocab_size 64"):
        score(batch["tokens"], np.full((2, 16), 64))


def losses(nll, segments=None, weights=None) -> Losses:
    nll = np.asarray(nll, np.float32)
    segments = np.ones(nll.shape, np.int32) if segments is None else np.asarray(segments, np.int32)
    return Losses(nll, np.zeros(nll.shape, np.int32), segments, np.asarray(segments > 0 if weights is None else weights, np.float32))


def test_padding_does_not_count():
    scored = losses([[2.0, 4.0, 99.0]], [[1, 1, 0]])
    assert scored.nats_per_token() == 3.0 and scored.num_tokens == 2
    assert scored.bits_per_byte(np.array([3])) == pytest.approx(6.0 / np.log(2) / 6)


def test_loss_by_position_uses_whole_pieces_only():
    nll = np.tile(np.arange(8.0), (3, 1))
    nll[1] = 100
    scored = losses(nll, [[1] * 8, [1] * 5 + [2] * 3, [1] * 8])
    assert loss_by_position(scored, (0, 2, 8)) == [0.5, 4.5]
    assert np.isnan(loss_by_position(losses([[1.0, 1.0]], [[1, 2]]), (0, 2))).all()


def test_loss_by_position_leaves_out_what_is_no_target():
    """Of conversations, as the mean over all tokens does."""
    scored = losses([[99, 1, 2, 99], [99, 99, 4, 99]], weights=[[0, 1, 1, 0], [0, 0, 2, 0]])
    assert loss_by_position(scored, (0, 2, 3)) == [1.0, 10 / 3] and np.isnan(loss_by_position(scored, (3, 4))).all()
    assert loss_by_position(scored, (0, 4))[0] == pytest.approx(scored.nats_per_token())


def test_document_starts_are_the_first_tokens_of_long_documents():
    tokens = np.concatenate([np.arange(1, 10), [0], [1, 2, 0], np.arange(21, 27), [0]]).astype(np.uint16)
    split = Split(tokens, np.array([0, 10, 13, 20]), ["a", "b", "c"], 0, 0)
    first, second = document_starts(split, sequence_length=5, batch_size=1)
    np.testing.assert_array_equal(first["targets"][0], [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(first["tokens"][0], [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(second["targets"][0], [21, 22, 23, 24, 25])
    padded, = document_starts(split, sequence_length=5, batch_size=4)
    assert padded["segment_ids"].sum() == padded["loss_weights"].sum() == 10 and padded["tokens"].shape == (4, 5)
    masked = dataclasses.replace(split, weights=(np.arange(20) % 2).astype(np.float32))
    padded, = document_starts(masked, sequence_length=5, batch_size=4)
    np.testing.assert_array_equal(padded["loss_weights"], [[0, 1, 0, 1, 0], [1, 0, 1, 0, 1], [0] * 5, [0] * 5])
    np.testing.assert_array_equal(padded["segment_ids"].any(axis=1), padded["segment_ids"].all(axis=1))


def test_losses_are_those_of_the_logits(tiny, batch, logits):
    cfg, variables = tiny
    scored = evaluate_batches(make_loss_function(cfg), variables, [batch, batch])
    wanted = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(scored.nll, np.concatenate([wanted, wanted]), rtol=2e-5)
    with pytest.raises(ValueError, match="batches: got none"):
        evaluate_batches(make_loss_function(cfg), variables, [])


@pytest.mark.parametrize("mixer", ["kda", "mla"])
def test_silenced_layers_add_nothing(tiny, mixer):
    _, variables = tiny
    changed = {jax.tree_util.keystr(path): (old, new) for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(variables["params"]), jax.tree.leaves(silence(variables, mixer)["params"])) if old is not new}
    assert changed and all(mixer in path and "o_proj" in path and not new.any() and old.any() for path, (old, new) in changed.items())
    with pytest.raises(ValueError, match="mixer: got 'rnn'"):
        silence(variables, "rnn")


def test_depth_weights_sum_to_one(tiny, batch):
    cfg, variables = tiny
    weights = mean_depth_weights(cfg, variables, batch)
    assert list(weights)[-1] == "output" and list(weights)[0] == "layer_00/attn"
    for site in weights.values():
        assert site.sum() == pytest.approx(1.0, abs=1e-4)


def test_recall_counts_argmax_at_weighted_positions(tiny, batch, logits):
    cfg, variables = tiny
    best = logits.argmax(-1).astype(np.int32)
    right = {**batch, "targets": best}
    half = {**right, "targets": np.where(np.arange(16) % 2 == 0, best, (best + 1) % 64)}
    assert recall_score(cfg, variables, [right], 4).accuracy == 1.0
    score = recall_score(cfg, variables, [half, right], 4)
    assert score.answers == 52 and score.accuracy == pytest.approx(39 / 52) and score.chance == 0.25
    with pytest.raises(ValueError, match="no position with loss weight"):
        recall_score(cfg, variables, [{**batch, "loss_weights": 0 * batch["loss_weights"]}], 4)
