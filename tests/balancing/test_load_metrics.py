"""Load metrics at their extremes, for one layer and for several."""
import jax.numpy as jnp
import numpy as np
import pytest

from longmoe.balancing import metrics

LOADS = jnp.array([[4, 4, 4, 4], [16, 0, 0, 0], [8, 8, 0, 0], [0, 0, 0, 0]], jnp.int32)


@pytest.mark.parametrize("metric,want", [
    (metrics.max_violation, [0, 3, 1, 0]), (metrics.load_entropy, [1, 0, 0.5, 1]), (metrics.dead_experts, [0, 3, 2, 0])])
def test_extremes(metric, want):
    np.testing.assert_allclose(metric(LOADS), want, atol=1e-6)
    np.testing.assert_allclose([metric(load) for load in LOADS], want, atol=1e-6)


def test_one_expert():
    load = jnp.array([5], jnp.int32)
    assert (metrics.max_violation(load), metrics.load_entropy(load), metrics.dead_experts(load)) == (0, 1, 0)
