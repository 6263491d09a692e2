"""Milliseconds of one more token behind a context of any length, on a cache that is made at its position outright."""
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longmoe.configs import ModelConfig
from longmoe.inference.engine import Decoding, decode
from longmoe.inference.sampling import Sampling
from longmoe.model.cache import KDACache, MLACache
from longmoe.model.lm import LongMoE, init_cache

STATE_SCALE = 0.1
"""Standard deviation of the numbers in a made recurrent state, and of made weights."""


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


def decode_milliseconds(model_config: ModelConfig, contexts: Sequence[int], *, tokens: int, repeats: int) -> dict[int, list[float]]:
    """Context -> milliseconds a token of one sequence, one figure for each of `repeats` calls of `tokens` tokens, the last of which ends at the context.

    Programs of all contexts are compiled side by side, then timed one after another. The weights are any numbers: neither they nor what the cache holds
    change how much is computed.
    """
    model, keys, calls = LongMoE(model_config), jax.random.split(jax.random.key(2), tokens), repeats + 1        # the first call warms up
    variables = small_numbers(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32)))

    def start(key: jax.Array, context: int) -> Decoding:
        cache = filled_cache(model_config, context, context - calls * tokens, key)
        return Decoding(token=jnp.zeros(1, jnp.int32), cache=cache, ended=jnp.zeros(1, bool))

    starts = [partial(start, context=context) for context in contexts]
    lowered = [(jax.jit(one).lower(jax.random.key(1)), decode.lower(model, Sampling(), None, variables, jax.eval_shape(one, jax.random.key(1)), keys))
               for one in starts]
    with ThreadPoolExecutor(len(contexts)) as pool:
        programs = list(pool.map(lambda pair: tuple(one.compile() for one in pair), lowered))
    return {context: _timed(*program, variables, keys, calls)[1:] for context, program in zip(contexts, programs)}


def _timed(fill: Any, decode: Any, variables: Any, keys: jax.Array, calls: int) -> list[float]:
    """Milliseconds a token of each call, one going on from the other."""
    state, found = fill(jax.random.key(1)), []
    for _ in range(calls):
        began = time.perf_counter()
        _, state = jax.block_until_ready(decode(variables, state, keys))
        found.append(1e3 * (time.perf_counter() - began) / len(keys))
    return found


def small_numbers(shapes: Any) -> Any:
    """Arrays of these shapes on the device, at once: a program that draws a model's weights takes longer to compile than its decoding to time."""
    draw = np.random.default_rng(0)
    fill = lambda like: jnp.asarray(STATE_SCALE * draw.standard_normal(like.shape, np.float32) if jnp.issubdtype(like.dtype, jnp.floating) else
                                    np.zeros(like.shape), like.dtype)
    return jax.tree.map(fill, shapes)
