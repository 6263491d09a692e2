"""Generation: one prefill over the prompt, then token by token on the recurrent state and the latent cache."""
import functools
from typing import Any

import jax
import jax.numpy as jnp

from longmoe.inference.sampling import check_sampling, sample
from longmoe.model.lm import LongMoE, Variables, init_cache, project
from longmoe.shapes import Array, Int


def generate(model: LongMoE, variables: Variables, prompt_tokens: Int[Array, "B P"], *, max_new_tokens: int,
             prompt_lengths: Int[Array, "B"] | None = None, temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
             key: Array | None = None, eos_id: int | None = None) -> Int[Array, "B max_new_tokens"]:
    """New tokens only, int32 [B, max_new_tokens]; after eos_id a row repeats eos_id.

    prompt_tokens: int32 [B, P], right-padded to the longest where prompt_lengths [B] is given.
    temperature 0 is greedy and needs no key. Raises ValueError for sampling values, or lengths, that make no sense.
    """
    check_sampling(temperature, top_k, top_p, key)
    prompt_tokens = jnp.asarray(prompt_tokens, jnp.int32)
    batch, width = prompt_tokens.shape
    if width < 1:
        raise ValueError(f"prompt_tokens: got shape {list(prompt_tokens.shape)}, wanted at least one token a row")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, wanted at least 1")
    lengths = jnp.full(batch, width, jnp.int32) if prompt_lengths is None else jnp.asarray(prompt_lengths, jnp.int32)
    if lengths.shape != (batch,) or bool(jnp.any((lengths < 1) | (lengths > width))):
        raise ValueError(f"prompt_lengths: got {lengths.tolist()}, wanted {batch} numbers from 1 to {width}")
    key = jax.random.key(0) if key is None else key
    return _generate(model, max_new_tokens, temperature, top_k, top_p, eos_id, dict(variables), prompt_tokens, lengths, key)


@functools.partial(jax.jit, static_argnums=range(6))
def _generate(model: LongMoE, max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, eos_id: int | None,
              variables: Variables, prompt: Array, lengths: Array, key: Array) -> Array:
    batch, width = prompt.shape
    cache = init_cache(model.model_config, batch, width + max_new_tokens)
    choose = functools.partial(sample, temperature=temperature, top_k=top_k, top_p=top_p)
    valid = (jnp.arange(width) < lengths[:, None]).astype(jnp.int32)
    output = model.apply(variables, prompt, valid, cache=cache, return_hidden=True)
    last = jnp.take_along_axis(output.hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    keys = jax.random.split(key, max_new_tokens)
    token = choose(project(model.model_config, last, variables["params"]["lm_head"]), keys[0])

    def step(carry: tuple[Array, Any, Array], key: Array) -> tuple[tuple[Array, Any, Array], Array]:
        token, cache, ended = carry
        output = model.apply(variables, token[:, None], cache=cache)
        following = choose(output.logits[:, 0], key)
        following = following if eos_id is None else jnp.where(ended, eos_id, following)
        return (following, output.cache, ended if eos_id is None else ended | (following == eos_id)), following

    ended = jnp.zeros(batch, bool) if eos_id is None else token == eos_id
    _, rest = jax.lax.scan(step, (token, output.cache, ended), keys[1:])
    return jnp.concatenate([token[:, None], rest.T], axis=1)
