"""Milliseconds of one more token behind a context of any length, on a cache that is made at its position outright."""
import time
from typing import Any

import jax
import jax.numpy as jnp

from longmoe.configs import ModelConfig
from longmoe.inference.engine import Decoding, decode
from longmoe.inference.sampling import Sampling
from longmoe.model.cache import KDACache, MLACache
from longmoe.model.lm import LongMoE, init_cache, init_variables

STATE_SCALE = 0.1
"""Standard deviation of the numbers in a made recurrent state."""


def filled_cache(model_config: ModelConfig, capacity: int, length: int, key: jax.Array) -> dict[str, Any]:
    """Caches of one row of `capacity` slots, of which `length` are in use, all numbers drawn at random: normalised latents have unit variance."""
    entries, layout = jax.tree.flatten(jax.eval_shape(lambda: init_cache(model_config, 1, capacity)), is_leaf=lambda x: isinstance(x, KDACache | MLACache))
    draw = lambda key, like: jax.random.normal(key, like.shape, like.dtype)

    def fill(key: jax.Array, entry: KDACache | MLACache) -> KDACache | MLACache:
        if isinstance(entry, MLACache):
            return MLACache(latent=draw(key, entry.latent), length=jnp.full(entry.length.shape, length, jnp.int32))
        conv_key, state_key = jax.random.split(key)
        return KDACache(conv=draw(conv_key, entry.conv), state=STATE_SCALE * draw(state_key, entry.state))

    return jax.tree.unflatten(layout, [fill(part, entry) for part, entry in zip(jax.random.split(key, len(entries)), entries)])


def array_bytes(model_config: ModelConfig, capacity: int) -> int:
    """Bytes of the arrays that hold one sequence of `capacity` tokens, counters left out."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: init_cache(model_config, 1, capacity)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if not jnp.issubdtype(leaf.dtype, jnp.integer))


def decode_milliseconds(model_config: ModelConfig, context: int, *, tokens: int, repeats: int) -> list[float]:
    """Milliseconds a token of one sequence, one figure for each of `repeats` calls of `tokens` tokens, the last of which ends at `context`.

    The weights are a fresh model's: neither they nor what the cache holds change how much is computed.
    """
    model, variables = LongMoE(model_config), init_variables(model_config, jax.random.key(0))
    calls = repeats + 1                                                 # the first one compiles
    cache = jax.jit(filled_cache, static_argnums=(0, 1, 2))(model_config, context, context - calls * tokens, jax.random.key(1))
    state = Decoding(token=jnp.zeros(1, jnp.int32), cache=cache, ended=jnp.zeros(1, bool))
    keys, found = jax.random.split(jax.random.key(2), tokens), []
    for _ in range(calls):
        began = time.perf_counter()
        _, state = jax.block_until_ready(decode(model, Sampling(), None, variables, state, keys))
        found.append(1e3 * (time.perf_counter() - began) / tokens)
    return found[1:]
