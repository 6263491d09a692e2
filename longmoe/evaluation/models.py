"""A model as two functions, text to text and tokens to losses, which is all that the suites ask of one; and ours as such a pair."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longmoe.configs import ModelConfig
from longmoe.data.tokenizer import Tokenizer
from longmoe.evaluation.examples import Count
from longmoe.model.lm import LongMoE, project

PROMPT_STEPS = 4
"""Prompts are padded to a multiple of a quarter of the power of two below their width, so that tasks of one length share compiled programs."""
ANSWER_STEP = 64
SCORED_AT_ONCE = 4096
"""Positions whose logits are in memory at a time."""


class TokenScores(NamedTuple):
    """nll float32 [B, T]: nats of targets[:, t] after tokens[:, :t + 1]; best int32 [B, T]: the most likely token there."""

    nll: np.ndarray
    best: np.ndarray


Generate = Callable[[Sequence[str], int], Sequence[str]]
"""(prompts, max_new_tokens) -> the text behind each prompt, greedy."""
ScoreTokens = Callable[[np.ndarray, np.ndarray], TokenScores]
"""(tokens, targets), int32 [B, T] -> TokenScores. Every row is one document."""


@dataclass(frozen=True)
class Model:
    """Any model: `generate` and `count` serve the tasks on text, `score` those on tokens and the losses by position. What is None is not asked for.

    count must count all tokens that the model reads for a prompt, a begin-of-text token too.
    """

    generate: Generate | None = None
    score: ScoreTokens | None = None
    count: Count | None = None


def make_count(tokenizer: Tokenizer) -> Count:
    """Tokens that `make_generate` reads for a text: its own, and the end-of-document token in front."""
    return lambda text: 1 + len(tokenizer.encode(text))


def make_generate(generate_tokens: Callable[..., Any], tokenizer: Tokenizer) -> Generate:
    """Text to text around `generate_tokens(prompt_tokens, *, max_new_tokens, prompt_lengths, eos_id)`, such as
    `functools.partial(longmoe.generate, model, variables)`: prompts as beginnings of documents, all of a call in one right-padded batch, greedy, up to
    the end of the document.
    """
    def generate(prompts: Sequence[str], max_new_tokens: int) -> list[str]:
        tokens, lengths = _padded([[tokenizer.eos_id, *ids] for ids in tokenizer.encode_batch(prompts)], tokenizer.eos_id)
        new = generate_tokens(tokens, max_new_tokens=-(-max_new_tokens // ANSWER_STEP) * ANSWER_STEP, prompt_lengths=lengths, eos_id=tokenizer.eos_id)
        return [tokenizer.decode(_until(row[:max_new_tokens], tokenizer.eos_id)) for row in np.asarray(new)]

    return generate


def make_score(model_config: ModelConfig, variables: Mapping[str, Any]) -> ScoreTokens:
    """Ours: one pass a batch, whose logits are made SCORED_AT_ONCE positions at a time. ValueError for ids outside the vocabulary."""
    @jax.jit
    def run(variables: Mapping[str, Any], tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = LongMoE(model_config).apply(variables, tokens, return_hidden=True).hidden
        batch, length = tokens.shape
        chunk = min(length, SCORED_AT_ONCE)
        padded = -length % chunk
        split = lambda x: jnp.moveaxis(jnp.pad(x, [(0, 0), (0, padded), *[(0, 0)] * (x.ndim - 2)]).reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

        def of_chunk(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            logits = project(model_config, part[0], variables["params"]["lm_head"])
            picked = jnp.take_along_axis(logits, part[1][..., None], axis=-1)[..., 0]
            return jax.nn.logsumexp(logits, axis=-1) - picked, jnp.argmax(logits, axis=-1).astype(jnp.int32)

        join = lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :length]
        nll, best = jax.lax.map(of_chunk, (split(hidden), split(targets)))
        return join(nll), join(best)

    def score(tokens: np.ndarray, targets: np.ndarray) -> TokenScores:
        largest = max(int(np.max(tokens)), int(np.max(targets)))
        if largest >= model_config.vocab_size:
            raise ValueError(f"tokens: got id {largest}, wanted ids below the model's vocab_size {model_config.vocab_size}")
        return TokenScores(*map(np.asarray, run(variables, tokens, targets)))

    return score


def _padded(rows: Sequence[Sequence[int]], fill: int) -> tuple[np.ndarray, np.ndarray]:
    """(int32 [B, P], lengths int32 [B])."""
    lengths = np.array([len(row) for row in rows], np.int32)
    longest = int(lengths.max())
    step = max(1, 2 ** (longest.bit_length() - 1) // PROMPT_STEPS)
    tokens = np.full((len(rows), -(-longest // step) * step), fill, np.int32)
    for row, ids in zip(tokens, rows):
        row[:len(ids)] = ids
    return tokens, lengths


def _until(row: np.ndarray, end: int) -> np.ndarray:
    found = np.flatnonzero(row == end)
    return row[:found[0]] if len(found) else row
