"""Attention Residuals: each sublayer reads a softmax-weighted sum over depth (Attention Residuals paper; Kimi K3 report eq. 8-10)."""
import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from longmoe.configs import ModelConfig
from longmoe.shapes import Array, Float, Hidden

STACKED = 10
"""From so many sources on they are put into one array. Each mixture then reads a copy of them, but XLA fuses a forward pass of many mixtures in a minute
where it takes over ten with each source by itself (full Attention Residuals over 24 layers, compiled for an H200)."""


@functools.partial(jax.jit, static_argnames="eps")
def mix(sources: Sequence[Hidden], query: Float[Array, "D"], scale: Float[Array, "D"], eps: float,
        skip_last: Array | None = None) -> tuple[Hidden, Float[Array, "B T S"]]:
    """sum_s p_s source_s with p = softmax over s of query . (scale * source_s / rms(source_s)), per token, in float32.

    Keys are normalised, values are not; no 1/sqrt(D). skip_last (bool scalar): leaves the last source out.
    Returns the mixture in the sources' dtype and the weights p, float32.
    """
    wide = jnp.promote_types(sources[0].dtype, jnp.float32)
    direction = query.astype(wide) * scale.astype(wide)
    if len(sources) >= STACKED:
        # Made again for the backward pass: the sources are there anyway.
        return jax.checkpoint(functools.partial(_mix_stacked, eps=eps))(tuple(sources), direction, skip_last)
    rows = [source.astype(wide) for source in sources]
    weights = _weights([_score(row, direction, eps) for row in rows], skip_last)
    mixture = sum(weights[..., i, None] * row for i, row in enumerate(rows))
    return mixture.astype(sources[0].dtype), weights


def _mix_stacked(sources: tuple[Hidden, ...], direction: Float[Array, "D"], skip_last: Array | None, eps: float) -> tuple[Hidden, Float[Array, "B T S"]]:
    stacked = jax.lax.optimization_barrier(jnp.stack(sources))
    rows = stacked.astype(direction.dtype)
    weights = _weights(list(_score(rows, direction, eps)), skip_last)
    return jnp.sum(jnp.moveaxis(weights, -1, 0)[..., None] * rows, axis=0).astype(stacked.dtype), weights


def _score(row: Float[Array, "... D"], direction: Float[Array, "D"], eps: float) -> Float[Array, "..."]:
    return jnp.sum(row * direction, -1) * jax.lax.rsqrt(jnp.mean(jnp.square(row), -1) + eps)


def _weights(scores: list[Float[Array, "B T"]], skip_last: Array | None) -> Float[Array, "B T S"]:
    if skip_last is not None:
        scores[-1] = jnp.where(skip_last, -jnp.inf, scores[-1])
    return jax.nn.softmax(jnp.stack(scores, axis=-1), axis=-1)


class DepthMix(nn.Module):
    """One site that mixes depth sources with its own learned query (zero at the start: a uniform average)."""
    config: ModelConfig

    @nn.compact
    def __call__(self, sources: Sequence[Hidden], skip_last: Array | None = None) -> tuple[Hidden, Float[Array, "B T S"]]:
        shape, dtype = (self.config.width,), jnp.dtype(self.config.param_dtype)
        query = self.param("query", nn.initializers.zeros, shape, dtype)
        scale = self.param("scale", nn.initializers.ones, shape, dtype)
        return mix(sources, query, scale, self.config.norm_eps, skip_last)
