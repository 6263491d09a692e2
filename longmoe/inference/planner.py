"""What a config costs, on paper: parameters, FLOPs, bytes. Counts come from the model's own shapes; nothing is allocated."""
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longmoe.configs import ModelConfig, TrainConfig
from longmoe.model.lm import LongMoE
from longmoe.parallel.rules import matrix_axes, path_name, spec_of

KDA_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Figures of one config."""
    total_params: int
    active_params: int
    """Parameters that a token meets: its chosen experts, the head counted, the input embedding not."""
    flops_per_token: float
    """Forward, averaged over the positions of a sequence of the config's length."""
    bytes_per_device: int
    """TrainConfig: parameters, float32 gradients, the optimizer's moments and each layer's saved input on one device of the mesh.
    ModelConfig: the parameters."""
    kv_bytes_per_token: int
    """MLA cache over all layers, in the model's dtype."""
    state_bytes_per_sequence: int
    """KDA states (float32) and convolution histories over all layers."""
    params_by_part: dict[str, int]
    """embedding, head, kda, mla, dense, router, experts, shared, latent, norms_and_depth."""


def estimate(cfg: TrainConfig | ModelConfig) -> Estimate:
    """Figures of a TrainConfig (at its sequence length, on its mesh) or of a ModelConfig (at 8,192 tokens, on one device)."""
    model = cfg.model if isinstance(cfg, TrainConfig) else cfg
    length = cfg.data.sequence_length if isinstance(cfg, TrainConfig) else 8192
    params = _shapes(model)
    parts = _by_part(params)
    total, moe = sum(parts.values()), model.moe
    idle = parts["experts"] * (moe.num_experts - moe.experts_per_token) // moe.num_experts
    active = total - idle - parts["embedding"]
    itemsize = jnp.dtype(model.dtype).itemsize
    kda_layers, mla_layers = model.mixers.count("kda"), model.mixers.count("mla")
    conv = 3 * model.kda.num_heads * model.kda.head_dim * (model.kda.conv_width - 1) * itemsize
    return Estimate(
        total_params=total, active_params=active, flops_per_token=2 * active + _mixer_flops(model, length), params_by_part=parts,
        bytes_per_device=_training_bytes(cfg, params) if isinstance(cfg, TrainConfig) else total * jnp.dtype(model.param_dtype).itemsize,
        kv_bytes_per_token=mla_layers * (model.mla.kv_lora_rank + model.mla.rope_dim) * itemsize,
        state_bytes_per_sequence=kda_layers * (4 * model.kda.num_heads * model.kda.head_dim ** 2 + conv))


def _shapes(model: ModelConfig) -> list[tuple[str, Any]]:
    variables = jax.eval_shape(LongMoE(model).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"])]


PARTS = (("embedding", "embedding"), ("head", "lm_head"), ("kda", "/kda/"), ("mla", "/mla/"), ("dense", "/mlp/"), ("router", "/router/"),
         ("experts", "/experts_"), ("shared", "/shared/"), ("latent", "/latent_"), ("norms_and_depth", ""))


def _by_part(params: list[tuple[str, Any]]) -> dict[str, int]:
    counts = dict.fromkeys((part for part, _ in PARTS), 0)
    for name, leaf in params:
        counts[next(part for part, mark in PARTS if mark in name)] += math.prod(leaf.shape)
    return counts


def _mixer_flops(model: ModelConfig, length: int) -> float:
    """Token mixing beyond the projections: KDA in chunks of 64 (state products, scores, their use), MLA over the mean of (length + 1) / 2 keys."""
    kda, mla = model.kda, model.mla
    per_head = 6 * kda.head_dim ** 2 + 8 * KDA_CHUNK * kda.head_dim
    attention = 2 * (mla.nope_dim + mla.rope_dim + mla.v_dim) * (length + 1) / 2
    return model.mixers.count("kda") * kda.num_heads * per_head + model.mixers.count("mla") * mla.num_heads * attention


def _training_bytes(cfg: TrainConfig, params: list[tuple[str, Any]]) -> int:
    axes = {name: max(size, 1) for name, size in dataclasses.asdict(cfg.mesh).items()}
    total = 0
    for name, leaf in params:
        itemsize = jnp.dtype(leaf.dtype).itemsize
        moments = 1 if cfg.optim.optimizer == "muon" and matrix_axes(name) is not None else 2
        total += math.prod(leaf.shape) // _shards(name, axes) * (itemsize + 4 + moments * itemsize)
    token_shards = axes["data"] * axes["fsdp"] * axes["expert"] * axes["context"]
    tokens = cfg.data.batch_size * cfg.data.sequence_length // cfg.accumulation_steps // token_shards
    return total + tokens * cfg.model.width * jnp.dtype(cfg.model.dtype).itemsize * cfg.model.num_layers


def _shards(name: str, axes: dict[str, int]) -> int:
    names = [axis for entry in spec_of(name) if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry)]
    return int(np.prod([axes[axis] for axis in names], dtype=np.int64))


