"""A checkpoint saved on eight devices goes onto one, or onto eight in another shape, value for value."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import AxisType
from tiny_config import tiny_train

import longmoe
from longmoe.configs import CheckpointConfig, MeshConfig
from longmoe.train.checkpoints import Checkpoints
from longmoe.train.state import abstract_train_state, init_train_state

CFG = tiny_train(num_layers=4, dense_layers=0)
MESHES = {"one": (MeshConfig(), 1), "fsdp 8": (MeshConfig(fsdp=8), 8), "fsdp 2, tensor 2, expert 2": (MeshConfig(fsdp=2, tensor=2, expert=2), 8),
          "data 2, expert 4": (MeshConfig(data=2, fsdp=1, expert=4), 8)}


def mesh_of(name):
    config, devices = MESHES[name]
    return longmoe.make_mesh(config, jax.devices()[:devices])


def host(state):
    return jax.tree.map(np.asarray, state.replace(rng=jax.random.key_data(state.rng)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(run folder, the state on the host), saved from 8 devices that share out every parameter. Moments and biases are made different from 0."""
    run = epath.Path(tmp_path_factory.mktemp("run"))
    state = init_train_state(CFG, mesh_of("fsdp 8"), jax.random.key(5))
    state = state.replace(step=state.step + 7, opt_state=jax.tree.map(lambda x: x + jnp.asarray(3, x.dtype), state.opt_state),
                          router_state=jax.tree.map(lambda x: x + 0.25, state.router_state))
    assert sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.params)) > 10
    with Checkpoints(run / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(7, state, {"next": 7}, CFG)
    return run, host(state)


@pytest.mark.parametrize("name", MESHES)
def test_any_mesh_takes_it(saved, name):
    run, want = saved
    mesh = mesh_of(name)
    like = abstract_train_state(CFG, mesh)
    with Checkpoints(run / "checkpoints", CheckpointConfig()) as checkpoints:
        state, data_state = checkpoints.restore(7, like, CFG)
    jax.tree.map(np.testing.assert_array_equal, host(state), want)
    assert data_state == {"next": 7}
    for (path, leaf), wanted in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(like)):
        assert leaf.dtype == wanted.dtype and leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim), path
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            assert leaf.sharding.mesh.axis_types == (AxisType.Auto,) * 5, path
    _, variables = longmoe.load_checkpoint(run, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, variables, {"params": want.params, "router_state": want.router_state})
