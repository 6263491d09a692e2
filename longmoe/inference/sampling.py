"""Choosing the next token from logits."""
import dataclasses

import jax
import jax.numpy as jnp

from longmoe.shapes import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int | None = None
    """Keeps the k most likely tokens."""
    top_p: float | None = None
    """Then keeps the fewest most likely tokens whose probability reaches top_p (at least one)."""

    def check(self, key: Array | None) -> None:
        """ValueError for values that no distribution follows from, and for a temperature without a key."""
        if self.temperature < 0:
            raise ValueError(f"temperature: got {self.temperature}, wanted 0 (greedy) or more")
        if self.temperature > 0 and key is None:
            raise ValueError(f"key: got None, wanted a jax.random.key, because temperature={self.temperature} samples; temperature=0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: got {self.top_k}, wanted None or at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, wanted None or a number in (0, 1]")


def sample(logits: Float[Array, "B V"], key: Array | None, sampling: Sampling) -> Int[Array, "B"]:
    """One token a row, int32; temperature 0 needs no key."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        floor = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    if sampling.top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(ordered, axis=-1)
        floor = jnp.min(jnp.where(before < sampling.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
