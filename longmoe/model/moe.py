"""Stable LatentMoE: routed experts in a latent space, RMSNorm after aggregation, shared experts at full width (Kimi K3 report)."""
import flax.linen as nn
import jax
import jax.numpy as jnp

import pallas_kernels
from longmoe.balancing import balancers
from longmoe.configs import ModelConfig
from longmoe.model.layers import FeedForward, RMSNorm, gated_halves, linear
from longmoe.model.router import Router
from longmoe.parallel.experts import over_experts
from longmoe.shapes import Array, Float, Hidden, Int


@jax.custom_vjp
def permute(rows: Float[Array, "N Z"], order: Int[Array, "M"], inverse: Int[Array, "M"]) -> Float[Array, "M Z"]:
    """Row i of the result is rows[order[i] // K], K = M / N copies of each row. Its derivative is a gather and a sum: no scatter in either direction."""
    return rows[order // (order.shape[0] // rows.shape[0])]


def _permute_fwd(rows: Array, order: Array, inverse: Array) -> tuple[Array, tuple[Array, int]]:
    return permute(rows, order, inverse), (inverse, rows.shape[0])


def _permute_bwd(residuals: tuple[Array, int], g: Array) -> tuple[Array, None, None]:
    inverse, count = residuals
    copies = g[inverse].reshape(count, -1, g.shape[-1])
    return jnp.sum(copies, axis=1, dtype=jnp.promote_types(g.dtype, jnp.float32)).astype(g.dtype), None, None


permute.defvjp(_permute_fwd, _permute_bwd)


@jax.custom_vjp
def combine(rows: Float[Array, "M Z"], weights: Float[Array, "N K"], order: Int[Array, "M"], inverse: Int[Array, "M"]) -> Float[Array, "N Z"]:
    """Sum over k of weights[n, k] * rows[inverse[n K + k]] in the weights' dtype, where inverse undoes order. Its derivatives are gathers, and what it keeps
    for them are its arguments."""
    return jnp.sum(weights[..., None] * _copies(rows, inverse, weights), axis=1)


def _copies(rows: Array, inverse: Array, weights: Array) -> Float[Array, "N K Z"]:
    return rows[inverse].reshape(*weights.shape, -1).astype(weights.dtype)


def _combine_bwd(residuals: tuple[Array, Array, Array, Array], g: Array) -> tuple[Array, Array, None, None]:
    rows, weights, order, inverse = residuals
    # Behind the barrier the copies are made again from the rows, not kept in the weights' wider dtype.
    rows, g = jax.lax.optimization_barrier((rows, g))
    dweights = jnp.sum(g[:, None] * _copies(rows, inverse, weights), axis=-1)
    drows = weights.reshape(-1)[order][:, None] * g[order // weights.shape[1]]
    return drows.astype(rows.dtype), dweights.astype(weights.dtype), None, None


combine.defvjp(lambda *arguments: (combine(*arguments), arguments), _combine_bwd)


def apply_experts(config: ModelConfig, rows: Float[Array, "N Z"], expert_ids: Int[Array, "N K"], combine_weights: Float[Array, "N K"],
                  gate_up: Float[Array, "E Z 2 F"], down: Float[Array, "E F Z"]) -> Float[Array, "N Z"]:
    """Sum over a token's experts of combine_weight * expert(row), float32. Ids equal to E contribute nothing."""
    experts, _, _, hidden_dim = gate_up.shape
    slots = expert_ids.reshape(-1)
    positions = jnp.arange(slots.size, dtype=jnp.int32)
    _, order = jax.lax.sort((slots, positions), num_keys=1, is_stable=True)
    inverse = jnp.zeros_like(order).at[order].set(positions, unique_indices=True)
    # By comparing all with all: no additions that meet in one place, and no search, which is a loop of many launches on a GPU.
    group_sizes = jnp.sum(slots[:, None] == jnp.arange(experts, dtype=slots.dtype), axis=0, dtype=jnp.int32)
    sorted_rows = permute(rows, order, inverse)
    hidden = pallas_kernels.grouped_matmul(sorted_rows, gate_up.reshape(experts, -1, 2 * hidden_dim).astype(rows.dtype), group_sizes,
                                           implementation=config.implementation)
    hidden = gated_halves(config, hidden)
    out = pallas_kernels.grouped_matmul(hidden, down.astype(rows.dtype), group_sizes, implementation=config.implementation)
    return combine(out, combine_weights, order, inverse)


class MoE(nn.Module):
    """The mixture-of-experts feed-forward."""
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Hidden, runs: Int[Array, "B T"] | None = None) -> tuple[Hidden, balancers.Statistics, Float[Array, ""] | None]:
        """runs: document of each token, 0 = padding (routed nowhere, counted nowhere). Returns the output, the router's statistics and its balance loss."""
        config, moe = self.config, self.config.moe
        routing, stats = Router(config, name="router")(x, runs)
        latent = x.shape[-1] if moe.latent_dim is None else moe.latent_dim
        init, dtype = nn.initializers.normal(config.init_std), jnp.dtype(config.param_dtype)
        gate_up = self.param("experts_gate_up", init, (moe.num_experts, latent, 2, moe.expert_dim), dtype)
        down = self.param("experts_down", init, (moe.num_experts, moe.expert_dim, latent), dtype)
        z = x if moe.latent_dim is None else linear(config, latent, "latent_down")(x)
        local = lambda *arguments: apply_experts(config, *arguments)
        y = over_experts(local, z, routing.expert_ids, routing.combine_weights, gate_up, down).astype(x.dtype)
        if moe.use_latent_norm:
            y = RMSNorm(config, config.norm_eps, name="latent_norm")(y)
        if moe.latent_dim is not None:
            y = linear(config, x.shape[-1], "latent_up")(y)
        if moe.num_shared_experts:
            y = y + FeedForward(config, moe.num_shared_experts * moe.shared_expert_dim, name="shared")(x)
        return y, stats, routing.balance_loss
