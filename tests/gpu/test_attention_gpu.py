"""Attention's kernels on a GPU against float32 on the same inputs: widths, odd lengths, documents, queries behind other tokens; two runs equal to the bit."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention, document_runs, first_visible
from pallas_kernels.testing import rms_ratio

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens,keys,start", [(1, 1, 0), (257, 257, 0), (1000, 1000, 0), (500, 1500, 900)])
@pytest.mark.parametrize("key,value", [(64, 64), (96, 64), (128, 128), (192, 128)])
def test_values_and_gradients(key, value, tokens, keys, start):
    draw = np.random.default_rng(0)
    ids = np.cumsum(draw.random((2, keys)) < 6 / keys, axis=1) + 1
    ids[:, keys // 2:keys // 2 + keys // 50] = 0
    first = first_visible(document_runs(jnp.asarray(ids, jnp.int32)))[:, start:start + tokens]
    normal = lambda length, width: jnp.asarray(draw.normal(size=(2, length, 3, width)), jnp.bfloat16)
    arrays, gradient = (normal(tokens, key), normal(keys, key), normal(keys, value)), normal(tokens, value)

    def run(implementation, dtype):
        def both(arrays, gradient):
            call = lambda q, k, v: attention(q, k, v, first=first, start=start, implementation=implementation, precision=jax.lax.Precision.HIGHEST)
            (o, largest), pull = jax.vjp(call, *arrays)
            return o, largest, *pull((gradient.astype(o.dtype), jnp.zeros_like(largest)))
        return [np.asarray(x, np.float32) for x in jax.jit(both)([x.astype(dtype) for x in arrays], gradient)]

    got, again, want = run("mosaic_gpu", jnp.bfloat16), run("mosaic_gpu", jnp.bfloat16), run("reference", jnp.float32)
    for name, a, b, w, bound in zip(("o", "largest", "dq", "dk", "dv"), got, again, want, (5e-3, 2e-3, 8e-3, 8e-3, 8e-3)):
        np.testing.assert_array_equal(a, b, err_msg=name)
        assert rms_ratio(a, w) < bound, name
