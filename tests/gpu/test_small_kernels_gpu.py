"""The kernels of the short convolution, the gated activations and top-k on a GPU: against float64 and a stable sort; two runs equal to the bit."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_activation, short_conv, top_k
from pallas_kernels.gated_activation.specs import Gate
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


@pytest.mark.parametrize("rows,features,halves", [(262144, 320, True), (8192, 3584, False), (64, 896, True), (1024, 64, False)])
@pytest.mark.parametrize("gate", [Gate("situ"), Gate("situ", 4.0, None), Gate("swiglu")])
def test_gated_activation(rows, features, halves, gate):
    keys = jax.random.split(jax.random.key(0), 3)
    widths = (2 * features,) if halves else (features, features)
    branches = [4 * jax.random.normal(key, (rows, width), jnp.bfloat16) for key, width in zip(keys, widths)]
    gradient = jax.random.normal(keys[2], (rows, features), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, branches, gradient):
        y, pull = jax.vjp(functools.partial(gated_activation, gate=gate, implementation=implementation), *branches)
        return y, *pull(gradient)

    got, want = run("mosaic_gpu", branches, gradient), run("xla", [x.astype(jnp.float32) for x in branches], gradient.astype(jnp.float32))
    for a, again, b in zip(got, run("mosaic_gpu", branches, gradient), want):
        np.testing.assert_array_equal(a, again)
        assert rms_ratio(a, b) < 2e-3
    broken = run("mosaic_gpu", [x.at[3, 7].set(jnp.nan) for x in branches], gradient)
    assert bool(jnp.isnan(broken[0][3, 7]))
