"""Packed documents: numbering, independence, padding."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import document_runs, kda
from pallas_kernels.kda import specs
from pallas_kernels.kda.documents import state_owner


@pytest.mark.parametrize("ids, runs", [
    ([1, 1, 2, 2, 1, 1], [1, 1, 2, 2, 3, 3]), ([1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 2, 2]), ([0, 0, 7, 7, 0, 3], [0, 0, 1, 1, 0, 2]),
    ([5, 4, 5, 0, 0, 0], [1, 2, 3, 0, 0, 0]), ([0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]), ([], [])])
def test_runs(ids, runs):
    got = document_runs(jnp.array([ids], jnp.int32))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, np.array([runs]).reshape(1, len(ids)))


def test_padding_belongs_to_what_came_before():
    np.testing.assert_array_equal(state_owner(document_runs(jnp.array([[0, 7, 7, 0, 0, 2, 0]]))), [[1, 1, 1, 1, 1, 2, 2]])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_packed_row_is_separate_calls(implementation):
    """Padding, a document that owns initial_state, padding, an id that comes back twice, padding."""
    x = specs.inputs(specs.Shape(1, 150, 2, 8, 12))
    ids = np.zeros((1, 150), np.int32)
    stretches = [(3, 40, 1), (45, 90, 1), (90, 92, 2), (92, 140, 1)]
    for first, last, name in stretches:
        ids[:, first:last] = name
    o, state = jax.jit(lambda x, ids: kda(**x, segment_ids=ids, lower_bound=-5.0, implementation=implementation))(x, ids)
    want, start = np.zeros(o.shape, np.float32), x.pop("initial_state")
    for first, last, _ in stretches:
        part, last_state = kda(**{n: v[:, first:last] for n, v in x.items()}, initial_state=start, implementation="reference")
        want[:, first:last], start = part, None
    np.testing.assert_allclose(o, want, atol=2e-6)
    np.testing.assert_allclose(state, last_state, atol=2e-6)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_nan_at_padding_touches_nothing(implementation):
    """NaN in every input and in the cotangent at padding: same outputs and gradients as zeros there, whose gradients are 0."""
    x = specs.inputs(specs.Shape(1, 90, 2, 8, 12))
    x["a_log"], x["dt_bias"] = np.zeros(2, np.float32), np.zeros((2, 8), np.float32)
    ids = np.repeat([0, 1, 0, 1, 0], [2, 30, 3, 40, 15])[None].astype(np.int32)
    padding = ids == 0

    @jax.jit
    def run(x, cotangent):
        f = lambda x: kda(**x, segment_ids=ids, gate="bounded", qk_l2norm=True, beta_logits=True, implementation=implementation)
        outputs, pull = jax.vjp(f, x)
        return outputs, pull((cotangent, jnp.ones_like(outputs[1])))[0]

    def filled(value):
        fill = lambda a: np.where(padding.reshape(1, 90, *(1,) * (a.ndim - 2)), np.float32(value), a)
        return run({n: fill(v) if v.shape[:2] == (1, 90) else v for n, v in x.items()}, fill(x["v"]))

    poisoned, clean = filled(np.nan), filled(0)
    jax.tree.map(np.testing.assert_array_equal, poisoned, clean)
    (o, _), gradients = poisoned
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
    assert not np.asarray(o)[padding].any() and not any(np.asarray(gradients[n])[padding].any() for n in ("q", "k", "v", "g", "beta"))
    assert np.asarray(gradients["initial_state"]).any()


def test_row_of_padding_passes_the_state_through():
    x = specs.inputs(specs.Shape(1, 20, 2, 8, 12))
    o, state = kda(**x, segment_ids=np.zeros((1, 20), np.int32), lower_bound=-5.0)
    assert not np.asarray(o).any()
    np.testing.assert_array_equal(state, x["initial_state"])
