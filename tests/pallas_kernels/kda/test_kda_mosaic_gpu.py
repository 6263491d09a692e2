"""The Mosaic GPU kernels in the interpreter, with race detection, against the token recurrence at the rounded inputs."""
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import UnsupportedError, kda, kda_segment
from pallas_kernels.kda import mosaic_gpu_forward, specs, vjp
from pallas_kernels.testing import outputs_and_gradients, rms_ratio

INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)
WIDE = ("q", "k", "v", "g")
OUTPUT_BOUND, GRADIENT_BOUND, DECAY_BOUND = 5e-3, 8e-3, 1e-2
SUM_BOUND = 2e-2
"""Of a_log's gradient: one number a head, a sum that cancels."""


def rounded(x, *names):
    return {n: np.asarray(jnp.asarray(v, jnp.bfloat16), np.float32) if n in names else v for n, v in x.items()}


def raw_inputs(shape, seed=0):
    """Raw gates and logits of beta, unnormalised q and k, with every parameter."""
    x = specs.inputs(shape, seed=seed)
    draw = np.random.default_rng(seed + 1)
    x["q"], x["k"] = 3 * x["q"], 0.5 * x["k"]
    x["g"], x["beta"] = np.float32(draw.normal(size=x["g"].shape)), np.float32(draw.normal(size=x["beta"].shape))
    x["a_log"] = np.float32(0.3 * draw.normal(size=shape.heads))
    x["dt_bias"] = np.float32(draw.normal(size=(shape.heads, shape.key)))
    return rounded(x, *WIDE)


BOUNDED = dict(gate="bounded", lower_bound=None, beta_logits=True, qk_l2norm=True)
DECAYS = dict(gate="log_decay", lower_bound=-5.0, beta_logits=False, qk_l2norm=False)


def run(keywords, narrow=WIDE, kernels=True):
    def call(q, k, v, g, beta, initial_state, a_log=None, dt_bias=None, segment_ids=None):
        if not kernels:
            kept = {n: value for n, value in keywords.items() if n != "save"}
            return kda(q, k, v, g, beta, initial_state=initial_state, a_log=a_log, dt_bias=dt_bias, segment_ids=segment_ids, implementation="reference",
                       **kept)
        wide = dict(q=q, k=k, v=v, g=g)
        wide = {n: x.astype(jnp.bfloat16) if n in narrow else x for n, x in wide.items()}
        return vjp.kda(*wide.values(), beta, initial_state, segment_ids, scale=q.shape[-1] ** -0.5, a_log=a_log, dt_bias=dt_bias,
                       interpret=INTERPRETER, **keywords)
    return call


def check(x, keywords, narrow=WIDE, gradients=True):
    draw = np.random.default_rng(5)
    cotangents = tuple(draw.normal(size=x[name].shape).astype(np.float32) for name in ("v", "initial_state"))
    cotangents = (np.asarray(jnp.asarray(cotangents[0], jnp.bfloat16), np.float32), cotangents[1])
    if not gradients:
        got = jax.jit(lambda x: run(keywords, narrow)(**x))(x), {}
        want = jax.jit(lambda x: run(keywords, kernels=False)(**x))(x), {}
    else:
        got = outputs_and_gradients(run(keywords, narrow), x, cotangents)
        want = outputs_and_gradients(run(keywords, kernels=False), x, cotangents, jnp.float64)
    ratios = {name: rms_ratio(got[0][i], want[0][i]) for i, name in enumerate(("o", "state"))}
    ratios |= {name: rms_ratio(got[1][name], want[1][name]) for name in want[1]}
    print({name: float(f"{ratio:.2g}") for name, ratio in ratios.items()})
    bounds = dict(o=OUTPUT_BOUND, state=OUTPUT_BOUND, g=DECAY_BOUND, dt_bias=DECAY_BOUND, beta=DECAY_BOUND, a_log=SUM_BOUND)
    assert all(ratio < bounds.get(name, GRADIENT_BOUND) for name, ratio in ratios.items()), ratios


def test_packed_documents_with_everything_inside(no_races):
    """Padding with NaN, documents at odd offsets, a chunk with several, T no multiple of 64."""
    x = raw_inputs(specs.Shape(1, 130, 2, 64, 64))
    ids = np.repeat([1, 2, 0, 3, 4], [21, 12, 5, 60, 32])[None].astype(np.int32)
    check(x | dict(segment_ids=ids), BOUNDED)


def test_key_wider_than_value(no_races):
    check(rounded(specs.inputs(specs.Shape(1, 64, 1, 128, 64), "strong_then_weak"), *WIDE), DECAYS, narrow=("q", "k", "v"), gradients=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tokens", [1, 15, 17, 64, 65, 192])
def test_lengths(no_races, tokens):
    check(raw_inputs(specs.Shape(1, tokens, 1, 64, 128)), BOUNDED)


@pytest.mark.exhaustive
@pytest.mark.parametrize("gate", specs.BOUNDED_GATES)
def test_gate_cases(no_races, gate):
    check(rounded(specs.inputs(specs.Shape(1, 130, 1, 64, 64), gate), *WIDE[:3]), DECAYS, narrow=("q", "k", "v"), gradients=False)


@pytest.mark.slow
def test_two_warpgroups_share_a_block(no_races, monkeypatch):
    monkeypatch.setattr(mosaic_gpu_forward, "warpgroups", lambda sequences, value: value // 64)
    check(raw_inputs(specs.Shape(2, 192, 1, 128, 128)), BOUNDED)


@pytest.mark.slow
def test_parts_of_a_sequence_run_side_by_side(no_races, monkeypatch):
    """Two parts, the cut inside a document, one more ends in the first; what `prepare` made is kept for the backward pass."""
    monkeypatch.setattr(mosaic_gpu_forward, "SHORTEST_PART", 1)
    monkeypatch.setattr(mosaic_gpu_forward, "FEWEST_PARTS", 2)
    monkeypatch.setattr(mosaic_gpu_forward, "parts_of", partial(mosaic_gpu_forward.parts_of, multiprocessors=2))
    x = raw_inputs(specs.Shape(1, 250, 1, 64, 64))
    # Slow decay, or the second part would not see the first.
    x = {n: a - 6 if n == "g" else a for n, a in x.items()}
    check(x | dict(segment_ids=np.repeat([1, 2, 3], [21, 200, 29])[None].astype(np.int32)), BOUNDED | dict(save=True))


@pytest.mark.parametrize("sequences,chunks,parts", [(16, 1024, 8), (4, 16384, 32), (8, 16384, 16), (64, 64, 1), (16, 64, 4), (16, 63, 1), (1, 7, 1),
                                                    (1, 1563, 3), (40, 1024, 1)])
def test_parts(sequences, chunks, parts):
    assert mosaic_gpu_forward.parts_of(sequences, chunks) == (parts if parts >= mosaic_gpu_forward.FEWEST_PARTS else 1)


@pytest.mark.slow
@pytest.mark.parametrize("key,value", [(64, 64), pytest.param(128, 64, marks=pytest.mark.exhaustive)])
def test_segment(no_races, monkeypatch, key, value):
    """Transition and state of packed documents, values and transition side by side: 128 columns, and 192, which `gradients` takes in two parts."""
    monkeypatch.setattr(specs, "unmet_on_hopper", list)
    monkeypatch.setattr(vjp, "kda", partial(vjp.kda, interpret=INTERPRETER))
    x = raw_inputs(specs.Shape(1, 100, 1, key, value))
    # Slow decay, or the transition would be nothing after 100 tokens.
    x = {n: a - 6 if n == "g" else a for n, a in x.items() if n not in ("q", "initial_state")}
    keywords = BOUNDED | dict(segment_ids=np.repeat([1, 0, 2], [20, 9, 71])[None].astype(np.int32))

    def call(implementation, k, v, g, beta, a_log, dt_bias):
        if implementation == "mosaic_gpu":
            k, v, g = (a.astype(jnp.bfloat16) for a in (k, v, g))
        # The rows of tokens before the last document are the transition's zeros: one run without documents too.
        whole = kda_segment(k, v, g, beta, a_log=a_log, dt_bias=dt_bias, implementation=implementation, **BOUNDED)
        return *whole, *kda_segment(k, v, g, beta, a_log=a_log, dt_bias=dt_bias, implementation=implementation, **keywords)

    draw = np.random.default_rng(3)
    shapes = [(1, 1, key, key), (1, 1, key, value)] * 2
    cotangents = tuple(np.float32(draw.normal(size=shape)) for shape in shapes)
    got = outputs_and_gradients(partial(call, "mosaic_gpu"), x, cotangents)
    want = outputs_and_gradients(partial(call, "reference"), x, cotangents, jnp.float64)
    assert not np.any(want[0][2]) and not np.any(got[0][2])
    for i in (0, 1, 3):
        assert rms_ratio(got[0][i], want[0][i]) < OUTPUT_BOUND, i
    ratios = {name: rms_ratio(got[1][name], want[1][name]) for name in want[1]}
    print(ratios)
    # With one head a_log's gradient is one number, a sum that cancels.
    bounds = dict(g=DECAY_BOUND, dt_bias=DECAY_BOUND, beta=DECAY_BOUND, a_log=5e-2)
    assert all(ratio < bounds.get(name, GRADIENT_BOUND) for name, ratio in ratios.items()), ratios


@pytest.mark.slow
def test_causal_to_the_bit(no_races):
    x = raw_inputs(specs.Shape(1, 130, 1, 64, 64))
    other = raw_inputs(specs.Shape(1, 130, 1, 64, 64), seed=7)
    call = jax.jit(lambda x: run(BOUNDED)(**x)[0])
    want = np.asarray(call(x)).astype(np.float32)
    for prefix in (1, 16, 21, 33, 65, 100):
        mixed = {n: np.where(np.arange(130).reshape(1, -1, *(1,) * (x[n].ndim - 2)) < prefix, x[n], other[n]) for n in (*WIDE, "beta")}
        np.testing.assert_array_equal(np.asarray(call(x | mixed)).astype(np.float32)[:, :prefix], want[:, :prefix])


@pytest.mark.slow
def test_nan_at_padding_stays_there(no_races):
    x = raw_inputs(specs.Shape(1, 64, 1, 64, 64))
    ids = np.repeat([1, 0, 2], [20, 9, 35])[None].astype(np.int32)
    call = jax.jit(lambda x: run(BOUNDED)(**x))
    poisoned = {n: np.where((ids == 0).reshape(1, -1, *(1,) * (x[n].ndim - 2)), np.nan, x[n]).astype(np.float32) for n in (*WIDE, "beta")}
    for got, want in zip(call(x | poisoned | dict(segment_ids=ids)), call(x | dict(segment_ids=ids))):
        np.testing.assert_array_equal(np.asarray(got).astype(np.float32), np.asarray(want).astype(np.float32))


def test_refusals_name_what_is_missing(monkeypatch):
    monkeypatch.setattr(specs, "unmet_on_hopper", list)
    x = {n: jnp.zeros((1, 4, 1, 64), jnp.bfloat16) for n in WIDE} | {"beta": jnp.zeros((1, 4, 1))}
    for keywords in (dict(), dict(gate="softplus")):
        with pytest.raises(UnsupportedError, match="lower_bound: .* promises none"):
            kda(**x, **keywords, implementation="mosaic_gpu")
        assert jax.eval_shape(partial(kda, **keywords), **x)[0].shape == (1, 4, 1, 64)
    with pytest.raises(UnsupportedError, match="dtype of g: got float32 with Dk = Dv = 128"):
        wide = {n: jnp.zeros((1, 4, 1, 128), jnp.float32 if n == "g" else jnp.bfloat16) for n in WIDE}
        kda(**wide, beta=x["beta"], lower_bound=-5.0, implementation="mosaic_gpu")
    with pytest.raises(UnsupportedError, match="Dk: got 96, wanted one of .* nearest"):
        kda(**{n: jnp.zeros((1, 4, 1, 96), jnp.bfloat16) for n in WIDE}, beta=x["beta"], lower_bound=-5.0, implementation="mosaic_gpu")
