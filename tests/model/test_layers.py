"""Small parts of the layers against float64."""
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_config import tiny_model

from longmoe.model import attn_residuals
from longmoe.model.layers import gated_activation, gated_halves, wide_matmul
from longmoe.model.moe import combine
from pallas_kernels.gated_activation.xla import situ_glu, swiglu
from pallas_kernels.testing import rms_ratio


def test_wide_matmul_is_a_float32_product():
    """Values and the kernel's gradient to float32's precision, at magnitudes far apart; that of x to bfloat16's."""
    draw = np.random.default_rng(1)
    x = jnp.asarray(draw.normal(size=(3, 50, 256)) * np.exp(draw.normal(size=256)), jnp.bfloat16)
    kernel, gradient = np.float32(draw.normal(size=(256, 40)) * np.exp(2 * draw.normal(size=40))), np.float32(draw.normal(size=(3, 50, 40)))

    @jax.jit
    def run(x, kernel, gradient):
        y, pull = jax.vjp(wide_matmul, x, kernel)
        return y, *pull(gradient)

    y, dx, dkernel = run(x, kernel, gradient)
    assert (y.dtype, dx.dtype, dkernel.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    x, kernel, gradient = np.float64(np.float32(x)), np.float64(kernel), np.float64(gradient)
    assert rms_ratio(y, x @ kernel) < 3e-7
    assert rms_ratio(dkernel, np.einsum("btd,bte->de", x, gradient)) < 3e-7
    assert rms_ratio(dx, gradient @ kernel.T) < 2e-3


@pytest.mark.parametrize("activation", ["situ", "swiglu"])
def test_gated_activation_is_the_plain_formula(activation):
    """Of two branches and of halves of one array: the same values, and the formula's own gradients."""
    config = tiny_model(activation=activation)
    plain = {"situ": lambda gate, linear: situ_glu(gate, linear, config.situ_beta, config.situ_linear_beta), "swiglu": swiglu}[activation]
    draw = np.random.default_rng(2)
    both, weight = np.float32(draw.normal(size=(5, 8))), np.float32(draw.normal(size=(5, 4)))
    forms = {"plain": lambda both: plain(*jnp.split(both, 2, axis=-1)), "branches": lambda both: gated_activation(config, *jnp.split(both, 2, axis=-1)),
             "halves": lambda both: gated_halves(config, both)}
    values, gradients = {}, {}
    for name, form in forms.items():
        values[name], pull = jax.vjp(form, both)
        gradients[name], = pull(weight)
    for name in ("branches", "halves"):
        np.testing.assert_allclose(values[name], values["plain"], rtol=1e-6)
        np.testing.assert_allclose(gradients[name], gradients["plain"], rtol=1e-5, atol=1e-7)


def test_combine_is_a_weighted_sum_of_copies():
    """Values, gradients, and nothing of the weights' wider dtype kept for the backward pass."""
    draw = np.random.default_rng(3)
    order = draw.permutation(15)
    inverse = np.argsort(order)
    rows, weights, gradient = (np.float32(draw.normal(size=shape)) for shape in ((15, 4), (5, 3), (5, 4)))
    rows = jnp.asarray(rows, jnp.bfloat16)
    y, pull = jax.vjp(lambda rows, weights: combine(rows, weights, order, inverse), rows, weights)
    drows, dweights = pull(jnp.asarray(gradient))
    exact = np.float64(np.float32(rows))[inverse].reshape(5, 3, 4)
    assert rms_ratio(y, np.sum(weights[..., None] * exact, axis=1)) < 1e-6 and y.dtype == jnp.float32
    assert rms_ratio(dweights, np.sum(gradient[:, None] * exact, axis=-1)) < 1e-6
    assert rms_ratio(drows, (weights[..., None] * gradient[:, None]).reshape(15, 4)[order]) < 3e-3 and drows.dtype == jnp.bfloat16
    kept = jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(lambda *x: combine(*x, order, inverse), *x)[1], rows, jnp.asarray(weights)))
    assert sum(x.size * x.dtype.itemsize for x in kept) <= rows.nbytes + weights.nbytes + 2 * 15 * 8


@pytest.mark.parametrize("skip", [None, False, True])
def test_many_depth_sources_are_mixed_as_few_are(skip, monkeypatch):
    """Outputs, weights and gradients, whether the sources are put into one array or not."""
    draw = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(draw.normal(size=shape), jnp.float32)
    sources, query, scale, weights = tuple(array(2, 5, 16) for _ in range(12)), array(16), array(16), array(2, 5, 16)
    skip = None if skip is None else jnp.bool_(skip)

    def run(stacked):
        monkeypatch.setattr(attn_residuals, "STACKED", stacked)
        f = lambda sources, query, scale: attn_residuals.mix.__wrapped__(sources, query, scale, 1e-5, skip)
        return f(sources, query, scale), jax.grad(lambda *a: jnp.sum(f(*a)[0] * weights), argnums=(0, 1, 2))(sources, query, scale)

    assert len(sources) >= attn_residuals.STACKED
    chex.assert_trees_all_close(run(attn_residuals.STACKED), run(100), rtol=1e-5, atol=1e-6)
