"""The portable form: all scores at one time, [B, H, T, S]."""
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def masked_softmax(scores: Float[Array, "*n S"], mask: Bool[Array, "*n S"]) -> tuple[Float[Array, "*n S"], Float[Array, "*n 1"]]:
    """(softmax over the last axis where mask holds, its largest score without gradient); a row that nothing is open to gives zeros."""
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    largest = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - largest), 0)
    total = jnp.sum(weights, -1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1), largest


def attention(q: Float[Array, "B T H D"], k: Float[Array, "B S H D"], v: Float[Array, "B S H Dv"], first: Int[Array, "B T"], start: Int[Array, ""],
              scale: float, precision: jax.lax.Precision | None) -> tuple[Float[Array, "B T H Dv"], Float[Array, "H"]]:
    """Sums in float32, or wider operands' dtype."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=wide, precision=precision) * scale
    keys, queries = jnp.arange(k.shape[1]), start + jnp.arange(q.shape[1])
    mask = (keys >= first[..., None]) & (keys <= queries[:, None])
    weights, largest = masked_softmax(scores, mask[:, None])
    o = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v, preferred_element_type=wide, precision=precision)
    return o.astype(v.dtype), jnp.max(largest, axis=(0, 2, 3))
