"""The train step: the contract's metrics, the guard against non-finite gradients, the balancer, the optimizer's table."""
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_config import batch_of, tiny_model, tiny_train

import longmoe
from longmoe.balancing import balancers
from longmoe.configs import MeshConfig, OptimConfig
from longmoe.parallel.mesh import make_mesh
from longmoe.parallel.rules import path_name
from longmoe.train.optim import decayed, learning_rate, make_optimizer, optimizer_labels
from longmoe.train.state import abstract_train_state, init_train_state
from longmoe.train.step import Accumulated, accumulate, apply_updates, make_train_step


@pytest.fixture(scope="module")
def case():
    cfg, mesh = tiny_train(num_layers=4), make_mesh(MeshConfig(), jax.devices()[:1])
    return cfg, mesh, make_train_step(cfg, mesh), batch_of(jax.random.key(0))


def fresh(case):
    cfg, mesh, _, _ = case
    return init_train_state(cfg, mesh, jax.random.key(7))


def host(tree):
    return jax.tree.map(lambda x: np.array(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x), tree)


@pytest.mark.slow
def test_one_step_is_adamw_by_hand(case):
    cfg, _, step, batch = case
    state = fresh(case)
    before = host(state)
    grads, loss, stats, *_ = jax.jit(lambda p, r: accumulate(cfg, p, r, batch))(state.params, state.router_state)
    after, metrics = step(state, batch)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert int(metrics["tokens"]) == int(jnp.sum(batch["loss_weights"] > 0)) and int(metrics["skipped"]) == 0
    rate = float(metrics["learning_rate"])
    np.testing.assert_allclose(rate, cfg.optim.learning_rate / cfg.optim.warmup_steps, rtol=1e-6)
    clip = min(1.0, cfg.optim.gradient_clip / norm)
    others = map(jax.tree.leaves, (after.params, grads, decayed(before.params)))
    for (path, old), new, g, mask in zip(jax.tree_util.tree_leaves_with_path(before.params), *others):
        # In the first step Adam's corrected moments are the gradient and its square.
        g = np.asarray(g, np.float64) * clip
        want = old - rate * (g / (np.abs(g) + cfg.optim.eps) + cfg.optim.weight_decay * mask * old)
        settled = np.abs(g) > 1e-5                                     # near zero the sign is decided by rounding
        np.testing.assert_allclose(np.asarray(new)[settled], want[settled], atol=2e-5, err_msg=path_name(path))
    solved = jax.tree.map(lambda bias, s: balancers.update(cfg.model.moe, s, bias), before.router_state, stats)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after.router_state, solved)


def test_metrics_are_the_contracts(case):
    cfg, _, step, batch = case
    _, metrics = step(fresh(case), batch)
    scalars = {"loss", "grad_norm", "param_norm", "update_norm", "learning_rate", "tokens", "skipped"}
    assert set(metrics) == scalars | {"max_violation", "dead_experts", "load_entropy", "expert_load"}
    assert all(metrics[name].shape == () for name in scalars)
    layers = cfg.model.num_moe_layers
    assert metrics["max_violation"].shape == (layers,) and metrics["expert_load"].shape == (layers, cfg.model.moe.num_experts)
    valid = int(jnp.sum(batch["segment_ids"] > 0))
    assert (np.sum(metrics["expert_load"], axis=1) == valid * cfg.model.moe.experts_per_token).all()


def test_non_finite_step_changes_only_the_count(case):
    _, _, step, batch = case
    state = fresh(case)
    before = host(state)
    after, metrics = step(state, batch | dict(loss_weights=batch["loss_weights"].at[0, 0].set(jnp.inf)))
    assert int(metrics["skipped"]) == 1 and float(metrics["update_norm"]) == 0
    jax.tree.map(np.testing.assert_array_equal, host(after.replace(step=after.step - 1)), before)
    again, metrics = step(after, batch)
    assert int(metrics["skipped"]) == 0 and int(again.step) == 2


def test_a_batch_without_trained_tokens_is_finite(case):
    _, _, step, batch = case
    _, metrics = step(fresh(case), batch | dict(loss_weights=jnp.zeros_like(batch["loss_weights"]), segment_ids=jnp.zeros_like(batch["segment_ids"])))
    assert float(metrics["loss"]) == 0 and int(metrics["skipped"]) == 0 and int(metrics["tokens"]) == 0


def test_loss_falls(case):
    _, _, step, batch = case
    state = fresh(case)
    losses = []
    for _ in range(15):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.exhaustive
def test_no_balancer_leaves_the_bias(case):
    cfg, mesh, _, batch = case
    cfg = dataclasses.replace(cfg, model=tiny_model(moe=dataclasses.replace(tiny_model().moe, balancer="none")))
    state, metrics = make_train_step(cfg, mesh)(init_train_state(cfg, mesh, jax.random.key(7)), batch)
    assert not any(np.any(x) for x in jax.tree.leaves(state.router_state)) and np.any(metrics["max_violation"])


def two_layers(balancer, **changes):
    """Attention only, the second layer with experts: little to compile."""
    model = tiny_model(num_layers=2, mla_every=1)
    model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, balancer=balancer, **changes))
    return dataclasses.replace(tiny_train(), model=model)


@functools.partial(jax.jit, static_argnums=0)
def accumulated(cfg, variables, batch):
    return accumulate(cfg, variables["params"], variables["router_state"], batch)


@pytest.mark.slow
def test_the_balance_loss_enters_the_objective_and_not_the_loss(key):
    cfg, batch = two_layers("auxiliary_loss", balance_loss=0.5), batch_of(key)
    variables = longmoe.init_variables(cfg.model, key)
    got, plain = accumulated(cfg, variables, batch), accumulated(two_layers("none"), variables, batch)
    assert plain.balance_loss is None and got.balance_loss > 0.9
    np.testing.assert_allclose(got.nll, plain.nll, rtol=1e-6)

    @jax.jit
    @jax.grad
    def alone(params):
        output = longmoe.LongMoE(cfg.model).apply(variables | {"params": params}, batch["tokens"], batch["segment_ids"])
        return output.balance_loss / jnp.sum(batch["segment_ids"] > 0)

    term = alone(variables["params"])
    jax.tree.map(lambda a, b, t: np.testing.assert_allclose(a, b + 0.5 * t, atol=2e-6), got.grads, plain.grads, term)
    assert np.any(term["layer_01"]["moe"]["router"]["kernel"])
    cut = accumulated(dataclasses.replace(cfg, accumulation_steps=4), variables, batch)
    np.testing.assert_allclose(cut.balance_loss, got.balance_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), cut.grads, got.grads)


@pytest.mark.parametrize("balancer", ["sign", "load_ema"])
def test_a_skipped_step_leaves_the_bias(key, balancer, case):
    cfg = two_layers(balancer)
    state = init_train_state(cfg, case[1], key)
    load = jnp.arange(cfg.model.moe.num_experts, dtype=jnp.int32)
    stats = jax.tree.map(lambda _: balancers.Loads(load, jnp.sum(load)), state.router_state)
    apply = jax.jit(lambda state, grads: apply_updates(cfg, state, Accumulated(grads, jnp.zeros(()), stats, None, None)))
    grads = jax.tree.map(jnp.ones_like, state.params)
    good, _ = apply(state, grads)
    bad, metrics = apply(state, grads | {"lm_head": grads["lm_head"].at[0, 0].set(jnp.nan)})
    bias = lambda state: np.asarray(jax.tree.leaves(state.router_state)[0])
    assert int(metrics["skipped"]) == 1 and not np.any(bias(bad)) and bias(good)[0] > 0 > bias(good)[-1]


def test_refuses_bad_batches(case):
    _, _, step, batch = case
    with pytest.raises(ValueError, match="wanted also .'targets'"):
        step(fresh(case), {name: x for name, x in batch.items() if name != "targets"})
    with pytest.raises(ValueError, match="one shape"):
        step(fresh(case), batch | dict(targets=batch["targets"][:, :-1]))


def test_learning_rate():
    cfg = dataclasses.replace(tiny_train(), steps=100, optim=OptimConfig(learning_rate=1.0, final_learning_rate=0.1, warmup_steps=10))
    rate = np.array([learning_rate(cfg, step) for step in range(101)])
    np.testing.assert_allclose(rate[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert (np.diff(rate[10:]) <= 1e-7).all() and rate[100] == pytest.approx(0.1) and rate[55] == pytest.approx(0.55, abs=0.01)


def test_muon_takes_matrices_and_makes_them_orthogonal(key):
    params = jax.eval_shape(longmoe.LongMoE(longmoe.presets.kimi_k3().model).init, key, jax.ShapeDtypeStruct((1, 4), jnp.int32))["params"]
    labels = {path_name(path): label for path, label in jax.tree_util.tree_leaves_with_path(optimizer_labels(OptimConfig(), params))}
    assert set(labels.values()) == {"muon", "adamw"} and set(jax.tree.leaves(optimizer_labels(OptimConfig(optimizer="adamw"), params))) == {"adamw"}
    for name, label in labels.items():
        vector = re.search(r"norm|residual|a_log|dt_bias|conv|embedding|lm_head|router|kda/b_proj", name)
        assert (label == "adamw") == bool(vector), name
    few = {"layers_04_12": {"step_0": {"moe": {"experts_gate_up": jax.random.normal(key, (2, 3, 8, 2, 5))}}}, "embedding": jnp.ones((4, 8))}
    optim = OptimConfig(gradient_clip=None, weight_decay=0.0, muon_rms=0.5)
    tx = make_optimizer(optim, tiny_model())
    update = tx.update(few, tx.init(few), few)[0]["layers_04_12"]["step_0"]["moe"]["experts_gate_up"] / (0.5 * 8 ** 0.5)
    for repeat, expert, half in np.ndindex(2, 3, 2):
        singular = np.linalg.svd(update[repeat, expert, :, half], compute_uv=False)
        assert (singular > 0.6).all() and (singular < 1.3).all()       # what five Newton-Schulz steps reach


def test_decay_leaves_vectors_alone():
    for preset in ("nano", "kimi_linear_48b"):
        shapes = jax.eval_shape(longmoe.LongMoE(getattr(longmoe.presets, preset)().model).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 4), jnp.int32))
        table = {path_name(path): (leaf, shape) for (path, leaf), shape in
                 zip(jax.tree_util.tree_leaves_with_path(decayed(shapes["params"])), jax.tree.leaves(shapes["params"]))}
        for name, (mask, shape) in table.items():
            stacked = name.startswith("layers_")
            if len(shape.shape) - stacked < 2:
                assert not mask, name
            assert mask == (not re.search("norm|residual|a_log|dt_bias|conv|embedding", name)), name


def test_rows_that_do_not_divide_over_the_mesh_are_refused():
    cfg = tiny_train(accumulation_steps=2)
    mesh = make_mesh(cfg.mesh, jax.devices()[:8])
    with pytest.raises(ValueError, match=r"got 8 rows in 2 micro-batches .* multiple of 16"):
        jax.eval_shape(make_train_step(cfg, mesh), abstract_train_state(cfg, mesh), batch_of(jax.random.key(0)))
