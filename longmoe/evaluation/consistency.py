"""Long-horizon consistency: one fact, asked again and again while a trace of an agent's steps grows behind it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longmoe.data.draws import Draws
from longmoe.data.planted import NUM_NUMBERS, number
from longmoe.data.words import NUM_PAIRS, pair
from longmoe.evaluation.examples import Draft, Place, SizeError, TextTask
from longmoe.evaluation.scoring import NUMBER, make_pattern_score

ASKS = 8
_ACTIONS = ("checked", "copied", "restarted", "listed", "compared", "archived", "renamed", "measured")
_RESULTS = ("no change", "done", "one warning", "took a while", "nothing to do", "repeated once")
_EVERY = 4


def consistency_task(asks: int = ASKS) -> TextTask:
    """Example i is ask i % asks of trace i // asks: the first (i % asks + 1) / asks of the trace's steps, then the question.

    The fact stands in the first line; every fourth later step states another key's number, which a guess is one of. Earlier asks and their answers are
    not in the trace, so that each ask has to find the fact. Units are steps.
    """
    if asks < 1:
        raise ValueError(f"asks: got {asks}, wanted at least 1")
    return TextTask("consistency", "consistency", 32, lambda draws, place: _trace(asks, draws, place), make_pattern_score(NUMBER),
                    least_units=asks, draws_shared_by=asks)


@dataclass(frozen=True)
class Consistency:
    """by_ask [asks]: the share of traces with a right answer at each ask; always_right: the share of traces right at every ask; unchanged: the share of
    traces with one and the same number at every ask, right or wrong."""

    by_ask: tuple[float, ...]
    always_right: float
    unchanged: float


def consistency(asked: Sequence[tuple[Mapping[str, Any], str, str]]) -> Consistency:
    """From (metadata, gold answer, output) of whole traces of `consistency_task`. An output's answer is the first number in it.

    ValueError for no trace, or one with asks missing.
    """
    traces: dict[int, dict[int, tuple[bool, str | None]]] = defaultdict(dict)
    for metadata, gold, output in asked:
        named = NUMBER.search(output)
        answer = named[0] if named else None
        traces[metadata["trace"]][metadata["ask"]] = answer == gold, answer
    asks = {metadata["asks"] for metadata, _, _ in asked}
    if len(asks) != 1 or any(len(trace) != max(asks) for trace in traces.values()):
        raise ValueError(f"asked: got {len(asked)} outputs of {len(traces)} traces, wanted all asks of every trace, of one task")
    rows = [[trace[ask] for ask in range(max(asks))] for trace in traces.values()]
    mean = lambda values: sum(values) / len(rows)
    return Consistency(by_ask=tuple(mean([right for right, _ in column]) for column in zip(*rows)),
                       always_right=mean([all(right for right, _ in row) for row in rows]),
                       unchanged=mean([len({answer for _, answer in row}) == 1 and row[0][1] is not None for row in rows]))


def _trace(asks: int, draws: Draws, place: Place) -> Draft:
    ask = place.index % asks
    steps = place.units * (ask + 1) // asks
    stated = 1 + (steps + _EVERY - 1) // _EVERY
    if 2 * stated > NUM_PAIRS:
        raise SizeError(f"length: got {place.length}, whose trace states {stated} facts, wanted at most {NUM_PAIRS // 2} for consistency")
    # The facts of a longer trace begin with those of a shorter one.
    keys = [pair(i) for i in draws.distinct(NUM_PAIRS, stated).tolist()]
    values = [number(i) for i in draws.distinct(NUM_NUMBERS, stated).tolist()]
    actions, results, objects = (draws.integers(bound, steps).tolist() for bound in (len(_ACTIONS), len(_RESULTS), NUM_PAIRS))
    lines = [f"Step {i}: noted that the access number of {keys[1 + i // _EVERY]} is {values[1 + i // _EVERY]}." if i % _EVERY == 0 else
             f"Step {i}: {_ACTIONS[actions[i]]} {pair(objects[i]).replace('-', ' ')}, {_RESULTS[results[i]]}." for i in range(steps)]
    trace = "\n".join(lines)
    prompt = (f"Below is the trace of an agent's work, which notes access numbers on the way.\n"
              f"Start: noted that the access number of {keys[0]} is {values[0]}.\n{trace}\n"
              f"What is the access number of {keys[0]}? The access number of {keys[0]} is")
    metadata = {"trace": place.index // asks, "ask": ask, "asks": asks, "steps": steps}
    return Draft(prompt, (values[0],), tuple(values), metadata)
