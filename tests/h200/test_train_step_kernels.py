"""The training step of `small` with the Hopper kernels, lowered for an H200 on a machine that has none."""
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from compile_for_h200 import h200_devices
from jax.sharding import NamedSharding, PartitionSpec

import longmoe
from longmoe.presets import PRESETS
from longmoe.train.state import abstract_train_state, lowered_init
from longmoe.train.step import KEYS, ROWS, make_train_step

pytestmark = pytest.mark.h200
KERNELS = 45
"""Of KDA: prepare, transitions, recur and reverse, each in a few forms of which some outputs are unused, and gradients; attention's three; of the grouped
matmul one for each shape, direction and tiles; of the short convolution, of three shapes of gated activations and of top-k both directions, each again where
layers are computed again."""


def test_layers_share_their_kernels(as_on_hopper):
    """The step has 17 layers and 300 calls of kernels: a model that lowered each call's kernel again took 100 s for it."""
    cfg = PRESETS["small"]()
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, batch_size=2, sequence_length=8192))
    mesh = longmoe.make_mesh(cfg.mesh, h200_devices(1))
    batch = {name: jax.ShapeDtypeStruct((2, 8192), jnp.float32 if name == "loss_weights" else jnp.int32, sharding=NamedSharding(mesh, ROWS)) for name in KEYS}
    program = make_train_step(cfg, mesh).lower(abstract_train_state(cfg, mesh), batch).as_text()
    assert 10 < program.count("@mosaic_gpu_v2(") <= KERNELS
    assert "ragged_dot" not in program


@pytest.mark.parametrize("devices", [1, 2])
def test_a_state_is_drawn_by_kernels_on_one_device_alone(devices):
    """Written out, the generator is most of a program that takes a minute to compile. On several devices each would draw the whole of every array."""
    cfg = PRESETS["small"]()
    mesh = longmoe.make_mesh(cfg.mesh, h200_devices(devices))
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    program = lowered_init(cfg, mesh, key).as_text()
    assert ("cu_threefry2x32" in program) == (devices == 1)


@pytest.mark.exhaustive
def test_pieces_are_not_filled_with_zeros_all_at_once():
    """What loops over pieces write begins as copies of one array of zeros. Made by one operation, all of them would be held from the first loop on."""
    cfg = PRESETS["small"]()
    model = dataclasses.replace(
        cfg.model, implementation="xla", num_layers=5, token_chunk=64, vocab_size=128, width=48, dense_dim=64,
        kda=dataclasses.replace(cfg.model.kda, num_heads=2, head_dim=16),
        mla=dataclasses.replace(cfg.model.mla, num_heads=2, q_lora_rank=16, kv_lora_rank=16, nope_dim=8, rope_dim=8, v_dim=8),
        moe=dataclasses.replace(cfg.model.moe, num_experts=8, experts_per_token=2, latent_dim=24, expert_dim=20, shared_expert_dim=20))
    cfg = dataclasses.replace(cfg, model=model, data=dataclasses.replace(cfg.data, batch_size=1, sequence_length=512))
    mesh = longmoe.make_mesh(cfg.mesh, h200_devices(1))
    batch = {name: jax.ShapeDtypeStruct((1, 512), jnp.float32 if name == "loss_weights" else jnp.int32, sharding=NamedSharding(mesh, ROWS)) for name in KEYS}
    program = make_train_step(cfg, mesh).lower(abstract_train_state(cfg, mesh), batch).compile().as_text()
    fills = [results.count("bf16[8,1,64,48]") for results in re.findall(r"= (\(.*?\)) fusion\(", program[program.index("\nENTRY"):])]
    assert max(fills, default=0) < 8
