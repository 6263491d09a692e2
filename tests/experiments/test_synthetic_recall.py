"""The experiment's rows, its members' training and its summary. (`test_mixers.py` has the arms' mathematics.)"""

import dataclasses

import jax
import numpy as np
import pytest
import synthetic_recall

from longmoe.evaluation.synthetic import make_batches

BUDGET = dataclasses.replace(synthetic_recall.BUDGETS["smoke"], lengths=(16, 32), rows=4)


@pytest.mark.parametrize("name", synthetic_recall.TASKS)
def test_packed_rows_are_the_tasks_examples(name):
    task = synthetic_recall.make_task(name, BUDGET)
    batch = synthetic_recall.make_packed(task, BUDGET, seed=3)(5)
    assert batch["tokens"].shape == (4, 32) and batch["places"].shape == (4, 16)
    short, long = (make_batches(task, length=length, batch_size=size, seed=3)(5) for length, size in ((16, 4), (32, 2)))
    np.testing.assert_array_equal(batch["tokens"], np.concatenate([short["tokens"].reshape(2, 32), long["tokens"]]))
    answered = short["segment_ids"].reshape(2, 2, 16) * np.array([1, 2])[:, None]
    np.testing.assert_array_equal(batch["segment_ids"], np.concatenate([answered.reshape(2, 32), long["segment_ids"]]))
    for row, part in enumerate([*short["targets"].reshape(2, 32), *long["targets"]]):
        weights = [*short["loss_weights"].reshape(2, 32), *long["loss_weights"]][row]
        used = batch["weights"][row] > 0
        assert sorted(batch["places"][row][used]) == np.flatnonzero(weights).tolist()
        np.testing.assert_array_equal(batch["answers"][row], part[batch["places"][row]])


def test_segments_do_not_differ_between_batches():
    """All members share those of the first batch of a call."""
    source = synthetic_recall.make_packed(synthetic_recall.make_task("stack", BUDGET), BUDGET, seed=0)
    assert len({source(number)["segment_ids"].tobytes() for number in range(4)}) == 1


def test_a_large_vocabulary_asks_an_eighth():
    budget = dataclasses.replace(BUDGET, mqar_ids=2048)
    batch = synthetic_recall.make_packed(synthetic_recall.make_task("mqar", budget), budget, seed=0)(0)
    assert batch["places"].shape == (4, 4) and batch["weights"].all()


@pytest.mark.slow
def test_members_train_by_themselves_and_a_rate_of_zero_learns_nothing():
    """Seeds of one call differ; a member's first step does not depend on the others' learning rates."""
    budget = dataclasses.replace(BUDGET, rates=(0.0, 1e-2), seeds=2, steps=4, steps_a_call=4)
    task = synthetic_recall.make_task("palindrome", budget)
    static = dict(size=synthetic_recall.model_size(task, budget), budget=budget, arm="no_delta_rule")
    params, state, rates = synthetic_recall.init_members(**static)
    before = jax.tree.map(np.asarray, params)
    batches, order = next(synthetic_recall.calls(task, budget))
    after, _, losses = synthetic_recall.train(params, state, rates, batches, order, **static)
    moved = np.array([max(np.abs(np.asarray(b)[m] - a[m]).max() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after))) for m in range(4)])
    assert rates.tolist() == pytest.approx([0, 0, 1e-2, 1e-2]) and (moved[:2] == 0).all() and (moved[2:] > 1e-3).all()
    losses = np.asarray(losses)
    np.testing.assert_allclose(losses[0, :2], losses[0, 2:], rtol=1e-5)
    assert losses.shape == (4, 4) and abs(losses[0, 0] - losses[0, 1]) > 1e-4 and not np.allclose(losses[3, :2], losses[3, 2:], rtol=1e-4)
    np.testing.assert_array_equal(order[:, :2], order[:, 2:])
    assert (order[:, 0] != order[:, 1]).any()


def test_the_best_rate_is_chosen_on_other_rows_than_are_reported():
    budget = dataclasses.replace(BUDGET, rates=(1e-3, 1e-2), seeds=2)
    found = dict(steps=[1, 2], curve=[[[0.0, 0.0]] * 4, [[0.5, 0.5], [0.7, 0.7], [0.1, 0.9], [0.1, 0.9]]],
                 report=[[0.49, 0.2], [0.51, 0.4], [1.0, 1.0], [1.0, 1.0]])
    got = synthetic_recall.summary(found, budget, 32)
    assert got["rate"] == 1e-3 and got["seeds"]["16"] == [0.49, 0.51]
    assert got["accuracy"]["16"] == pytest.approx([0.5, 0.5 - 12.7062 * 0.01, 0.5 + 12.7062 * 0.01], abs=1e-3)
    assert [point[0] for point in got["over_steps"]] == [0.0, 0.6]
