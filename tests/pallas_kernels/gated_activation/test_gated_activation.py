"""Gated activations: tanh and both forms of SiTU against float64, refusals, and the Hopper kernels in the interpreter with race detection."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import UnsupportedError, gated_activation
from pallas_kernels.gated_activation import api, specs, vjp, xla
from pallas_kernels.gated_activation.specs import Gate
from pallas_kernels.gated_activation.xla import situ_glu, tanh
from pallas_kernels.testing import outputs_and_gradients, rms_ratio


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


@pytest.mark.parametrize("linear_beta", [None, 3.0])
def test_situ_of_bfloat16_is_exact_to_its_rounding(linear_beta):
    """Values and both gradients in the form with one division, against float64 at the same inputs, tiny and huge ones among them."""
    draw = np.random.default_rng(3)
    sizes = np.repeat([1e-3, 0.1, 1, 10, 100, 1e4], 500)
    a, b = (jnp.asarray(draw.normal(size=sizes.size) * draw.permutation(sizes), jnp.bfloat16) for _ in range(2))

    @jax.jit
    def run(a, b):
        y, pull = jax.vjp(lambda a, b: situ_glu(a, b, 4.0, linear_beta), a, b)
        return y, *pull(jnp.ones_like(y))

    got = [np.float64(np.float32(x)) for x in run(a, b)]
    a, b = np.float64(np.float32(a)), np.float64(np.float32(b))
    gate, bend = 1 / (1 + np.exp(-np.maximum(a, -700))), np.tanh(a / 4)
    bounded, slope = (b, 1.0) if linear_beta is None else (3 * np.tanh(b / 3), 1 - np.tanh(b / 3) ** 2)
    want = 4 * bend * gate * bounded, gate * bounded * (1 - bend ** 2 + 4 * bend * (1 - gate)), 4 * bend * gate * slope
    for g, w in zip(got, want):
        assert np.all(np.isfinite(g))
        np.testing.assert_allclose(g, w, rtol=2 ** -7, atol=1e-5 * (1 if linear_beta else 1e4))


def in_float64(gate, branches, gradient):
    """(value, gradients) of the definition by autodiff."""
    names = dict(zip("ab", branches))
    run = lambda **x: xla.activate(gate, tuple(x.values()))
    value, found = outputs_and_gradients(run, {name: np.asarray(x, np.float64) for name, x in names.items()}, np.asarray(gradient, np.float64), jnp.float64)
    return value, list(found.values())


@pytest.mark.parametrize("gate", [Gate("situ"), Gate("situ", 2.0, None), Gate("swiglu")])
@pytest.mark.parametrize("dtype,bound", [(jnp.float32, 1e-6), (jnp.bfloat16, 3e-3), (jnp.float16, 4e-4)])
def test_values_and_gradients(gate, dtype, bound):
    draw = np.random.default_rng(4)
    array = lambda *shape: jnp.asarray(4 * draw.standard_normal(shape), dtype)
    for branches in ((array(3, 5, 16),), (array(3, 5, 8), array(3, 5, 8))):
        gradient = array(3, 5, 8)
        y, pull = jax.vjp(functools.partial(gated_activation, gate=gate), *branches)
        want, slopes = in_float64(gate, branches, gradient)
        for got, exact in zip((y, *pull(gradient)), (want, *slopes)):
            assert got.dtype == dtype and rms_ratio(got, exact) < bound


def test_refusals():
    for branches, words in [((jnp.zeros((2, 3)),), r"got one of shape \(2, 3\), wanted an even last axis"),
                            ((jnp.zeros((2, 4)), jnp.zeros((2, 4), jnp.bfloat16)), "wanted the same for both"),
                            ((jnp.zeros((2, 4), jnp.int32),), "wanted one or two arrays of numbers"), ((), "wanted one or two arrays of numbers")]:
        with pytest.raises(ValueError, match=words):
            gated_activation(*branches, gate=Gate("swiglu"))
    with pytest.raises(UnsupportedError, match="wanted a Hopper GPU"):
        gated_activation(jnp.zeros((64, 128), jnp.bfloat16), gate=Gate("situ"), implementation="mosaic_gpu")
    assert not specs.unmet_by_shape(shape=(4, 8192, 640), dtype=jnp.bfloat16)
    for shape in ((1, 512), (64, 96), (0, 64), (64, 16384), ()):
        assert len(specs.unmet_by_shape(shape=shape, dtype=jnp.float32)) == 2, shape


def test_blocks_are_made_of_slabs():
    for features in range(specs.LANES, specs.TILE_SIZE + 1, specs.LANES):
        block, slab = specs.block_rows(features)
        assert block % slab == 0 and slab * features % (specs.VECTOR * specs.THREADS) == 0, features
        # Both branches and a gradient fit into a block's shared memory.
        assert 3 * block * features * 2 < 227 * 1024, features


@pytest.fixture
def kernels(monkeypatch, no_races):
    """`gated_activation` by the kernels in the interpreter; fails on a race."""
    monkeypatch.setattr(api, "choose", lambda *arguments, **facts: "mosaic_gpu")
    monkeypatch.setattr(vjp, "gated_activation", functools.partial(vjp.gated_activation, interpret=plgpu.InterpretGPUParams(detect_races=True)))


@pytest.mark.parametrize("features,halves,gate", [(320, True, Gate("situ")), (128, False, Gate("swiglu")), (64, True, Gate("situ", 4.0, None)),
                                                   (896, False, Gate("situ"))])
def test_kernels_in_the_interpreter(features, halves, gate, kernels):
    rows, draw = 2 * specs.block_rows(features)[0], np.random.default_rng(5)
    array = lambda width: jnp.asarray(4 * draw.standard_normal((2, rows // 2, width)), jnp.bfloat16)
    branches, gradient = (array(2 * features),) if halves else (array(features), array(features)), array(features)
    y, pull = jax.vjp(functools.partial(gated_activation, gate=gate), *branches)
    want, slopes = in_float64(gate, branches, gradient)
    for got, exact in zip((y, *pull(gradient)), (want, *slopes)):
        assert got.dtype == jnp.bfloat16 and rms_ratio(got, exact) < 2e-3


def test_members_of_a_vmap_take_turns(kernels):
    members = jnp.asarray(np.random.default_rng(6).standard_normal((2, 128, 128)), jnp.bfloat16)
    run = functools.partial(gated_activation, gate=Gate("swiglu"))
    np.testing.assert_array_equal(jax.vmap(run)(members)[1], run(members[1]))
