"""Generation: one prefill over the prompt, then token by token on the recurrent state and the latent cache."""
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from longmoe.inference.sampling import Sampling, sample
from longmoe.model.lm import LongMoE, Variables, init_cache, project
from longmoe.shapes import Array, Bool, Int

STREAM_CHUNK = 8
"""Tokens that `stream` decodes between two looks at them: each look costs a round trip to the device."""


@struct.dataclass
class Decoding:
    """Where generation stands; `decode` takes it over (its buffers are donated)."""
    token: Int[Array, "B"]
    """The newest token of each row, which no cache holds yet."""
    cache: Any
    ended: Bool[Array, "B"]
    """Rows that have given eos_id."""


def generate(model: LongMoE, variables: Variables, prompt_tokens: Int[Array, "B P"], *, max_new_tokens: int,
             prompt_lengths: Int[Array, "B"] | None = None, temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
             key: Array | None = None, eos_id: int | None = None) -> Int[Array, "B max_new_tokens"]:
    """New tokens only, int32 [B, max_new_tokens]; after eos_id a row repeats eos_id.

    prompt_tokens: int32 [B, P], right-padded to the longest where prompt_lengths [B] is given.
    temperature 0 is greedy, whatever top_k and top_p say, and needs no key. Raises ValueError for sampling values, or lengths, that make no sense.
    """
    sampling, prompt, lengths, keys = _checked(prompt_tokens, prompt_lengths, max_new_tokens, Sampling(temperature, top_k, top_p), key)
    start = prefill(model, sampling, eos_id, prompt.shape[1] + max_new_tokens, dict(variables), prompt, lengths, keys[0])
    first = jnp.copy(start.token)                                       # decode takes `start` over
    rest, _ = decode(model, sampling, eos_id, dict(variables), start, keys[1:])
    return jnp.concatenate([first[:, None], rest], axis=1)


def stream(model: LongMoE, variables: Variables, prompt_tokens: Int[Array, "B P"], *, max_new_tokens: int,
           prompt_lengths: Int[Array, "B"] | None = None, temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
           key: Array | None = None, eos_id: int | None = None) -> Iterator[np.ndarray]:
    """The tokens of `generate`, as they come: int32 [B, n] arrays, n = 1 and then up to STREAM_CHUNK. Ends early once every row has given eos_id.

    Arguments are checked when the first array is asked for.
    """
    sampling, prompt, lengths, keys = _checked(prompt_tokens, prompt_lengths, max_new_tokens, Sampling(temperature, top_k, top_p), key)
    state = prefill(model, sampling, eos_id, prompt.shape[1] + max_new_tokens, dict(variables), prompt, lengths, keys[0])
    tokens, ended = np.array(state.token)[:, None], np.array(state.ended)   # copies: decode takes the state over
    yield tokens
    for at in range(1, max_new_tokens, STREAM_CHUNK):
        if ended.all():
            return
        decoded, state = decode(model, sampling, eos_id, dict(variables), state, keys[at:at + STREAM_CHUNK])
        ended = np.array(state.ended)
        yield np.asarray(decoded)


@functools.partial(jax.jit, static_argnums=range(4))
def prefill(model: LongMoE, sampling: Sampling, eos_id: int | None, capacity: int, variables: Variables, prompt: Int[Array, "B P"],
            lengths: Int[Array, "B"], key: Array) -> Decoding:
    """Reads right-padded prompts into caches of `capacity` tokens and chooses each row's first new token."""
    batch, width = prompt.shape
    cache = init_cache(model.model_config, batch, capacity)
    valid = (jnp.arange(width) < lengths[:, None]).astype(jnp.int32)
    output = model.apply(variables, prompt, valid, cache=cache, return_hidden=True)
    last = jnp.take_along_axis(output.hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    token = sample(project(model.model_config, last, variables["params"]["lm_head"]), key, sampling)
    return Decoding(token=token, cache=output.cache, ended=jnp.zeros(batch, bool) if eos_id is None else token == eos_id)


@functools.partial(jax.jit, static_argnums=range(3), donate_argnums=4)
def decode(model: LongMoE, sampling: Sampling, eos_id: int | None, variables: Variables, state: Decoding,
           keys: Array) -> tuple[Int[Array, "B n"], Decoding]:
    """One token a row for each of the n keys, and where generation stands then."""
    def step(state: Decoding, key: Array) -> tuple[Decoding, Array]:
        output = model.apply(variables, state.token[:, None], cache=state.cache)
        token, ended = sample(output.logits[:, 0], key, sampling), state.ended
        if eos_id is not None:
            token = jnp.where(ended, eos_id, token)
            ended = ended | (token == eos_id)
        return Decoding(token=token, cache=output.cache, ended=ended), token

    state, tokens = jax.lax.scan(step, state, keys)
    return tokens.T, state


def _checked(prompt_tokens: Array, prompt_lengths: Array | None, max_new_tokens: int, sampling: Sampling,
             key: Array | None) -> tuple[Sampling, Array, Array, Array]:
    """(sampling, prompt int32 [B, P], lengths int32 [B], a key for each new token)."""
    sampling.check(key)
    prompt = jnp.asarray(prompt_tokens, jnp.int32)
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"prompt_tokens: got shape {list(prompt.shape)}, wanted [B, P] with at least one token a row")
    batch, width = prompt.shape
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, wanted at least 1")
    lengths = jnp.full(batch, width, jnp.int32) if prompt_lengths is None else jnp.asarray(prompt_lengths, jnp.int32)
    if lengths.shape != (batch,) or bool(jnp.any((lengths < 1) | (lengths > width))):
        raise ValueError(f"prompt_lengths: got {lengths.tolist()}, wanted {batch} numbers from 1 to {width}")
    return sampling, prompt, lengths, jax.random.split(jax.random.key(0) if key is None else key, max_new_tokens)
