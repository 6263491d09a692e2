"""`fit`: files of a run, refusal of another config, stopping on gradients that stay non-finite."""
import dataclasses
import json

import jax
import numpy as np
import pytest
from tiny_config import tiny_train

import longmoe
from longmoe.configs import CheckpointConfig, DataConfig, TrainConfig, from_json
from longmoe.data.tasks import recall_vocab_size
from longmoe.train import loop
from longmoe.train.metrics import read_lines

PAIRS = 4


def config(steps=6, **changes):
    cfg = tiny_train(vocab_size=recall_vocab_size(PAIRS), num_layers=2, **changes)
    return dataclasses.replace(cfg, steps=steps, data=DataConfig(task="associative_recall", num_pairs=PAIRS, sequence_length=24, batch_size=4),
                               checkpoint=CheckpointConfig(every=2, keep=2), mesh=longmoe.configs.MeshConfig(data=1, fsdp=1))


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(loop, "make_mesh", lambda mesh_config: longmoe.make_mesh(mesh_config, devices))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 6 steps in one go."""
    with pytest.MonkeyPatch.context() as patch:
        devices = jax.devices()[:1]
        patch.setattr(loop, "make_mesh", lambda mesh_config: longmoe.make_mesh(mesh_config, devices))
        return longmoe.fit(config(), str(tmp_path_factory.mktemp("run") / "whole"))


def test_files_of_a_run(whole):
    lines = read_lines(whole.paths.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "grad_norm", "learning_rate", "max_violation", "dead_experts", "load_entropy", "tokens_per_second", "step_seconds",
            "elapsed_seconds"} <= set(lines[0])
    assert "expert_load" in lines[0] and "expert_load" not in lines[1]
    record = json.loads(whole.paths.run_json.read_text())
    assert from_json(TrainConfig, json.dumps(record["config"])) == config()
    assert record["versions"]["jax"] == jax.__version__ and any("kda" in line for line in record["kernels"])
    assert int(whole.state.step) == 6
    log = whole.paths.log.read_text()
    assert f"jax {jax.__version__}" in log and "mesh: one device" in log and "kda xla" in log and "GiB of temporaries" in log
    assert "data: generated, task associative_recall" in log and "saved step 6 of 6" in log
    # The step holds at least its parameters and their gradients.
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(whole.state.params))
    assert record["compile_seconds"] > 0 and record["compiled_bytes"]["arguments"] > size and record["compiled_bytes"]["temporary"] > size


def test_a_finished_run_says_so(whole, capfd):
    again = longmoe.fit(config(), str(whole.paths.root))
    assert int(again.state.step) == 6 and "step 6 of 6 is done already" in capfd.readouterr().err


@pytest.mark.slow
def test_refuses_another_config_and_fresh_starts_over(whole, tmp_path):
    run = str(tmp_path / "run")
    longmoe.fit(config(steps=2), run)
    other = config(steps=2, init_std=0.07)
    with pytest.raises(ValueError, match=r"another config \(model.init_std: saved 0.05, now 0.07\)"):
        longmoe.fit(other, run)
    assert int(longmoe.fit(other, run, fresh=True).state.step) == 2


def test_stops_after_steps_that_are_not_finite(tmp_path, monkeypatch):
    loader = loop.make_loader

    def poisoned(*arguments, **keywords):
        for batch, state in loader(*arguments, **keywords):
            yield batch | dict(loss_weights=np.full_like(batch["loss_weights"], np.inf)), state

    monkeypatch.setattr(loop, "make_loader", poisoned)
    cfg = dataclasses.replace(config(), max_skipped_steps=3, checkpoint=CheckpointConfig(every=100))
    with pytest.raises(RuntimeError, match="3 times in a row"):
        longmoe.fit(cfg, str(tmp_path / "run"))
    rows = json.loads((tmp_path / "run" / "skipped_batches.json").read_text())
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["source_ids"] for row in rows)
