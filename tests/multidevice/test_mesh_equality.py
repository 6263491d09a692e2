"""Eight simulated devices give what one gives; parameters lie where their rules say."""
import dataclasses
import re

import jax
import numpy as np
import pytest
from tiny_config import batch_of, tiny_model, tiny_train

import longmoe
from longmoe.configs import MeshConfig
from longmoe.parallel.mesh import make_mesh
from longmoe.parallel.rules import RULES, path_name, spec_of
from longmoe.train.state import abstract_train_state, init_train_state
from longmoe.train.step import make_train_step

WIDE = dict(dense_dim=64)
MESHES = {"fsdp": MeshConfig(fsdp=8), "expert": MeshConfig(fsdp=1, expert=8), "mixed": MeshConfig(data=2, fsdp=2, expert=2),
          "tensor": MeshConfig(fsdp=2, expert=2, tensor=2), "context": MeshConfig(fsdp=2, expert=2, context=2)}


def two_steps(cfg, mesh, batch):
    state = init_train_state(cfg, mesh, jax.random.key(1))
    step = make_train_step(cfg, mesh)
    losses = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(jax.device_get(metrics))
    return state, losses


@pytest.fixture(scope="module")
def single():
    cfg, batch = tiny_train(**WIDE), batch_of(jax.random.key(2))
    # Low enough that it clips heads: the largest logits and the clip are compared too.
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, qk_clip=0.1))
    return cfg, batch, two_steps(cfg, make_mesh(MeshConfig(), jax.devices()[:1]), batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_eight_devices_equal_one(single, name):
    cfg, batch, (want_state, want) = single
    state, got = two_steps(dataclasses.replace(cfg, mesh=MESHES[name]), make_mesh(MESHES[name]), batch)
    for a, b in zip(got, want):
        for metric in ("loss", "grad_norm", "param_norm", "update_norm", "learning_rate"):
            np.testing.assert_allclose(a[metric], b[metric], rtol=2e-5, err_msg=metric)
        np.testing.assert_array_equal(a["expert_load"], b["expert_load"])
        np.testing.assert_allclose(a["max_logit"], b["max_logit"], rtol=1e-4)
    assert (want[0]["max_logit"] > 0.1).any()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), state.router_state, want_state.router_state)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(abstract_train_state(cfg, make_mesh(MESHES[name])))):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


def test_every_parameter_has_one_rule_and_every_rule_is_used():
    names = set()
    for preset in ("nano", "kimi_linear_48b"):
        model = getattr(longmoe.presets, preset)().model
        shapes = jax.eval_shape(longmoe.LongMoE(model).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 4), np.int32))
        names |= {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes["params"])}
    for name in names:
        spec_of(name)
    unused = [pattern for pattern, _ in RULES if not any(re.fullmatch(pattern, name) for name in names)]
    assert not unused
    with pytest.raises(ValueError, match="layer_00/kda/novelty.*0 sharding rules"):
        spec_of("layer_00/kda/novelty")


def test_moments_lie_with_their_parameters():
    cfg, mesh = tiny_train(**WIDE), make_mesh(MESHES["mixed"])
    state = abstract_train_state(cfg, mesh)
    sharded = lambda tree: sum(not x.sharding.is_fully_replicated for x in jax.tree.leaves(tree))
    assert sharded(state.opt_state) == 2 * sharded(state.params) > 0


def test_refusals():
    with pytest.raises(ValueError, match="wanted 8"):
        make_mesh(MeshConfig(data=3, fsdp=1))
    with pytest.raises(ValueError, match="-1 on at most one"):
        MeshConfig(data=-1, fsdp=-1)
    cfg = tiny_train(width=36)
    with pytest.raises(ValueError, match=r"dimension \d is 36, wanted a multiple of 8"):
        abstract_train_state(cfg, make_mesh(MeshConfig(fsdp=8)))
    cfg = tiny_train(moe=dataclasses.replace(tiny_model().moe, num_experts=6))
    with pytest.raises(ValueError, match="experts_down.*is 6, wanted a multiple of 8"):
        abstract_train_state(cfg, make_mesh(MeshConfig(fsdp=1, expert=8)))
