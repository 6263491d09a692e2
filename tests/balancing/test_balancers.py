"""Every balancer behind MoEConfig.balancer on skewed scores: which way it pushes, that it evens the load, that its sums add up, what it does not touch."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longmoe.balancing import balancers
from longmoe.balancing.auxiliary import balance_loss
from longmoe.balancing.quantile import max_violation
from longmoe.configs import MoEConfig

B, T, E, K = 8, 128, 16, 2
BIASES = ("quantile", "sign", "load_ema")
ALL = (*BIASES, "auxiliary_loss", "none")


def moe(balancer, **changes):
    return MoEConfig(num_experts=E, experts_per_token=K, balancer=balancer, **changes)


def skewed(seed=0):
    """Logits of which some experts' are larger everywhere; a fifth of the tokens is padding."""
    rng = np.random.default_rng(seed)
    logits = np.linspace(-1, 1, E) + rng.normal(size=(B, T, E))
    return jnp.asarray(logits, jnp.float32), jnp.asarray(rng.random((B, T)) < 0.8)


def count(config, scores, bias, valid):
    return balancers.route(config, scores, bias, valid)[1]


def iterate(config, steps):
    """(MaxVio of each step, bias after the last) on the same scores."""
    logits, valid = skewed()
    scores, bias, violations = jax.nn.sigmoid(logits), jnp.zeros(E), []
    step = jax.jit(lambda bias: (lambda s: (max_violation(s.load), balancers.update(config, s, bias)))(count(config, scores, bias, valid)))
    for _ in range(steps):
        violation, bias = step(bias)
        violations.append(float(violation))
    return violations, bias


@pytest.mark.parametrize("balancer,steps,reached", [("quantile", 10, 0.06), ("sign", 60, 0.1), ("load_ema", 60, 0.4)])
def test_evens_the_load(balancer, steps, reached):
    """load_ema keeps a ripple: one step moves a bias by up to a tenth of load_bias."""
    violations, _ = iterate(moe(balancer, bias_rate=0.01), steps)
    assert violations[0] > 1.9 and np.mean(violations[-5:]) < reached


def test_without_a_balancer_nothing_changes():
    for balancer in ("none", "auxiliary_loss"):
        violations, bias = iterate(moe(balancer), 3)
        assert len(set(violations)) == 1 and not np.any(bias)


@pytest.mark.parametrize("balancer", BIASES)
def test_crowded_experts_get_harder_to_choose(balancer):
    config = moe(balancer, bias_rate=0.01)
    logits, valid = skewed()
    statistics = count(config, jax.nn.sigmoid(logits), jnp.zeros(E), valid)
    bias = np.asarray(balancers.update(config, statistics, jnp.zeros(E)))
    load = np.asarray(statistics.load)
    assert bias[load.argmax()] < 0 < bias[load.argmin()]
    assert np.corrcoef(bias, load)[0, 1] < -0.5


def test_the_sign_rule_by_hand():
    load = jnp.array([[0, 4, 4, 8], [3, 3, 3, 3]], jnp.int32)
    statistics = balancers.Loads(load, jnp.array([8, 6], jnp.int32))
    config = dataclasses.replace(moe("sign", bias_rate=0.25), num_experts=4)
    np.testing.assert_array_equal(balancers.update(config, statistics, jnp.ones((2, 4))), [[1.25, 1, 1, 0.75], [1, 1, 1, 1]])


def test_ranks_by_hand():
    np.testing.assert_allclose(balancers.ranked_bias(jnp.array([[5, 1, 9], [2, 2, 7], [4, 4, 4]]), 2.0), [[0, 1, -1], [0.5, 0.5, -1], [0, 0, 0]])
    np.testing.assert_array_equal(balancers.ranked_bias(jnp.array([3]), 2.0), [0])


def test_bias_ema_is_of_the_bias():
    logits, valid = skewed()
    scores, old = jax.nn.sigmoid(logits), jnp.linspace(-0.1, 0.1, E)
    for balancer, default in (("quantile", 0.0), ("load_ema", 0.9)):
        update = lambda share, balancer=balancer: np.asarray(
            balancers.update(moe(balancer, bias_ema=share), count(moe(balancer), scores, old, valid), old))
        np.testing.assert_array_equal(update(None), update(default))
        np.testing.assert_allclose(update(0.75), 0.75 * old + 0.25 * update(0.0), atol=1e-7)


@pytest.mark.parametrize("balancer", ALL)
def test_sums_add_up_and_layers_stack(balancer):
    config = moe(balancer)
    layers = [skewed(seed) for seed in range(3)]
    bias = jnp.asarray(np.random.default_rng(5).normal(size=(3, E)) * 0.1, jnp.float32)
    whole = [count(config, jax.nn.sigmoid(logits), b, valid) for (logits, valid), b in zip(layers, bias)]
    assert {x.dtype for x in jax.tree.leaves(whole)} == {jnp.dtype("int32")}
    for (logits, valid), b, want in zip(layers, bias, whole):
        rows = [count(config, jax.nn.sigmoid(logits[i:i + 2]), b, valid[i:i + 2]) for i in range(0, B, 2)]
        jax.tree.map(np.testing.assert_array_equal, functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), rows), want)
    stacked = balancers.update(config, jax.tree.map(lambda *x: jnp.stack(x), *whole), bias)
    np.testing.assert_allclose(stacked, [balancers.update(config, s, b) for s, b in zip(whole, bias)], atol=1e-6)


@pytest.mark.parametrize("balancer", ALL)
def test_nothing_valid_keeps_the_bias_to_the_bit(balancer):
    logits, valid = skewed()
    bias = jnp.linspace(-0.3, 0.5, E)
    statistics = count(moe(balancer), jax.nn.sigmoid(logits), bias, jnp.zeros_like(valid))
    np.testing.assert_array_equal(balancers.update(moe(balancer), statistics, bias), bias)


@pytest.mark.parametrize("balancer", ALL)
def test_no_gradient_through_the_bias(balancer):
    logits, valid = skewed()

    def leak(logits, bias):
        statistics = count(moe(balancer), jax.nn.sigmoid(logits), bias, valid)
        return jnp.sum(balancers.update(moe(balancer), statistics, bias) ** 2)

    assert not any(np.any(np.asarray(g)) for g in jax.grad(leak, (0, 1))(logits, jnp.linspace(-0.1, 0.1, E)))


@functools.partial(jax.jit, static_argnums=2)
def loss_of(logits, valid, over):
    scores = jax.nn.sigmoid(logits)
    return balance_loss(scores, jax.lax.top_k(scores, K)[1], valid, over)


@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_balance_loss_is_its_definition(over):
    logits, valid = skewed()
    scores, keep = 1 / (1 + np.exp(-np.asarray(logits, np.float64))), np.asarray(valid)
    groups = [(scores[i][keep[i]]) for i in range(B)] if over == "sequence" else [scores[keep]]
    want = 0.0
    for group in groups:
        share = np.bincount(np.argsort(-group, axis=1)[:, :K].ravel(), minlength=E) * E / (K * len(group))
        want += len(group) * np.sum(share * np.mean(group / group.sum(1, keepdims=True), axis=0))
    np.testing.assert_allclose(loss_of(logits, valid, over), want, rtol=1e-5)
    even = jnp.full((1, E, E), 0.5)
    ids = (jnp.arange(E)[:, None] + jnp.arange(K)) % E
    np.testing.assert_allclose(balance_loss(even, ids[None], jnp.ones((1, E), bool), over), E, rtol=1e-6)


def test_sequence_loss_adds_up_over_rows_and_batch_loss_does_not():
    logits, valid = skewed()
    parts = lambda over: sum(float(loss_of(logits[i:i + 1], valid[i:i + 1], over)) for i in range(B))
    np.testing.assert_allclose(parts("sequence"), loss_of(logits, valid, "sequence"), rtol=1e-5)
    assert abs(parts("batch") / float(loss_of(logits, valid, "batch")) - 1) > 1e-3


@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_balance_loss_gradient_against_finite_differences(over):
    """float64; the choices stay what they are between the two ends, so the counts do too."""
    with jax.enable_x64(True):
        logits, valid = skewed()
        logits = jnp.asarray(np.asarray(logits[:3, :9]), jnp.float64)
        valid, ids = valid[:3, :9], jax.lax.top_k(logits, K)[1]
        loss = jax.jit(lambda x: balance_loss(jax.nn.sigmoid(x), ids, valid, over))
        gradient = np.asarray(jax.grad(loss)(logits))
        rng = np.random.default_rng(0)
        for _ in range(5):
            direction, step = rng.normal(size=logits.shape), 1e-5
            slope = (float(loss(logits + step * direction)) - float(loss(logits - step * direction))) / (2 * step)
            np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-7)
    assert not np.any(gradient[~np.asarray(valid)])


def test_padding_counts_for_nothing_in_the_balance_loss():
    logits, valid = skewed()
    want = jax.value_and_grad(loss_of)(logits, valid, "sequence")
    for junk in (9.0, np.nan, np.inf):
        got = jax.value_and_grad(lambda x, junk=junk: loss_of(jnp.where(valid[..., None], x, junk), valid, "sequence"))(logits)
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert float(loss_of(logits, jnp.zeros_like(valid), "sequence")) == 0


def test_descending_the_balance_loss_evens_the_load():
    logits, valid = skewed()
    load = lambda offset: count(moe("auxiliary_loss"), jax.nn.sigmoid(logits + offset), jnp.zeros(E), valid).load
    descend = jax.jit(lambda offset: offset - 2e-3 * jax.grad(lambda o: loss_of(logits + o, valid, "batch"))(offset))
    offset = jnp.zeros(E)
    for _ in range(60):
        offset = descend(offset)
    assert max_violation(load(offset)) < 0.5 * max_violation(load(jnp.zeros(E)))
