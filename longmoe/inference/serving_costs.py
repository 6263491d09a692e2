"""What serving a model costs, on paper: bytes of weights, caches and recurrent state, FLOPs, and the time that reading those bytes takes at least."""
import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from longmoe.configs import ModelConfig
from longmoe.model.costs import active_parameters, cache_numbers, parameter_shapes, parameters_by_part, recurrence_flops

BITS = {"float32": 32.0, "bfloat16": 16.0, "fp8": 8.0, "mxfp4": 4.25}
"""Bits a number, block scales among them."""
LENGTHS = (8192, 65536, 262144, 1048576)


@dataclasses.dataclass(frozen=True)
class ServingConfig:
    """Devices and dtypes that a model is served on."""
    devices: int = 8
    """Devices that share weights, caches and state evenly."""
    weights: Literal["float32", "bfloat16", "fp8", "mxfp4"] = "bfloat16"
    """Dtype of the routed experts; mxfp4 and fp8 leave all other weights in bfloat16."""
    cache: Literal["float32", "bfloat16", "fp8"] = "bfloat16"
    """Dtype of MLA's latents."""
    state: Literal["float32", "bfloat16"] = "float32"
    """Dtype of KDA's recurrent states."""
    memory: float = 141e9
    """Bytes of a device's memory (an H200's)."""
    usable: float = 0.9
    """Share of the memory that weights, caches and state may fill."""
    bandwidth: float = 4.8e12
    """Bytes a second of a device's memory (an H200's)."""
    batch: int = 1
    """Sequences decoded together, for the bandwidth floor."""

    def __post_init__(self) -> None:
        for name in ("devices", "memory", "bandwidth", "batch"):
            if getattr(self, name) <= 0:
                raise ValueError(f"ServingConfig.{name}: got {getattr(self, name)}, wanted a positive number")
        if not 0 < self.usable <= 1:
            raise ValueError(f"ServingConfig.usable: got {self.usable}, wanted a share in (0, 1]")


@dataclasses.dataclass(frozen=True)
class ServingRow:
    """One context length."""
    length: int
    latent_bytes: int
    """MLA's cache of one sequence."""
    sequence_bytes: int
    """Latents, KDA states and convolution histories of one sequence."""
    sequences: int
    """Sequences that fit beside the weights on all devices; 0 where not even the weights fit."""
    decode_flops: float
    """FLOPs of one more token at this length, MLA on the latents themselves."""
    prefill_flops: float
    """FLOPs of reading the whole context, MLA on expanded keys and values."""
    floor_ms: float
    """Least milliseconds of a decoding step of `batch` sequences: what it reads and writes over the bandwidth of all devices."""


@dataclasses.dataclass(frozen=True)
class Serving:
    """Bytes and FLOPs of serving one model."""
    config: ServingConfig
    expert_bytes: float
    """Weights of the routed experts."""
    other_bytes: float
    """All other weights."""
    latent_bytes_per_token: int
    state_bytes: int
    """KDA states of one sequence."""
    conv_bytes: int
    """Convolution histories of one sequence, in the model's dtype."""
    weight_flops: float
    """FLOPs of a token in the weights alone."""
    rows: tuple[ServingRow, ...]

    @property
    def weight_bytes(self) -> float:
        return self.expert_bytes + self.other_bytes

    @property
    def snapshot_tokens(self) -> float:
        """Tokens of latents that one snapshot of the recurrent state is as large as."""
        return (self.state_bytes + self.conv_bytes) / self.latent_bytes_per_token if self.latent_bytes_per_token else math.inf


def serving_costs(model: ModelConfig, config: ServingConfig, lengths: tuple[int, ...] = LENGTHS) -> Serving:
    """Figures of `model` on `config` at each context length."""
    parts = parameters_by_part(parameter_shapes(model))
    total, active = sum(parts.values()), active_parameters(model, parts)
    mla, mla_layers, cache = model.mla, model.mixers.count("mla"), cache_numbers(model)
    size = lambda count, dtype: count * BITS[dtype] / 8
    experts = size(parts["experts"], config.weights)
    others = size(total - parts["experts"], config.weights if config.weights == "float32" else "bfloat16")
    latent = int(size(cache.latent, config.cache))
    state = int(size(cache.state, config.state))
    conv = cache.conv * jnp.dtype(model.dtype).itemsize
    fixed = state + conv
    moe = model.moe
    touched = 1 - (1 - moe.experts_per_token / moe.num_experts) ** config.batch    # share of the experts that a batch meets, chosen evenly
    read = others * (1 - parts["embedding"] / (total - parts["experts"])) + experts * touched
    absorbed = 2 * mla_layers * mla.num_heads * (2 * mla.kv_lora_rank + mla.rope_dim)
    expanded = 2 * mla_layers * mla.num_heads * (mla.nope_dim + mla.rope_dim + mla.v_dim)
    room = config.devices * config.memory * config.usable - experts - others
    rows = []
    for length in lengths:
        moved = read + config.batch * (latent * length + 2 * fixed)
        rows.append(ServingRow(
            length=length, latent_bytes=latent * length, sequence_bytes=latent * length + fixed,
            sequences=max(0, int(room // (latent * length + fixed))), decode_flops=2 * active + recurrence_flops(model) + absorbed * length,
            prefill_flops=length * (2 * active + recurrence_flops(model)) + expanded * length * (length + 1) / 2,
            floor_ms=1e3 * moved / (config.devices * config.bandwidth)))
    return Serving(config, experts, others, latent, state, conv, 2.0 * active, tuple(rows))
