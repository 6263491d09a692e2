"""Rotated key columns: the rotation by hand, decoding, packing, and a sequence that devices share out."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_config import tiny_model

from longmoe.configs import MeshConfig, MLAConfig
from longmoe.interop.hf_config import to_hf
from longmoe.model.cache import after_tokens, init_layer_cache
from longmoe.model.mla import MLA, rotate
from longmoe.parallel.mesh import make_mesh
from longmoe.presets import kimi_linear_48b
from pallas_kernels.testing import rms_ratio

TOKENS, THETA = 24, 50.0


@functools.cache
def case(theta=THETA):
    """(layer, its parameters far from their start, input [2, T, D])."""
    model = tiny_model()
    model = dataclasses.replace(model, mla=dataclasses.replace(model.mla, rope_theta=theta))
    x = jax.random.normal(jax.random.key(1), (2, TOKENS, model.width))
    layer = MLA(model)
    params = layer.init(jax.random.key(2), x)
    return layer, jax.tree.map(lambda w: w if w.ndim == 1 else 10 * w, params), x


@functools.cache
def run(theta=THETA):
    layer, params, _ = case(theta)
    return jax.jit(lambda x, runs, cache: layer.apply(params, x, runs, cache)[:2])


def test_rotation_is_a_complex_product():
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 1000]])
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[..., None, None] * THETA ** (-np.arange(4) / 4))
    np.testing.assert_allclose(rotate(jnp.asarray(x), jnp.asarray(positions), THETA), np.concatenate([turned.real, turned.imag], axis=-1), atol=3e-4)
    np.testing.assert_allclose(rotate(jnp.asarray(x[:, :, 0]), jnp.asarray(positions), THETA)[0, 0], x[0, 0, 0])


def test_decoding_equals_the_forward_pass():
    """A right-padded prompt of each row's own length, then token by token, each row at its own position."""
    _, _, x = case()
    want, lengths = run()(x, None, None)[0], np.array([9, 5])
    prompt = jnp.where((jnp.arange(12) < lengths[:, None])[..., None], x[:, :12], 7.0)
    cache, valid = init_layer_cache(case()[0].config, "mla", 2, TOKENS), (jnp.arange(12) < lengths[:, None]).astype(jnp.int32)
    got, latents = run()(prompt, valid, cache)
    cache = after_tokens(cache, latents, valid)
    for row, length in enumerate(lengths):
        assert rms_ratio(got[row, :length], want[row, :length]) < 1e-5
    for step in range(TOKENS - int(lengths.max())):
        at = lengths + step
        got, latents = run()(x[np.arange(2), at][:, None], None, cache)
        cache = after_tokens(cache, latents, np.ones((2, 1), np.int32))
        assert rms_ratio(got[:, 0], want[np.arange(2), at]) < 1e-5
    assert rms_ratio(want, run(None)(x, None, None)[0]) > 0.01


def test_only_distances_within_a_document_count():
    _, _, x = case()
    alone = run()(x[:, :10], None, None)[0]
    packed = jnp.concatenate([x[:, 10:17], x[:, :10], x[:, 17:24]], axis=1)
    runs = jnp.asarray(np.repeat([[1, 2, 0]], 2, axis=0).repeat([7, 10, 7], axis=1), jnp.int32)
    assert rms_ratio(run()(packed, runs, None)[0][:, 7:17], alone) < 1e-5


def test_devices_that_share_out_a_sequence_count_from_its_start():
    layer, params, x = case()
    mesh = make_mesh(MeshConfig(data=2, fsdp=1, context=4))

    @jax.jit
    def shared(x):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            x = jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data",), "context")))
            return layer.apply(params, x)[0]

    assert rms_ratio(shared(x), run()(x, None, None)[0]) < 1e-5


def test_refusals():
    with pytest.raises(ValueError, match="rope_theta: got 0, wanted None or a positive number"):
        MLAConfig(rope_theta=0)
    with pytest.raises(ValueError, match="rope_dim: got 3 with rope_theta=10000"):
        MLAConfig(rope_dim=3, rope_theta=10000)
    model = kimi_linear_48b().model
    with pytest.raises(ValueError, match="mla.rope_theta: got 10000.0, wanted None"):
        to_hf(dataclasses.replace(model, mla=dataclasses.replace(model.mla, rope_theta=10000.0)))
