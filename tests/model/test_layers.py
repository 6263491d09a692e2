"""Small parts of the layers against float64."""
import jax
import jax.numpy as jnp
import numpy as np

from longmoe.model.layers import tanh


def test_tanh_is_exact_to_the_last_places():
    draw = np.random.default_rng(0)
    x = np.float32(np.concatenate([draw.normal(size=20_000) * size for size in (1e-3, 0.05, 0.3, 1, 3, 8)]))
    want = np.tanh(x.astype(np.float64))
    ulps = np.abs(np.asarray(jax.jit(tanh)(x)) - want) / np.spacing(np.abs(want).astype(np.float32))
    assert ulps.max() < 1.5 and np.sqrt(np.mean(ulps ** 2)) < 0.4
    slope = jax.jit(jax.vmap(jax.grad(tanh)))(x)
    np.testing.assert_allclose(slope, 1 - want ** 2, atol=2e-7)
    ends = tanh(jnp.float32([np.inf, -np.inf, np.nan, 0.0, 60.0, -200.0]))
    np.testing.assert_array_equal(ends, np.float32([1, -1, np.nan, 0, 1, -1]))
