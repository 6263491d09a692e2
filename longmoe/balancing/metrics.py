"""How even the load is, a layer: for logs only, nothing here drives a bias. `load` counts tokens, [E] or [layers, E]."""
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from longmoe.balancing.quantile import max_violation

__all__ = ["dead_experts", "load_entropy", "max_violation"]


def load_entropy(load: Int[Array, "*layers E"]) -> Float[Array, "*layers"]:
    """Entropy of the load's distribution over experts over its maximum log E, float32: 1 is even or nothing routed, 0 is one expert alone."""
    load = jnp.asarray(load, jnp.float32)
    total, experts = jnp.sum(load, axis=-1), load.shape[-1]
    share = load / jnp.where(total > 0, total, 1)[..., None]
    entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1)), axis=-1)
    return jnp.where(total > 0, entropy / math.log(experts), 1) if experts > 1 else jnp.ones_like(total)


def dead_experts(load: Int[Array, "*layers E"]) -> Int[Array, "*layers"]:
    """Experts that no token chose, int32. 0 where nothing was routed."""
    load = jnp.asarray(load)
    return jnp.where(jnp.any(load > 0, axis=-1), jnp.sum(load == 0, axis=-1, dtype=jnp.int32), 0)
