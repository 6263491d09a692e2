"""Gated multi-head latent attention (Kimi K3 report): without positional encoding, or with rotated key columns for comparison."""
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

import pallas_kernels
from longmoe.configs import ModelConfig
from longmoe.model.cache import LatentRow, MLACache, append_latents, valid_tokens
from longmoe.model.latent_attention import expand, from_chunks, into_chunks, latent_attention
from longmoe.model.layers import RMSNorm, float_dtype, linear, precision
from longmoe.parallel.context import sharded_attention
from longmoe.parallel.mesh import axis_size, is_distributed
from longmoe.shapes import Array, Float, Hidden, Int
from pallas_kernels.attention.xla import masked_softmax
from pallas_kernels.dispatch import Implementation

WHOLE_ROWS = 1024
"""Rows of up to so many tokens have all their scores at one time; longer ones go chunk by chunk (`latent_attention`)."""
CACHED_QUERIES = 128
"""Tokens behind a cache that have all their scores at one time."""


def causal_attention(q: Float[Array, "B T H Dk"], k: Float[Array, "B T H Dk"], v: Float[Array, "B T H Dv"], scale: float,
                     runs: Int[Array, "B T"] | None = None, precision: jax.lax.Precision | None = None, return_max_logits: bool = False,
                     implementation: Implementation = "auto") -> tuple[Float[Array, "B T H Dv"], Float[Array, "H"] | None]:
    """(softmax(scale q k^T) v over earlier tokens of the same document, None or the largest scale q k^T of each head), as `pallas_kernels.attention`.

    runs: document of each token, 0 = padding (output 0).
    """
    first = None if runs is None else pallas_kernels.first_visible(runs)
    o, largest = pallas_kernels.attention(q, k, v, first=first, scale=scale, precision=precision, implementation=implementation)
    return o, largest if return_max_logits else None


def rotate(x: Float[Array, "B T *heads R"], positions: Int[Array, "B T"], theta: float) -> Float[Array, "B T *heads R"]:
    """Rotary position embedding (Su et al., 2021, arXiv 2104.09864), angles in float32: column i of the first half and of the second are a pair, which
    position t turns by t theta^(-2 i / R)."""
    half = x.shape[-1] // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    angles = positions[..., None].astype(wide) * theta ** (-jnp.arange(half, dtype=wide) / half)
    angles = angles.reshape(*positions.shape, *[1] * (x.ndim - 3), half)
    first, second, cos, sin = x[..., :half].astype(wide), x[..., half:].astype(wide), jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1).astype(x.dtype)


def _positions(x: Hidden, runs: Array | None, cache: MLACache | None, start: Array | int) -> Int[Array, "B T"]:
    """Tokens of the row before each one. Documents of a packed row go on counting: only differences within one reach the scores."""
    if cache is None:
        return jnp.broadcast_to(start + jnp.arange(x.shape[1]), x.shape[:2])
    return cache.length[:, None] + jnp.cumsum(valid_tokens(x, runs), axis=1) - 1


class MLA(nn.Module):
    """Token mixer with full attention; its cache holds kv_lora_rank + rope_dim numbers a token."""
    config: ModelConfig
    return_max_logits: bool = False

    @nn.compact
    def __call__(self, x: Hidden, runs: Int[Array, "B T"] | None = None,
                 cache: MLACache | None = None,
                 row: LatentRow | None = None) -> tuple[Hidden, Float[Array, "B T R"] | None, Float[Array, "H"] | None]:
        """runs: document of each token, 0 = padding. With a cache every row is one document, so runs only tells padding. row: x is a piece of rows.

        Returns the output, or the latents of x where those of the row are not known yet; where a cache was given, the latents of x, for `after_tokens`; with
        return_max_logits, and without a cache, each head's largest logit.
        """
        config, mla = self.config, self.config.mla
        batch, tokens, width = x.shape
        positions = None if mla.rope_theta is None else _positions(x, runs, cache, 0 if row is None else row.start)
        turned = lambda y: y if positions is None else rotate(y, positions, mla.rope_theta)
        latent = linear(config, mla.kv_lora_rank + mla.rope_dim, "kv_a_proj")(x)
        compressed = RMSNorm(config, config.latent_norm_eps, name="kv_a_norm")(latent[..., :mla.kv_lora_rank])
        latent = jnp.concatenate([compressed, turned(latent[..., mla.kv_lora_rank:])], axis=-1)
        if row is not None and row.latent is None:
            return latent, None, None
        q = self._queries(x)
        q = jnp.concatenate([q[..., :mla.nope_dim], turned(q[..., mla.nope_dim:])], axis=-1) if mla.rope_theta is not None else q
        kv_b = self.param("kv_b_proj", nn.initializers.normal(config.init_std),
                          (mla.kv_lora_rank, mla.num_heads, mla.nope_dim + mla.v_dim), jnp.dtype(config.param_dtype)).astype(x.dtype)
        scale = (mla.nope_dim + mla.rope_dim) ** -0.5
        if cache is None:
            o, largest = self._over_latents(q, latent, kv_b, runs, scale, row)
        else:
            o, largest = self._over_cache(q, latent, kv_b, cache, valid_tokens(x, runs), scale), None
        if mla.use_output_gate:
            gate = linear(config, mla.num_heads * mla.v_dim, "g_proj")(x).astype(float_dtype(config))
            o = o * jax.nn.sigmoid(gate).reshape(o.shape)
        return linear(config, width, "o_proj")(o.astype(x.dtype).reshape(batch, tokens, -1)), None if cache is None else latent, largest

    def _queries(self, x: Hidden) -> Array:
        config, mla = self.config, self.config.mla
        if mla.q_lora_rank is not None:
            x = RMSNorm(config, config.latent_norm_eps, name="q_a_norm")(linear(config, mla.q_lora_rank, "q_a_proj")(x))
        q = linear(config, mla.num_heads * (mla.nope_dim + mla.rope_dim), "q_b_proj")(x)
        return q.reshape(*x.shape[:2], mla.num_heads, -1)

    def _over_latents(self, q: Array, latent: Array, kv_b: Array, runs: Array | None, scale: float,
                      row: LatentRow | None) -> tuple[Array, Array | None]:
        """Attention of a pass without cache. The keys and values of a long row are never held whole, nor those of one that devices share out."""
        high, common = precision(self.config), dict(return_max_logits=self.return_max_logits, implementation=self.config.implementation)
        attention = functools.partial(latent_attention, scale=scale, precision=high, **common)
        if row is not None:
            return attention(q, row.latent, kv_b, runs, row.runs, row.start)
        if axis_size("context") > 1 or q.shape[1] > WHOLE_ROWS:
            # On each shard by itself: chunks that cannot meet are passed over without asking other devices.
            return sharded_attention(attention, q, latent, kv_b, runs) if is_distributed() else attention(q, latent, kv_b, runs, runs, 0)
        keys, values = expand(latent, kv_b, q.shape[-1], high)
        return causal_attention(q, keys, values, scale, runs, high, **common)

    def _over_cache(self, q: Array, latent: Array, kv_b: Array, cache: MLACache, valid: Array, scale: float) -> Array:
        """Attention of tokens behind those that `cache` holds.

        A single token reads the cache as it is. Prompts are read as in a pass without cache: their cost is a causal pass's, whatever the capacity, and no
        score is held that a chunk does not need.
        """
        if q.shape[1] == 1:
            return self._absorbed(q, kv_b, cache.latent, cache.length[:, None], scale, own=latent)

        def behind() -> Array:
            seen = cache.length[:, None] + jnp.cumsum(valid, axis=1)   # tokens of the row up to and with each query
            latents = append_latents(cache, latent, valid).latent
            if q.shape[1] <= CACHED_QUERIES:
                return self._absorbed(q, kv_b, latents, seen, scale)
            chunks = into_chunks(q, CACHED_QUERIES), into_chunks(seen, CACHED_QUERIES)
            return from_chunks(jax.lax.map(lambda part: self._absorbed(part[0], kv_b, latents, part[1], scale), chunks), q.shape[1])

        return jax.lax.cond(jnp.all(cache.length == 0), lambda: self._over_latents(q, latent, kv_b, valid, scale, None)[0].astype(q.dtype), behind)

    def _absorbed(self, q: Array, kv_b: Array, latents: Array, seen: Array, scale: float, own: Array | None = None) -> Array:
        """Attention on the first `seen` [B, T] of a row's latents [B, S, R] and, of a single token, on its own: keys' and values' expansions are folded into
        the query and the output. Latents are read whole, key columns too, since a product with a part of them would copy that part first."""
        mla, high = self.config.mla, precision(self.config)
        product = functools.partial(jnp.einsum, precision=high)
        scored = functools.partial(product, "bqhr,bsr->bhqs", preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))
        query = jnp.concatenate([product("bqhd,rhd->bqhr", q[..., :mla.nope_dim], kv_b[..., :mla.nope_dim]), q[..., mla.nope_dim:]], axis=-1)
        scores = scored(query, latents)
        mask = jnp.broadcast_to((jnp.arange(latents.shape[1]) < seen[..., None])[:, None], scores.shape)
        if own is not None:
            scores = jnp.concatenate([scores, scored(query, own)], axis=-1)
            mask = jnp.pad(mask, [(0, 0)] * 3 + [(0, 1)], constant_values=True)
        weights = masked_softmax(scores * scale, mask)[0].astype(q.dtype)
        mixed = product("bhqs,bsr->bqhr", weights[..., :latents.shape[1]], latents)
        if own is not None:
            mixed = mixed + product("bhqs,bsr->bqhr", weights[..., -1:], own)
        return product("bqhr,rhd->bqhd", mixed[..., :mla.kv_lora_rank], kv_b[..., mla.nope_dim:])
