"""What the gates between stages ask for, measured on the run's own held-out text and on the needle grid."""
import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from longmoe.configs import DataConfig, TrainConfig
from longmoe.data.loader import make_loader, with_default_corpus
from longmoe.data.sources import open_tokenizer
from longmoe.evaluation.haystack import default_essay
from longmoe.evaluation.models import Model, make_count, make_generate
from longmoe.evaluation.niah import needle_tasks
from longmoe.evaluation.suites import cells, model_answers, run_tasks
from longmoe.inference.engine import generate
from longmoe.model.lm import LongMoE
from longmoe.train.losses import chunked_cross_entropy
from longmoe.train.state import TrainState

BATCHES = 16
"""Held-out batches of a step's size that a loss is the mean of, at most."""
NEEDLES = 4
"""Examples of the needle grid at each depth."""


def measure_gate(cfg: TrainConfig, state: TrainState, asked: tuple[str, ...]) -> dict[str, float]:
    """For `longmoe.fit(..., measure=measure_gate)`: {"loss", "short_loss", "needle"}, those that the thresholds `asked` (of GateConfig) need.

    loss, short_loss: nats a held-out token on rows of the stage's and of the first stage's length. needle: official score on the grid at the stage's length.
    ValueError where the held-out text does not fill one row, or the needle does not fit.
    """
    variables = {"params": state.params, "router_state": state.router_state}
    figures = {}
    if "max_loss" in asked:
        figures["loss"] = _loss(cfg, variables, cfg.data)
    if "max_short_loss_rise" in asked:
        short = cfg.stages[0].sequence_length
        figures["short_loss"] = _loss(cfg, variables, dataclasses.replace(cfg.data, sequence_length=short, batch_size=cfg.tokens_per_step // short))
    if "min_needle" in asked:
        figures["needle"] = _needle(cfg, variables)
    return figures


def _loss(cfg: TrainConfig, variables: Mapping[str, Any], data: DataConfig) -> float:
    @jax.jit
    def nll(variables: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> jax.Array:
        hidden = LongMoE(cfg.model).apply(variables, batch["tokens"], batch["segment_ids"], return_hidden=True).hidden
        return chunked_cross_entropy(cfg.model, hidden, variables["params"]["lm_head"], batch["targets"], batch["loss_weights"], chunk=cfg.optim.loss_chunk)[1]

    total = weight = 0.0
    for batch, _ in itertools.islice(make_loader(data, seed=cfg.seed, split="heldout"), BATCHES):
        total += float(nll(variables, {name: jnp.asarray(batch[name]) for name in ("tokens", "segment_ids", "targets", "loss_weights")}))
        weight += float(batch["loss_weights"].sum())
    if not weight:
        raise ValueError("data: got no held-out token, wanted a source with a held-out part for the gate's loss")
    return total / weight


def _needle(cfg: TrainConfig, variables: Mapping[str, Any]) -> float:
    tokenizer = open_tokenizer(with_default_corpus(cfg.data))
    model = Model(generate=make_generate(functools.partial(generate, LongMoE(cfg.model), variables), tokenizer), count=make_count(tokenizer))
    grid = needle_tasks(default_essay())[:1]
    results = run_tasks(grid, model_answers(model), lengths=[cfg.data.sequence_length], samples=NEEDLES, count=model.count, seed=cfg.seed)
    if results.unfit:
        raise ValueError(f"gate.min_needle: {results.unfit[0].reason}")
    return cells(results.records, lambda record: record.task)[grid[0].name].official.mean
