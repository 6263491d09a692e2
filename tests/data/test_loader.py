import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_sources import EOS, all_batches, equal, make_packer, make_source, make_split

from longmoe.configs import DataConfig
from longmoe.data.hashing import permutation, random_bits
from longmoe.data.loader import make_loader


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 17), st.integers(1, 4), st.integers(1, 9))
def test_every_stored_token_is_a_target_once_after_its_true_predecessor(lengths, length, rows, lanes):
    split = make_split(lengths)
    seen = []
    for batch in all_batches(make_packer([make_source(lengths)], length, rows, lanes)):
        used = batch["segment_ids"] > 0
        np.testing.assert_array_equal(batch["loss_weights"], used.astype(np.float32))
        np.testing.assert_array_equal(batch["source_ids"] >= 0, used)
        for tokens, targets, segments, sources in zip(*(batch[k] for k in ("tokens", "targets", "segment_ids", "source_ids"))):
            check_row(split, tokens, targets, segments, sources)
            seen += [(s, t) for s, t, g in zip(sources, targets, segments) if g]
    assert sorted(seen) == sorted((d, t) for d in range(len(split)) for t in split.document(d))


def check_row(split, tokens, targets, segments, sources):
    starts = np.flatnonzero(np.diff(segments, prepend=0) * (segments > 0))
    np.testing.assert_array_equal(segments[starts], np.arange(1, len(starts) + 1))
    for start in starts:
        piece = segments == segments[start]
        document = split.document(sources[start])
        first = int(np.flatnonzero(document == targets[start])[0])
        np.testing.assert_array_equal(targets[piece], document[first:first + piece.sum()])
        before = np.concatenate([[EOS], document[:-1]])
        np.testing.assert_array_equal(tokens[piece], before[first:first + piece.sum()])


def test_a_long_document_goes_on_in_the_next_row_of_its_lane():
    batches = all_batches(make_packer([make_source([20, 20])], 8, 2, 2))
    for first, second in itertools.pairwise(batches):
        open_rows = (first["targets"][:, -1] != EOS) & (first["segment_ids"][:, -1] > 0)
        np.testing.assert_array_equal(first["source_ids"][open_rows, -1], second["source_ids"][open_rows, 0])
        np.testing.assert_array_equal(first["targets"][open_rows, -1], second["tokens"][open_rows, 0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(2, 30), st.integers(1, 3),
       st.integers(1, 6))
def test_whole_documents_are_cut_only_where_no_row_can_hold_them(lengths, others, length, rows, lanes):
    sources = [make_source(lengths, "whole", whole=True), make_source(others, "cut")]
    batches = all_batches(make_packer(sources, length, rows, lanes))
    ids, targets = (np.concatenate([batch[name] for batch in batches]) for name in ("source_ids", "targets"))
    for document, stored in enumerate(lengths):
        in_rows = [row for row in range(len(ids)) if (ids[row] == document).any()]
        assert (ids == document).sum() == stored
        assert len(in_rows) == 1 or stored > length
    assert sum((ids == len(lengths) + document).sum() for document in range(len(others))) == sum(others)
    for row, (sources_of, targets_of) in enumerate(zip(ids, targets)):
        padded = np.flatnonzero(sources_of < 0)
        assert not len(padded) or (sources_of[padded[0]:] < 0).all() and targets_of[padded[0] - 1] == EOS, row


def test_resume_between_a_row_and_the_whole_document_that_did_not_fit():
    def made():
        return make_packer([make_source([5, 9, 7, 6, 8], whole=True)], 12, 1, 2, repeat=True)

    packer = made()
    steps = [(packer.next_batch(), json.loads(json.dumps(packer.state()))) for _ in range(12)]
    assert any(["made", index, 0] in state["lanes"] for _, state in steps for index in range(5))
    for (_, state), (following, _) in itertools.pairwise(steps):
        again = made()
        again.restore(state)
        equal(again.next_batch(), following)


def test_a_very_long_document_takes_its_lane_s_share():
    packer = make_packer([make_source([400] + [20] * 200)], 8, 2, 8, repeat=True)
    sources = np.stack([packer.next_batch()["source_ids"] for _ in range(160)])
    start = int(np.flatnonzero((sources == 0).any(axis=(1, 2)))[0])
    assert 0 < (sources[start:start + 40] == 0).mean() <= 1 / 8 + 0.02


def test_repeating_rows_are_never_padded_and_epochs_differ(folder):
    loader = make_loader(config(folder), seed=0)
    opened = []
    for batch, state in loader:
        assert (batch["segment_ids"] > 0).all() and all(a.shape == (4, 32) for a in batch.values())
        assert {a.dtype.name for a in batch.values()} == {"int32", "float32"}
        opened += batch["source_ids"][(batch["tokens"] == folder.train.eos_id)].tolist()
        if state["packer"]["sources"]["corpus"]["epoch"] == 2:
            break
    count = len(folder.train)
    first, second = opened[:count], opened[count:2 * count]
    assert sorted(first) == sorted(second) == list(range(count)) and first != second


def test_epochs_are_permutations_of_seed_and_epoch_alone():
    orders = [permutation(50, seed, epoch).tolist() for seed in range(3) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders) and len({tuple(order) for order in orders}) == 9
    assert orders[4] == permutation(50, 1, 1).tolist()


def test_hashed_bits_do_not_move():
    assert random_bits(1, 2, shape=(2,)).tolist() == random_bits(1, 2, shape=(5,))[:2].tolist()
    assert permutation(8, 0, 0).tolist() == [0, 7, 2, 5, 4, 6, 3, 1]
    draws = random_bits(7, shape=(100_000,)) / 2.0**64
    assert abs(draws.mean() - 0.5) < 0.005 and abs(draws.std() - 12**-0.5) < 0.005


def config(folder, **changes) -> DataConfig:
    return dataclasses.replace(DataConfig(path=str(folder.path), sequence_length=32, batch_size=4), **changes)


@pytest.mark.parametrize("split, task", [("train", "text"), ("heldout", "text"), ("train", "associative_recall"), ("heldout", "associative_recall")])
def test_resume_is_exact_at_every_step(folder, split, task):
    cfg = config(folder, task=task, sequence_length=48, num_pairs=8)
    whole = list(itertools.islice(make_loader(cfg, seed=5, split=split), 12))
    for step, (_, state) in enumerate(whole[:-1]):
        state = json.loads(json.dumps(state))
        rest = list(itertools.islice(make_loader(cfg, seed=5, split=split, state=state), len(whole) - step - 1))
        for (batch, after), (wanted, wanted_after) in zip(rest, whole[step + 1:], strict=True):
            equal(batch, wanted)
            assert after == wanted_after


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=10), st.integers(0, 4), st.sampled_from([(8, 4, 4), (16, 2, 2), (5, 6, 4), (64, 1, 1), (8, 3, 7)]))
def test_no_token_is_lost_or_repeated_when_rows_change(lengths, steps, after):
    split, sources = make_split(lengths), [make_source(lengths)]
    first = make_packer(sources, 8, 4, 4)
    batches = [b for b in (first.next_batch() for _ in range(steps)) if b is not None]
    length, rows, lanes = after
    second = make_packer(sources, length, rows, lanes)
    second.restore(json.loads(json.dumps(first.state())))
    batches += all_batches(second)
    seen = sorted((s, t) for b in batches for s, t in zip(b["source_ids"].ravel(), b["targets"].ravel()) if s >= 0)
    assert seen == sorted((d, t) for d in range(len(split)) for t in split.document(d))


def test_held_out_pass_is_finite_and_in_order(folder):
    batches = [b for b, _ in make_loader(config(folder), seed=0, split="heldout")]
    sources = np.concatenate([b["source_ids"].ravel() for b in batches])
    targets = np.concatenate([b["targets"].ravel() for b in batches])[sources >= 0]
    np.testing.assert_array_equal(targets, folder.heldout.tokens)
    assert (np.diff(sources[sources >= 0]) >= 0).all()


def test_another_run_state_is_refused(folder):
    cfg = config(folder)
    _, state = next(make_loader(cfg, seed=0))
    for change, says in (({"seed": 1}, "seed"), ({"split": "heldout"}, "split")):
        with pytest.raises(ValueError, match=f"state: it was saved with {says}"):
            make_loader(cfg, **({"seed": 0, "state": state} | change))
    packer = state["packer"]
    cursor = packer["sources"]["corpus"]
    for change, says in (({"sources": {"corpus": {**cursor, "fingerprint": "another"}}}, "'corpus' was saved with fingerprint another"),
                         ({"sources": {"corpus": {**cursor, "next": 10**6}}}, "belongs to other data"),
                         ({"lanes": [["corpus", 10**6, 0]] * 4}, "belongs to other data"), ({"lanes": [["corpus", 0, 10**6]]}, "belongs to other data"),
                         ({"sources": {"corpus": cursor, "web": cursor}}, "lacks web; list every source")):
        with pytest.raises(ValueError, match=says):
            make_loader(cfg, seed=0, state={**state, "packer": {**packer, **change}})


def test_the_model_must_hold_all_tokens(folder, caplog):
    with pytest.raises(ValueError, match="vocab_size: the model has 200 tokens"):
        make_loader(config(folder), seed=0, vocab_size=200)
    with pytest.raises(ValueError, match="needs 129"):
        make_loader(config(folder, task="associative_recall"), seed=0, vocab_size=128)
    with pytest.raises(ValueError, match="no folder"):
        make_loader(config(folder, path="/nowhere"), seed=0)
    with caplog.at_level("INFO", "longmoe"):
        make_loader(config(folder, task="associative_recall"), seed=0, vocab_size=129)
        assert not caplog.messages
        make_loader(config(folder, task="associative_recall"), seed=0, vocab_size=130)
    assert caplog.messages == ["associative recall of 16 pairs uses 129 of the model's 130 tokens"]


def test_recall_rows():
    cfg = DataConfig(task="associative_recall", num_pairs=16, sequence_length=50, batch_size=64)
    batch, _ = next(make_loader(cfg, seed=0, split="heldout"))
    used = batch["segment_ids"] > 0
    assert used[:, :48].all() and not used[:, 48:].any()
    asked = batch["loss_weights"] > 0
    assert asked[:, 32:48].all() and asked.sum() == 64 * 16
    for tokens, targets in zip(batch["tokens"], batch["targets"]):
        pairs = dict(zip(tokens[0:32:2].tolist(), tokens[1:32:2].tolist()))
        assert len(pairs) == len(set(pairs.values())) == 16 and not set(pairs) & set(pairs.values())
        assert max(pairs) <= 64 < min(pairs.values()) and max(pairs.values()) <= 128
        assert sorted(tokens[32:48]) == sorted(pairs) and [pairs[k] for k in tokens[32:48].tolist()] == targets[32:48].tolist()
    # Asking in the order of writing would let a model count instead of recall.
    order = np.array([[list(row[0:32:2]).index(k) for k in row[32:48]] for row in batch["tokens"]])
    assert abs(np.corrcoef(order.ravel(), np.tile(np.arange(16), 64))[0, 1]) < 0.1


def test_recall_training_rows_take_turns_at_problem_sizes():
    cfg = DataConfig(task="associative_recall", num_pairs=16, sequence_length=50, batch_size=8)
    batch, _ = next(make_loader(cfg, seed=0))
    for row, size in enumerate([16, 8, 4, 2] * 2):
        tokens, targets, weights, segments = (batch[name][row] for name in ("tokens", "targets", "loss_weights", "segment_ids"))
        assert segments.max() == 16 // size and (segments[48:] == 0).all() and weights.sum() == 16
        for problem in range(1, 16 // size + 1):
            k, t, w = tokens[segments == problem], targets[segments == problem], weights[segments == problem]
            pairs = dict(zip(k[0:2 * size:2].tolist(), k[1:2 * size:2].tolist()))
            assert not w[:2 * size].any() and w[2 * size:].all()
            assert sorted(k[2 * size:]) == sorted(pairs) and [pairs[q] for q in k[2 * size:].tolist()] == t[2 * size:].tolist()


def test_recall_splits_seeds_and_steps_differ():
    cfg = DataConfig(task="associative_recall", num_pairs=4, sequence_length=12, batch_size=2)
    draws = [next(make_loader(cfg, seed=seed, split=split))[0]["tokens"] for seed in (0, 1) for split in ("train", "heldout")]
    draws.append(list(itertools.islice(make_loader(cfg, seed=0), 2))[1][0]["tokens"])
    assert len({d.tobytes() for d in draws}) == len(draws)
    with pytest.raises(ValueError, match="sequence_length: got 11"):
        next(make_loader(dataclasses.replace(cfg, sequence_length=11), seed=0))
