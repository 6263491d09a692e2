import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longmoe.evaluation.statistics import RULER_THRESHOLD, Interval, effective_context, student, weighted_averages, wilson


def test_wilson_is_the_published_interval():
    """Newcombe (1998, Statistics in Medicine 17, table I), method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for hits, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)):
        found = wilson(hits / n, n)
        assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


@settings(deadline=None)
@given(st.integers(1, 10**6), st.floats(0, 1))
def test_wilson_holds_its_mean(n, mean):
    found = wilson(mean, n)
    assert 0 <= found.low <= mean <= found.high <= 1 and wilson(mean, 4 * n).high - mean <= found.high - mean + 1e-12


def test_wilson_refuses_what_is_no_share():
    with pytest.raises(ValueError, match="n: got 0"):
        wilson(0.5, 0)
    with pytest.raises(ValueError, match=r"mean: got 1\.5"):
        wilson(1.5, 3)


@pytest.mark.parametrize("n", [2, 3, 7, 11, 12, 30])
def test_student_covers_the_mean_of_19_samples_in_20(n):
    samples = np.random.default_rng(n).normal(3.0, 2.0, (20_000, n))
    found = [student(sample) for sample in samples]
    assert np.mean([x.low <= 3.0 <= x.high for x in found]) == pytest.approx(0.95, abs=0.005)
    assert all(x.n == n and x.mean == pytest.approx(sample.mean()) for x, sample in zip(found[:9], samples))


def test_student_refuses_a_single_run():
    with pytest.raises(ValueError, match="values: got 1, wanted at least 2"):
        student([0.5])


def scores(**means: float) -> dict[int, Interval]:
    return {int(name[1:]): Interval(mean, mean - 0.1, min(1.0, mean + 0.1), 10) for name, mean in means.items()}


def test_effective_context():
    found = scores(_1024=1.0, _2048=0.96, _4096=0.86, _8192=0.8, _16384=0.1)
    none = dict.fromkeys(found, 0.0)
    relative = effective_context(found, none)
    assert (relative.length, relative.low, relative.high) == (4096, 2048, 8192) and relative.threshold == 0.85
    assert effective_context(found, none, threshold=RULER_THRESHOLD).length == 4096
    assert effective_context(found, dict.fromkeys(found, 0.8)).length == 2048, "the lower bound has to lie above chance"
    assert effective_context(scores(_1024=0.2, _2048=0.2), dict.fromkeys((1024, 2048), 0.25)).length == 0
    half = effective_context(scores(_1024=0.5, _2048=0.45, _4096=0.3), dict.fromkeys((1024, 2048, 4096), 0.1))
    assert half.length == 2048 and half.threshold == pytest.approx(0.425)
    with pytest.raises(ValueError, match="scores: got lengths"):
        effective_context({}, {})


def test_weighted_averages():
    """Weights 1, 2, 3 over 6."""
    rising, falling = weighted_averages({8192: 0.0, 1024: 1.0, 4096: 0.5})
    assert math.isclose(rising, (1 + 2 * 0.5) / 6) and math.isclose(falling, (3 + 2 * 0.5) / 6)
