"""Quantile Balancing's pieces: what is counted, that counts add up exactly, what comes out of a solve, and what it does not touch."""
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from longmoe.balancing import quantile as qb

N, E, K = 192, 12, 3
statistics = jax.jit(qb.statistics, static_argnums=2)
select = jax.jit(qb.select, static_argnums=2)
solve = jax.jit(qb.solve, static_argnums=2)


def problem(seed, n=N, e=E):
    rng = np.random.default_rng(seed)
    scores = 1 / (1 + np.exp(-(rng.normal(size=e) + rng.normal(size=(n, e)))))
    bias = rng.normal(size=e) * 0.3
    return jnp.asarray(scores, jnp.float32), jnp.asarray(bias - bias.mean(), jnp.float32), jnp.asarray(rng.random(n) < 0.8)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


seeds = given(seed=st.integers(0, 2**31))


@seeds
@settings(max_examples=20, deadline=None)
def test_counts_are_those_of_the_definition(seed):
    scores, bias, valid = problem(seed)
    got = statistics(scores, bias, K, valid)
    biased = np.asarray(scores) + np.asarray(bias)
    order = np.argsort(-biased, axis=1, kind="stable")
    np.testing.assert_array_equal(select(scores, bias, K).expert_ids, order[:, :K])
    keep = np.asarray(valid)
    np.testing.assert_array_equal(got.load, np.bincount(order[keep, :K].ravel(), minlength=E))
    cutoff = np.take_along_axis(biased, order[:, K:K + 1], axis=1)
    offset = (cutoff - np.asarray(scores) - np.asarray(bias))[keep]
    edges = np.float32(qb.RANGE * np.sinh(qb.WARP * np.linspace(-1, 1, qb.BINS + 1)) / np.sinh(qb.WARP))
    bins = np.minimum(np.searchsorted(edges, offset, side="right"), qb.BINS)
    np.testing.assert_array_equal(got.histogram, [np.bincount(column, minlength=qb.BINS + 1) for column in bins.T])
    assert got.tokens == keep.sum() and {x.dtype for x in got} == {jnp.dtype("int32")}


@given(seed=st.integers(0, 2**31), cut=st.integers(0, N))
@settings(max_examples=25, deadline=None)
def test_integer_equal_under_any_split(seed, cut):
    """Masks cut the batch, so that one compiled function serves every split; the next test cuts shapes."""
    scores, bias, valid = problem(seed)
    first = jnp.arange(N) < cut
    whole = statistics(scores, bias, K, valid)
    halves = qb.merge(statistics(scores, bias, K, valid & first), statistics(scores, bias, K, valid & ~first))
    assert_equal(whole, halves)
    assert_equal(solve(whole, bias, K), solve(halves, bias, K))


def test_integer_equal_in_odd_micro_batches_eager_or_jitted():
    scores, bias, valid = problem(0)
    parts = [f(scores[a:b], bias, K, valid[a:b]) for f, a, b in ((statistics, 0, 1), (qb.statistics, 1, 71), (statistics, 71, N))]
    assert_equal(functools.reduce(qb.merge, parts), statistics(scores, bias, K, valid))


def test_integer_equal_over_devices():
    scores, bias, valid = problem(1)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])
    count = lambda scores, bias, valid: jax.lax.psum(qb.statistics(scores, bias, K, valid), "data")
    sharded = jax.jit(jax.shard_map(count, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P()))
    assert_equal(sharded(scores, bias, valid), statistics(scores, bias, K, valid))


@seeds
@settings(max_examples=20, deadline=None)
def test_order_of_experts_and_tokens_does_not_matter(seed):
    scores, bias, valid = problem(seed)
    rng = np.random.default_rng(seed + 1)
    tokens, experts = rng.permutation(N), rng.permutation(E)
    plain, moved = statistics(scores, bias, K, valid), statistics(scores[tokens][:, experts], bias[experts], K, valid[tokens])
    assert_equal(moved, qb.Statistics(plain.load[experts], plain.histogram[experts], plain.tokens))
    np.testing.assert_allclose(solve(moved, bias[experts], K), solve(plain, bias, K)[experts], atol=1e-6)


@seeds
@settings(max_examples=20, deadline=None)
def test_solve_is_the_quantile_to_a_bin(seed):
    scores, bias, valid = problem(seed, n=4096)
    got = solve(statistics(scores, bias, K, valid), bias, K)
    assert got.dtype == jnp.float32 and abs(float(got.mean())) < 1e-6
    required = (np.asarray(select(scores, bias, K).cutoff)[:, None] - np.asarray(scores))[np.asarray(valid)]
    want = np.quantile(required, K / E, axis=0)
    # A bin is 7 % as wide as it is far from the present bias.
    shift = np.abs(want - np.asarray(bias)).max()
    np.testing.assert_allclose(got, want - want.mean(), atol=0.08 * shift + 1e-3)


@pytest.mark.parametrize("k", [1, 5, E - 1])
def test_repeated_solves_even_the_load(k):
    scores, bias, _ = problem(k, n=4096)
    for _ in range(6):
        bias = solve(statistics(scores, bias, k), bias, k)
    assert qb.max_violation(statistics(scores, bias, k).load) < 0.1


def test_nothing_valid_keeps_the_bias_to_the_bit():
    scores, bias, _ = problem(0)
    bias = bias + 1
    nothing = statistics(scores, bias, K, jnp.zeros(N, bool))
    assert not any(np.any(np.asarray(x)) for x in nothing)
    assert_equal(solve(nothing, bias, K), bias)
    assert_equal(solve(qb.statistics(scores[:0], bias, K), bias, K), bias)


def test_padding_counts_for_nothing_whatever_it_holds():
    scores, bias, valid = problem(0)
    for junk in (0.0, 7.0, np.nan, np.inf):
        assert_equal(statistics(jnp.where(valid[:, None], scores, junk), bias, K, valid), statistics(scores, bias, K, valid))


def test_every_expert_chosen_leaves_nothing_to_balance():
    scores, bias, _ = problem(0, e=4)
    got = qb.statistics(scores, bias, 4)
    np.testing.assert_array_equal(got.load, [N] * 4)
    assert_equal(qb.solve(got, bias, 4), bias)
    assert qb.select(scores, bias, 4).expert_ids.shape == (N, 4)


def test_ties_go_to_the_lower_index():
    got = select(jnp.full((5, E), 0.5), qb.init_bias(E), K)
    np.testing.assert_array_equal(got.expert_ids, [[0, 1, 2]] * 5)


def test_far_out_of_range_recovers():
    """Biases 6 apart, outside every bin: each solve moves by the range."""
    scores, bias, _ = problem(0, n=4096)
    bias = bias.at[0].add(6.0)
    for _ in range(8):
        bias = solve(statistics(scores, bias, K), bias, K)
    assert qb.max_violation(statistics(scores, bias, K).load) < 0.1


def test_no_gradient_in_or_out():
    scores, bias, _ = problem(0)

    def leak(scores, bias):
        selection = qb.select(scores, bias, K)
        # A float cast of the counts would carry a gradient if the bins did.
        counts = qb.statistics_from_selection(scores, bias, selection)
        return jnp.sum(selection.cutoff) + jnp.sum(qb.solve(counts, bias, K) ** 2) + jnp.sum(counts.histogram.astype(jnp.float32) ** 2)

    assert not any(np.any(np.asarray(g)) for g in jax.grad(leak, (0, 1))(scores, bias))


def test_layers_stack_and_scan():
    layers = [problem(seed) for seed in range(3)]
    scores, bias, valid = (jnp.stack(x) for x in zip(*layers))
    want = [statistics(*layer[:2], K, layer[2]) for layer in layers]
    stacked = jax.jit(jax.vmap(lambda *x: qb.statistics(*x[:2], K, x[2])))(scores, bias, valid)
    scanned = jax.lax.scan(lambda _, x: (None, qb.statistics(x[0], x[1], K, x[2])), None, (scores, bias, valid))[1]
    assert_equal(stacked, scanned)
    assert_equal(stacked, jax.tree.map(lambda *x: jnp.stack(x), *want))
    new = qb.solve(qb.merge(stacked, stacked), bias, K)
    np.testing.assert_allclose(new, jax.vmap(qb.solve, in_axes=(0, 0, None))(qb.merge(stacked, stacked), bias, K), atol=1e-7)
    np.testing.assert_allclose(new, [qb.solve(s, layer[1], K) for s, layer in zip(want, layers)], atol=1e-6)
    assert qb.max_violation(stacked.load).shape == (3,)


def test_half_precision_scores_are_compared_in_float32():
    scores, bias, _ = problem(0)
    assert_equal(statistics(scores.astype(jnp.bfloat16), bias, K), statistics(scores.astype(jnp.bfloat16).astype(jnp.float32), bias, K))


@pytest.mark.parametrize("call,message", [
    (lambda s, b: qb.init_bias(0), "num_experts: got 0"),
    (lambda s, b: qb.select(s, b, E + 1), f"k: got {E + 1}, wanted 1 to {E}"),
    (lambda s, b: qb.statistics(s, b, 0), "k: got 0"),
    (lambda s, b: qb.statistics(s[None], b, K), r"scores: got shape \(1, 192, 12\), wanted \[N, E\]"),
    (lambda s, b: qb.statistics(s, b[1:], K), r"bias: got shape \(11,\), wanted \[12\]"),
    (lambda s, b: qb.statistics(s, b, K, jnp.ones(3, bool)), r"valid: got shape \(3,\), wanted \[192\]"),
    (lambda s, b: qb.solve(qb.statistics(s, b, K), b[None], K), r"bias: got shape \(1, 12\)"),
    (lambda s, b: qb.solve(qb.statistics(s, b, K), b, E + 1), "k: got 13"),
])
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call(*problem(0)[:2])
