"""Attention on latents in chunks against attention with all keys at once."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longmoe import presets
from longmoe.model.latent_attention import expand, latent_attention
from longmoe.model.mla import MLA, causal_attention
from pallas_kernels import document_runs
from pallas_kernels.testing import outputs_and_gradients, rms_ratio

HIGH = jax.lax.Precision.HIGHEST
DOCUMENTS = np.array([[1] * 5 + [2] * 13 + [0] * 2 + [2] * 9, [0] * 8 + [1] * 21], np.int32)


def inputs(tokens=29, heads=2):
    draw = np.random.default_rng(0)
    normal = lambda *shape: draw.normal(size=shape).astype(np.float32)
    return dict(q=normal(2, tokens, heads, 12), latent=normal(2, tokens, 10), kv_b=normal(6, heads, 8 + 5))


def whole(q, latent, kv_b, runs=None):
    keys, values = expand(latent, kv_b, q.shape[-1], HIGH)
    return causal_attention(q, keys, values, 0.3, runs, HIGH, return_max_logits=True)


@pytest.mark.parametrize("chunks, packed", [((29, 29), True), ((8, 5), True), ((7, 16), False)])
def test_any_chunks_give_attention(chunks, packed):
    x, runs = inputs(), {"runs": np.asarray(document_runs(DOCUMENTS))} if packed else {}

    def in_chunks(q, latent, kv_b, runs=None):
        return latent_attention(q, latent, kv_b, runs, runs, 0, scale=0.3, precision=HIGH, query_chunk=chunks[0], key_chunk=chunks[1],
                                return_max_logits=True)

    cotangents = np.random.default_rng(1).normal(size=(2, 29, 2, 5)).astype(np.float32), np.zeros(2, np.float32)
    (o, largest), gradients = outputs_and_gradients(in_chunks, x | runs, cotangents)
    (want, want_largest), want_gradients = outputs_and_gradients(whole, x | runs, cotangents)
    assert rms_ratio(o, want) < 1e-6 and all(rms_ratio(gradients[n], want_gradients[n]) < 2e-6 for n in x)
    np.testing.assert_allclose(largest, want_largest, rtol=1e-6)


def test_later_queries_of_the_same_latents():
    x, runs = inputs(), np.asarray(document_runs(DOCUMENTS))
    want, _ = jax.jit(whole)(**x, runs=runs)
    later = jax.jit(functools.partial(latent_attention, scale=0.3, precision=HIGH, query_chunk=4, key_chunk=6))
    got, largest = later(x["q"][:, 11:], x["latent"], x["kv_b"], runs[:, 11:], runs, 11)
    np.testing.assert_allclose(got, want[:, 11:], atol=1e-5)
    assert largest is None


def test_memory_is_linear_in_tokens():
    """Four times the tokens take no more than about four times the temporary memory, in both directions."""
    def bytes_of(tokens):
        x = inputs(tokens)
        loss = lambda x: jnp.sum(latent_attention(**x, runs=None, key_runs=None, start=0, scale=0.3, query_chunk=64, key_chunk=64)[0])
        return jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis().temp_size_in_bytes

    few, many = bytes_of(512), bytes_of(2048)
    assert many < 4.2 * few, (few, many)


def test_chunks_that_cannot_meet_are_passed_over():
    """NaN in the latents of another document is never read where whole chunks keep it apart."""
    x, runs = inputs(32), np.repeat(np.array([[1, 2]], np.int32), 16, axis=1).repeat(2, 0)
    x["latent"][:, :16] = np.nan
    o, _ = jax.jit(functools.partial(latent_attention, scale=0.3, query_chunk=8, key_chunk=8))(**x, runs=runs, key_runs=runs, start=0)
    assert np.isfinite(o[:, 16:]).all()


def test_long_rows_of_the_layer_go_in_chunks(monkeypatch, key):
    """The mixer gives the same whichever way a row is long enough for, largest logits included."""
    config = dataclasses.replace(presets.nano().model, width=32)
    module, x = MLA(config, return_max_logits=True), jax.random.normal(key, (2, 29, 32))
    runs = document_runs(DOCUMENTS)
    params = module.init(key, x, runs)["params"]
    want, want_largest = module.apply({"params": params}, x, runs)[::2]
    monkeypatch.setattr("longmoe.model.mla.WHOLE_ROWS", 16)
    got, largest = module.apply({"params": params}, x, runs)[::2]
    np.testing.assert_allclose(got, want, atol=1e-6 * float(jnp.abs(want).max()))
    np.testing.assert_allclose(largest, want_largest, rtol=1e-6)


def test_chunks_see_no_logit_of_what_fills_them_up():
    x = {name: np.abs(value) for name, value in inputs().items()} | {"runs": None}
    x["q"] = -x["q"]
    want = jax.jit(whole)(**x)[1]
    got = jax.jit(functools.partial(latent_attention, scale=0.3, precision=HIGH, query_chunk=8, key_chunk=5, return_max_logits=True))(
        **x, key_runs=None, start=0)[1]
    assert (want < 0).all()
    np.testing.assert_allclose(got, want, rtol=1e-6)
