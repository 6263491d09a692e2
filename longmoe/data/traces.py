"""Traces of an agent that keeps a list with a tool: dialogues of any length whose answers rest on what was said and done long before."""

from collections import defaultdict
from collections.abc import Callable, Iterator

from longmoe.data.draws import Draws
from longmoe.data.hashing import text_key
from longmoe.data.long_documents import Evidence, Filling, LongDocument, Turn
from longmoe.data.words import draw_pairs

SYSTEM = "You keep a list of crates. set(name, n) writes a count, add(name, n) adds to one, read(file) shows a file. Answer questions from memory."
ITEMS = 12
"""Names on the list of one trace."""
_READ, _SET, _ADD, _ASK = range(4)
_KINDS = (_READ, _READ, _SET, _ADD, _ASK)
"""What the user wants, by turns of the draws: reading is twice as likely as each other thing."""
_READ_CHARACTERS = 1200


def trace_documents(filling: Filling, *, seed: int, length: Callable[[Draws], int]) -> Iterator[LongDocument]:
    """Endless traces: the user has counts set and added to, files read (whose long output is filling), and asks for counts.

    length: (draws) -> tokens of filling in a trace, which ends when all of it has been read; what is said comes on top. An answer rests on the last set of
    its name and on every addition since: sums over several places. The assistant's turns are its calls and answers. Trace i depends on seed, i and the
    filling alone.
    """
    index = 0
    while True:
        draws = Draws(text_key("trace"), seed, index)
        yield _trace(f"trace-{seed}-{index}", filling, length(draws), draws)
        index += 1


def _trace(name: str, filling: Filling, tokens: int, draws: Draws) -> LongDocument:
    names = draw_pairs(draws, ITEMS)
    chunks, unread = iter(filling.take(draws, tokens)), True
    counts: dict[str, int] = {}
    told: dict[str, list[int]] = defaultdict(list)                      # turns that the present count of a name rests on
    turns, evidence = [Turn("system", SYSTEM)], []

    def say(role: str, content: str) -> None:
        turns.append(Turn(role, content))

    while unread or not evidence:
        kind, item, n = _KINDS[draws.integer(len(_KINDS))], names[draws.integer(ITEMS)], 1 + draws.integer(99)
        if kind == _READ:
            output = ""
            while len(output) < _READ_CHARACTERS and (chunk := next(chunks, "")):
                output += chunk
            unread = bool(output)
            if output:
                say("user", f"Read file {len(turns)}.")
                say("assistant", f"read({len(turns) - 1})")
                say("tool", output)
        elif kind == _ASK and counts:
            item = draws.choose(list(counts), 1)[0]
            say("user", f"How many crates of {item} are on the list?")
            say("assistant", f"{counts[item]}")
            evidence += [Evidence(turn, 0, len(turns) - 1) for turn in told[item]]
        elif kind in (_SET, _ADD):
            fresh = kind == _SET or item not in counts
            counts[item] = n if fresh else counts[item] + n
            told[item] = [*([] if fresh else told[item]), len(turns)]
            say("user", f"Put {n} crates of {item} on the list." if fresh else f"Add {n} crates of {item}.")
            say("assistant", f"{'set' if fresh else 'add'}({item}, {n})")
            say("tool", "done")
    return LongDocument(name, tuple(turns), tuple(evidence), joint="\n")
