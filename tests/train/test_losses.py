"""The chunked cross-entropy against the plain one in float64."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_config import tiny_model

from longmoe.train.losses import chunked_cross_entropy
from pallas_kernels.testing import rms_ratio

B, T, D, V = 3, 17, 8, 29


def inputs(key):
    keys = jax.random.split(key, 4)
    weights = jnp.maximum(jax.random.normal(keys[3], (B, T)), 0)
    return jax.random.normal(keys[0], (B, T, D)), jax.random.normal(keys[1], (D, V)), jax.random.randint(keys[2], (B, T), 0, V), weights


def plain(hidden, head, targets, weights, z_loss):
    logits = hidden @ head
    partition = jax.nn.logsumexp(logits, axis=-1)
    nll = partition - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.sum(weights * (nll + z_loss * partition ** 2)), jnp.sum(weights * nll)


@pytest.mark.parametrize("chunk,z_loss", [(1, 0.0), (7, 0.01), (12, 0.0), (1000, 0.01)])
def test_values_and_gradients(key, chunk, z_loss):
    hidden, head, targets, weights = inputs(key)
    got = jax.jit(jax.value_and_grad(lambda h, w: chunked_cross_entropy(tiny_model(), h, w, targets, weights, chunk=chunk, z_loss=z_loss),
                                     (0, 1), has_aux=True))(hidden, head)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in (hidden, head, weights)]
        want = jax.value_and_grad(lambda h, w: plain(h, w, jnp.asarray(np.asarray(targets)), wide[2], z_loss), (0, 1), has_aux=True)(*wide[:2])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert rms_ratio(a, b) < 1e-6


def test_weight_zero_reaches_nothing(key):
    hidden, head, targets, weights = inputs(key)
    off = weights == 0
    loss = lambda h, t: chunked_cross_entropy(tiny_model(), h, head, t, weights, chunk=8)
    want = jax.value_and_grad(loss, has_aux=True)(hidden, targets)
    got = jax.value_and_grad(loss, has_aux=True)(jnp.where(off[..., None], jnp.nan, hidden), jnp.where(off, V + 5, targets))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not np.any(np.asarray(got[1])[np.asarray(off)])


def test_whole_logits_never_exist(key):
    """No buffer of the compiled gradient is as large as [tokens, vocabulary]."""
    model, tokens, vocab = tiny_model(), 4096, 8192
    kinds = (((1, tokens, D), jnp.float32), ((D, vocab), jnp.float32), ((1, tokens), jnp.int32), ((1, tokens), jnp.float32))
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]
    grad = jax.jit(jax.grad(lambda h, w, t, m: chunked_cross_entropy(model, h, w, t, m, chunk=128)[0], (0, 1)))
    assert grad.lower(*shapes).compile().memory_analysis().temp_size_in_bytes < tokens * vocab * 4 / 4
