"""What a long-context task is: examples that are a pure function of (task, length, seed, index), and a score of an output.

A text task builds a prompt out of any number of units (sentences, lines, words); here that number is found for a budget of tokens. As in RULER, the
budget holds the prompt and its answer together, the number of units is found once a task and length with the tokenizer that will be used, and an
example that would come out longer (its names and numbers take more tokens) gives up units until it fits. No prompt is ever cut.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from longmoe.data.draws import Draws
from longmoe.data.hashing import text_key

Count = Callable[[str], int]
"""A text's length in the tokens of the model that will read it, all that the model is given with it included."""
MAX_SEARCH_STEPS = 24
SLACK = 2.0**-14
"""Share of a length that may stay empty, so that a prompt of a million tokens is not counted again for the sake of a word: 64 tokens there."""
_PROBE = -1


class SizeError(ValueError):
    """A length that a task cannot have."""


class Score(NamedTuple):
    """Both in [0, 1]. `official` is the benchmark's own rule, `strict` the one that a list of guesses or a longer number does not pass."""

    official: float
    strict: float


class Place(NamedTuple):
    """What a builder is to build: `units` of filling, for a target of `length` tokens, number `index` of its task (the probe of a size is -1)."""

    units: int
    length: int
    index: int


@dataclass(frozen=True)
class Draft:
    """A prompt and its gold answers.

    candidates: strings of the answers' form that a guess is drawn from: those of the prompt where it holds wrong ones, else ones that are nowhere in it.
    chance: expected official score of a guess; None where it is the share of candidates that are answers.
    """

    prompt: str
    answers: tuple[str, ...]
    candidates: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    chance: float | None = None


@dataclass(frozen=True)
class TextExample:
    """A prompt of at most length - answer_tokens tokens (`prompt_tokens` as counted) and what a right answer holds."""

    prompt: str
    answers: tuple[str, ...]
    candidates: tuple[str, ...]
    chance: float
    index: int
    length: int
    prompt_tokens: int
    answer_tokens: int
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class TextTask:
    """A task on text.

    build: (draws, place) -> Draft. Draws that must not change with the number of units come first.
    score: (example, output) -> Score.
    answer_tokens: the budget of the answer; an answer that takes more in the tokens of the model gets as many as it takes.
    render: how a right answer is written out, for the oracle and for guesses.
    least_units: fewest units that make an example.
    draws_shared_by: so many examples in a row get the same draws (and differ by their index).
    """

    name: str
    family: str
    answer_tokens: int
    build: Callable[[Draws, Place], Draft]
    score: Callable[[TextExample, str], Score]
    render: Callable[[Sequence[str]], str] = ", ".join
    least_units: int = 1
    draws_shared_by: int = 1


@dataclass(frozen=True)
class TokenExample:
    """A row of token ids and the predictions asked of it, which a model makes in one pass, every answer fed.

    tokens, targets int32 [T]; asked bool [T]: where the model's most likely token after tokens[:t + 1] must be targets[t].
    """

    tokens: np.ndarray
    targets: np.ndarray
    asked: np.ndarray
    candidates: np.ndarray
    chance: float
    index: int
    length: int
    metadata: Mapping[str, Any]

    @property
    def answers(self) -> np.ndarray:
        """int32 [asked.sum()]."""
        return self.targets[self.asked]


@dataclass(frozen=True)
class TokenTask:
    """A task on token ids below vocab_size.

    build: (draws, length) -> (tokens, targets, asked), [T] each with T <= length.
    candidates: the ids that an answer can be; a guess is one of them.
    """

    name: str
    family: str
    vocab_size: int
    candidates: range
    build: Callable[[Draws, int], tuple[np.ndarray, np.ndarray, np.ndarray]]

    def score(self, example: TokenExample, output: np.ndarray) -> Score:
        """output int [asked]: the predictions in order. official: the share that is right; strict: all are."""
        right = np.asarray(output) == example.answers
        return Score(float(right.mean()), float(right.all()))


Task = TextTask | TokenTask
Example = TextExample | TokenExample


def make_examples(task: Task, *, length: int, count: Count | None = None, seed: int = 0) -> Callable[[int], Any]:
    """-> index -> the example of that number: TextExample or TokenExample, by the task.

    length: tokens of prompt and answer together. count: needed for text. SizeError (a ValueError) where no example of the task is that short.
    """
    if length < 1:
        raise ValueError(f"length: got {length}, wanted at least 1")
    if isinstance(task, TokenTask):
        return lambda index: _token_example(task, length, seed, index)
    if count is None:
        raise ValueError(f"count: got None, wanted a function from text to its number of tokens, because {task.name} is a task on text")
    units, units_a_token = _find_units(task, length, count, seed)

    def example(index: int) -> TextExample:
        left = units
        while True:
            draft = _draft(task, length, seed, index, left)
            prompt_tokens, answer_tokens = count(draft.prompt), _answer_tokens(task, draft, count)
            over = prompt_tokens + answer_tokens - length
            if over <= 0:
                return TextExample(draft.prompt, draft.answers, draft.candidates, _chance(draft), index, length, prompt_tokens, answer_tokens,
                                   draft.metadata)
            if left <= task.least_units:
                raise _too_short(task, length, prompt_tokens + answer_tokens)
            left = max(task.least_units, left - max(1, int(over * units_a_token)))

    return example


def _find_units(task: TextTask, length: int, count: Count, seed: int) -> tuple[int, float]:
    """(the most units, to within one unit or SLACK of the length, whose probe fits; units a token).

    Interpolation between a size that fits and one that does not, past a few steps every other one a bisection: sizes
    are close to linear in units, but need not be.
    """
    def size(units: int) -> int:
        draft = _draft(task, length, seed, _PROBE, units)
        return count(draft.prompt) + _answer_tokens(task, draft, count)

    low, low_size = task.least_units, size(task.least_units)
    if low_size > length:
        raise _too_short(task, length, low_size)
    high, high_size = None, 0
    guess, slope = low + 32, 1.0
    for step in range(MAX_SEARCH_STEPS):
        guess_size = size(guess)
        slope = max((guess_size - low_size) / (guess - low), 1e-3) if guess_size > low_size else slope
        if guess_size <= length:
            low, low_size = guess, guess_size
        else:
            high, high_size = guess, guess_size
        if high is not None:
            slope = max((high_size - low_size) / (high - low), 1e-3)
        if high == low + 1 or length - low_size < max(slope, length * SLACK):
            break
        guess = low + max(1, int((length - low_size) / slope))
        if high is not None:
            guess = (low + high) // 2 if step > 6 and step % 2 else min(guess, high - 1)
    return low, 1.0 / slope


def _draft(task: TextTask, length: int, seed: int, index: int, units: int) -> Draft:
    return task.build(Draws(seed, text_key(task.name), length, index // task.draws_shared_by), Place(units, length, index))


def _answer_tokens(task: TextTask, draft: Draft, count: Count) -> int:
    return max(task.answer_tokens, 1 + count(task.render(draft.answers)))


def _chance(draft: Draft) -> float:
    if draft.chance is not None:
        return draft.chance
    return len(set(draft.answers) & set(draft.candidates)) / len(draft.candidates)


def _too_short(task: Task, length: int, wanted: int) -> SizeError:
    return SizeError(f"length: got {length}, wanted at least about {wanted} tokens, the shortest example of {task.name} with its answer")


def _token_example(task: TokenTask, length: int, seed: int, index: int) -> TokenExample:
    tokens, targets, asked = task.build(Draws(seed, text_key(task.name), length, index), length)
    return TokenExample(tokens.astype(np.int32), targets.astype(np.int32), asked, np.arange(task.candidates.start, task.candidates.stop),
                        1.0 / len(task.candidates), index, length, {"asked": int(asked.sum())})
