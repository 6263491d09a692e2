"""The balancers behind MoEConfig.balancer: what the router counts, and how a step's counts change the bias."""
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from longmoe.balancing import quantile
from longmoe.configs import MoEConfig


class Loads(NamedTuple):
    """Counts of a balancer that needs no more than loads, int32."""
    load: Int[Array, "*layers E"]
    tokens: Int[Array, "*layers"]


Statistics = quantile.Statistics | Loads


@functools.partial(jax.jit, static_argnums=0)
def route(moe: MoEConfig, scores: Float[Array, "B T E"], bias: Float[Array, "E"],
          valid: Bool[Array, "B T"]) -> tuple[Int[Array, "B T K"], Statistics]:
    """Ids of each token's experts_per_token best experts by scores + bias, best first, and additive integer sums over the valid tokens."""
    flat = scores.reshape(-1, scores.shape[-1])
    selection = quantile.select(flat, bias, moe.experts_per_token)
    ids, valid = selection.expert_ids, valid.reshape(-1)
    if moe.balancer == "quantile":
        sums: Statistics = quantile.statistics_from_selection(flat, bias, selection, valid)
    else:
        slots = jnp.where(valid[:, None], ids, moe.num_experts)
        sums = Loads(jnp.zeros(moe.num_experts, jnp.int32).at[slots].add(1, mode="drop"), jnp.sum(valid, dtype=jnp.int32))
    return ids.reshape(*scores.shape[:-1], -1), sums


def update(moe: MoEConfig, statistics: Statistics, bias: Float[Array, "*layers E"]) -> Float[Array, "*layers E"]:
    """The bias that the next step uses, from the whole step's statistics and the bias that they were taken under."""
    if moe.balancer == "quantile":
        solved = quantile.solve(statistics, bias, moe.experts_per_token)
        return moe.bias_ema * jax.lax.stop_gradient(bias) + (1 - moe.bias_ema) * solved if moe.bias_ema else solved
    return jax.lax.stop_gradient(bias)
