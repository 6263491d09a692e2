"""The short convolution: values and gradients against loops in float64, packed documents, history, refusals; the Hopper kernels in the interpreter."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import UnsupportedError, short_conv
from pallas_kernels.short_conv import api, mosaic_gpu, specs, vjp
from pallas_kernels.testing import outputs_and_gradients, rms_ratio


def by_loops(x, taps, runs=None, history=None, history_runs=None):
    """numpy float64, one token at a time."""
    (batch, tokens, channels), width = x.shape, len(taps)
    x = np.concatenate([np.zeros((batch, width - 1, channels)) if history is None else history, x], axis=1)
    if runs is not None:
        before = np.full((batch, width - 1), -1 if history is None else 1) if history_runs is None else history_runs
        runs = np.concatenate([before, runs], axis=1)
    out = np.zeros((batch, tokens, channels))
    for b, t in np.ndindex(batch, tokens):
        here = t + width - 1
        for back in range(width):
            if runs is None or runs[b, here - back] == runs[b, here] > 0:
                out[b, t] += taps[width - 1 - back] * x[b, here - back]
    return out / (1 + np.exp(-out))


def arguments(batch, tokens, channels, width, packed=True):
    draw = np.random.default_rng(tokens + channels)
    x = dict(x=draw.standard_normal((batch, tokens, channels)), taps=draw.standard_normal((width, channels)))
    if packed:
        runs = np.cumsum(draw.random((batch, tokens)) < 0.2, axis=1) + 1
        runs[draw.random((batch, tokens)) < 0.1] = 0
        x["runs"] = np.int32(runs)
    return x


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens,width", [(1, 4), (2, 4), (17, 4), (9, 1), (9, 2)])
def test_against_loops(tokens, width, packed):
    x = arguments(2, tokens, 3, width, packed)
    with jax.enable_x64():
        assert rms_ratio(short_conv(**x), by_loops(**x)) < 1e-14


@pytest.mark.parametrize("history_runs", [None, np.int32([[0, 1, 1], [2, 2, 3]])])
def test_history(history_runs):
    x = arguments(2, 9, 3, 4)
    x["history"] = np.random.default_rng(0).standard_normal((2, 3, 3))
    with jax.enable_x64():
        assert rms_ratio(short_conv(**x, history_runs=history_runs), by_loops(**x, history_runs=history_runs)) < 1e-14
        whole = short_conv(np.concatenate([x["history"], x["x"]], axis=1), x["taps"])
        assert rms_ratio(short_conv(x["x"], x["taps"], history=x["history"]), whole[:, 3:]) < 1e-14


def test_refusals():
    x = {name: jnp.asarray(value, jnp.float32) for name, value in arguments(2, 8, 3, 4, packed=False).items()}
    for name, value, words in [("taps", jnp.zeros((4, 5)), r"taps: got shape \(4, 5\), wanted \[width, 3\]"),
                               ("runs", jnp.ones((2, 7), jnp.int32), r"runs: got shape \(2, 7\), wanted \[2, 8\]"),
                               ("history", jnp.zeros((2, 2, 3)), r"history: got shape \(2, 2, 3\), wanted \[2, 3, 3\]"),
                               ("x", jnp.zeros((2, 3)), r"x: got float32 \(2, 3\), wanted numbers")]:
        with pytest.raises(ValueError, match=words):
            short_conv(**(x | {name: value}))
    with pytest.raises(UnsupportedError, match="wanted a Hopper GPU"):
        short_conv(**x, implementation="mosaic_gpu")
    assert not specs.unmet_by_shape(tokens=8192, channels=384, width=4, dtype=jnp.float16)
    assert len(specs.unmet_by_shape(tokens=1, channels=96, width=1, dtype=jnp.float32)) == 4


@pytest.fixture
def kernels(monkeypatch, no_races):
    """`short_conv` by the kernels in the interpreter; fails on a race."""
    monkeypatch.setattr(api, "choose", lambda *arguments, **facts: "mosaic_gpu")
    monkeypatch.setattr(vjp, "short_conv", functools.partial(vjp.short_conv, interpret=plgpu.InterpretGPUParams(detect_races=True)))


# Several tiles and rows; two columns of a block; three blocks of columns; taps that reach over the edge of the kernels; a history.
@pytest.mark.parametrize("batch,tokens,channels,width,history", [(2, 128, 128, 4, False), (1, 64, 256, 2, False), (1, 64, 384, 3, False),
                                                                  (1, 192, 128, specs.EDGE + 1, False), (2, 64, 128, 4, True)])
def test_kernels_in_the_interpreter(batch, tokens, channels, width, history, kernels):
    x = arguments(batch, tokens, channels, width)
    draw = np.random.default_rng(1)
    if history:
        x |= dict(history=draw.standard_normal((batch, width - 1, channels)), history_runs=np.int32(np.arange(batch * (width - 1)).reshape(batch, -1) % 3))
    x = {name: np.asarray(jnp.asarray(value, jnp.bfloat16 if name in ("x", "history") else None), None) for name, value in x.items()}
    exact = {name: np.asarray(value, np.float64) if name in ("x", "history", "taps") else value for name, value in x.items()}
    g = np.asarray(jnp.asarray(draw.standard_normal((batch, tokens, channels)), jnp.bfloat16))
    floats = [name for name in ("x", "taps", "history") if name in x]
    fixed = {name: value for name, value in x.items() if name not in floats}
    out, pull = jax.vjp(lambda values: short_conv(**values, **fixed), {name: jnp.asarray(x[name]) for name in floats})
    got = pull(jnp.asarray(g))[0]
    want_out, want = outputs_and_gradients(functools.partial(short_conv_by_xla), exact, np.asarray(g, np.float64), jnp.float64)
    assert out.dtype == jnp.bfloat16 and got["taps"].dtype == jnp.float32
    assert rms_ratio(out, want_out) < 2e-3
    for name in floats:
        assert rms_ratio(got[name], want[name]) < (1e-6 if name == "taps" and not history else 8e-3), name


def short_conv_by_xla(**x):
    from pallas_kernels.short_conv import xla
    return xla.short_conv(x["x"], x["taps"], x.get("runs"), x.get("history"), x.get("history_runs"))


def test_another_documents_nan_does_not_leak(kernels):
    x = arguments(1, 64, 128, 4)
    runs = np.repeat(np.int32([1, 2]), 32)[None]
    bad, good = x["x"].copy(), x["x"].copy()
    bad[:, :32] = np.nan
    run = lambda x_: jax.vjp(lambda y: short_conv(y, jnp.asarray(x["taps"], jnp.float32), runs), jnp.asarray(x_, jnp.bfloat16))
    (out, pull), (want, want_pull) = run(bad), run(good)
    g = jnp.ones_like(out).at[:, :32].set(0)
    np.testing.assert_array_equal(out[:, 32:], want[:, 32:])
    np.testing.assert_array_equal(pull(g)[0][:, 32:], want_pull(g)[0][:, 32:])


def test_members_of_a_vmap_take_turns(kernels):
    x = arguments(2, 64, 128, 4)
    x = [jnp.asarray(x["x"], jnp.bfloat16), jnp.asarray(x["taps"], jnp.float32), jnp.asarray(x["runs"])]
    members = jnp.stack([x[0], 2 * x[0]])
    got = jax.vmap(short_conv, in_axes=(0, None, None))(members, *x[1:])
    np.testing.assert_array_equal(got[1], short_conv(members[1], *x[1:]))


def test_blocks_have_no_more_than_the_copy_engine_takes():
    assert specs.block_shape(1024) == (2, 256) and specs.block_shape(256) == (1, 256) and specs.block_shape(384) == (1, 128)
    assert mosaic_gpu.TILE % mosaic_gpu.UNROLL == 0
