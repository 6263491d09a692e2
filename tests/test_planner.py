"""The planner's figures against the published ones and against the model's own arrays."""
import dataclasses

import jax
import numpy as np
import pytest
from tiny_config import tiny_model

import longmoe
from longmoe.inference.serving_costs import ServingConfig


@pytest.mark.parametrize("preset,total,active", [
    ("kimi_k3", 2779.48e9, 104.19e9), ("kimi_linear_48b", 49.12e9, 3.11e9), ("small", 0.81e9, 172e6), ("base", 5.916e9, 0.736e9)])
def test_published_sizes(preset, total, active):
    found = longmoe.estimate(getattr(longmoe.presets, preset)())
    np.testing.assert_allclose([found.total_params, found.active_params], [total, active], rtol=5e-3)
    assert sum(found.params_by_part.values()) == found.total_params


def test_k3_parts():
    """The counts that the published shapes give, layer by layer."""
    found = longmoe.estimate(longmoe.presets.kimi_k3())
    parts = found.params_by_part
    assert parts["kda"] == 69 * 443_740_384 and parts["mla"] == 24 * 232_196_096 and parts["dense"] == 726_663_168
    assert parts["experts"] == 92 * 896 * 33_030_144 and parts["embedding"] == parts["head"] == 1_174_405_120
    assert parts["router"] + parts["latent"] + parts["shared"] == 92 * (189_927_808 - 896)            # the published count includes the biases
    assert parts["norms_and_depth"] == 93 * 6 * 7168 + 3 * 7168
    assert found.kv_bytes_per_token == 27_648
    assert found.state_bytes_per_sequence == 69 * (6 * 2 ** 20 + 3 * 3 * 12288 * 2)


def test_counts_the_models_own_arrays(key):
    model = tiny_model()
    params = longmoe.init_variables(model, key)["params"]
    assert longmoe.estimate(model).total_params == sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize("changes", [dict(), dict(dtype="bfloat16"), dict(mla_every=0), dict(mla_every=1)])
def test_cache_bytes_are_the_caches(changes):
    """Every array that generation allocates, for several rows and capacities."""
    model = tiny_model(**changes)
    found = longmoe.estimate(model)
    lengths = 4 * model.mixers.count("mla")                             # an int32 a row and MLA layer
    for rows, capacity in ((1, 1), (3, 100), (2, 257)):
        cache = jax.tree.leaves(longmoe.init_cache(model, rows, capacity))
        assert sum(x.nbytes for x in cache) == rows * (capacity * found.kv_bytes_per_token + found.state_bytes_per_sequence + lengths)


def test_serving_rows_are_the_caches():
    model = tiny_model(dtype="bfloat16")
    found = longmoe.estimate(model).serving(ServingConfig(devices=1))
    for row in found.rows:
        cache = jax.eval_shape(lambda row=row: longmoe.init_cache(model, 1, row.length))
        assert row.sequence_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) - 4 * model.mixers.count("mla")
        assert row.latent_bytes == row.length * found.latent_bytes_per_token


def test_k3_serving_figures():
    """Kimi K3's published geometry, worked out by hand from its report."""
    k3 = longmoe.estimate(longmoe.presets.kimi_k3())
    found = k3.serving(ServingConfig(weights="mxfp4"))
    assert found.latent_bytes_per_token == 24 * 576 * 2 == 27_648
    np.testing.assert_allclose([found.state_bytes, found.conv_bytes], [434.1e6, 15.3e6], rtol=3e-3)
    assert round(found.snapshot_tokens) == 16_253
    np.testing.assert_allclose([row.latent_bytes / 1e9 for row in found.rows], [0.23, 1.81, 7.25, 28.99], atol=5e-3)
    np.testing.assert_allclose([found.expert_bytes, found.other_bytes], [1.446e12, 113.5e9], rtol=2e-3)
    np.testing.assert_allclose(found.weight_flops, 0.208e12, rtol=3e-3)
    recurrence = 69 * 96 * (6 * 128 ** 2 + 8 * 64 * 128)
    assert recurrence < 2e9                                             # KDA costs the same at every length
    last = found.rows[-1]
    np.testing.assert_allclose(last.decode_flops - found.weight_flops - recurrence, 5.26e12, rtol=3e-3)
    np.testing.assert_allclose(last.prefill_flops, (0.2185 + 0.81) * 1e18 + recurrence * 2 ** 20, rtol=3e-3)
    half = k3.serving(ServingConfig(cache="fp8", state="bfloat16"))
    assert half.latent_bytes_per_token == 13_824 and half.state_bytes == found.state_bytes // 2
    assert round(k3.serving(ServingConfig(state="bfloat16")).snapshot_tokens) == 8_403


def test_kimi_linear_serving_figures():
    """27 layers, 7 of them MLA: a quarter of what 27 layers of MLA would cache."""
    found = longmoe.estimate(longmoe.presets.kimi_linear_48b()).serving()
    assert found.latent_bytes_per_token == 7 * 576 * 2 and found.state_bytes == 20 * 32 * 128 * 128 * 4
    np.testing.assert_allclose(found.weight_bytes, 2 * 49.12e9, rtol=5e-3)


def test_capacity_and_floor_follow_devices_and_dtypes():
    model = longmoe.presets.small().model
    serving = lambda **changes: longmoe.estimate(model).serving(dataclasses.replace(ServingConfig(devices=1), **changes))
    one = serving()
    for row in one.rows:
        fits = lambda sequences, row=row: one.weight_bytes + sequences * row.sequence_bytes <= 0.9 * 141e9
        assert fits(row.sequences) and not fits(row.sequences + 1)
    # A step reads the weights that its tokens meet, each sequence's latents, and reads and writes its state.
    active = longmoe.estimate(model).active_params
    moved = 2 * active + one.rows[0].latent_bytes + 2 * (one.state_bytes + one.conv_bytes)
    np.testing.assert_allclose(one.rows[0].floor_ms, 1e3 * moved / 4.8e12, rtol=1e-6)
    assert serving(devices=4).rows[0].floor_ms == pytest.approx(one.rows[0].floor_ms / 4)
    assert serving(batch=10_000).rows[0].floor_ms > 1e3 * one.weight_bytes / 4.8e12 > one.rows[0].floor_ms
    assert serving(memory=1e9).rows[0].sequences == 0
    with pytest.raises(ValueError, match="ServingConfig.devices: got 0"):
        serving(devices=0)
