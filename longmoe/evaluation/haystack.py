"""Text that needles are hidden in: a fixed block that repeats, or prose (an essay), by default that of the standard library's docstrings."""

import bisect
import functools
import itertools
import re
from collections.abc import Sequence

from longmoe.data.corpus import stdlib_contents

NOISE = ("The rain falls on the hills.", "The river runs to the sea.", "The sun dries the sand.", "A cloud comes up.", "And the rain falls again.")
"""The block of five sentences that the repeated haystack is made of (RULER's "noise"; the words are ours)."""
_END = re.compile(r"(?<=[.!?])\s+")
_LONG_NUMBER = re.compile(r"\d{5}")
_PAIR = re.compile(r"[a-z]+-[a-z]+")
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_PLAIN_WORD = re.compile(r"[A-Za-z][a-z'-]*[,;:.!?]?")


class Essay:
    """Prose as sentences, repeated when more words are asked for than there are.

    Words with five digits in a row are left out, so that no number or uuid that is planted occurs in it; `pairs` are its hyphenated words, which are
    no keys then. ValueError for a text without words.
    """

    def __init__(self, text: str):
        words = [word for word in text.split() if not _LONG_NUMBER.search(word)]
        if not words:
            raise ValueError(f"text: got {len(text)} characters without a word, wanted prose")
        self._sentences = _END.split(" ".join(words))
        self._ends = list(itertools.accumulate(len(sentence.split()) for sentence in self._sentences))
        self.pairs = frozenset(_PAIR.findall(text.lower()))

    @property
    def num_words(self) -> int:
        return self._ends[-1]

    def sentences(self, num_words: int) -> list[str]:
        """The first `num_words` words, cut into sentences; the last one may be cut short."""
        rounds, left = divmod(num_words, self.num_words)
        whole = bisect.bisect_right(self._ends, left)
        cut = left - (self._ends[whole - 1] if whole else 0)
        rest = [" ".join(self._sentences[whole].split()[:cut])] if cut else []
        return self._sentences * rounds + self._sentences[:whole] + rest


def insert(units: Sequence[str], places: Sequence[int], needles: Sequence[str]) -> list[str]:
    """`units` with needles[i] before units[places[i]] (at the end for len(units)); needles of one place keep their order."""
    result, done = [], 0
    for place, needle in sorted(zip(places, needles), key=lambda pair: pair[0]):
        result += units[done:place]
        result.append(needle)
        done = place
    return result + list(units[done:])


@functools.cache
def default_essay() -> Essay:
    """Sentences of English prose from the docstrings of the running interpreter's standard library, each once (about two seconds).

    They differ between versions of Python: scores that are to be compared use one version, or an Essay of one's own.
    """
    contents = stdlib_contents()
    found = itertools.chain.from_iterable(_DOCSTRING.findall(contents.content(position)) for position in range(len(contents)))
    sentences = itertools.chain.from_iterable(_END.split(" ".join(text.split())) for text in found)
    return Essay(" ".join(dict.fromkeys(sentence for sentence in sentences if _is_prose(sentence))))


def _is_prose(sentence: str) -> bool:
    words = sentence.split()
    return 6 <= len(words) <= 60 and sentence[0].isupper() and sentence[-1] in ".!?" and all(_PLAIN_WORD.fullmatch(word) for word in words)
