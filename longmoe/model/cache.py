"""Decoding caches: what a layer keeps of the tokens before, one entry a layer, of a size that `init_cache` fixes."""
import jax.numpy as jnp
from flax import struct

from longmoe.configs import ModelConfig
from longmoe.shapes import Array, Float, Int


@struct.dataclass
class KDACache:
    """Recurrent memory of a KDA layer; its size does not depend on the context."""
    conv: Float[Array, "B W-1 C"]
    """Last inputs of the q, k and v convolutions, side by side (C = 3 H Dk)."""
    state: Float[Array, "B H Dk Dv"]
    """float32."""


@struct.dataclass
class KDACarry:
    """What a KDA layer hands from one piece of a packed row to the next."""
    conv: Float[Array, "B W-1 C"]
    """As in KDACache."""
    state: Float[Array, "B H Dk Dv"]
    """float32; of the document that the last token belongs to."""
    runs: Int[Array, "B W"]
    """Documents of the last W tokens, 0 = padding, -1 = before the row."""


@struct.dataclass
class LatentRow:
    """Latents of whole rows, for attention of a piece of them."""
    latent: Float[Array, "B T R"] | None
    """As in MLACache; None until they are known."""
    runs: Int[Array, "B T"] | None
    """Document of each token, 0 = padding; None: one document a row."""
    start: Int[Array, ""]
    """Token of the row that the piece begins with."""


@struct.dataclass
class MLACache:
    """Latents of an MLA layer's tokens so far."""
    latent: Float[Array, "B S R"]
    """Normalised kv latent and the shared key columns (rotated where the model rotates), R = kv_lora_rank + rope_dim; S slots."""
    length: Int[Array, "B"]
    """Slots in use, int32."""


LayerCache = KDACache | MLACache


def init_layer_cache(config: ModelConfig, mixer: str, batch: int, capacity: int) -> LayerCache:
    """Empty cache of one layer for `batch` rows of at most `capacity` tokens."""
    if mixer == "kda":
        kda = config.kda
        return KDACache(conv=jnp.zeros((batch, kda.conv_width - 1, 3 * kda.num_heads * kda.head_dim), jnp.dtype(config.dtype)),
                        state=jnp.zeros((batch, kda.num_heads, kda.head_dim, kda.head_dim), jnp.float32))
    return MLACache(latent=jnp.zeros((batch, capacity, config.mla.kv_lora_rank + config.mla.rope_dim), jnp.dtype(config.dtype)),
                    length=jnp.zeros(batch, jnp.int32))


def init_carry(config: ModelConfig, batch: int) -> KDACarry:
    """The carry before the first piece of a row."""
    empty = init_layer_cache(config, "kda", batch, 0)
    return KDACarry(conv=empty.conv, state=empty.state.astype(jnp.promote_types(config.dtype, jnp.float32)),
                    runs=jnp.full((batch, config.kda.conv_width), -1, jnp.int32))


def valid_tokens(tokens: Array, runs: Int[Array, "B T"] | None) -> Int[Array, "B T"]:
    """1 where a token of [B, T, ...] is real and 0 at padding (document 0); runs None: no padding."""
    return jnp.ones(tokens.shape[:2], jnp.int32) if runs is None else (runs > 0).astype(jnp.int32)


def append_latents(cache: MLACache, latents: Float[Array, "*L B T R"], valid: Int[Array, "B T"]) -> MLACache:
    """Writes each row's valid tokens (1, others 0) behind the ones it holds; tokens past the capacity are dropped (the caller sizes the cache).

    cache: a layer's, or those of L layers along a further first axis.
    """
    slots = cache.length[..., None] + jnp.cumsum(valid, axis=1) - 1
    slots = jnp.where(valid > 0, slots, cache.latent.shape[-2])
    rows = jnp.ix_(*map(jnp.arange, cache.length.shape))                 # indices of layers and rows, [L, B]
    latent = cache.latent.at[*(index[..., None] for index in rows), slots].set(latents.astype(cache.latent.dtype), mode="drop")
    return MLACache(latent=latent, length=cache.length + jnp.sum(valid, axis=1))


def after_tokens(before: LayerCache, found: KDACache | Float[Array, "*L B T R"], valid: Int[Array, "B T"]) -> LayerCache:
    """The cache of a layer, or of L layers along a first axis, behind new tokens. found: what the layer returned for them, its recurrent memory after them or
    their latents.

    A layer does not write latents itself: a scan over layers would make a new cache for each token, of all the tokens before it.
    """
    return append_latents(before, found, valid) if isinstance(before, MLACache) else found
