"""What a training step sends along the axis context, read from the compiled program: nothing that grows with T but the latents."""
import re

import jax
import numpy as np
import pytest
from tiny_config import batch_of, tiny_train

from longmoe.configs import MeshConfig
from longmoe.parallel.mesh import make_mesh
from longmoe.train.state import init_train_state
from longmoe.train.step import make_train_step

ROWS, TOKENS, RANKS = 8, 40, 8
CFG = tiny_train(num_layers=4, dense_layers=0, dense_dim=64)            # one scan of two super-blocks, KDA and MLA


def first_step(mesh, batch):
    """(metrics of one step, text of the compiled program)."""
    state = init_train_state(CFG, mesh, jax.random.key(1))
    step = make_train_step(CFG, mesh).lower(state, batch).compile()
    return step(state, jax.device_put(batch, step.input_shardings[0][1]))[1], step.as_text()


@pytest.mark.exhaustive
def test_only_states_halos_and_latents_move():
    batch = batch_of(jax.random.key(0), ROWS, TOKENS)
    metrics, program = first_step(make_mesh(MeshConfig(fsdp=1, context=RANKS)), batch)
    moved = {"all-gather": set(), "all-to-all": set(), "collective-permute": set()}
    for shapes, operation in re.findall(rf"= (.*?) ({'|'.join(moved)})(?:-start)?\(", program):
        moved[operation] |= set(re.findall(r"\w+\[[\d,]*\]", shapes))
    kda, mla = CFG.model.kda, CFG.model.mla
    maps = f"f32[{RANKS},{ROWS},{kda.num_heads},{kda.head_dim},{2 * kda.head_dim}]"
    latents, documents = f"f32[{ROWS},{TOKENS},{mla.kv_lora_rank + mla.rope_dim}]", f"s32[{ROWS},{TOKENS}]"
    # A gather over the expert axis of one device gives back what the device has.
    own = {shape for shape in moved["all-gather"] if re.match(rf"\w+\[{ROWS},{TOKENS // RANKS},", shape)}
    assert moved["all-gather"] - own == {maps, f"s32[{RANKS},2,{ROWS}]", latents, documents}
    assert not moved["all-to-all"]
    halo, channels = kda.conv_width - 1, 3 * kda.num_heads * kda.head_dim
    assert moved["collective-permute"] == {f"f32[{ROWS},{halo},{channels}]", f"s32[{ROWS},{halo}]", f"s32[{ROWS},1]"}

    want, _ = first_step(make_mesh(MeshConfig(), jax.devices()[:1]), batch)
    np.testing.assert_allclose(metrics["loss"], want["loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], want["grad_norm"], rtol=1e-5)
