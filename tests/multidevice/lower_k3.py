"""Lowers the Kimi K3 train step for 8 simulated devices and prints what it took, as JSON. A process of its own, so that its memory is its own."""
import dataclasses
import json
import resource
import sys
import time

import jax
import jax.numpy as jnp

import longmoe
from longmoe.parallel.rules import path_name
from longmoe.train.state import abstract_train_state
from longmoe.train.step import KEYS, ROWS, make_train_step


def lowered(num_layers: int, tokens: int):
    """(lowered step, abstract state) of Kimi K3 cut to num_layers, for rows of `tokens`, 8 rows."""
    cfg = longmoe.presets.kimi_k3()
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, num_layers=num_layers),
                              data=dataclasses.replace(cfg.data, sequence_length=tokens, batch_size=8))
    mesh = longmoe.make_mesh(cfg.mesh)
    state = abstract_train_state(cfg, mesh)
    rows = jax.sharding.NamedSharding(mesh, ROWS)
    batch = {name: jax.ShapeDtypeStruct((8, tokens), jnp.float32 if name == "loss_weights" else jnp.int32, sharding=rows) for name in KEYS}
    return make_train_step(cfg, mesh).lower(state, batch), state


if __name__ == "__main__":
    began = time.monotonic()
    step, state = lowered(num_layers=93, tokens=4096)
    seconds = time.monotonic() - began
    experts = {path_name(path): list(leaf.sharding.spec) for path, leaf in jax.tree_util.tree_leaves_with_path(state)
               if "experts_" in path_name(path)}
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    json.dump(dict(seconds=seconds, cpu_seconds=time.process_time(), max_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                   devices=len(jax.devices()), parameters=parameters, experts=experts, hlo_bytes=len(step.as_text())), sys.stdout)
