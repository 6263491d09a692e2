"""Stages of one run: what they must fit, exact hand-over, gates, and the record of tokens."""
import dataclasses
import json

import jax
import numpy as np
import pytest
from mixed_run import make_sources, mixed_config

import longmoe
from longmoe.configs import GateConfig, MeshConfig, StageConfig, from_json, to_json
from longmoe.configs import TrainConfig as Config
from longmoe.data.loader import make_loader
from longmoe.data.sources import open_sources
from longmoe.train.checkpoints import complete_steps
from longmoe.train.run_files import RunPaths
from longmoe.train.stages import stages_of

TOKENS = 192                                                            # of a step: 8 rows of 24


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return mixed_config(make_sources(tmp_path_factory.mktemp("sources")))


def staged(base, *stages, **changes):
    return dataclasses.replace(base, **changes).with_stages(stages)


THREE = (StageConfig(24, 2 * TOKENS), StageConfig(48, 2 * TOKENS, weights={"notes": 0.0, "chats": 5.0}),
         StageConfig(96, 3 * TOKENS, mesh=MeshConfig(data=2, fsdp=1)))


def test_tokens_of_a_step_stay(base):
    first, second, third = stages_of(staged(base, *THREE))
    assert [(s.begin, s.end) for s in (first, second, third)] == [(0, 2), (2, 4), (4, 7)]
    assert [(s.config.data.batch_size, s.config.data.sequence_length, s.config.accumulation_steps) for s in (first, second, third)] == [
        (8, 24, 4), (4, 48, 4), (2, 96, 2)]
    assert [source.weight for source in second.config.data.sources] == [3.0, 0.0, 5.0] and first.config.data.sources == base.data.sources
    assert third.config.mesh.data == 2 and first.config.mesh == base.mesh
    assert stages_of(base)[0][1:] == (base, 0, base.steps)


def test_config_goes_through_json(base):
    cfg = staged(base, *THREE[:2], StageConfig(96, TOKENS, gate=GateConfig(max_loss=3.0)))
    assert from_json(Config, to_json(cfg)) == cfg


@pytest.mark.parametrize("stage,words", [
    (StageConfig(25, TOKENS), "sequence_length: got 25, wanted a divisor of 192"), (StageConfig(24, 300), "tokens: got 300, wanted a multiple of 192"),
    (StageConfig(24, TOKENS, weights={"web": 1.0}), r"weights: got web, wanted names of data.sources \(code, notes, chats\)")])
def test_what_does_not_fit_is_named(base, stage, words):
    with pytest.raises(ValueError, match=r"stages\[0\]." + words):
        staged(base, stage)


def test_steps_must_be_those_of_the_stages(base):
    with pytest.raises(ValueError, match="steps: got 20 with stages of 1 steps in all, wanted 1"):
        dataclasses.replace(base, stages=(StageConfig(24, TOKENS),))


def test_gates_need_a_measure_and_text(base, tmp_path):
    cfg = staged(base, StageConfig(24, TOKENS, gate=GateConfig(max_loss=1.0)))
    with pytest.raises(ValueError, match=r"measure: got None with gates at the end of stages \[0\]"):
        longmoe.fit(cfg, tmp_path)
    with pytest.raises(ValueError, match="gate: got max_loss with data.task='associative_recall'"):
        dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, task="associative_recall"))


def test_no_token_is_lost_or_repeated_at_a_switch(base):
    """Each document that was begun, in the order of its source, has its tokens from the first on, each once; the rest of an open one comes later."""
    sources = {source.name: source for source in open_sources(base.data, "train")}
    found, state = {name: {} for name in sources}, None
    for stage in stages_of(staged(base, *THREE)):
        loader = make_loader(dataclasses.replace(stage.config.data, prefetch=0), seed=base.seed, state=state)
        for _ in range(stage.end - stage.begin):
            batch, state = next(loader)
            for number, target in zip(batch["source_ids"].ravel().tolist(), batch["targets"].ravel().tolist()):
                name, document = loader.packer.locate(number)
                found[name].setdefault(document, []).append(target)
    for name, source in sources.items():
        cursor, documents = state["packer"]["sources"][name], source.documents
        assert cursor["epoch"] == 0 and cursor["tokens"] == sum(map(len, found[name].values()))
        stored = {documents.document_name(i): documents.document(i).tokens.tolist() for i in range(len(documents))}
        # A document that was taken may wait in a lane whose turn has not come.
        assert len(found[name]) <= cursor["next"]
        assert all(tokens == stored[document][:len(tokens)] for document, tokens in found[name].items())
        is_open = [document for document, tokens in found[name].items() if len(tokens) < len(stored[document])]
        assert len(is_open) + cursor["next"] - len(found[name]) == sum(lane is not None and lane[0] == name for lane in state["packer"]["lanes"])


def numbers(state):
    plain = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(plain(leaf)) for leaf in jax.tree.leaves(state)]


EIGHT = dict(accumulation_steps=1, mesh=MeshConfig(data=1, fsdp=8))


CUT = (StageConfig(24, 2 * TOKENS), StageConfig(48, 2 * TOKENS, {"notes": 0.0}, MeshConfig(data=4, fsdp=1, context=2)),
       StageConfig(96, 2 * TOKENS, mesh=MeshConfig(data=1, fsdp=2, context=4)))


@pytest.mark.parametrize("stages,cuts", [pytest.param(CUT[:2], (1,), marks=pytest.mark.slow),
                                         pytest.param(CUT, (1, 3, 4, 5), marks=pytest.mark.exhaustive)], ids=["two stages", "three stages"])
def test_a_run_cut_in_a_stage_is_the_run_to_the_bit(base, tmp_path, stages, cuts):
    cfg = staged(base, *stages, **EIGHT)
    cfg = dataclasses.replace(cfg, checkpoint=dataclasses.replace(cfg.checkpoint, every=1, keep=9))
    steps = [*range(1, 2 * len(stages) + 1)]
    whole = longmoe.fit(cfg, tmp_path / "whole")
    assert complete_steps(RunPaths(whole.paths.root).checkpoints) == steps and int(whole.state.step) == steps[-1]
    for step in cuts:
        again = longmoe.fit(cfg, tmp_path / "whole", resume_from=step)
        assert all((a == b).all() for a, b in zip(numbers(whole.state), numbers(again.state), strict=True))
    rows = json.loads((tmp_path / "whole" / "stages.json").read_text())
    assert [row["end"] for row in rows] == steps[1::2] and [row["rows"] for row in rows] == [8, 4, 2][:len(stages)]
    assert all(sum(row["tokens_of_stage"].values()) == 2 * TOKENS for row in rows)
    losses = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in losses] == steps


@pytest.mark.exhaustive
def test_gates(base, tmp_path):
    """A missed gate ends the run behind its checkpoint; another gate lets it go on, and what has passed is not measured again."""
    calls = []

    def measure(cfg, state, asked):
        calls.append((int(state.step), asked))
        return {"loss": 2.5, "short_loss": 2.0 + 0.1 * len(calls)}

    stages = (StageConfig(24, TOKENS, gate=GateConfig(max_loss=2.0)), StageConfig(48, TOKENS, gate=GateConfig(max_short_loss_rise=0.1)))
    one = dict(accumulation_steps=1, mesh=MeshConfig(data=2, fsdp=1, context=4))
    with pytest.raises(RuntimeError, match="stage 0 ended at step 1 and missed its gate: loss 2.5000, wanted at most 2.0"):
        longmoe.fit(staged(base, *stages, **one), tmp_path, measure=measure)
    looser = dataclasses.replace(stages[0], gate=GateConfig(max_loss=3.0))
    fitted = longmoe.fit(staged(base, looser, stages[1], **one), tmp_path, measure=measure)
    assert int(fitted.state.step) == 2 and calls == [(1, ("max_loss", "max_short_loss_rise"))] * 2 + [(2, ("max_short_loss_rise",))]
    longmoe.fit(staged(base, looser, stages[1], **one), tmp_path, measure=measure)
    assert len(calls) == 3


@pytest.mark.exhaustive
def test_measured_on_the_runs_own_text(base):
    cfg = staged(base, StageConfig(24, TOKENS, gate=GateConfig(max_loss=99.0, max_short_loss_rise=1.0)))
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, sources=cfg.data.sources[:1]))
    stage, = stages_of(cfg)
    mesh = longmoe.make_mesh(cfg.mesh, jax.devices()[:1])
    found = longmoe.measure_gate(stage.config, longmoe.init_train_state(stage.config, mesh, jax.random.key(0)), ("max_loss", "max_short_loss_rise"))
    assert set(found) == {"loss", "short_loss"} and abs(found["loss"] - np.log(300)) < 0.5 and found["loss"] == found["short_loss"]
