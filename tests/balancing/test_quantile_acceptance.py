"""At a K3 layer's size, 896 experts and top-16 on one fixed batch of 16,384 tokens: histogram solves against exact quantiles.

One token of load is 0.0034 of MaxVio here, so figures near the floor of about 0.015 differ by a few tokens between equally good biases.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longmoe.balancing import quantile as qb

pytestmark = pytest.mark.slow
TOKENS, EXPERTS, K = 16384, 896, 16
TARGET = TOKENS * K / EXPERTS
SLACK = 1.2


@functools.cache
def scores(skew: float) -> jax.Array:
    keys = jax.random.split(jax.random.key(0))
    mean = jax.random.normal(keys[0], (EXPERTS,))
    return jax.nn.sigmoid(skew * mean + jax.random.normal(keys[1], (TOKENS, EXPERTS)))


@jax.jit
def observe(scores, bias):
    selection = qb.select(scores, bias, K)
    return selection.cutoff, qb.statistics_from_selection(scores, bias, selection)


def histogram_solve(bias, scores, cutoff, statistics):
    return qb.solve(statistics, bias, K)


def exact_solve(bias, scores, cutoff, statistics):
    """The bias with which floor(TARGET) tokens choose the expert: halfway to the required bias of the next token."""
    required = np.ascontiguousarray((np.asarray(cutoff)[:, None] - np.asarray(scores)).T)
    rank = int(TARGET)
    required.partition((rank - 1, rank), axis=1)
    new = required[:, rank - 1:rank + 1].mean(axis=1)
    return jnp.asarray(new - new.mean(), jnp.float32)


def run(solver, bias, scores, steps):
    """The bias after `steps` solves and MaxVio after each."""
    violations = []
    seen = observe(scores, bias)
    for _ in range(steps):
        bias = solver(bias, scores, *seen)
        seen = observe(scores, bias)
        violations.append(float(qb.max_violation(seen[1].load)))
    return bias, violations


@functools.cache
def from_zero(solver):
    return run(solver, qb.init_bias(EXPERTS), scores(1.0), 5)


def test_five_solves_from_zero_reach_what_exact_quantiles_reach():
    (_, got), (_, want) = from_zero(histogram_solve), from_zero(exact_solve)
    print("from zero:", got, "exact:", want)
    assert got[-1] <= SLACK * want[-1] < 0.06


@pytest.mark.parametrize("error", [1.0, -1.0])
def test_one_bias_off_by_one_is_mended_in_three_solves(error):
    """MaxVio is back within the slack of what exact quantiles reach on these tokens.

    It is blind to a starved expert, so that expert's share is held too. From below neither solver gets all the way: the tokens for which
    the expert came (k+1)-th require exactly the bias that it has.
    """
    off = from_zero(histogram_solve)[0].at[0].add(error)
    share = lambda bias: float(observe(scores(1.0), bias)[1].load[0] / TARGET)
    new, got = run(histogram_solve, off, scores(1.0), 3)
    print(f"off by {error}: share {share(off)} then {share(new)}; MaxVio {got}")
    bound = SLACK * from_zero(exact_solve)[1][-1]
    assert abs(share(off) - 1) > 0.9
    assert got[-1] <= bound and 0.85 < share(new) <= 1 + bound


def test_doubled_skew_is_followed_as_fast_as_exact_quantiles_do():
    """Both start from the same bias, converged at single skew."""
    bias, _ = from_zero(exact_solve)
    (_, got), (_, want) = (run(solver, bias, scores(2.0), 3) for solver in (histogram_solve, exact_solve))
    print("doubled skew:", got, "exact:", want)
    assert got[-1] <= SLACK * want[-1] < 0.15
