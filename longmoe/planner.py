"""What a config costs, on paper: parameters, FLOPs, memory in training and in serving. Counts come from the model's own shapes; nothing is allocated."""
import dataclasses
import functools
from typing import Literal

import jax.numpy as jnp

from longmoe.configs import ModelConfig, TrainConfig
from longmoe.inference.serving_costs import Serving, ServingConfig, serving_costs
from longmoe.model.costs import active_parameters, cache_numbers, forward_flops, parameter_shapes, parameters_by_part
from longmoe.train.memory import TrainingMemory, training_memory


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Figures of one config."""
    model: ModelConfig
    config: TrainConfig | None
    """None for a bare ModelConfig."""
    platform: Literal["gpu", "cpu"]
    """What `training` is for."""
    total_params: int
    active_params: int
    """Parameters that a token meets: its chosen experts, the head counted, the input embedding not."""
    flops_per_token: float
    """Forward, averaged over the positions of a sequence of the config's length."""
    kv_bytes_per_token: int
    """MLA cache over all layers, in the model's dtype."""
    state_bytes_per_sequence: int
    """KDA states (float32) and convolution histories over all layers."""
    params_by_part: dict[str, int]
    """embedding, head, kda, mla, dense, router, experts, shared, latent, norms_and_depth."""

    @functools.cached_property
    def training(self) -> TrainingMemory | None:
        """Memory of a training step on one device of the mesh; None for a ModelConfig. Traces a layer of each kind: seconds."""
        return None if self.config is None else training_memory(self.config, self.platform)

    @property
    def bytes_per_device(self) -> int:
        """The most that a training step needs on one device; of a ModelConfig, the parameters."""
        return self.total_params * jnp.dtype(self.model.param_dtype).itemsize if self.training is None else self.training.peak

    def flops_at(self, length: int) -> float:
        """Forward FLOPs a token, averaged over the positions of a sequence of `length` tokens."""
        return forward_flops(self.model, self.active_params, length)

    def serving(self, config: ServingConfig | None = None) -> Serving:
        """Bytes, FLOPs and the bandwidth floor of serving on these devices."""
        return serving_costs(self.model, ServingConfig() if config is None else config)


def estimate(cfg: TrainConfig | ModelConfig, *, platform: Literal["gpu", "cpu"] = "gpu") -> Estimate:
    """Figures of a TrainConfig (at its sequence length, on its mesh) or of a ModelConfig (at 8,192 tokens, on one device).

    platform: what the training memory is for; a CPU holds the train state twice.
    """
    model = cfg.model if isinstance(cfg, TrainConfig) else cfg
    length = cfg.data.sequence_length if isinstance(cfg, TrainConfig) else 8192
    parts = parameters_by_part(parameter_shapes(model))
    active = active_parameters(model, parts)
    itemsize, cache = jnp.dtype(model.dtype).itemsize, cache_numbers(model)
    return Estimate(model=model, config=cfg if isinstance(cfg, TrainConfig) else None, platform=platform,
                    total_params=sum(parts.values()), active_params=active, flops_per_token=forward_flops(model, active, length), params_by_part=parts,
                    kv_bytes_per_token=cache.latent * itemsize,
                    state_bytes_per_sequence=4 * cache.state + cache.conv * itemsize)
