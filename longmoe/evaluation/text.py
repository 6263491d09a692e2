"""Loss on held-out text: bits a byte, by position, and with one kind of layer silenced."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longmoe.configs import ModelConfig
from longmoe.data.token_folder import Split
from longmoe.evaluation.ngrams import bits_per_byte
from longmoe.model.lm import LongMoE

Variables = Mapping[str, Any]
LossFunction = Callable[[Variables, Mapping[str, np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class Losses:
    """Every prediction of an evaluation pass, rows in order.

    nll float32 [R, T] nats; targets, segment_ids int32 [R, T]; weights float32 [R, T], 0 where nothing was predicted.
    """

    nll: np.ndarray
    targets: np.ndarray
    segment_ids: np.ndarray
    weights: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int((self.weights > 0).sum())

    def nats_per_token(self) -> float:
        return float((self.nll * self.weights).sum(dtype=np.float64) / self.weights.sum(dtype=np.float64))

    def bits_per_byte(self, bytes_per_token: np.ndarray) -> float:
        """All nats, those of end-of-document tokens too, over the bytes of the predicted text."""
        predicted = self.weights > 0
        return bits_per_byte(float(self.nll[predicted].sum(dtype=np.float64)), int(bytes_per_token[self.targets[predicted]].sum(dtype=np.int64)))


def make_loss_function(model_config: ModelConfig) -> LossFunction:
    """-> (variables, batch) -> nll float32 [B, T]; compiled once for each batch shape, whatever the variables hold."""

    @jax.jit
    def nll(variables: Variables, tokens: jax.Array, targets: jax.Array, segment_ids: jax.Array) -> jax.Array:
        logits = LongMoE(model_config).apply(variables, tokens, segment_ids).logits
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - picked

    return lambda variables, batch: np.asarray(nll(variables, batch["tokens"], batch["targets"], batch["segment_ids"]))


def evaluate_batches(loss_function: LossFunction, variables: Variables, batches: Iterable[Mapping[str, np.ndarray]]) -> Losses:
    """Scores every batch (those of `make_loader(..., split="heldout")`, or `document_starts`). ValueError when there is none."""
    parts = [(loss_function(variables, b), b["targets"], b["segment_ids"], b["loss_weights"]) for b in batches]
    if not parts:
        raise ValueError("batches: got none, wanted at least one; is the held-out split shorter than asked for?")
    return Losses(*(np.concatenate(arrays) for arrays in zip(*parts)))


def document_starts(split: Split, *, sequence_length: int, batch_size: int) -> list[dict[str, np.ndarray]]:
    """Batches whose rows are the first `sequence_length` tokens of each document that has as many, under the split's own weights.

    The last batch is filled with padding.
    """
    long_enough = np.flatnonzero(split.lengths() >= sequence_length)
    count = -(-len(long_enough) // batch_size) * batch_size
    shape = (count, sequence_length)
    targets, weights, segments = np.full(shape, split.eos_id, np.int32), np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    for row, document in enumerate(long_enough):
        own = split.document_weights(document)
        targets[row], weights[row] = split.document(document)[:sequence_length], 1.0 if own is None else own[:sequence_length]
        segments[row] = 1
    tokens = np.concatenate([np.full((count, 1), split.eos_id, np.int32), targets[:, :-1]], axis=1)
    batch = {"tokens": tokens, "targets": targets, "segment_ids": segments, "loss_weights": weights}
    return [{name: a[i:i + batch_size] for name, a in batch.items()} for i in range(0, count, batch_size)]


def loss_by_position(losses: Losses, edges: Sequence[int]) -> list[float]:
    """Mean loss of the positions edges[i] <= p < edges[i + 1] of a row, by their weights, over the rows that are one whole piece of a document.

    All bins average over the same pieces, so a difference between bins comes from the context before a position (and, of conversations, from what
    stands there); NaN where no such row has a token with weight.
    """
    whole = np.all(losses.segment_ids == 1, axis=1)
    weights = losses.weights[whole]
    nats, weight = (losses.nll[whole] * weights).sum(axis=0, dtype=np.float64), weights.sum(axis=0, dtype=np.float64)
    return [float(nats[a:b].sum() / weight[a:b].sum()) if weight[a:b].any() else float("nan") for a, b in zip(edges[:-1], edges[1:])]


def silence(variables: Variables, mixer: str) -> dict[str, Any]:
    """`variables` with the output projection of every "kda" or "mla" layer at zero, so that those layers add nothing."""
    found = 0

    def zero(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        nonlocal found
        names = [str(getattr(entry, "key", entry)) for entry in path]
        if mixer in names and names[-2:] == ["o_proj", "kernel"]:
            found += 1
            return jnp.zeros_like(leaf)
        return leaf

    params = jax.tree_util.tree_map_with_path(zero, variables["params"])
    if not found:
        raise ValueError(f"mixer: got {mixer!r}, but no parameter path holds {mixer}/o_proj/kernel; wanted 'kda' or 'mla', and a model that has it")
    return {**variables, "params": params}


def mean_depth_weights(model_config: ModelConfig, variables: Variables, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Site name -> float32 [sources]: how much each site takes from each depth source, mean over the batch's tokens."""
    run = jax.jit(lambda v, tokens, segments: LongMoE(model_config).apply(v, tokens, segments, return_depth_weights=True).depth_weights)
    return {site: np.asarray(weights) for site, weights in run(variables, batch["tokens"], batch["segment_ids"]).items()}
