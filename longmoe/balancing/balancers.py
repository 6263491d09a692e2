"""The balancers behind MoEConfig.balancer: what the router counts, and how a step's counts change the bias.

    quantile         the bias with which each expert would have had its fair share of the step's tokens (longmoe.balancing.quantile)
    sign             a fixed amount up for an expert below the mean load, down for one above (DeepSeek-V3 report, section 2.1.2)
    load_ema         a moving average of load ranks, busiest lowest (see `ranked_bias`)
    auxiliary_loss   the bias stays; the objective carries longmoe.balancing.auxiliary.balance_loss
    none             the bias stays

All of them read integer sums over the whole step and write `expert_bias`, the one state: what the next forward pass adds to the scores.
"""
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


@functools.partial(jax.jit, static_argnames=("moe", "top_k"))
def route(moe: MoEConfig, scores: Float[Array, "B T E"], bias: Float[Array, "E"], valid: Bool[Array, "B T"],
          top_k: quantile.TopK = jax.lax.top_k) -> tuple[Int[Array, "B T K"], Statistics]:
    """Ids of each token's experts_per_token best experts by scores + bias, best first, and additive integer sums over the valid tokens."""
    flat = scores.reshape(-1, scores.shape[-1])
    selection = quantile.select(flat, bias, moe.experts_per_token, top_k=top_k)
    ids, valid = selection.expert_ids, valid.reshape(-1)
    if moe.balancer == "quantile":
        sums: Statistics = quantile.statistics_from_selection(flat, bias, selection, valid)
    else:
        slots = jnp.where(valid[:, None], ids, moe.num_experts)
        sums = Loads(jnp.zeros(moe.num_experts, jnp.int32).at[slots].add(1, mode="drop"), jnp.sum(valid, dtype=jnp.int32))
    return ids.reshape(*scores.shape[:-1], -1), sums


def update(moe: MoEConfig, statistics: Statistics, bias: Float[Array, "*layers E"]) -> Float[Array, "*layers E"]:
    """The bias that the next step uses, from the whole step's statistics and the bias that they were taken under."""
    bias = jax.lax.stop_gradient(bias)
    match moe.balancer:
        case "quantile":
            return _average(bias, quantile.solve(statistics, bias, moe.experts_per_token), 0.0 if moe.bias_ema is None else moe.bias_ema)
        case "sign":
            return bias + moe.bias_rate * load_sign(statistics.load)
        case "load_ema":
            new = _average(bias, ranked_bias(statistics.load, moe.load_bias), 0.9 if moe.bias_ema is None else moe.bias_ema)
            return jnp.where(statistics.tokens[..., None] > 0, new, bias)
        case _:
            return bias


def load_sign(load: Int[Array, "*layers E"]) -> Float[Array, "*layers E"]:
    """1 for an expert below the mean load, -1 for one above, 0 for one at it; float32. Zeros where nothing was routed."""
    load = load.astype(jnp.float32)
    return jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


def ranked_bias(load: Int[Array, "*layers E"], distance: float) -> Float[Array, "*layers E"]:
    """Each expert's rank among the loads, spread over `distance`: distance / 2 for the idlest, -distance / 2 for the busiest, the mean of
    their places for equal loads. float32, mean zero.

    A common description of load balancing keeps a moving average of loads, maps it to its quantiles and adds those to the scores. Taken at
    its word a busy expert gets busier, so the sign is turned here; and the average is taken of the ranks instead of the loads, so that the
    bias is the only state. That also lets it settle: an average of ranks holds any value, the ranks of an average only E fixed ones.
    """
    mine, others = load[..., :, None], load[..., None, :]
    ahead = jnp.sum(others > mine, axis=-1) - jnp.sum(others < mine, axis=-1)
    return ahead.astype(jnp.float32) * (distance / 2 / max(1, load.shape[-1] - 1))


def _average(old: Array, new: Array, share: float) -> Array:
    return share * old + (1 - share) * new if share else new
