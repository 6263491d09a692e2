"""How fast a run goes and what it fills: step time, tokens a second, model FLOPs utilisation, device memory. All from the host's clock."""
import time
from collections.abc import Sequence
from typing import Any

import jax

from longmoe.configs import TrainConfig
from longmoe.model.costs import active_parameters, forward_flops, parameter_shapes, parameters_by_part

PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA H200": 989.4e12}
"""Device kind -> dense bfloat16 FLOPs a second (NVIDIA's data sheets). Utilisation is left out on devices that are not here."""


class Throughput:
    """Measures the time between calls of `step`."""

    def __init__(self, cfg: TrainConfig, devices: Sequence[Any]):
        """devices: those of the mesh."""
        self._available = available_flops(cfg, devices)
        self._per_token = training_flops(cfg) if self._available is not None else 0.0
        self._devices = [device for device in devices if device.process_index == jax.process_index()]
        self.start()

    def start(self) -> None:
        """Time counts from here: called when compilation is over."""
        self._began = self._last = time.monotonic()

    def step(self, tokens: int) -> dict[str, float]:
        """Figures of the step that ended now and read `tokens` valid tokens: step_seconds, tokens_per_second, elapsed_seconds and, where the devices' peak
        is known, mfu."""
        now = time.monotonic()
        seconds, self._last = max(now - self._last, 1e-9), now
        figures = dict(step_seconds=seconds, tokens_per_second=tokens / seconds, elapsed_seconds=now - self._began)
        if self._available is not None:
            figures["mfu"] = self._per_token * tokens / seconds / self._available
        return figures

    def memory(self) -> dict[str, int]:
        """device_bytes_in_use and device_peak_bytes, the largest over this process's devices; empty where the backend does not count (the CPU)."""
        stats = [found for device in self._devices if (found := device.memory_stats())]
        names = {"bytes_in_use": "device_bytes_in_use", "peak_bytes_in_use": "device_peak_bytes"}
        return {name: max(found[key] for found in stats) for key, name in names.items() if stats and all(key in found for found in stats)}


def available_flops(cfg: TrainConfig, devices: Sequence[Any]) -> float | None:
    """FLOPs a second of all devices at the model's dtype; None unless that is bfloat16 and every device is in PEAK_FLOPS."""
    peaks = [PEAK_FLOPS.get(device.device_kind) for device in devices]
    return sum(peaks) if cfg.model.dtype == "bfloat16" and None not in peaks else None


def training_flops(cfg: TrainConfig) -> float:
    """FLOPs of a token's forward and backward pass: three forward passes. What rematerialisation computes again is not counted."""
    parts = parameters_by_part(parameter_shapes(cfg.model))
    return 3 * forward_flops(cfg.model, active_parameters(cfg.model, parts), cfg.data.sequence_length)
