"""Means, intervals and paired differences over seeds, and what a second call reads back."""
import json
from types import SimpleNamespace

import arms
import pytest
from one_part import full_width
from tiny_config import tiny_model, tiny_train

import longmoe
from longmoe.model.costs import active_parameters, parameter_shapes, parameters_by_part

T2 = 4.30265
"""Student's quantile of three values."""


def test_summary_is_element_by_element():
    alone = arms.summary([[1.0, 2.0]])
    assert alone == {"mean": [1.0, 2.0], "low": [None, None], "high": [None, None], "n": 1, "values": [[1.0, 2.0]]}
    found = arms.summary([[0.0, 5.0], [3.0, 5.0], [6.0, 5.0]])
    half = T2 * 3 / 3**0.5
    assert found["mean"] == [3.0, 5.0] and found["n"] == 3
    assert found["low"] == pytest.approx([3 - half, 5.0], rel=1e-5) and found["high"] == pytest.approx([3 + half, 5.0], rel=1e-5)


def test_differences_are_paired_by_seed():
    """Seeds differ by 10, arms by 1: the interval of the difference knows nothing of the seeds."""
    figures = {"base": [{"loss": 10.0, "other": 0}, {"loss": 20.0, "other": 0}, {"loss": 30.0, "other": 0}],
               "changed": [{"loss": 11.1, "other": 0}, {"loss": 20.9, "other": 0}, {"loss": 31.0, "other": 0}]}
    found = arms.differences(figures, "base", ["loss"])
    assert list(found) == ["changed"] and list(found["changed"]) == ["loss"]
    assert found["changed"]["loss"]["values"] == pytest.approx([1.1, 0.9, 1.0])
    assert found["changed"]["loss"]["high"] - found["changed"]["loss"]["mean"] == pytest.approx(T2 * 0.1 / 3**0.5, rel=1e-4)
    assert arms.summaries(figures)["base"]["loss"]["mean"] == 20.0
    by_position = {"base": [{"bins": [1.0, 2.0]}], "changed": [{"bins": [1.5, 1.0]}]}
    assert arms.differences(by_position, "base", ["bins"])["changed"]["bins"]["mean"] == [0.5, -1.0]
    with pytest.raises(ValueError):
        arms.differences({**figures, "changed": figures["changed"][:2]}, "base", ["loss"])


def test_curve_is_a_mean_over_steps_and_then_over_seeds():
    lines = [[{"step": step, "loss": 10.0 * seed + step, "load": [step, step + 2]} for step in range(1, 7)] for seed in range(3)]
    band = arms.curve(lines, window=2)
    assert list(band.x) == [2, 3, 4, 5, 6] and band.mean.tolist() == [11.5, 12.5, 13.5, 14.5, 15.5]
    assert band.high[0] - band.mean[0] == pytest.approx(T2 * 10 / 3**0.5, rel=1e-5)
    layers = arms.curve(lines[:1], "load", window=100)
    assert list(layers.x) == [6] and layers.mean.tolist() == [4.5] and str(layers.low[0]) == "nan"


@pytest.fixture
def fits(monkeypatch):
    """A `fit` that trains nothing; the list gets each config and folder."""
    calls = []

    def fit(cfg, run_dir):
        calls.append((cfg, run_dir))
        metrics = arms.Path(run_dir) / "metrics.jsonl"
        metrics.parent.mkdir(parents=True, exist_ok=True)
        metrics.write_text(json.dumps({"step": 1, "loss": float(cfg.seed)}) + "\n")
        return SimpleNamespace(state=SimpleNamespace(params={}, router_state={}), paths=SimpleNamespace(metrics=metrics))

    monkeypatch.setattr(longmoe, "fit", fit)
    return calls


def test_the_same_call_measures_nothing_twice(fits, tmp_path):
    configs, measured = {"a": tiny_train(), "b 1:1": tiny_train(width=64)}, []

    def measure(run):
        measured.append((run.arm, run.seed, run.config.model.width))
        return {"figure": run.config.model.width + run.seed}

    first = arms.train(configs, range(2), tmp_path, measure)
    assert measured == [("a", 0, 32), ("b 1:1", 0, 64), ("a", 1, 32), ("b 1:1", 1, 64)] and [cfg.seed for cfg, _ in fits] == [0, 0, 1, 1]
    assert first.figures == {"a": [{"figure": 32}, {"figure": 33}], "b 1:1": [{"figure": 64}, {"figure": 65}]}
    assert [line["loss"] for run in first.lines["a"] for line in run] == [0.0, 1.0] and (tmp_path / "b_1_1" / "seed_1" / "figures.json").exists()
    again = arms.train(configs, range(2), tmp_path, measure)
    assert again.figures == first.figures and again.lines == first.lines and len(measured) == len(fits) == 4 and again.seconds >= first.seconds
    arms.train({"a": tiny_train(width=16)}, range(1), tmp_path, measure)
    assert measured[4:] == [("a", 0, 16)]


def test_runs_side_by_side(tmp_path):
    """Each in a process: figures and lines come back under their arms, as from one after another. All were trained before: no process has to."""
    configs = {"a": tiny_train(), "b": tiny_train(width=64)}
    for width, (arm, cfg) in zip((32, 64), configs.items()):
        for seed in range(2):
            folder = tmp_path / arm / f"seed_{seed}"
            arms.once(folder / "figures.json", arms.to_json(arms.dataclasses.replace(cfg, seed=seed)), lambda: {"figure": width + seed})  # noqa: B023
            (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": width + seed}) + "\n")
    found = arms.train(configs, range(2), tmp_path, arms.heldout_loss, jobs=2)
    assert found.figures == {"a": [{"figure": 32}, {"figure": 33}], "b": [{"figure": 64}, {"figure": 65}]}
    assert {arm: [line["loss"] for run in runs for line in run] for arm, runs in found.lines.items()} == {"a": [32, 33], "b": [64, 65]}


@pytest.mark.parametrize("meets", ["num_experts", "experts_per_token"])
def test_full_width_experts_make_up_for_the_latent_space(meets):
    """All parameters of the MoE layers, or those that a token meets, agree within half a unit of hidden width."""
    def counts(model):
        parts = parameters_by_part(parameter_shapes(model))
        return {"num_experts": sum(parts.values()), "experts_per_token": active_parameters(model, parts)}[meets]

    model = tiny_model(num_layers=2, dense_layers=0)
    changed = tiny_model(num_layers=2, dense_layers=0, moe=full_width(model, getattr(model.moe, meets), 1))
    unit = 2 * getattr(model.moe, meets) * 3 * model.width
    norms = 2 * (model.width - model.moe.latent_dim)
    assert changed.moe.latent_dim is None and abs(counts(changed) - norms - counts(model)) <= unit / 2
    assert full_width(model, getattr(model.moe, meets), 64).expert_dim == 64
