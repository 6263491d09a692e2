"""The commands `longmoe import-hf` and `longmoe export-hf`."""
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import tyro

from longmoe.configs import ModelConfig
from longmoe.interop import hf
from longmoe.interop.folders import describe, load_model, save_model


@dataclasses.dataclass(frozen=True)
class ImportHf:
    """Turns a Hugging Face checkpoint of kimi_linear or kimi_k3 into a folder with a ModelConfig and its variables."""
    path: tyro.conf.Positional[str]
    """Folder with config.json and safetensors."""
    out: str
    """New folder: model_config.json, model.safetensors."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of parameters and activations; None keeps the checkpoint's."""


@dataclasses.dataclass(frozen=True)
class ExportHf:
    """Writes a model as a Hugging Face checkpoint of the family that expresses it."""
    path: tyro.conf.Positional[str]
    """A run directory (its newest checkpoint), or a folder that `longmoe import-hf` or longmoe.interop.folders.save_model wrote."""
    out: str
    """New folder: config.json, safetensors."""
    pack_experts: Literal["floor", "round"] | None = None
    """Packs the routed experts as MXFP4, with this rule for the groups' exponents."""
    max_shard_bytes: int = hf.MAX_SHARD_BYTES
    """Largest file."""


def import_hf(arguments: list[str]) -> None:
    """longmoe import-hf PATH --out DIR."""
    parsed = tyro.cli(ImportHf, args=arguments, prog="longmoe import-hf")
    config, variables = hf.load_hf(parsed.path, dtype=parsed.dtype)
    save_model(config, variables, parsed.out)
    print(f"{parsed.out}: {describe(config, variables)}")


def export_hf(arguments: list[str], load: Callable[[str], tuple[ModelConfig, Any]] = load_model) -> None:
    """longmoe export-hf PATH --out DIR. `load` reads PATH: (config, variables)."""
    parsed = tyro.cli(ExportHf, args=arguments, prog="longmoe export-hf")
    config, variables = load(parsed.path)
    hf.save_hf(config, variables, parsed.out, pack_experts=parsed.pack_experts, max_shard_bytes=parsed.max_shard_bytes)
    print(f"{parsed.out}: {describe(config, variables)}")
