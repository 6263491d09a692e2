"""The whole text model: equal under every way of running it, isolated documents, strict causality."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_config import VOCAB, batch_of, tiny_model, tiny_train

from longmoe import presets
from longmoe.balancing import balancers
from longmoe.configs import ModelConfig, ResidualConfig
from longmoe.model.depth import flat_plan, split_layers, stack_layers, unstack_layers
from longmoe.model.lm import LongMoE, init_variables
from longmoe.train.step import accumulate
from pallas_kernels.testing import rms_ratio


def randomized(variables, key, scale=0.03):
    """Moves every parameter off its special starting value (zero queries, unit norms, zero biases).

    The embedding is near unit size, as in a trained model: from a small one, 16 sublayers amplify float32 rounding about fifty times.
    """
    leaves, tree = jax.tree.flatten(variables)
    keys = jax.random.split(key, len(leaves))
    moved = jax.tree.unflatten(tree, [x + scale * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves)])
    return moved | {"params": moved["params"] | {"embedding": 20 * moved["params"]["embedding"]}}


@functools.lru_cache
def compiled(cfg):
    return jax.jit(lambda v, b: accumulate(cfg, v["params"], v["router_state"], b))


def loss_grads_stats(cfg, variables, batch):
    sums = compiled(cfg)(variables, batch)
    return sums.nll, sums.grads, sums.stats


def numbered(model):
    """Variables of the model's shapes whose values are all different; no compilation."""
    shapes = jax.eval_shape(LongMoE(model).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 4), jnp.int32))
    return jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(x.size).normal(size=x.shape), x.dtype), shapes)


def assert_same(cfg, variables, got, want, bound=1e-6):
    """Loss, every gradient and the next router state within an RMS ratio; loads equal.

    Histograms may differ: a score that moves by one bit can cross the edge of a bin 4e-5 wide.
    """
    assert rms_ratio(got[0], want[0]) < bound
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    assert rms_ratio(flat(got[1]), flat(want[1])) < bound
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got[1]), jax.tree.leaves(want[1])):
        if np.sqrt(np.mean(np.square(b))) > 1e-3 * np.sqrt(np.mean(np.square(flat(want[1])))):
            assert rms_ratio(a, b) < 10 * bound, path
    state, counts = variables["router_state"], [jax.tree.map(lambda s: s.load, x[2], is_leaf=lambda s: isinstance(s, tuple)) for x in (got, want)]
    jax.tree.map(np.testing.assert_array_equal, *counts)
    solved = [jax.tree.map(lambda bias, s: balancers.update(cfg.model.moe, s, bias), state, x[2]) for x in (got, want)]
    assert rms_ratio(flat(solved[0]), flat(solved[1])) < bound


@pytest.fixture(scope="module")
def case():
    key = jax.random.key(3)
    cfg = tiny_train()
    variables = randomized(init_variables(cfg.model, key), key)
    batch = batch_of(key)
    return cfg, variables, batch, loss_grads_stats(cfg, variables, batch)


def test_scanned_equals_unrolled(case):
    cfg, variables, batch, want = case
    flat = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, scan_layers=False))
    got = loss_grads_stats(flat, unstack_layers(cfg.model, variables), batch)
    restacked = stack_layers(cfg.model, {"grads": got[1], "stats": got[2]})
    assert_same(cfg, variables, (got[0], restacked["grads"], restacked["stats"]), want)


@pytest.mark.parametrize("remat", [pytest.param("full", marks=pytest.mark.slow), pytest.param("save_matmuls", marks=pytest.mark.exhaustive)])
def test_remat_equals_none(case, remat):
    cfg, variables, batch, want = case
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, remat=remat))
    assert_same(cfg, variables, loss_grads_stats(cfg, variables, batch), want)


def test_micro_batches_equal_one(case):
    cfg, variables, batch, want = case
    assert_same(cfg, variables, loss_grads_stats(dataclasses.replace(cfg, accumulation_steps=4), variables, batch), want)


def test_packed_equals_separate(case):
    cfg, variables, batch, want = case
    rows, tokens = batch["tokens"].shape
    separate = {name: [] for name in batch}
    for row in range(rows):
        for document in (1, 2):
            where = np.flatnonzero(np.asarray(batch["segment_ids"][row]) == document)
            for name, values in batch.items():
                piece = np.zeros(tokens, values.dtype)
                piece[:len(where)] = np.asarray(values)[row, where]
                separate[name].append(np.minimum(piece, 1) if name == "segment_ids" else piece)
    assert_same(cfg, variables, loss_grads_stats(cfg, variables, {name: jnp.asarray(np.stack(x)) for name, x in separate.items()}), want)


def test_padding_content_is_never_read(case):
    cfg, variables, batch, want = case
    padding = batch["segment_ids"] == 0
    other = batch | dict(tokens=jnp.where(padding, 7, batch["tokens"]), targets=jnp.where(padding, VOCAB - 1, batch["targets"]))
    got = loss_grads_stats(cfg, variables, other)
    jax.tree.map(np.testing.assert_array_equal, got[2], want[2])
    np.testing.assert_array_equal(got[0], want[0])


@pytest.mark.parametrize("kind", ["block", "full", "plain"])
def test_no_gradient_from_later_tokens(kind):
    """The gradient of the logits at t with respect to the embedding of a token that only stands after t is exactly zero."""
    model = tiny_model(residual=ResidualConfig(kind=kind, block_size=2), num_layers=3)
    variables = jax.tree.map(lambda x: 0.2 * x, numbered(model))
    tokens = jnp.arange(20)[None] + 10

    def at(params, t):
        return jnp.sum(jnp.sin(LongMoE(model).apply(variables | {"params": params}, tokens).logits[0, t]))

    grad = jax.jit(jax.grad(at))
    for t in (0, 7, 15, 16, 19):
        rows = np.abs(np.asarray(grad(variables["params"], t)["embedding"])[10:30]).max(axis=1)
        assert not rows[t + 1:].any() and rows[:t + 1].all()


@pytest.mark.parametrize("kind,block", [("block", 1), ("block", 3), ("block", 5), ("block", 100), ("full", 4), ("plain", 4)])
def test_layouts_are_inverse(kind, block):
    model = tiny_model(residual=ResidualConfig(kind=kind, block_size=block))
    variables = numbered(model)
    apart = unstack_layers(model, variables)
    assert {f"layer_{i:02d}" for i in range(model.num_layers)} <= set(apart["params"])
    jax.tree.map(np.testing.assert_array_equal, stack_layers(model, apart), variables)
    jax.tree.map(np.testing.assert_array_equal, stack_layers(model, variables), variables)
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(model, apart), apart)


def test_every_layer_is_planned_once():
    for model in (tiny_model(), tiny_model(mla_layers=(2, 6, 7)), tiny_model(mla_every=0), ModelConfig(num_layers=93, residual=ResidualConfig(block_size=12))):
        layers = [layer for group in flat_plan(model) for layer, _, _ in group.layers()]
        assert layers == list(range(model.num_layers))
    assert max(group.repeats for group in flat_plan(ModelConfig(num_layers=93, residual=ResidualConfig(block_size=12)))) == 3


def test_depth_weights(case):
    cfg, variables, batch, _ = case
    output = jax.jit(lambda v, t, s: LongMoE(cfg.model).apply(v, t, s, return_depth_weights=True))(variables, batch["tokens"], batch["segment_ids"])
    assert len(output.depth_weights) == 2 * cfg.model.num_layers + 1
    for name, weights in output.depth_weights.items():
        np.testing.assert_allclose(jnp.sum(weights), 1, rtol=1e-5, err_msg=name)
    assert output.depth_weights["layer_00/attn"].shape == (1,)
    assert output.depth_weights["output"].shape == (3,)
    # A layer inside a scan that opens a block reads the finished blocks alone.
    assert output.depth_weights["layer_04/attn"][-1] == 0 and output.depth_weights["layer_06/attn"][-1] > 0.05


def test_statistics_count_valid_tokens(case):
    cfg, _, batch, want = case
    valid = int(jnp.sum(batch["segment_ids"] > 0))
    layers = split_layers(cfg.model, want[2])
    assert len(layers) == cfg.model.num_moe_layers
    for stats in layers.values():
        stats = stats["moe"]["router"]["expert_bias"]
        assert int(stats.tokens) == valid and int(jnp.sum(stats.load)) == valid * cfg.model.moe.experts_per_token


def test_variables_and_purity(key):
    model = tiny_model(num_layers=2)
    variables = init_variables(model, key)
    assert set(variables) == {"params", "router_state"}
    loss = lambda v: jnp.sum(LongMoE(model).apply(v, jnp.zeros((1, 5), jnp.int32)).logits ** 2)
    grads = jax.jit(jax.grad(loss))(variables)["router_state"]
    assert not any(np.any(x) for x in jax.tree.leaves(grads))


@pytest.mark.exhaustive
def test_bfloat16_stays_close(case):
    cfg, variables, batch, _ = case
    half = dataclasses.replace(cfg.model, dtype="bfloat16")
    want, got = (jax.jit(LongMoE(model).apply)(variables, batch["tokens"], batch["segment_ids"]).logits for model in (cfg.model, half))
    assert got.dtype == jnp.float32 and 1e-4 < rms_ratio(got, want) < 0.2


def test_refuses_bad_tokens():
    model = tiny_model()
    variables = numbered(model)
    with pytest.raises(ValueError, match="tokens: got float32"):
        LongMoE(model).apply(variables, jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match="segment_ids"):
        LongMoE(model).apply(variables, jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 5), jnp.int32))
    for ids, found in ([[0, 999]], "from 0 to 999"), ([[-1, 2]], "from -1 to 2"):
        with pytest.raises(ValueError, match=f"tokens: got ids {found}, wanted 0 to {model.vocab_size - 1}"):
            LongMoE(model).apply(variables, jnp.asarray(ids))


def test_what_is_no_config_or_no_key_is_refused():
    cfg = presets.nano()
    for make in (LongMoE, lambda config: init_variables(config, jax.random.key(0))):
        with pytest.raises(ValueError, match="model_config: got a TrainConfig, wanted a ModelConfig, which is its .model"):
            make(cfg)
    with pytest.raises(ValueError, match=r"key: got 0, wanted a key such as jax.random.key\(0\)"):
        init_variables(cfg.model, 0)
