"""A model small enough to compile in seconds that still has every part: both mixers, a dense and several MoE layers, two depth blocks, of which the
second is one scan of two super-blocks."""
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from longmoe.configs import DataConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig, OptimConfig, ResidualConfig, TrainConfig

VOCAB = 62


def tiny_model(**changes: Any) -> ModelConfig:
    model = ModelConfig(
        vocab_size=VOCAB, width=32, num_layers=8, mla_every=2, dense_dim=48, dtype="float32",
        kda=KDAConfig(num_heads=2, head_dim=16), mla=MLAConfig(num_heads=2, q_lora_rank=16, kv_lora_rank=16, nope_dim=8, rope_dim=4, v_dim=8),
        moe=MoEConfig(num_experts=8, experts_per_token=2, latent_dim=16, expert_dim=24, num_shared_experts=1, shared_expert_dim=24),
        residual=ResidualConfig(block_size=4), init_std=0.05)
    return dataclasses.replace(model, **changes)


def tiny_train(*, accumulation_steps: int = 1, optimizer: str = "adamw", **changes: Any) -> TrainConfig:
    return TrainConfig(model=tiny_model(**changes), data=DataConfig(sequence_length=24, batch_size=8), steps=20, accumulation_steps=accumulation_steps,
                       optim=OptimConfig(optimizer=optimizer, loss_chunk=40, warmup_steps=2))


def batch_of(key: jax.Array, rows: int = 8, tokens: int = 24) -> dict[str, jax.Array]:
    """Packed rows: two documents and padding at the end, each of another length."""
    keys = jax.random.split(key, 3)
    text = jax.random.randint(keys[0], (rows, tokens + 1), 0, VOCAB)
    cut, end = jax.random.randint(keys[1], (2, rows, 1), 5, 12)
    position = jnp.arange(tokens)
    segments = jnp.where(position < cut, 1, jnp.where(position < cut + end, 2, 0))
    weights = (segments > 0) * jax.random.uniform(keys[2], (rows, tokens), minval=0.5)
    return dict(tokens=text[:, :-1], targets=text[:, 1:], loss_weights=weights.astype(jnp.float32), segment_ids=segments.astype(jnp.int32))
