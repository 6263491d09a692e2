"""The optimizers' table over every preset and layout, Per-Head Muon against Muon on each block, and the schedules."""
import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_config import tiny_model, tiny_train

import longmoe
from longmoe.configs import MeshConfig, OptimConfig
from longmoe.parallel.mesh import make_mesh
from longmoe.parallel.rules import MATRICES, RULES, path_name
from longmoe.presets import PRESETS
from longmoe.train.optim import decayed, learning_rate, make_optimizer, optimizer_labels
from longmoe.train.state import abstract_train_state


def layouts(preset):
    """The preset's parameters as shapes, {"stacked", "per layer"}."""
    model = PRESETS[preset]().model
    stacked = jax.eval_shape(longmoe.LongMoE(model).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))["params"]
    return {"stacked": stacked, "per layer": jax.eval_shape(lambda p: longmoe.unstack_layers(model, {"params": p}), stacked)["params"]}


@pytest.mark.parametrize("preset", PRESETS)
def test_one_label_and_one_sharding_rule_a_parameter(preset):
    found = layouts(preset)
    assert len(jax.tree.leaves(found["stacked"])) < len(jax.tree.leaves(found["per layer"])) or preset == "nano"
    kinds = {}
    for layout, params in found.items():
        labels = optimizer_labels(OptimConfig(), params)
        chex.assert_trees_all_equal_structs(labels, params)
        for (path, label), mask in zip(jax.tree_util.tree_leaves_with_path(labels), jax.tree.leaves(decayed(params))):
            name = path_name(path)
            rules = [pattern for pattern, _ in RULES if re.fullmatch(pattern, name)]
            matrices = [pattern for pattern, _ in MATRICES if re.fullmatch(pattern, name)]
            assert len(rules) == 1 and len(matrices) == (label == "muon"), (layout, name, rules, matrices)
            # The same parameter has the same label and decay in either layout.
            kind = re.sub(r"^layer_\d+/|^layers_\d+_\d+/step_\d+/", "", name)
            assert kinds.setdefault(kind, (label, mask)) == (label, mask), name
    vectors = {kind for kind, (label, _) in kinds.items() if label == "adamw"}
    assert all(re.search(r"norm|residual|a_log|dt_bias|conv|embedding|lm_head|router|kda/b_proj", kind) for kind in vectors)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_moments_are_sharded_like_their_parameters(optimizer):
    """Muon's momentum too, though its matrices are cut out of it by head."""
    cfg = tiny_train(optimizer=optimizer, dense_dim=64)
    state = abstract_train_state(cfg, make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2)))
    params = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        name = path_name(path)
        owner = next((p for p in params if name.endswith("/" + p)), None)
        if owner is not None:
            found[owner] = found.get(owner, 0) + 1
            assert leaf.sharding == params[owner].sharding and leaf.shape == params[owner].shape, name
    labels = {path_name(path): label for path, label in jax.tree_util.tree_leaves_with_path(optimizer_labels(cfg.optim, state.params))}
    assert found == {name: 1 if label == "muon" else 2 for name, label in labels.items()}


OPTIM = OptimConfig(gradient_clip=None, weight_decay=0.0, muon_rms=0.3)
MODEL = tiny_model()
HEADS, RANK, WIDTH = 2, 16, 32


def problem(key, repeats):
    """A few parameters of a layer, with random values, in the layout of a single layer or of `repeats` stacked ones."""
    shapes = {"kda": {"q_proj": {"kernel": (WIDTH, HEADS * 16)}, "o_proj": {"kernel": (HEADS * 16, WIDTH)}},
              "mla": {"q_b_proj": {"kernel": (RANK, HEADS * 12)}, "kv_b_proj": (RANK, HEADS, 16)},
              "moe": {"experts_gate_up": (3, 16, 2, 24), "experts_down": (3, 24, 16)}, "attn_norm": {"scale": (WIDTH,)}}
    lead = () if repeats == 1 else (repeats,)
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    values = [jax.random.normal(k, (*lead, *shape)) for k, shape in zip(jax.random.split(key, len(leaves)), leaves)]
    layer = jax.tree.unflatten(tree, values)
    return {"layer_03": layer} if repeats == 1 else {f"layers_04_{4 + repeats:02d}": {"step_0": layer}}


def blocks(name, x, per_head):
    """[(index, matrix)] of one parameter of a single layer, from the definition."""
    if per_head and name.endswith("q_proj/kernel"):
        return [(np.s_[:, 16 * h:16 * h + 16], x[:, 16 * h:16 * h + 16]) for h in range(HEADS)]
    if per_head and name.endswith("q_b_proj/kernel"):
        return [(np.s_[:, 12 * h:12 * h + 12], x[:, 12 * h:12 * h + 12]) for h in range(HEADS)]
    if name.endswith("kv_b_proj"):
        if per_head:
            return [(np.s_[:, h, part], x[:, h, part]) for h in range(HEADS) for part in (slice(0, 8), slice(8, 16))]
        return [(np.s_[:], x.reshape(RANK, -1))]
    if name.endswith("gate_up"):
        return [(np.s_[e, :, i], x[e, :, i]) for e in range(3) for i in range(2)]
    if name.endswith("down"):
        return [(np.s_[e], x[e]) for e in range(3)]
    return [(np.s_[:], x)]


@jax.jit
def muon_alone(first, second):
    """The second update of optax's Muon for one matrix, at a root mean square of 0.3."""
    tx = optax.contrib.scale_by_muon(beta=OPTIM.muon_momentum)
    _, state = tx.update(first, tx.init(first))
    return tx.update(second, state)[0] * 0.3 * max(first.shape) ** 0.5


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("repeats", [1, 2])
def test_muon_is_muon_on_each_block_apart(key, per_head, repeats):
    tx = make_optimizer(dataclasses.replace(OPTIM, muon_per_head=per_head), MODEL)
    first, second = problem(key, repeats), problem(jax.random.fold_in(key, 1), repeats)

    @jax.jit
    def two(first, second):
        _, state = tx.update(first, tx.init(first), first)
        return tx.update(second, state, first)[0]

    got = two(first, second)
    for (path, update), a, b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(first), jax.tree.leaves(second)):
        name = path_name(path)
        if name.endswith("scale"):
            continue
        for repeat in range(repeats):
            layer = lambda x, repeat=repeat: np.asarray(x if repeats == 1 else x[repeat])
            for (index, early), (_, late) in zip(blocks(name, layer(a), per_head), blocks(name, layer(b), per_head)):
                want = np.asarray(muon_alone(early, late))
                np.testing.assert_allclose(layer(update)[index].reshape(want.shape), want, atol=2e-5, err_msg=f"{name} {index}")
                assert abs(np.sqrt(np.mean(np.square(want))) / 0.3 - 1) < 0.5


def test_per_head_on_eight_devices_is_that_on_one(key):
    """Heads are cut out of tensors that lie over the tensor and fsdp axes."""
    cfg = tiny_train(optimizer="muon", dense_dim=64)
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    state = abstract_train_state(cfg, mesh)
    few = {"layer_00": {"kda": {"q_proj": state.params["layer_00"]["kda"]["q_proj"]}}, "layer_01": {"mla": state.params["layer_01"]["mla"]}}
    grads = jax.tree.map(lambda x: jax.random.normal(key, x.shape), few)
    tx = make_optimizer(cfg.optim, cfg.model)
    update = jax.jit(lambda g: tx.update(g, tx.init(g), g)[0])
    laid_out = jax.device_put(grads, jax.tree.map(lambda x: x.sharding, few))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), update(laid_out), update(jax.device_put(grads, jax.devices()[0])))


def rates(steps=100, **changes):
    optim = OptimConfig(learning_rate=1.0, final_learning_rate=0.1, warmup_steps=10, **changes)
    cfg = dataclasses.replace(tiny_train(), steps=steps, optim=optim)
    return np.asarray(jax.vmap(lambda step: learning_rate(cfg, step))(jnp.arange(steps + 1)))


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_schedules_warm_up_and_never_rise_after(schedule):
    rate = rates(schedule=schedule)
    np.testing.assert_allclose(rate[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert (np.diff(rate[10:]) <= 1e-7).all()
    assert rate[100] == pytest.approx({"cosine": 0.1, "wsd": 0.1, "constant": 1.0}[schedule])
    assert rate[55] == pytest.approx({"cosine": 0.55, "wsd": 1.0, "constant": 1.0}[schedule], abs=0.01)


def test_wsd_falls_over_its_share():
    rate = rates(schedule="wsd", decay_share=0.4)
    np.testing.assert_allclose(rate[10:61], 1, rtol=1e-6)
    np.testing.assert_allclose(rate[60:], np.linspace(1, 0.1, 41), rtol=1e-5)


def test_gradient_clip_is_of_the_global_norm():
    grads = {"embedding": jnp.full((4, 3), 2.0), "final_norm": {"scale": jnp.full(4, -1.0)}}
    updates = {}
    for clip in (1.0, None):
        # A large eps makes Adam's first update proportional to the gradient.
        tx = make_optimizer(OptimConfig(gradient_clip=clip, weight_decay=0.0, eps=1e6), MODEL)
        updates[clip] = tx.update(grads, tx.init(grads), grads)[0]
    norm = np.sqrt(12 * 4 + 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a * norm, b, rtol=1e-5), updates[1.0], updates[None])


@pytest.mark.parametrize("field,value,message", [
    ("decay_share", 0.0, r"decay_share: got 0.0, wanted a number in \(0, 1\]"), ("qk_clip", -1.0, "qk_clip: got -1.0"), ("gradient_clip", 0.0, "got 0.0")])
def test_refuses(field, value, message):
    with pytest.raises(ValueError, match=message):
        OptimConfig(**{field: value})
