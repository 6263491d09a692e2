"""The short convolution's and top-k's kernels on a GPU: against float64 and a stable sort, packed documents, two runs equal to the bit."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import short_conv, top_k
from pallas_kernels.testing import rms_ratio

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("batch,tokens,channels,width", [(2, 8192, 1024, 4), (1, 64, 384, 2), (3, 192, 128, 9), (1, 65536, 768, 4)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_short_conv(batch, tokens, channels, width, dtype):
    draw = np.random.default_rng(0)
    runs = np.cumsum(draw.random((batch, tokens)) < 1 / 50, axis=1) + 1
    runs[draw.random((batch, tokens)) < 1 / 20] = 0
    runs, normal = jnp.asarray(runs, jnp.int32), lambda *shape: jnp.asarray(draw.standard_normal(shape), jnp.float32)
    x, taps, g = normal(batch, tokens, channels).astype(dtype), normal(width, channels), normal(batch, tokens, channels).astype(dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, x, taps, g):
        out, pull = jax.vjp(lambda x, taps: short_conv(x, taps, runs, implementation=implementation), x, taps)
        return out, *pull(g)

    got, again = run("mosaic_gpu", x, taps, g), run("mosaic_gpu", x, taps, g)
    few = slice(None, None, channels // 16)                 # float64 is slow there
    with jax.enable_x64():
        want = run("xla", *(y[..., few].astype(jnp.float64) for y in (x, taps, g)))
    for a, b, w, bound in zip(got, again, want, (3e-3, 3e-3, 1e-4)):
        np.testing.assert_array_equal(a, b)
        assert rms_ratio(a[..., few], w) < bound


@pytest.mark.parametrize("rows,columns,k", [(32768, 896, 17), (65536, 112, 9), (64, 8, 8), (128, 1024, 32), (192, 136, 17)])
def test_top_k(rows, columns, k):
    x = np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)
    x[::2] = np.round(2 * x[::2]) + 0.0                     # ties, without -0
    x[1, ::3], x[3, 1:] = np.inf, -np.inf
    values, ids = top_k(jnp.asarray(x), k, implementation="mosaic_gpu")
    np.testing.assert_array_equal(ids, np.argsort(-x, axis=1, kind="stable")[:, :k])
    np.testing.assert_array_equal(values, np.take_along_axis(x, np.asarray(ids), axis=1))
