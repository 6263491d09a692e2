"""Rows in pieces (ModelConfig.token_chunk): the same outputs, gradients, statistics and largest logits as whole rows, in memory that grows less."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longmoe
from longmoe import presets
from longmoe.configs import KDAConfig, MLAConfig, MoEConfig, ResidualConfig
from pallas_kernels.testing import rms_ratio

TOKENS, PIECE = 48, 16
# Documents that end on an edge, span three pieces, begin and end inside one, and a piece that begins with padding and one of nothing else.
PACKED = np.array([[1] * 16 + [2] * 32, [1] * 5 + [2] * 30 + [3] * 6 + [0] * 7, [1] * 12 + [0] * 8 + [2] * 12 + [0] * 16], np.int32)


def tiny(**changes):
    model = dataclasses.replace(
        presets.nano().model, vocab_size=64, width=32, num_layers=2, mla_every=2, dense_layers=0, dense_dim=32, kda=KDAConfig(num_heads=2, head_dim=16),
        mla=MLAConfig(num_heads=2, q_lora_rank=16, kv_lora_rank=16, nope_dim=8, rope_dim=4, v_dim=8), init_std=0.3, init="normal",
        moe=MoEConfig(num_experts=4, latent_dim=16, expert_dim=16, shared_expert_dim=16), residual=ResidualConfig(block_size=1), remat="full")
    return dataclasses.replace(model, **changes)


def passes(config, variables, tokens, segment_ids):
    """Hidden states, gradients, statistics and largest logits of a pass that reads everything."""
    weights = jax.random.normal(jax.random.key(2), (*tokens.shape, config.width))

    def loss(params):
        out = longmoe.LongMoE(config).apply({**variables, "params": params}, tokens, segment_ids, return_hidden=True, return_max_logits=True)
        hidden = out.hidden if segment_ids is None else jnp.where((segment_ids > 0)[..., None], out.hidden, 0)
        return jnp.sum(weights * hidden), (hidden, out.router_stats, out.max_logits)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])


ONE = dict(num_layers=1, mla_every=0, dense_layers=1)
ROPE = dict(residual=ResidualConfig(kind="plain"), mla=dataclasses.replace(tiny().mla, rope_theta=100.0))
SCANNED = dict(num_layers=4, residual=ResidualConfig(block_size=4))


@pytest.mark.parametrize("changes,packed", [
    (ONE, True), pytest.param({}, True, marks=pytest.mark.slow),
    pytest.param({"residual": ResidualConfig(kind="full"), "remat": "none"}, True, marks=pytest.mark.slow),
    pytest.param(ROPE, False, marks=pytest.mark.exhaustive), pytest.param(SCANNED | {"remat": "save_matmuls"}, True, marks=pytest.mark.exhaustive)],
    ids=["one layer", "block", "full", "rope", "scanned"])
def test_pieces_are_the_row(changes, packed):
    whole = tiny(**changes)
    variables = longmoe.init_variables(whole, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (len(PACKED), TOKENS), 0, whole.vocab_size)
    documents = jnp.asarray(PACKED) if packed else None
    (_, (want, want_stats, want_logits)), want_gradients = passes(whole, variables, tokens, documents)
    (_, (got, stats, logits)), gradients = passes(dataclasses.replace(whole, token_chunk=PIECE), variables, tokens, documents)
    assert rms_ratio(got, want) < 5e-6
    jax.tree.map(np.testing.assert_array_equal, stats, want_stats)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), logits, want_logits)
    worst = max(jax.tree.leaves(jax.tree.map(rms_ratio, gradients, want_gradients)))
    assert worst < 2e-5, jax.tree.map(rms_ratio, gradients, want_gradients)


@pytest.mark.slow
def test_a_convolution_of_one_tap_hands_on_its_document():
    config = tiny(kda=KDAConfig(num_heads=2, head_dim=16, conv_width=1), num_layers=1, mla_every=0, dense_layers=1)
    variables = longmoe.init_variables(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (len(PACKED), TOKENS), 0, config.vocab_size)
    (_, (want, *_)), _ = passes(config, variables, tokens, jnp.asarray(PACKED))
    (_, (got, *_)), _ = passes(dataclasses.replace(config, token_chunk=PIECE), variables, tokens, jnp.asarray(PACKED))
    assert rms_ratio(got, want) < 2e-6


@pytest.mark.exhaustive
def test_memory_of_a_step_grows_by_what_is_kept_alone():
    """Four times the tokens: what is held besides the layers' inputs and outputs stays."""
    def temporary(tokens, chunk):
        config = tiny(mla_every=0, token_chunk=chunk, dtype="bfloat16")
        variables = jax.eval_shape(longmoe.LongMoE(config).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))

        def loss(params, rest, tokens):
            return jnp.sum(longmoe.LongMoE(config).apply({**rest, "params": params}, tokens, return_hidden=True).hidden.astype(jnp.float32))

        rest = {name: tree for name, tree in variables.items() if name != "params"}
        program = jax.jit(jax.grad(loss)).lower(variables["params"], rest, jax.ShapeDtypeStruct((1, tokens), jnp.int32)).compile()
        return program.memory_analysis().temp_size_in_bytes

    whole, pieces = (temporary(4096, chunk) - temporary(1024, chunk) for chunk in (None, 256))
    assert pieces < 0.12 * whole, (pieces, whole)


def test_what_does_not_fit_is_said():
    config = tiny(token_chunk=20)
    variables = longmoe.init_variables(config, jax.random.key(0))
    with pytest.raises(ValueError, match="token_chunk: got 20 for rows of 48 tokens, wanted a divisor"):
        longmoe.LongMoE(config).apply(variables, jnp.zeros((1, TOKENS), jnp.int32))
    with pytest.raises(ValueError, match="token_chunk: got 20 with moe.balancer='auxiliary_loss'"):
        tiny(token_chunk=20, moe=MoEConfig(balancer="auxiliary_loss"))
