"""What the model costs a token: parameters by part and FLOPs, from the model's own shapes; nothing is allocated."""
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longmoe.configs import ModelConfig
from longmoe.model.lm import LongMoE
from longmoe.parallel.rules import path_name

KDA_CHUNK = 64
PARTS = (("embedding", "embedding"), ("head", "lm_head"), ("kda", "/kda/"), ("mla", "/mla/"), ("dense", "/mlp/"), ("router", "/router/"),
         ("experts", "/experts_"), ("shared", "/shared/"), ("latent", "/latent_"), ("norms_and_depth", ""))


@functools.cache
def parameter_shapes(model: ModelConfig) -> tuple[tuple[str, Any], ...]:
    """(path, shape and dtype) of every parameter."""
    variables = jax.eval_shape(LongMoE(model).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))
    return tuple((path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"]))


def parameters_by_part(shapes: tuple[tuple[str, Any], ...]) -> dict[str, int]:
    """Parameters of each of PARTS."""
    counts = dict.fromkeys((part for part, _ in PARTS), 0)
    for name, leaf in shapes:
        counts[next(part for part, mark in PARTS if mark in name)] += math.prod(leaf.shape)
    return counts


def active_parameters(model: ModelConfig, parts: dict[str, int]) -> int:
    """Parameters that a token meets: its chosen experts, the head counted, the input embedding not."""
    idle = parts["experts"] * (model.moe.num_experts - model.moe.experts_per_token) // model.moe.num_experts
    return sum(parts.values()) - idle - parts["embedding"]


def forward_flops(model: ModelConfig, active: int, length: int) -> float:
    """FLOPs of a token's forward pass, averaged over the positions of a sequence of `length` tokens."""
    return 2 * active + _mixer_flops(model, length)


def _mixer_flops(model: ModelConfig, length: int) -> float:
    """Token mixing beyond the projections: KDA's recurrence, and MLA over the mean of (length + 1) / 2 keys."""
    mla = model.mla
    attention = 2 * (mla.nope_dim + mla.rope_dim + mla.v_dim) * (length + 1) / 2
    return recurrence_flops(model) + model.mixers.count("mla") * mla.num_heads * attention


def recurrence_flops(model: ModelConfig) -> float:
    """FLOPs of a token in all KDA operators, in chunks of 64: state products, scores and their use. The same at every length."""
    kda = model.kda
    return model.mixers.count("kda") * kda.num_heads * (6 * kda.head_dim ** 2 + 8 * KDA_CHUNK * kda.head_dim)


class CacheNumbers(NamedTuple):
    """Numbers that generation keeps, over all layers; their dtypes are the caller's."""
    latent: int
    """MLA's latents and shared keys, a token."""
    state: int
    """KDA's recurrent states, a sequence."""
    conv: int
    """Histories of KDA's convolutions, a sequence."""


def cache_numbers(model: ModelConfig) -> CacheNumbers:
    kda, mla, kda_layers = model.kda, model.mla, model.mixers.count("kda")
    channels = kda_layers * kda.num_heads * kda.head_dim
    return CacheNumbers(model.mixers.count("mla") * (mla.kv_lora_rank + mla.rope_dim), channels * kda.head_dim, 3 * channels * (kda.conv_width - 1))
