"""The train state: everything that a step reads and writes, and how it lies on a mesh."""
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from longmoe.configs import TrainConfig
from longmoe.model.lm import RUN_ONCE, LongMoE, random_numbers_by_kernel
from longmoe.parallel.rules import param_shardings, path_name
from longmoe.shapes import Array
from longmoe.train.optim import make_optimizer


@struct.dataclass
class TrainState:
    """What a checkpoint holds, beside the data's position and the config."""
    step: Array
    """int32: steps taken, skipped ones included."""
    params: Any
    router_state: Any
    """expert_bias of each MoE layer: what the next forward uses."""
    opt_state: Any
    rng: Array
    """Key of the run; a step uses fold_in(rng, step)."""


def _init(cfg: TrainConfig, key: Array) -> TrainState:
    init_key, run_key = jax.random.split(key)
    # Only the parameters are wanted of this pass: lowering kernels for it would take longer than all the rest.
    variables = LongMoE(dataclasses.replace(cfg.model, implementation="xla")).init(init_key, jnp.zeros((1, 8), jnp.int32))
    params = variables["params"]
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, router_state=variables.get("router_state", {}),
                      opt_state=make_optimizer(cfg.optim, cfg.model).init(params), rng=run_key)


def abstract_train_state(cfg: TrainConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the train state, without any memory: for lowering, planning and restoring."""
    shapes = jax.eval_shape(lambda key: _init(cfg, key), jax.random.key(0))
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, state_shardings(mesh, shapes))


def state_shardings(mesh: Mesh, state: TrainState) -> TrainState:
    """A sharding for each leaf: parameters by their rules, moments like their parameters, the rest on every device."""
    params = param_shardings(mesh, state.params)
    by_path = {path_name(path): (sharding, leaf.shape) for (path, sharding), leaf in
               zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(state.params))}
    everywhere = NamedSharding(mesh, PartitionSpec())

    def moment(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        # A moment's path ends in its parameter's path, whatever the optimizer wraps around it.
        names = path_name(path).split("/")
        for start in range(len(names)):
            sharding, shape = by_path.get("/".join(names[start:]), (None, None))
            if sharding is not None and shape == leaf.shape:
                return sharding
        return everywhere

    replicated = lambda tree: jax.tree.map(lambda _: everywhere, tree)
    return TrainState(step=everywhere, params=params, router_state=replicated(state.router_state),
                      opt_state=jax.tree_util.tree_map_with_path(moment, state.opt_state), rng=everywhere)


def init_train_state(cfg: TrainConfig, mesh: Mesh, key: Array) -> TrainState:
    """A fresh state on `mesh`, made in place: no device ever holds what is not its own."""
    with random_numbers_by_kernel(mesh.size == 1):
        return _init_on(cfg, mesh, key)(cfg, key)


def lowered_init(cfg: TrainConfig, mesh: Mesh, key: Array) -> jax.stages.Lowered:
    """The program (key) -> state of `init_train_state`. Lowered by itself, it may be compiled beside another one."""
    with random_numbers_by_kernel(mesh.size == 1):
        return _init_on(cfg, mesh, key).lower(cfg, key)


def _init_on(cfg: TrainConfig, mesh: Mesh, key: Array) -> Any:
    """`_init`, jitted for `mesh`."""
    shapes = jax.eval_shape(lambda key: _init(cfg, key), key)
    return jax.jit(_init, static_argnums=0, out_shardings=state_shardings(mesh, shapes), compiler_options=RUN_ONCE)
