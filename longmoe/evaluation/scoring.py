"""Rules that turn an output into a score: the benchmarks' own, and strict ones beside them.

RULER counts an answer that occurs anywhere in the output: "12345678" holds "2345678", and a list of every number in the prompt holds all answers. The
strict rules look at whole words and at everything that the output names, so that neither passes. Text around an answer changes neither score.
"""

import difflib
import re
from collections.abc import Callable, Collection, Sequence

from longmoe.evaluation.examples import Score, TextExample

NUMBER = re.compile(r"(?<![\w-])\d+(?!\w)")
UUID = re.compile(r"(?<![\w-])[0-9a-f]+(?:-[0-9a-f]+){4}(?![\w-])", re.IGNORECASE)
VARIABLE = re.compile(r"\b[A-Z]{5}\b")
_WORD = re.compile(r"[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*")
_LIST = re.compile(r"(?:final answer:)?\s*\[([^\[\]]*)\]\.?", re.IGNORECASE)


def contained(answers: Sequence[str], output: str) -> float:
    """The share of `answers` that occur in `output` whatever their case (RULER, scripts/eval)."""
    output = output.lower()
    return sum(answer.lower() in output for answer in answers) / len(answers)


def names_exactly(answers: Collection[str], named: Collection[str]) -> float:
    """1 when the two hold the same strings whatever their case and however often, else 0."""
    return float({answer.lower() for answer in answers} == {name.lower() for name in named})


def make_pattern_score(pattern: re.Pattern[str]) -> Callable[[TextExample, str], Score]:
    """official: `contained`; strict: the output's matches of `pattern`, all that look like an answer, are the answers and no others."""
    return lambda example, output: Score(contained(example.answers, output), names_exactly(example.answers, pattern.findall(output)))


def word_score(example: TextExample, output: str) -> Score:
    """official: `contained`; strict: the candidates among the output's words are the answers and no others."""
    known = {candidate.lower() for candidate in example.candidates} | {answer.lower() for answer in example.answers}
    named = known.intersection(_WORD.findall(output.lower()))
    return Score(contained(example.answers, output), names_exactly(example.answers, named))


def list_score(example: TextExample, output: str) -> Score:
    """official: F1 of the set that the last line lists as `Final Answer: [a, b]` (the words before the bracket may be missing), 1 when it and the gold
    set are empty, 0 without such a line; strict: the two sets are equal. Source: OpenAI's GraphWalks."""
    lines = output.strip().splitlines()
    listed = _LIST.fullmatch(lines[-1].strip()) if lines else None
    if not listed:
        return Score(0.0, 0.0)
    named = {part.strip().strip("'\"").lower() for part in listed[1].split(",")} - {""}
    gold = {answer.lower() for answer in example.answers}
    if not named and not gold:
        return Score(1.0, 1.0)
    return Score(2.0 * len(named & gold) / (len(named) + len(gold)), float(named == gold))


def matched(gold: str, output: str, prefix: str) -> float:
    """difflib's ratio between the two texts behind `prefix`, 0 where the output does not begin with it (OpenAI's MRCR)."""
    if not output.startswith(prefix):
        return 0.0
    return difflib.SequenceMatcher(None, output.removeprefix(prefix), gold.removeprefix(prefix)).ratio()


def repetition_score(example: TextExample, output: str) -> Score:
    """official: `matched`; strict: equality. White space around the output plays no part.

    The one answer begins with example.metadata["prefix"].
    """
    gold, output = example.answers[0], output.strip()
    return Score(matched(gold, output, example.metadata["prefix"]), float(output == gold))
