"""The balance loss: the term that Quantile Balancing replaces, as a baseline (Switch Transformer eq. 4; DeepSeek-V3 report eq. 17-20)."""
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def balance_loss(scores: Float[Array, "B T E"], expert_ids: Int[Array, "B T K"], valid: Bool[Array, "B T"],
                 over: Literal["sequence", "batch"]) -> Float[Array, ""]:
    """Sum over valid tokens of E / K * sum over experts of (share of choices) * (mean normalised score), float32; 1 a token where both are even.

    over: "sequence" takes shares and means within each row, so that sums of parts of a batch equal the whole; "batch" over all rows given.
    The share is a count and carries no gradient; the scores' mean does. Padding counts for nothing, whatever it holds.
    """
    experts, k = scores.shape[-1], expert_ids.shape[-1]
    axes = (1,) if over == "sequence" else (0, 1)
    scores = jnp.where(valid[..., None], scores.astype(jnp.promote_types(scores.dtype, jnp.float32)), 0)
    normalised = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
    chosen = (expert_ids[..., None] == jnp.arange(experts)) & valid[..., None, None]           # [B, T, K, E], fused into the sum
    load = jax.lax.stop_gradient(jnp.sum(chosen, axis=(*axes, 2)).astype(scores.dtype))
    count = jnp.sum(valid, axis=axes).astype(scores.dtype)[..., None]
    return jnp.sum(experts / k * load * jnp.sum(normalised, axis=axes) / jnp.maximum(count, 1))
