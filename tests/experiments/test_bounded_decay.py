"""What the bounded-decay experiment measures: the factors are the operator's, the counts are those of casting, the timed calls compute one thing."""

import bounded_decay
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import specs
from pallas_kernels.testing import rms_ratio


def tiles(gate, spread):
    return bounded_decay.tiles(bounded_decay.draw_log_decays(gate, (8, 16, 2, 8), spread))


@pytest.mark.parametrize("dtype, bound", [("float32", 1e-6), ("bfloat16", 5e-3)])
def test_factors_of_a_bounded_tile_are_exact_to_rounding(dtype, bound):
    found = bounded_decay.tile_error(tiles("bounded", 16.0), jnp.dtype(dtype))
    assert 0 < found["rms_relative"] < bound and found["not_finite"] == 0


def test_factors_of_an_unbounded_tile_are_not():
    assert bounded_decay.tile_error(tiles("softplus", 16.0), jnp.dtype("float32"))["not_finite"] > 0.1


def test_a_tiles_factors_meet_before_it():
    """Neighbouring tiles of a chunk do not change each other's factors, and their product is the decay after token j through token i."""
    g = tiles("bounded", 2.0)
    left, right = bounded_decay.tile_factors(g, jnp.float32)
    alone = bounded_decay.tile_factors(np.repeat(g[5:6], 4, axis=0), jnp.float32)
    np.testing.assert_array_equal(left[5], alone[0][0])
    np.testing.assert_allclose(left[5, 9] * right[5, 4], np.exp(g[5, 5:10].astype(np.float64).sum(0)), rtol=2e-6)


@pytest.mark.parametrize("gate", bounded_decay.GATES)
@pytest.mark.parametrize("constant", [1.0, 16.0])
def test_range_shares_are_those_of_casting(gate, constant):
    g = tiles(gate, 4.0)
    left = constant * np.exp(np.cumsum(g.astype(np.float64), axis=1))
    found = bounded_decay.range_shares(g, jnp.dtype("float16"), constant)
    for side in ("left", "right"):
        with np.errstate(over="ignore", divide="ignore"):
            half = (left if side == "left" else 1 / left).astype(np.float16)
        # Just above the largest number a cast rounds down to it, so that counts may differ by a hair.
        assert found[f"{side} overflow"] == pytest.approx(np.mean(np.isinf(half)), abs=1e-3)
        assert found[f"{side} underflow"] == pytest.approx(np.mean(half < np.finfo(np.float16).smallest_normal), abs=1e-3)
    assert found["right overflow"] > 0.01


def test_a_promise_that_is_not_kept_breaks_the_factored_operator_alone():
    shape = specs.Shape(1, 70, 2, 8, 8)
    kept = bounded_decay.operator_errors(shape, "bounded", 4.0, "float32")
    broken = bounded_decay.operator_errors(shape, "softplus", 16.0, "float32")
    assert kept["factored"] < 1e-6 and kept["exact"] < 1e-6 and broken["exact"] < 1e-6
    assert broken["factored"] is None or broken["factored"] > 1e-2


def test_timed_calls_compute_one_thing():
    draw = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(draw.normal(size=shape), jnp.float32)
    arguments = (*(normal(1, 40, 2, 8) for _ in range(4)), jax.nn.sigmoid(normal(1, 40, 2)), normal(2), normal(2, 8))
    outputs = {name: jax.jit(call)(*arguments) for name, call in bounded_decay.timed_calls("float32").items()}
    assert set(outputs) == {"factored tiles", "exact tiles"} and rms_ratio(*outputs.values()) < 1e-5


@pytest.mark.slow
def test_speed_rows_hold_times_and_errors():
    rows = bounded_decay.speed_part(bounded_decay.SCALES["smoke"])["rows"]
    assert [row["call"] for row in rows] == ["factored tiles", "exact tiles"]
    assert all(row[what][0] >= row[what][1] > 0 for row in rows for what in ("forward", "forward_backward")) and max(row["rms"] for row in rows) < 1e-6
