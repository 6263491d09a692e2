"""The chunked implementation against the token recurrence in float64 at the float32-rounded inputs: RMS(diff) / RMS(reference), each output, each gradient."""
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda
from pallas_kernels.kda import chunk, specs
from pallas_kernels.testing import outputs_and_gradients, rms_ratio

BOUND = 1e-5
QUICK = (0, 1, 64, 130)
LENGTHS = [pytest.param(t, marks=() if t in QUICK else pytest.mark.exhaustive) for t in specs.TEST_LENGTHS]


def cotangents(arguments, seed=1):
    draw = np.random.default_rng(seed)
    return tuple(draw.normal(size=arguments[name].shape).astype(np.float32) for name in ("v", "initial_state"))


def both(arguments, **keywords):
    """-> {name: array} of the chunked run in float32 and of the reference in float64."""
    results = []
    for dtype, extra in ((jnp.float32, dict(implementation="xla")), (jnp.float64, dict(implementation="reference"))):
        outputs, gradients = outputs_and_gradients(partial(kda, **{**keywords, **extra}), arguments, cotangents(arguments), dtype)
        results.append(dict(o=outputs[0], final_state=outputs[1], **{f"d {name}": x for name, x in gradients.items()}))
    return results


def assert_rows_close(got, want, rows, bound=BOUND, skip=()):
    bad = {(row, name): ratio for i, row in enumerate(rows) for name in got
           if (row, name) not in skip and not (ratio := rms_ratio(got[name][i], want[name][i])) < bound}
    assert not bad


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("promise", [-5.0, None])
def test_against_the_recurrence(tokens, promise):
    gates = specs.BOUNDED_GATES if promise else specs.BOUNDED_GATES + specs.UNBOUNDED_GATES
    x = specs.inputs(specs.Shape(len(gates), tokens, 2, 24, 16), gates)
    got, want = both(x, lower_bound=promise)
    # The gradient of a gate carries its own decay, exp(-40) at times: nothing is left of it but rounding, judged against the random row's.
    near_zero = {(row, "d g") for row in ("pinned", *(("strong", "strong_first") if tokens == 1 else ()))}
    assert_rows_close(got, want, gates, skip=near_zero)
    for row, name in near_zero & {(row, "d g") for row in gates}:
        error = got[name][gates.index(row)] - want[name][gates.index(row)]
        assert not tokens or np.sqrt(np.mean(error ** 2)) < BOUND * np.sqrt(np.mean(want[name][0] ** 2))


def test_key_wider_than_value_and_scale():
    x = specs.inputs(specs.Shape(1, 70, 2, 16, 40))
    assert_rows_close(*both(x, lower_bound=-5.0, scale=0.7), ["random"])


def test_a_promise_below_the_factored_range_takes_exact_tiles():
    assert specs.factored("log_decay", -5.0) and specs.factored("bounded", None) and not specs.factored("softplus", None)
    assert not specs.factored("log_decay", None) and not specs.factored("log_decay", -8.0)
    x = specs.inputs(specs.Shape(2, 70, 1, 8, 8), ("random", "strong"))
    x["g"] = np.float32(1.6) * x["g"]
    assert_rows_close(*both(x, lower_bound=-8.0), ["random", "strong"])


@pytest.mark.parametrize("promise", [-5.0, pytest.param(None, marks=pytest.mark.slow)])
def test_documents_that_start_at_every_offset(promise):
    """Row b: documents start at tokens b and b + 70, with padding before the second in every third row."""
    x = specs.inputs(specs.Shape(64, 140, 1, 8, 12), ("random",) * 32 + ("strong_then_weak",) * 32)
    t, start = np.arange(140)[None], np.arange(64)[:, None]
    ids = np.where(t < start, 1, np.where(t < start + 70, 2, 1))
    x["segment_ids"] = np.where((start % 3 == 0) & (t >= start + 60) & (t < start + 70), 0, ids).astype(np.int32)
    got, want = both(x, lower_bound=promise)
    assert_rows_close(got, want, range(64), bound=2 * BOUND)
    assert max(rms_ratio(got[name], want[name]) for name in got) < BOUND


@pytest.mark.parametrize("bound", [chunk.FACTORED_BOUND, chunk.FACTORED_BOUND - 0.005])
def test_every_channel_at_the_lowest_bound(bound):
    """Factored tiles at their limit, where a factor is the smallest that float32 does not flush to zero, and exact ones right below it."""
    x = specs.inputs(specs.Shape(1, 70, 1, 16, 8))
    x["g"] = np.full_like(x["g"], bound)
    assert specs.factored("log_decay", bound) == (bound >= chunk.FACTORED_BOUND)
    assert_rows_close(*both(x, lower_bound=bound), range(1))


@pytest.mark.slow
def test_many_documents_in_one_chunk():
    x = specs.inputs(specs.Shape(2, 130, 1, 8, 12))
    x["segment_ids"] = np.stack([np.arange(130) + 1, np.arange(130) // 2 % 3]).astype(np.int32)
    assert_rows_close(*both(x, lower_bound=-5.0), range(2))


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_gates_inside_with_every_gradient(gate):
    """Raw gates, logits of beta and unnormalised q, k; row 1 has saturated gates, whose gradient is judged against row 0."""
    x = specs.inputs(specs.Shape(2, 70, 2, 16, 8))
    draw = np.random.default_rng(3)
    x["q"], x["k"] = 3 * x["q"], 0.2 * x["k"]
    x["g"], x["beta"] = np.float32(draw.normal(size=x["g"].shape)), np.float32(draw.normal(size=x["beta"].shape))
    x["g"][1] += np.where(draw.uniform(size=x["g"][1].shape) < 0.5, -12, 12).astype(np.float32)
    x["a_log"], x["dt_bias"] = np.float32([-0.3, 0.4]), np.float32(draw.normal(size=(2, 16)))
    got, want = both(x, gate=gate, qk_l2norm=True, beta_logits=True)
    for name in ("d a_log", "d dt_bias"):
        assert rms_ratio(got.pop(name), want.pop(name)) < BOUND, name
    assert_rows_close(got, want, ["ordinary", "saturated"], skip={("saturated", "d g")})
    assert np.sqrt(np.mean((got["d g"][1] - want["d g"][1]) ** 2)) < BOUND * np.sqrt(np.mean(want["d g"][0] ** 2))


@pytest.mark.slow
def test_float64_inputs():
    x = specs.inputs(specs.Shape(2, 70, 2, 8, 12), ("random", "strong_then_weak"))
    want = both(x)[1]
    outputs, gradients = outputs_and_gradients(partial(kda, lower_bound=-5.0, implementation="xla"), x, cotangents(x), jnp.float64)
    assert outputs[0].dtype == outputs[1].dtype == np.float64
    assert_rows_close(dict(o=outputs[0], final_state=outputs[1], **{f"d {n}": g for n, g in gradients.items()}), want, range(2), bound=1e-13)


def test_bfloat16_inputs():
    """bfloat16 operands, float32 sums: a few units of 2^-9 from the recurrence at the rounded inputs."""
    x = specs.inputs(specs.Shape(2, 130, 2, 32, 24), ("random", "strong"))
    x = {n: v if n in ("g", "beta", "initial_state") else np.asarray(jnp.asarray(v, jnp.bfloat16), np.float32) for n, v in x.items()}

    def run(q, k, v, **rest):
        return kda(*(a.astype(jnp.bfloat16) for a in (q, k, v)), **rest, lower_bound=-5.0, implementation="xla")

    outputs, gradients = outputs_and_gradients(run, x, cotangents(x))
    assert outputs[0].dtype == jnp.bfloat16 and outputs[1].dtype == np.float32
    (o, state), want = outputs_and_gradients(partial(kda, implementation="reference"), x, cotangents(x), jnp.float64)
    ratios = dict(o=rms_ratio(outputs[0], o), final_state=rms_ratio(outputs[1], state), **{n: rms_ratio(gradients[n], want[n]) for n in want})
    assert max(ratios.values()) < 2e-2 and max(ratios["o"], ratios["final_state"]) < 6e-3, ratios


@pytest.mark.parametrize("promise", [-5.0, pytest.param(None, marks=pytest.mark.slow)])
def test_saving_residuals_changes_nothing(promise):
    x = specs.inputs(specs.Shape(1, 70, 2, 8, 12))
    runs = [outputs_and_gradients(partial(kda, lower_bound=promise, residuals=r), x, cotangents(x)) for r in specs.RESIDUALS]
    np.testing.assert_array_equal(runs[0][0][0], runs[1][0][0])
    assert max(rms_ratio(runs[0][1][n], runs[1][1][n]) for n in runs[0][1]) < 1e-6
