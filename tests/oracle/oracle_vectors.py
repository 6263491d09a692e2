"""The golden vectors: where they lie, how a case is read, and how a result is compared with it.

Small cases are committed under data/. The larger ones are read from the folder that they came from where that lies beside the repository.
"""
import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from pallas_kernels.testing import rms_ratio

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[3] / "shared" / "oracle"

# Relative to the largest |reference|, float32 against float64 (or the producer's float32): the vectors' own README.
BOUNDS = {"attnres_mix": 2e-6, "situ_glu": 2e-6, "latent_moe": 3e-6, "gated_mla": 3e-6, "glm5_kda": 2e-5, "kimi_linear": 1e-4, "k3": 1e-4}
GRADIENT_BOUNDS = BOUNDS | {"k3": 5e-4}
FLOAT64_BOUND = 1e-10


def committed(kind: str) -> list[str]:
    return sorted(path.stem for path in DATA.glob(f"{kind}_s*.json"))


def cases(kind: str) -> list[str]:
    """All cases of a kind that can be read here."""
    return sorted({*committed(kind), *(path.stem for path in SHARED.glob(f"{kind}_s*.json"))})


def folder_of(case: str) -> Path:
    return DATA if (DATA / f"{case}.json").is_file() else SHARED


@dataclasses.dataclass(frozen=True)
class Case:
    """One case; the dicts hold numpy arrays under the names that follow the file's prefixes in., w., cot., out. and grad."""
    name: str
    config: Any
    inputs: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    cotangents: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]

    def best(self, name: str) -> np.ndarray:
        """The float64 output where there is one."""
        return self.outputs.get(f"{name}_f64", self.outputs[name])


@functools.cache
def load(name: str) -> Case:
    folder = folder_of(name)
    arrays = load_arrays(folder / f"{name}.safetensors")
    if (gradients := folder / f"{name}.grads.safetensors").is_file():
        arrays |= {f"grad.{key}": x for key, x in load_arrays(gradients).items()}
    part = lambda prefix: {key.removeprefix(prefix): x for key, x in arrays.items() if key.startswith(prefix)}
    return Case(name, json.loads((folder / f"{name}.json").read_text())["config"], *map(part, ("in.", "w.", "cot.", "out.", "grad.")))


def load_arrays(file: Path) -> dict[str, np.ndarray]:
    """A file through the safetensors library; bfloat16, which its numpy side lacks, through its flax side."""
    with safe_open(file, "numpy") as plain, safe_open(file, "flax") as flax:
        return {name: np.asarray((flax if plain.get_slice(name).get_dtype() == "BF16" else plain).get_tensor(name)) for name in plain.keys()}


def checkpoint(name: str, scratch: Path) -> Path:
    """The checkpoint's folder of a model case. The packed case's is put together in `scratch`: only its experts are stored apart from k3_s1's weights."""
    folder = folder_of(name) / name
    if (folder / "model.safetensors").is_file():
        return folder
    packed = load_arrays(folder / "experts.safetensors")
    replaced = {name.removesuffix("_packed").removesuffix("_scale") for name in packed}
    whole = {name: x for name, x in load_arrays(DATA / "k3_s1" / "model.safetensors").items() if name not in replaced} | packed
    built = scratch / name
    built.mkdir(parents=True, exist_ok=True)
    save_file(whole, built / "model.safetensors")
    (built / "config.json").write_bytes((folder / "config.json").read_bytes())
    return built


@dataclasses.dataclass(frozen=True)
class Figure:
    """How far one quantity of a case is from its reference."""
    case: str
    quantity: str
    dtype: str
    worst: float
    """Largest |difference| / largest |reference|."""
    rms: float
    """RMS of the difference / RMS of the reference."""
    bound: float | None
    """For `worst`; None where the figure is only reported."""

    @property
    def passes(self) -> bool:
        return self.bound is None or self.worst <= self.bound


def compare(case: str, dtype: str, got: Mapping[str, Any], want: Mapping[str, np.ndarray], bound: float | None) -> list[Figure]:
    """One figure a quantity. Raises KeyError where `got` lacks one."""
    figures = []
    for name, reference in want.items():
        reference, value = np.asarray(reference, np.float64), np.asarray(got[name]).astype(np.float64)
        assert value.shape == reference.shape, f"{case} {name}: {value.shape} against {reference.shape}"
        size = np.max(np.abs(reference))
        figures.append(Figure(case, name, dtype, float(np.max(np.abs(value - reference)) / (size or 1)), rms_ratio(value, reference), bound))
    return figures


def assert_passes(figures: list[Figure]) -> None:
    assert figures
    far = [f"{figure.case} {figure.quantity} {figure.dtype}: {figure.worst:.2e} over {figure.bound:.0e}" for figure in figures if not figure.passes]
    assert not far, "\n".join(far)
