"""Associative recall: how often the model gives the value that went with a key."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longmoe.configs import ModelConfig
from longmoe.model.lm import LongMoE


@dataclass(frozen=True)
class RecallScore:
    """accuracy over `answers` queries; `chance` is a guess among the row's own values."""

    accuracy: float
    chance: float
    answers: int


def recall_score(model_config: ModelConfig, variables: Mapping[str, Any], batches: Iterable[Mapping[str, np.ndarray]], num_pairs: int) -> RecallScore:
    """Greedy answers (argmax over the whole vocabulary) at the positions that carry loss weight."""

    @jax.jit
    def hits(variables: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> jax.Array:
        logits = LongMoE(model_config).apply(variables, batch["tokens"], batch["segment_ids"]).logits
        return jnp.sum((jnp.argmax(logits, axis=-1) == batch["targets"]) & (batch["loss_weights"] > 0))

    right, answers = 0, 0
    for batch in batches:
        right += int(hits(variables, batch))
        answers += int((batch["loss_weights"] > 0).sum())
    if not answers:
        raise ValueError("batches: got no position with loss weight, wanted batches of the associative-recall task")
    return RecallScore(right / answers, 1.0 / num_pairs, answers)
