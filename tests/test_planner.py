"""The planner's figures against the published ones and against the model's own arrays."""
import jax
import numpy as np
import pytest
from tiny_config import tiny_model

import longmoe


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


def test_cache_bytes_are_the_caches(key):
    model = tiny_model()
    found = longmoe.estimate(model)
    cache = jax.eval_shape(lambda: longmoe.init_cache(model, 1, 100))
    bytes_of = lambda capacity: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(lambda: longmoe.init_cache(model, 1, capacity))))
    assert bytes_of(101) - bytes_of(100) == found.kv_bytes_per_token
    lengths = 4 * model.mixers.count("mla")
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) == 100 * found.kv_bytes_per_token + found.state_bytes_per_sequence + lengths
