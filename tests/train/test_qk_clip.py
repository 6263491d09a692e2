"""QK-Clip: the largest logits are those of the definition however the layers run, and clipping brings exactly the heads above the threshold to it."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_config import batch_of, tiny_model, tiny_train

from longmoe.configs import MeshConfig, ResidualConfig
from longmoe.model.depth import unstack_layers
from longmoe.model.lm import LongMoE, init_cache, init_variables
from longmoe.model.mla import MLA, causal_attention
from longmoe.parallel.mesh import make_mesh
from longmoe.train.qk_clip import clip_queries_and_keys, layer_maxima
from longmoe.train.state import init_train_state
from longmoe.train.step import accumulate, make_train_step

HEADS = 4


def wide_heads():
    model = tiny_model(init_std=0.3)
    return dataclasses.replace(model, mla=dataclasses.replace(model.mla, num_heads=HEADS))


def layer(key, q_lora_rank=16):
    """(config, MLA, its params, inputs, runs with padding and two documents)."""
    config = wide_heads()
    config = dataclasses.replace(config, mla=dataclasses.replace(config.mla, q_lora_rank=q_lora_rank))
    x = jax.random.normal(key, (2, 20, config.width))
    runs = jnp.asarray(np.repeat([[1, 2, 0]], 2, 0).repeat([9, 8, 3], axis=1))
    module = MLA(config, return_max_logits=True)
    return config, module, module.init(key, x, runs)["params"], x, runs


def logits_by_hand(config, params, x, runs):
    """[B, H, T, T] in float64; -inf where a query may not see a key."""
    mla, wide = config.mla, lambda a: np.asarray(a, np.float64)
    norm = lambda y: y / np.sqrt(np.mean(y ** 2, -1, keepdims=True) + config.latent_norm_eps)
    x = wide(x)
    q = norm(x @ wide(params["q_a_proj"]["kernel"])) if mla.q_lora_rank else x
    q = (q @ wide(params["q_b_proj"]["kernel"])).reshape(*x.shape[:2], HEADS, -1)
    latent = x @ wide(params["kv_a_proj"]["kernel"])
    k = np.einsum("btr,rhd->bthd", norm(latent[..., :mla.kv_lora_rank]), wide(params["kv_b_proj"])[..., :mla.nope_dim])
    rope = latent[:, :, None, mla.kv_lora_rank:].repeat(HEADS, axis=2)
    logits = np.einsum("bqhd,bkhd->bhqk", q, np.concatenate([k, rope], -1)) * (mla.nope_dim + mla.rope_dim) ** -0.5
    runs, at = np.asarray(runs), np.arange(x.shape[1])
    seen = (runs[:, :, None] == runs[:, None]) & (runs > 0)[:, None] & (at <= at[:, None])
    return np.where(seen[:, None], logits, -np.inf)


@pytest.mark.parametrize("q_lora_rank", [16, None])
def test_largest_logits_are_over_valid_pairs_only(key, q_lora_rank):
    config, module, params, x, runs = layer(key, q_lora_rank)
    # What padding holds would be largest.
    x = jnp.where((runs > 0)[..., None], x, 50 * x)
    got = module.apply({"params": params}, x, runs)[2]
    np.testing.assert_allclose(got, logits_by_hand(config, params, x, runs).max((0, 2, 3)), rtol=1e-5)
    assert MLA(config).apply({"params": params}, x, runs)[2] is None


def test_padding_alone_has_no_logit(key):
    q, k, v = jax.random.uniform(key, (3, 2, 17, HEADS, 8))
    nothing = causal_attention(q, k, v, 0.5, jnp.zeros((2, 17), jnp.int32), return_max_logits=True)
    assert (nothing[1] == jnp.finfo(jnp.float32).min).all()


def test_largest_logits_carry_no_gradient(key):
    _, module, params, x, runs = layer(key)
    assert not any(np.any(g) for g in jax.tree.leaves(jax.grad(lambda p: jnp.sum(module.apply({"params": p}, x, runs)[2]))(params)))


@pytest.mark.parametrize("q_lora_rank", [16, None])
def test_clips_the_heads_above_the_threshold_and_no_other(key, q_lora_rank):
    config, module, params, x, runs = layer(key, q_lora_rank)
    before = module.apply({"params": params}, x, runs)[2]
    order = np.argsort(before)
    threshold = float(before[order[1]] + before[order[2]]) / 2
    clipped = clip_queries_and_keys(config, {"layer_01": {"mla": params}}, {"layer_01": {"mla": before}}, threshold)["layer_01"]["mla"]
    after = module.apply({"params": clipped}, x, runs)[2]
    np.testing.assert_allclose(after[order[2:]], threshold, rtol=1e-5)
    np.testing.assert_array_equal(after[order[:2]], before[order[:2]])
    heads = lambda p: {"q": np.moveaxis(np.asarray(p["q_b_proj"]["kernel"]).reshape(-1, HEADS, 12), 1, 0), "kv": np.moveaxis(np.asarray(p["kv_b_proj"]), 1, 0)}
    old, new = heads(params), heads(clipped)
    for head in range(HEADS):
        gamma = min(1.0, threshold / float(before[head]))
        if head in order[:2]:
            jax.tree.map(lambda a, b, head=head: np.testing.assert_array_equal(a[head], b[head]), new, old)
        np.testing.assert_allclose(new["q"][head, :, :8], old["q"][head, :, :8] * gamma ** 0.5, rtol=1e-6)
        np.testing.assert_allclose(new["q"][head, :, 8:], old["q"][head, :, 8:] * gamma, rtol=1e-6)
        np.testing.assert_allclose(new["kv"][head, :, :8], old["kv"][head, :, :8] * gamma ** 0.5, rtol=1e-6)
        np.testing.assert_array_equal(new["kv"][head, :, 8:], old["kv"][head, :, 8:])
    shared = lambda p: {name: value for name, value in p.items() if name not in ("q_b_proj", "kv_b_proj")}
    jax.tree.map(np.testing.assert_array_equal, shared(clipped), shared(params))


def test_stacked_layers_are_clipped_like_single_ones(key):
    config, _, params, _, _ = layer(key)
    layers = [params, jax.tree.map(lambda p: 2 * p, params)]
    largest = jnp.array([[1.0, 4.0, 9.0, 2.0], [5.0, 0.5, 3.0, 8.0]])
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
    got = clip_queries_and_keys(config, {"layers_00_02": {"step_0": {"mla": stack(layers), "other": 1}}}, {"layers_00_02": {"step_0": {"mla": largest}}}, 3.0)
    want = stack([clip_queries_and_keys(config, {"mla": p}, {"mla": m}, 3.0)["mla"] for p, m in zip(layers, largest)])
    jax.tree.map(np.testing.assert_array_equal, got, {"layers_00_02": {"step_0": {"mla": want, "other": 1}}})


def test_bfloat16_parameters_below_the_threshold_keep_their_bits(key):
    config, _, params, _, _ = layer(key)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    clipped = clip_queries_and_keys(config, {"mla": params}, {"mla": jnp.array([1.0, 2.0, -5.0, jnp.finfo(jnp.float32).min])}, 3.0)["mla"]
    jax.tree.map(np.testing.assert_array_equal, clipped, params)
    assert {x.dtype for x in jax.tree.leaves(clipped)} == {jnp.dtype("bfloat16")}


def attention_only(**changes):
    """Four MLA layers, three of them one scan, and one MoE layer: little to compile."""
    cfg = tiny_train(num_layers=4, mla_every=1, dense_layers=3, residual=ResidualConfig(block_size=3), init_std=0.2, **changes)
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, learning_rate=1e-12, final_learning_rate=0.0, qk_clip=0.25))


def test_scan_remat_and_accumulation_give_the_same_maxima(key):
    cfg = attention_only(accumulation_steps=4, remat="full")
    flat = dataclasses.replace(cfg.model, scan_layers=False, remat="none")
    variables, batch = init_variables(cfg.model, key), batch_of(key)
    got = jax.jit(lambda v: accumulate(cfg, v["params"], v["router_state"], batch).max_logits)(variables)
    want = jax.jit(lambda v: LongMoE(flat).apply(v, batch["tokens"], batch["segment_ids"], return_hidden=True, return_max_logits=True).max_logits)(
        unstack_layers(cfg.model, variables))
    assert [x.shape for x in jax.tree.leaves(got)] == [(2,), (3, 2)]
    np.testing.assert_allclose(layer_maxima(cfg.model, got), layer_maxima(flat, want), rtol=2e-5)


@pytest.mark.slow
def test_a_step_brings_the_next_forward_pass_below_the_threshold(key):
    """The learning rate is next to nothing, so that the clip is all that changes."""
    cfg, mesh, batch = attention_only(), make_mesh(MeshConfig(), jax.devices()[:1]), batch_of(key)
    step, state = make_train_step(cfg, mesh), init_train_state(cfg, mesh, key)
    state, first = step(state, batch)
    state, second = step(state, batch)
    assert first["max_logit"].shape == (4,) and (first["max_logit"] > 0.3).all()
    assert second["max_logit"][0] == pytest.approx(0.25, rel=1e-4)
    # Clipping the first layer moves the inputs of the later ones a little.
    assert (second["max_logit"] < (first["max_logit"] + 0.25) / 2).all()
    old = jax.tree.map(np.array, state.params)
    state, skipped = step(state, batch | dict(loss_weights=jnp.full_like(batch["loss_weights"], jnp.inf)))
    assert int(skipped["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, old)


def test_a_model_without_mla_has_nothing_to_clip(key):
    model = tiny_model(mla_every=0, num_layers=1)
    run = lambda key: LongMoE(model).init_with_output(key, jnp.zeros((1, 8), jnp.int32), return_max_logits=True)
    output, variables = jax.eval_shape(run, key)
    assert output.max_logits == {} and clip_queries_and_keys(model, variables["params"], {}, 1.0) == variables["params"]


def test_refuses_a_cache(key):
    model = tiny_model(num_layers=1)
    with pytest.raises(ValueError, match="return_max_logits: got a cache too"):
        LongMoE(model).init(key, jnp.zeros((1, 4), jnp.int32), cache=init_cache(model, 1, 8), return_max_logits=True)
