import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longmoe.evaluation.statistics import RULER_THRESHOLD, Interval, effective_context, student, student95, weighted_averages, wilson


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


def test_student_is_the_published_table():
    for freedom, quantile in ((1, 12.706), (2, 4.303), (10, 2.228), (11, 2.201), (12, 2.179), (20, 2.086), (30, 2.042), (120, 1.980)):
        assert student95(freedom) == pytest.approx(quantile, abs=6e-4)


def test_student_of_a_few_values():
    """2, 4, 9: mean 5, variance (9 + 1 + 16) / 2 = 13, so half = 4.303 sqrt(13 / 3)."""
    found = student([2.0, 4.0, 9.0])
    assert (found.mean, found.n) == (5.0, 3) and found.high - 5 == pytest.approx(4.30265 * math.sqrt(13 / 3)) and found.high + found.low == pytest.approx(10)
    assert student([0.0, 0.1, 0.9], least=0, most=1) == Interval(student([0.0, 0.1, 0.9]).mean, 0, 1, 3)
    alone = student([2.0])
    assert (alone.mean, alone.n) == (2.0, 1) and math.isnan(alone.low) and math.isnan(alone.high)
    with pytest.raises(ValueError, match="values: got none"):
        student([])


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
