"""Expert parallelism: each device of the expert axis holds some experts and serves every token of its group.

Dropless by gathering: tokens of the group are gathered, each device adds what its own experts contribute, and the sums are scattered back. Runs on
every backend. Parameters are gathered over fsdp only within a device's own experts; a whole stack never exists on one device.
"""
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from longmoe.parallel.mesh import BATCH_AXES, TOKEN_AXES, axis_size, check_divides, is_distributed
from longmoe.shapes import Array, Float, Int

TOKENS = PartitionSpec(BATCH_AXES, "context", None)
GATE_UP = PartitionSpec("expert", "fsdp", None, "tensor")
DOWN = PartitionSpec("expert", "tensor", "fsdp")

LocalExperts = Callable[[Array, Array, Array, Array, Array], Array]
"""(rows [N, Z], expert_ids [N, K] with E for none, combine_weights [N, K], gate_up [E, Z, 2, F], down [E, F, Z]) -> [N, Z]."""


def over_experts(local: LocalExperts, rows: Float[Array, "B T Z"], expert_ids: Int[Array, "B T K"], combine_weights: Float[Array, "B T K"],
                 gate_up: Float[Array, "E Z 2 F"], down: Float[Array, "E F Z"]) -> Float[Array, "B T Z"]:
    """`local` over all tokens and experts; on a mesh of several devices, each device applies it with its own experts.

    Expert ids equal to E mean no expert (padding).
    """
    def flat(rows: Array, ids: Array, weights: Array, gate_up: Array, down: Array) -> Array:
        batch, tokens, _ = rows.shape
        cut = lambda x: x.reshape(batch * tokens, -1)
        return local(cut(rows), cut(ids), cut(weights), gate_up, down).reshape(batch, tokens, -1)

    def sharded(rows: Array, ids: Array, weights: Array, gate_up: Array, down: Array) -> Array:
        rows, ids, weights = (jax.lax.all_gather(x, "expert", axis=0, tiled=True) for x in (rows, ids, weights))
        if axis_size("fsdp") > 1:
            gate_up = jax.lax.all_gather(gate_up, "fsdp", axis=1, tiled=True)
            down = jax.lax.all_gather(down, "fsdp", axis=2, tiled=True)
        experts = gate_up.shape[0]
        ids = ids - jax.lax.axis_index("expert") * experts
        out = flat(rows, jnp.where((ids >= 0) & (ids < experts), ids, experts), weights, gate_up, down)
        out = jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)
        return jax.lax.psum(out, "tensor")

    if not is_distributed():
        return flat(rows, expert_ids, combine_weights, gate_up, down)
    check_divides("num_experts", gate_up.shape[0], "expert")
    check_divides("latent_dim", gate_up.shape[1], "fsdp")
    check_divides("expert_dim", gate_up.shape[3], "tensor")
    # Without varying-axes checks: the grouped matmul's own derivative rule returns weight gradients that vary over the token axes, and they are summed
    # where the weights enter.
    return jax.shard_map(sharded, in_specs=(TOKENS, TOKENS, TOKENS, GATE_UP, DOWN), out_specs=TOKENS, check_vma=False)(
        rows, expert_ids, combine_weights, gate_up, down)


def over_tokens(local: Callable[..., tuple[Any, Any]], *per_token: Array, shared: Array) -> tuple[Any, Any]:
    """local(*per_token, shared) -> (arrays [B, T, ...], sums), each device with its own tokens; the sums are added over all devices.

    per_token: arrays [B, T, ...]; shared: one array that every device sees whole. Nothing of the tokens moves between devices.
    """
    if not is_distributed():
        return local(*per_token, shared)

    def sharded(*arguments: Array) -> tuple[Any, Any]:
        outputs, sums = local(*arguments)
        return outputs, jax.tree.map(lambda x: jax.lax.psum(x, TOKEN_AXES), sums)

    specs = (*(PartitionSpec(BATCH_AXES, "context") for _ in per_token), PartitionSpec())
    out = (PartitionSpec(BATCH_AXES, "context"), PartitionSpec())
    return jax.shard_map(sharded, in_specs=specs, out_specs=out, check_vma=False)(*per_token, shared)
