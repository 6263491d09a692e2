"""The balancers behind MoEConfig.balancer: what the router counts, and how a step's counts change the bias."""
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


def select(scores: Float[Array, "B T E"], bias: Float[Array, "E"], k: int) -> tuple[Int[Array, "B T k"], Float[Array, "B T"]]:
    """Ids of the k best experts by scores + bias, best first, and the best biased score that was left out. Without gradient."""
    selection = quantile.select(scores.reshape(-1, scores.shape[-1]), bias, k)
    return selection.expert_ids.reshape(*scores.shape[:-1], k), selection.cutoff.reshape(scores.shape[:-1])


def statistics(moe: MoEConfig, scores: Float[Array, "B T E"], bias: Float[Array, "E"], expert_ids: Int[Array, "B T k"],
               cutoff: Float[Array, "B T"], valid: Bool[Array, "B T"]) -> Statistics:
    """Additive integer sums over the valid tokens of a selection that `select` made from the same scores and bias."""
    ids, valid = expert_ids.reshape(-1, expert_ids.shape[-1]), valid.reshape(-1)
    if moe.balancer == "quantile":
        selection = quantile.Selection(ids, cutoff.reshape(-1))
        return quantile.statistics_from_selection(scores.reshape(-1, scores.shape[-1]), bias, selection, valid)
    slots = jnp.where(valid[:, None], ids, moe.num_experts)
    return Loads(jnp.zeros(moe.num_experts, jnp.int32).at[slots].add(1, mode="drop"), jnp.sum(valid, dtype=jnp.int32))


def update(moe: MoEConfig, statistics: Statistics, bias: Float[Array, "*layers E"]) -> Float[Array, "*layers E"]:
    """The bias that the next step uses, from the whole step's statistics and the bias that they were taken under."""
    if moe.balancer == "quantile":
        return quantile.solve(statistics, bias, moe.experts_per_token)
    return jax.lax.stop_gradient(bias)
