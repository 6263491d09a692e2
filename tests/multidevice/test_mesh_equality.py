"""Eight simulated devices give what one gives; parameters lie where their rules say."""
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_rows import packed_rows
from tiny_config import batch_of, tiny_model, tiny_train

import longmoe
from longmoe.balancing import balancers
from longmoe.configs import MeshConfig
from longmoe.parallel.mesh import make_mesh
from longmoe.parallel.rules import RULES, path_name, spec_of
from longmoe.train.state import abstract_train_state, init_train_state
from longmoe.train.step import make_train_step
from pallas_kernels.testing import rms_ratio

WIDE = dict(dense_dim=64)
MIXED = MeshConfig(data=2, fsdp=2, expert=2)
MESHES = {"data 8": MeshConfig(data=8, fsdp=1), "fsdp 8": MeshConfig(fsdp=8), "expert 4, data 2": MeshConfig(data=2, fsdp=1, expert=4),
          "context 8": MeshConfig(fsdp=1, context=8), "context 4, expert 2": MeshConfig(fsdp=1, expert=2, context=4),
          "tensor 2, fsdp 4": MeshConfig(fsdp=4, tensor=2), "context 2, tensor 2, expert 2": MeshConfig(fsdp=1, expert=2, tensor=2, context=2)}
IN_THE_SUITE = ("context 2, tensor 2, expert 2",)
OWN, SEED = 3, 3
"""Tokens of a rank when eight share out a row: as many as the convolutions look back. The seed's routes are clear (MIN_GAP)."""
MIN_GAP = 1e-4
"""Least distance between the last chosen and the first expert left out: rounding, which differs between meshes, cannot change a route."""


def step_batches():
    """Three batches whose documents begin and end at edges of ranks, span them and leave ranks empty."""
    ids = np.concatenate([packed_rows(OWN), packed_rows(OWN)[::-1]])
    for i in range(3):
        batch = batch_of(jax.random.key(SEED + i), *ids.shape)
        weights = np.where(ids > 0, np.random.default_rng(i).uniform(0.5, 1, ids.shape), 0).astype(np.float32)
        yield batch | dict(segment_ids=np.roll(ids, i, axis=0), loss_weights=np.roll(weights, i, axis=0))


def run_steps(cfg, mesh, batches):
    """(final state, metrics of each step). KDA forgets slowly, since fast decay hides what leaks; the router's scores are spread out."""
    def changed(path, leaf):
        name = path_name(path)
        return leaf - 4 if name.endswith("kda/dt_bias") else leaf * 8 if name.endswith("router/kernel") else leaf

    state = init_train_state(cfg, mesh, jax.random.key(1))
    state = state.replace(params=jax.tree_util.tree_map_with_path(changed, state.params))
    step, metrics = make_train_step(cfg, mesh), []
    for batch in batches:
        state, more = step(state, batch)
        metrics.append(jax.device_get(more))
    return state, metrics


@pytest.fixture(scope="module")
def single():
    """(config, batches, result on one device)."""
    cfg = tiny_train(**WIDE, num_layers=4)
    # The clip is low enough that it clips heads: the largest logits and the clip are compared too. Adam's eps is above the rounding of a gradient, which
    # would otherwise become a step where the gradient is near zero.
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, qk_clip=0.1, eps=1e-6))
    gaps, route, batches = [], balancers.route, list(step_batches())

    def watched(moe, scores, bias, valid, top_k):
        ranked = jnp.sort(scores + bias, axis=-1)
        gap = ranked[..., -moe.experts_per_token] - ranked[..., -moe.experts_per_token - 1]
        jax.debug.callback(lambda gap: gaps.append(float(gap)), jnp.min(jnp.where(valid, gap, 1)))
        return route(moe, scores, bias, valid, top_k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balancers, "route", watched)
        result = run_steps(cfg, make_mesh(MeshConfig(), jax.devices()[:1]), batches)
        jax.effects_barrier()
    assert len(gaps) >= 3 * cfg.model.num_moe_layers and min(gaps) > MIN_GAP, sorted(gaps)[:3]
    return cfg, batches, result


# One with three axes in the suite.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in IN_THE_SUITE else pytest.param(name, marks=pytest.mark.exhaustive) for name in MESHES])
def test_eight_devices_equal_one(single, name):
    cfg, batches, (want_state, want) = single
    state, got = run_steps(dataclasses.replace(cfg, mesh=MESHES[name]), make_mesh(MESHES[name]), batches)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-6)
        for metric in ("grad_norm", "param_norm", "update_norm", "learning_rate"):
            np.testing.assert_allclose(a[metric], b[metric], rtol=1e-5, err_msg=metric)
        np.testing.assert_array_equal(a["expert_load"], b["expert_load"])
        np.testing.assert_allclose(a["max_logit"], b["max_logit"], rtol=1e-5)
    assert (want[0]["max_logit"] > 0.1).any()
    # A score on the edge of a bin of the balancer's histogram moves the bias by up to a bin's share.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state.router_state, want_state.router_state)
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    params, wanted_params = flat(state.params), flat(want_state.params)
    error, largest = rms_ratio(params, wanted_params), np.max(np.abs(params - wanted_params)) / cfg.optim.learning_rate
    print(f"{name}: parameters differ by {error:.1e} RMS, at most {largest:.1e} of the learning rate")
    assert error < 1e-6 and largest < 0.05
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
    cfg, mesh = tiny_train(**WIDE), make_mesh(MIXED)
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
