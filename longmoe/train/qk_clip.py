"""QK-Clip (Kimi K2 report, MuonClip): keeps an MLA head's largest attention logit below a threshold by scaling its query and key weights.

A head whose largest logit S exceeds the threshold tau is to give gamma = tau / S times its logits. A logit is q_nope . k_nope + q_rope . k_rope. The
first product shares gamma out evenly, sqrt(gamma) to each side's weights. k_rope belongs to all heads, so q_rope takes all of it.
"""
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from longmoe.configs import MLAConfig, ModelConfig
from longmoe.model.depth import split_layers
from longmoe.shapes import Array, Float


def clip_queries_and_keys(config: ModelConfig, params: Mapping[str, Any], max_logits: Mapping[str, Any], threshold: float) -> dict[str, Any]:
    """`params` with the heads scaled whose largest logit is above `threshold`; every other number keeps its bits.

    max_logits: of ModelOutput, per head [H], or [repeats, H] in scanned layers.
    """
    def visit(params: Any, largest: Any) -> Any:
        if "mla" in largest:
            return {**params, "mla": _clip(config.mla, params["mla"], _gamma(largest["mla"], threshold))}
        return {**params, **{name: visit(params[name], part) for name, part in largest.items()}}

    return visit(params, max_logits)


def layer_maxima(config: ModelConfig, max_logits: Mapping[str, Any]) -> Float[Array, "layers H"]:
    """The largest logits of all MLA layers in the order of depth, [MLA layers, H]."""
    layers = split_layers(config, max_logits)
    return jnp.stack([layers[layer]["mla"] for layer in sorted(layers)])


def _gamma(largest: Array, threshold: float) -> Array:
    """threshold / largest where that is above the threshold, otherwise exactly 1."""
    above = largest > threshold
    return jnp.where(above, threshold / jnp.where(above, largest, 1), 1)


def _clip(mla: MLAConfig, params: Mapping[str, Any], gamma: Float[Array, "*layers H"]) -> dict[str, Any]:
    def columns(*parts: tuple[Array, int]) -> Array:
        """Each head's factors, repeated for the columns that they scale, [*layers, H, columns]."""
        return jnp.concatenate([jnp.repeat(factor[..., None], count, axis=-1) for factor, count in parts], axis=-1)

    root = jnp.sqrt(gamma)
    query = columns((root, mla.nope_dim), (gamma, mla.rope_dim)).reshape(*gamma.shape[:-1], 1, -1)      # over kernel [*layers, rank, H * (nope + rope)]
    key = columns((root, mla.nope_dim), (jnp.ones_like(gamma), mla.v_dim))[..., None, :, :]             # over [*layers, rank, H, nope + v]
    scale = lambda x, factor: (x.astype(factor.dtype) * factor).astype(x.dtype)
    return {**params, "q_b_proj": {**params["q_b_proj"], "kernel": scale(params["q_b_proj"]["kernel"], query)},
            "kv_b_proj": scale(params["kv_b_proj"], key)}
