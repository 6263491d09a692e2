"""Choosing the next token from logits."""
import jax
import jax.numpy as jnp

from longmoe.shapes import Array, Float, Int


def sample(logits: Float[Array, "B V"], key: Array | None, *, temperature: float, top_k: int | None = None,
           top_p: float | None = None) -> Int[Array, "B"]:
    """One token a row, int32. temperature 0 takes the most likely one and needs no key.

    top_k keeps the k most likely tokens; top_p then keeps the fewest most likely ones whose probability reaches top_p (at least one).
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_k is not None:
        floor = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(ordered, axis=-1)
        floor = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def check_sampling(temperature: float, top_k: int | None, top_p: float | None, key: Array | None) -> None:
    """ValueError for values that no distribution follows from."""
    if temperature < 0:
        raise ValueError(f"temperature: got {temperature}, wanted 0 (greedy) or more")
    if temperature > 0 and key is None:
        raise ValueError(f"key: got None, wanted a jax.random.key, because temperature={temperature} samples; temperature=0 is greedy")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: got {top_k}, wanted None or at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: got {top_p}, wanted None or a number in (0, 1]")
