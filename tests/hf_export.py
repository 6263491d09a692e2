"""The small kimi_linear models whose exports transformers loads: one with weights from numpy alone, one trained for 20 steps.

    python tests/hf_export.py --out build/hf_export          # then tests/oracle/check_transformers.py, in an environment with torch

Each export lies beside the tokens and the logits that it should give.
"""
import argparse
import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file

from longmoe import LongMoE, init_train_state, make_mesh, make_train_step, presets, save_hf
from longmoe.configs import DataConfig, ModelConfig, OptimConfig, TrainConfig
from longmoe.interop.hf_names import variable_shapes

STEPS = 20


def kimi_linear_model(**changes: Any) -> ModelConfig:
    """Kimi Linear's architecture, small enough to export in a test."""
    full = presets.kimi_linear_48b().model
    return dataclasses.replace(
        full, vocab_size=96, width=32, num_layers=6, dense_dim=48, dtype="float32", param_dtype="float32", remat="none",
        kda=dataclasses.replace(full.kda, num_heads=2, head_dim=16),
        mla=dataclasses.replace(full.mla, num_heads=2, kv_lora_rank=16, nope_dim=8, rope_dim=4, v_dim=8),
        moe=dataclasses.replace(full.moe, num_experts=6, experts_per_token=2, expert_dim=24, shared_expert_dim=24), **changes)


def seeded_variables(config: ModelConfig) -> dict[str, Any]:
    """Weights that do not depend on JAX's random numbers, nor on a machine's arithmetic: integers over a power of two."""
    draw = np.random.default_rng(0)
    make = lambda shape: (draw.integers(-512, 512, shape.shape) / (2048 if len(shape.shape) > 1 else 1024) + (len(shape.shape) == 1)).astype(np.float32)
    return traverse_util.unflatten_dict({leaf: jnp.asarray(make(shape)) for leaf, shape in sorted(variable_shapes(config).items())})


def trained_variables(config: ModelConfig) -> dict[str, Any]:
    """STEPS optimizer steps on a fixed batch whose tokens repeat with a period."""
    cfg = TrainConfig(model=config, data=DataConfig(sequence_length=32, batch_size=8), steps=STEPS, optim=OptimConfig(warmup_steps=5, learning_rate=1e-2))
    mesh = make_mesh(cfg.mesh, devices=jax.devices()[:1])
    state, step = init_train_state(cfg, mesh, jax.random.key(0)), make_train_step(cfg, mesh)
    draw = np.random.default_rng(1)
    tokens = jnp.asarray(np.tile(draw.integers(0, config.vocab_size, (8, 11)), 3), jnp.int32)
    batch = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], loss_weights=jnp.ones((8, 32)), segment_ids=jnp.ones((8, 32), jnp.int32))
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return {"params": state.params, "router_state": state.router_state}


def folder_hash(folder: Path) -> str:
    """SHA-256 over the names and bytes of a folder's files (check_transformers.py computes the same)."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/hf_export"))
    out = parser.parse_args().out
    out.mkdir(parents=True)
    config = kimi_linear_model()
    for name, make in {"seeded": seeded_variables, "trained": trained_variables}.items():
        variables = make(config)
        save_hf(config, variables, out / name)
        tokens = np.random.default_rng(2).integers(0, config.vocab_size, (2, 41))
        logits = LongMoE(config).apply(variables, jnp.asarray(tokens, jnp.int32)).logits
        save_file({"tokens": tokens, "logits": np.asarray(logits)}, out / f"{name}.logits.safetensors")
        print(f"{name}: {folder_hash(out / name)}")


if __name__ == "__main__":
    main()
