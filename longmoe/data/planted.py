"""Documents with planted facts and questions about them: sparse evidence in long text, retrieval, several hops and sums over many places."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from longmoe.data.draws import Draws
from longmoe.data.hashing import text_key
from longmoe.data.long_documents import Evidence, Filling, LongDocument, Turn
from longmoe.data.words import draw_pairs

ABSENT = "not stated"
"""The answer where a text gives a key no number."""
PREFACE = ("The text below is followed by a question. If the text gives a key more than one special magic number, the last one counts. "
           f"If it gives none, the answer is: {ABSENT}.")
NUM_NUMBERS = 9_000_000
"""Numbers of seven digits."""
MOST_PLACES = 4
"""Places that the evidence of one answer stands at, at most."""


class Planted(NamedTuple):
    """Facts in the order in which they stand, a question that ends where the answer begins, and the answer. The last `needed` facts are its evidence."""
    facts: Sequence[str]
    question: str
    answer: str
    needed: int


def needle(kind: str, key: str, value: str) -> str:
    """The sentence that is planted; kind is "number" or "uuid"."""
    return f"One of the special magic {kind}s for {key} is: {value}."


def number_question(key: str) -> str:
    """The question about a needle, up to its answer."""
    return f"What is the special magic number for {key}? The special magic number for {key} is"


def number(place: int) -> str:
    """The number of seven digits at a place below NUM_NUMBERS."""
    return str(1_000_000 + place)


def draw_numbers(draws: Draws, count: int) -> list[str]:
    """Different numbers of seven digits."""
    return [number(place) for place in draws.distinct(NUM_NUMBERS, count).tolist()]


def _single(draws: Draws, key: str) -> Planted:
    value, = draw_numbers(draws, 1)
    return Planted([needle("number", key, value)], number_question(key), value, 1)


def _last_counts(draws: Draws, key: str) -> Planted:
    old, new = draw_numbers(draws, 2)
    return Planted([needle("number", key, old), needle("number", key, new)], number_question(key), new, 1)


def _absent(draws: Draws, key: str) -> Planted:
    return Planted([], number_question(key), ABSENT, 0)


def _chain(draws: Draws, key: str) -> Planted:
    hops, (value,) = 2 + draws.integer(MOST_PLACES - 1), draw_numbers(draws, 1)
    names = [f"{key}-{place}" for place in range(hops)]
    facts = [f"The access code of {names[0]} is {value}.",
             *(f"The access code of {later} is the one of {earlier}." for earlier, later in zip(names, names[1:]))]
    return Planted(draws.shuffled(facts), f"What is the access code of {names[-1]}? The access code of {names[-1]} is", value, hops)


def _total(draws: Draws, key: str) -> Planted:
    counts = (1 + draws.integers(99, 2 + draws.integer(MOST_PLACES - 1))).tolist()
    facts = [f"The depot of {key} received {count} crates." for count in counts]
    return Planted(facts, f"How many crates did the depot of {key} receive in all? In all it received", str(sum(counts)), len(facts))


KINDS: dict[str, Callable[[Draws, str], Planted]] = {"single": _single, "last_counts": _last_counts, "absent": _absent, "chain": _chain, "total": _total}
"""What is planted: one number, a number that a later one replaces, none, a chain of 2 to MOST_PLACES hops in any order, 2 to MOST_PLACES counts to add."""


def planted_documents(filling: Filling, *, seed: int, questions: int | Callable[[Draws], int], length: Callable[[Draws], int],
                      kinds: Sequence[str] = tuple(KINDS), near: bool = True) -> Iterator[LongDocument]:
    """Endless documents: a preface, filling with facts between its chunks, then questions with their answers.

    questions: of each document, or (draws) -> theirs. A model that has yet to learn to look learns from documents with few facts: where there are forty,
    to copy any of them is hardly better than to guess. length: (draws) -> tokens of a document's filling; facts and questions come on top.

    Facts stand at distances from the end that are uniform for one half of the questions and log-uniform for the other, so that near and far are both
    practised; near False: uniform for all. Document i depends on seed, i and the filling alone.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds or not callable(questions) and questions < 1:
        raise ValueError(f"kinds: got {', '.join(kinds) or 'none'} with questions={questions}, wanted names among {', '.join(KINDS)} and a question or more")
    how_many = questions if callable(questions) else lambda draws: questions
    index = 0
    while True:
        draws = Draws(text_key("planted"), seed, index)
        chunks, count = filling.take(draws, length(draws)), how_many(draws)
        asked = [KINDS[kinds[kind]](draws, key) for kind, key in zip(draws.integers(len(kinds), count).tolist(), draw_pairs(draws, count))]
        yield _document(f"planted-{seed}-{index}", chunks, asked, draws, near)
        index += 1


def _document(name: str, chunks: Sequence[str], asked: Sequence[Planted], draws: Draws, near: bool) -> LongDocument:
    behind: list[list[tuple[str, int]]] = [[] for _ in range(len(chunks) + 1)]              # facts before each chunk: (fact, its question or -1)
    for question, planted in enumerate(asked):
        log_uniform, points = near and question % 2 == 1, draws.uniform(len(planted.facts))
        # In chunks from the end, from 0 (right before the questions) to all of them.
        distances = ((len(chunks) + 1)**points - 1 if log_uniform else points * (len(chunks) + 1)).astype(int)
        first_needed = len(planted.facts) - planted.needed
        for i, (fact, distance) in enumerate(zip(planted.facts, sorted(distances.tolist(), reverse=True))):
            behind[len(chunks) - min(distance, len(chunks))].append((fact, question if i >= first_needed else -1))
    text, stands = PREFACE + "\n", []
    pieces = [text]
    size = len(text)
    for facts, chunk in zip(behind, (*chunks, "")):
        for fact, question in facts:
            if question >= 0:
                stands.append((question, size))
            pieces.append(fact + "\n")
            size += len(fact) + 1
        pieces.append(chunk)
        size += len(chunk)
    turns = []
    for question, planted in enumerate(asked):
        before = "".join(pieces) if question == 0 else ""
        turns += [Turn("user", f"{before}\n{planted.question} "), Turn("assistant", f"{planted.answer}.\n")]
    return LongDocument(name, tuple(turns), tuple(Evidence(0, at, 2 * question + 1) for question, at in stands))
