"""longmoe: ultra-long-context sparse language models in JAX.

    import longmoe
    cfg = longmoe.presets.nano()
    variables = longmoe.init_variables(cfg.model, jax.random.key(0))
    logits = longmoe.LongMoE(cfg.model).apply(variables, tokens).logits

Names load on first use, so that importing the package is quick and never touches a device.
"""
import importlib
import importlib.metadata
import re
import warnings
from typing import Any

_HOMES = {
    "presets": "longmoe.presets",
    "quantile_balancing": "longmoe.balancing.quantile",
    "LongMoE": "longmoe.model.lm", "ModelOutput": "longmoe.model.lm", "init_variables": "longmoe.model.lm", "init_cache": "longmoe.model.lm",
    "stack_layers": "longmoe.model.depth", "unstack_layers": "longmoe.model.depth",
    "make_mesh": "longmoe.parallel.mesh",
    "TrainState": "longmoe.train.state", "init_train_state": "longmoe.train.state", "make_train_step": "longmoe.train.step",
    "fit": "longmoe.train.loop", "Stopped": "longmoe.train.signals", "load_checkpoint": "longmoe.train.checkpoints",
    "load_hf": "longmoe.interop.hf", "save_hf": "longmoe.interop.hf",
    "measure_gate": "longmoe.stage_gates", "generate": "longmoe.inference.engine", "estimate": "longmoe.planner",
}
_JAX = ((0, 11, 2), (0, 13))
"""The first release of JAX that works, and the first that nobody has tried."""
_MODULES = {"presets", "quantile_balancing"}

__all__ = sorted(_HOMES)


def check_jax(installed: str) -> None:
    """ImportError for a JAX that is too old, a warning for one that is newer than any that was tried."""
    release = tuple(int(part) for part in re.findall(r"\d+", installed)[:3])
    first, after = (".".join(map(str, version)) for version in _JAX)
    advice = f"wanted jax >= {first} and < {after}: pip install 'jax>={first},<{after}'"
    if release < _JAX[0]:
        raise ImportError(f"longmoe does not run on jax {installed}, {advice}")
    if release >= _JAX[1]:
        warnings.warn(f"longmoe was never tried on jax {installed}, {advice}", stacklevel=2)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'longmoe' has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


check_jax(importlib.metadata.version("jax"))
