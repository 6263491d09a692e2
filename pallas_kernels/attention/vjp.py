"""The operator on Hopper: rows made a multiple of the kernels' blocks, and their gradient."""
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.mosaic_gpu import BLOCK, Config, forward, key_gradients, query_gradient


def attention(q: Float[Array, "B T H D"], k: Float[Array, "B S H D"], v: Float[Array, "B S H Dv"], first: Int[Array, "B T"], start: Int[Array, ""], *,
              scale: float, interpret: Any = None) -> tuple[Float[Array, "B T H Dv"], Float[Array, "H"]]:
    """interpret: `plgpu.InterpretGPUParams`, for tests."""
    length = q.shape[1]
    start = start.astype(jnp.int32).reshape(1)
    # A query past the end sees nothing, a key past the end is seen by nobody.
    beyond = start + jnp.arange(length, length + -length % BLOCK, dtype=jnp.int32) + 1
    first = jnp.concatenate([first.astype(jnp.int32), jnp.broadcast_to(beyond, (first.shape[0], beyond.size))], axis=1)
    q, k, v = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK), (0, 0), (0, 0))) for x in (q, k, v))
    o, largest = _attention(Config(scale, interpret), q, k, v, first, start)
    lowest = jnp.finfo(jnp.float32).min
    largest = jnp.max(largest, axis=(0, 2), initial=lowest)
    return o[:, :length], jnp.where(largest > lowest / 1e9, largest * math.log(2), lowest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(config: Config, q: Array, k: Array, v: Array, first: Array, start: Array) -> tuple[Array, Float[Array, "B H T"]]:
    o, _, largest = forward(config, q, k, v, first, start)
    return o, largest


def _forward(config: Config, *arguments: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    o, log_sum, largest = forward(config, *arguments)
    return (o, largest), (*arguments, o, log_sum)


def _backward(config: Config, residuals: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple[Array | None, ...]:
    *arguments, o, log_sum = residuals
    do = cotangents[0]
    delta = jnp.einsum("bthd,bthd->bht", o, do, preferred_element_type=jnp.float32)
    dq = query_gradient(config, *arguments, do, log_sum, delta)
    return dq, *key_gradients(config, *arguments, do, log_sum, delta), None, None


_attention.defvjp(_forward, _backward)
