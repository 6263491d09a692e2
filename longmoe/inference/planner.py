"""What a config costs, on paper: parameters, FLOPs, bytes. Counts come from the model's own shapes; nothing is allocated."""
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from longmoe.configs import ModelConfig, TrainConfig
from longmoe.model.costs import active_parameters, forward_flops, parameter_shapes, parameters_by_part
from longmoe.parallel.rules import matrix_axes, spec_of


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
    params = parameter_shapes(model)
    parts = parameters_by_part(params)
    total, active = sum(parts.values()), active_parameters(model, parts)
    itemsize = jnp.dtype(model.dtype).itemsize
    kda_layers, mla_layers = model.mixers.count("kda"), model.mixers.count("mla")
    conv = 3 * model.kda.num_heads * model.kda.head_dim * (model.kda.conv_width - 1) * itemsize
    return Estimate(
        total_params=total, active_params=active, flops_per_token=forward_flops(model, active, length), params_by_part=parts,
        bytes_per_device=_training_bytes(cfg, params) if isinstance(cfg, TrainConfig) else total * jnp.dtype(model.param_dtype).itemsize,
        kv_bytes_per_token=mla_layers * (model.mla.kv_lora_rank + model.mla.rope_dim) * itemsize,
        state_bytes_per_sequence=kda_layers * (4 * model.kda.num_heads * model.kda.head_dim ** 2 + conv))


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


