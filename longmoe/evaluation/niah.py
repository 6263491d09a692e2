"""Needles in a haystack: RULER's eight retrieval tasks, and the grid of length against depth with its two controls.

A needle is a sentence that gives a key its number (or uuid); the prompt ends with the beginning of the answer. Definitions follow NVIDIA/RULER
(scripts/data/synthetic/niah.py); the wording is ours, so that figures compare between models scored here and not with published ones.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from longmoe.data.draws import Draws
from longmoe.data.planted import ABSENT, PREFACE, draw_numbers, needle, number_question
from longmoe.data.words import draw_pairs
from longmoe.evaluation.examples import Draft, Place, Score, TextExample, TextTask
from longmoe.evaluation.haystack import NOISE, Essay, insert
from longmoe.evaluation.scoring import NUMBER, UUID, make_pattern_score, names_exactly

ANSWER_TOKENS = 128
DEPTHS = tuple(range(0, 101, 10))
"""Percent of the haystack's sentences before the needle: 0 puts it first, 100 right before the question."""
_DEPTH_POINTS = 40
_DECOYS = 16


@dataclass(frozen=True)
class NiahVariant:
    """One row of RULER's table of retrieval tasks."""

    name: str
    haystack: Literal["noise", "essay", "needle"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


VARIANTS = (
    NiahVariant("niah_single_1", "noise"),
    NiahVariant("niah_single_2", "essay"),
    NiahVariant("niah_single_3", "essay", value="uuids"),
    NiahVariant("niah_multikey_1", "essay", keys=4),
    NiahVariant("niah_multikey_2", "needle"),
    NiahVariant("niah_multikey_3", "needle", key="uuids", value="uuids"),
    NiahVariant("niah_multivalue", "essay", values=4),
    NiahVariant("niah_multiquery", "essay", keys=4, queries=4),
)


def niah_tasks(essay: Essay) -> list[TextTask]:
    """RULER's niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue and niah_multiquery.

    Units: noise lines, essay words, or distractor lines. A guess takes from the prompt's values where some are wrong, else from values nowhere in it.
    """
    def task(variant: NiahVariant) -> TextTask:
        score = make_pattern_score(NUMBER if variant.value == "numbers" else UUID)
        least = variant.keys * variant.values
        return TextTask(variant.name, "retrieval", ANSWER_TOKENS, lambda draws, place: _niah(variant, essay, draws, place), score, least_units=least)

    return [task(variant) for variant in VARIANTS]


def needle_tasks(essay: Essay, depths: Sequence[int] = DEPTHS) -> list[TextTask]:
    """needle_grid: example i has its needle at depths[i % len(depths)] percent of an essay, and len(depths) examples in a row share key and
    number. The controls, under the same instructions:
    needle_absent has no needle, and the answer is "not stated"; needle_duplicate gives the key a wrong number somewhere before the right one at the
    example's depth, and the last one counts.
    """
    wrong = [depth for depth in depths if not 0 <= depth <= 100]
    if wrong or not depths:
        raise ValueError(f"depths: got {list(depths)}, wanted percentages from 0 to 100")

    def task(name: str, family: str, kind: Literal["present", "absent", "duplicate"], score: Callable[[TextExample, str], Score]) -> TextTask:
        return TextTask(name, family, ANSWER_TOKENS, lambda draws, place: _grid(kind, essay, depths, draws, place), score, draws_shared_by=len(depths))

    by_number = make_pattern_score(NUMBER)
    return [task("needle_grid", "retrieval", "present", by_number), task("needle_absent", "control", "absent", _absent_score),
            task("needle_duplicate", "control", "duplicate", by_number)]


def draw_uuids(draws: Draws, count: int) -> list[str]:
    """Random uuids of version 4 (RFC 9562)."""
    return [str(uuid.UUID(int=high << 64 | low, version=4)) for high, low in draws.bits(count, 2).tolist()]


def _niah(variant: NiahVariant, essay: Essay, draws: Draws, place: Place) -> Draft:
    lines = place.units if variant.haystack == "needle" else 0
    num_values = variant.keys * variant.values
    keys = draw_uuids(draws, variant.keys + lines) if variant.key == "uuids" else draw_pairs(draws, variant.keys + lines, essay.pairs)
    draw_values = draw_numbers if variant.value == "numbers" else draw_uuids
    values = draw_values(draws, num_values + lines + _DECOYS)
    values, others, decoys = values[:num_values], values[num_values:-_DECOYS], values[-_DECOYS:]
    kind = variant.value[:-1]
    needles = [needle(kind, keys[i // variant.values], value) for i, value in enumerate(values)]
    asked = draws.choose(keys[:variant.keys], variant.queries)
    answers = tuple(value for key in asked for i, value in enumerate(values) if keys[i // variant.values] == key)

    if variant.haystack == "essay":
        sentences = essay.sentences(place.units)
        points = draws.distinct(_DEPTH_POINTS, num_values).tolist()
        depths = [100.0 * point / (_DEPTH_POINTS - 1) for point in points]
        context = " ".join(insert(sentences, [int(len(sentences) * depth / 100) for depth in depths], needles))
    else:
        filling = [" ".join(NOISE)] * place.units if variant.haystack == "noise" else [needle(kind, *pair) for pair in zip(keys[variant.keys:], others)]
        places = draws.distinct(len(filling) + 1, num_values).tolist()
        depths = [100.0 * line / len(filling) for line in places]
        context = "\n".join(insert(filling, places, needles))
    wrong = others or [value for value in values if value not in answers]
    metadata = {"keys": tuple(asked)} | ({"depth": depths[0]} if num_values == 1 else {})
    return Draft(_prompt(kind, context, asked, single=len(answers) == 1), answers, (*answers, *wrong) if wrong else tuple(decoys), metadata)


def _prompt(kind: str, context: str, asked: Sequence[str], *, single: bool) -> str:
    keys = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
    if single:
        return (f"The text below hides a special magic {kind}. Memorise it, because you will be asked for it.\n{context}\n"
                f"What is the special magic {kind} for {keys} that the text above gives? The special magic {kind} for {keys} that the text above gives is")
    return (f"The text below hides some special magic {kind}s. Memorise them, because you will be asked for them.\n{context}\n"
            f"What are all the special magic {kind}s for {keys} that the text above gives? "
            f"The special magic {kind}s for {keys} that the text above gives are")


def _grid(kind: Literal["present", "absent", "duplicate"], essay: Essay, depths: Sequence[int], draws: Draws, place: Place) -> Draft:
    depth = depths[place.index % len(depths)]
    key, = draw_pairs(draws, 1, essay.pairs)
    value, other, *decoys = draw_numbers(draws, 2 + _DECOYS)
    sentences = essay.sentences(place.units)
    at = len(sentences) * depth // 100
    if kind == "present":
        sentences = insert(sentences, [at], [needle("number", key, value)])
    elif kind == "duplicate":
        sentences = insert(sentences, [draws.integer(at + 1), at], [needle("number", key, other), needle("number", key, value)])
    prompt = f"{PREFACE}\n{' '.join(sentences)}\n{number_question(key)}"
    answers, candidates = {"present": ((value,), tuple(decoys)), "absent": ((ABSENT,), tuple(decoys)), "duplicate": ((value,), (value, other))}[kind]
    return Draft(prompt, answers, candidates, {"depth": float(depth), "keys": (key,)})


def _absent_score(example: TextExample, output: str) -> Score:
    """official: says "not stated" and names no number; strict: says nothing else."""
    said = output.strip().strip(".").lower()
    official = float(ABSENT in said and not NUMBER.search(output))
    return Score(official, names_exactly((ABSENT,), (said,)))
