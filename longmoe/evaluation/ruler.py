"""RULER: the eleven of its thirteen tasks that need no data set (Hsieh et al., 2024, arXiv 2404.06654; NVIDIA/RULER, scripts/data/synthetic).

The eight retrieval tasks are in `niah`; here are variable tracking (vt), common words (cwe) and frequent words (fwe). The two question-answering tasks
need SQuAD and HotpotQA. The wording and the word lists are ours, the sizes, counts, answer budgets and scores are RULER's.
"""

import string
from collections.abc import Sequence

import numpy as np

from longmoe.data.draws import Draws
from longmoe.data.words import draw_words
from longmoe.evaluation.examples import Draft, Place, SizeError, TextTask
from longmoe.evaluation.haystack import NOISE, Essay, insert
from longmoe.evaluation.niah import VARIANTS, niah_tasks
from longmoe.evaluation.scoring import VARIABLE, make_pattern_score, word_score

TASKS = (*(variant.name for variant in VARIANTS), "vt", "cwe", "fwe")
"""Names of the eleven tasks, in RULER's order."""
HOPS = 4
COMMON_WORDS = 10
SHORT = 4096
"""Below this length the lists of cwe repeat their words less."""
_EXAMPLE_LINES = 2
_FREQUENT = 3
_ZETA_2 = np.pi**2 / 6


def ruler_tasks(essay: Essay) -> list[TextTask]:
    """The tasks of TASKS, in their order."""
    return [*niah_tasks(essay),
            TextTask("vt", "multi-hop", 30, _variables, make_pattern_score(VARIABLE)),
            TextTask("cwe", "aggregation", 120, _common_words, word_score, least_units=2 * COMMON_WORDS),
            TextTask("fwe", "aggregation", 50, _frequent_words, word_score, least_units=64)]


def _variables(draws: Draws, place: Place) -> Draft:
    """One chain of HOPS assignments among lines of noise; units are those lines. A worked example with names of three letters comes first."""
    letters = string.ascii_uppercase
    names = [_code(letters, 5, code) for code in draws.distinct(len(letters)**5, 2 * (HOPS + 1)).tolist()]
    names, decoys = names[:HOPS + 1], names[HOPS + 1:]
    shorter = [_code(letters, 3, code) for code in draws.distinct(len(letters)**3, HOPS + 1).tolist()]
    value, other = (str(10_000 + number) for number in draws.distinct(90_000, 2).tolist())
    example = _tracked(draws, shorter, other, _EXAMPLE_LINES)
    prompt = f"{example} {', '.join(shorter)}.\n\n{_tracked(draws, names, value, place.units)}"
    return Draft(prompt, tuple(names), tuple(decoys), {"value": value})


def _tracked(draws: Draws, names: Sequence[str], value: str, lines: int) -> str:
    chain = [f"VAR {name} = {source}" for name, source in zip(names, [value, *(f"VAR {name}" for name in names)])]
    places = np.sort(draws.integers(lines + 1, len(chain))).tolist()
    context = "\n".join(insert([" ".join(NOISE)] * lines, places, chain))
    return (f"The text below hides assignments to variables. Follow every chain of them.\n{context}\n"
            f"Which variables have the value {value}, directly or through other variables? The {len(names)} variables with the value {value} are")


def _common_words(draws: Draws, place: Place) -> Draft:
    """A numbered list of `units` different words, ten of which occur ten times as often as the others (six times below SHORT)."""
    often, seldom = (30, 3) if place.length >= SHORT else (6, 1)
    shown = (40, 10, 3) if place.length >= SHORT else (20, 3, 1)
    words = draw_words(draws, shown[0] + place.units)
    shown_list = _numbered(draws, words[:shown[0]], *shown[1:])
    words = words[shown[0]:]
    question = f"Which {COMMON_WORDS} words occur most often in the list above? The {COMMON_WORDS} words that occur most often are"
    prompt = (f"Below is a numbered list of words, some of which occur more often than the others. Memorise those that do.\n{shown_list}\n{question} "
              f"{', '.join(_answer_list(shown_list))}.\n\n"
              f"Below is a numbered list of words, some of which occur more often than the others. Memorise those that do.\n"
              f"{_numbered(draws, words, often, seldom)}\n{question}")
    return Draft(prompt, tuple(words[:COMMON_WORDS]), tuple(words), {"words": len(words), "often": often, "seldom": seldom})


def _numbered(draws: Draws, words: Sequence[str], often: int, seldom: int) -> str:
    """The first COMMON_WORDS of `words` `often` times each and the others `seldom` times, shuffled and numbered from 1."""
    listed = draws.shuffled([*words[:COMMON_WORDS] * often, *words[COMMON_WORDS:] * seldom])
    return " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))


def _answer_list(numbered: str) -> list[str]:
    """The words that occur most often in a list of `_numbered`."""
    words, counts = np.unique(numbered.split()[1::2], return_counts=True)
    return words[np.argsort(-counts, kind="stable")[:COMMON_WORDS]].tolist()


def _frequent_words(draws: Draws, place: Place) -> Draft:
    """`units` words of a made-up language, the word of rank k floor(units k^-2 / zeta(2)) times; rank 1 is noise, ranks 2 to 4 are asked for."""
    vocabulary = max(place.length // 50, 2 + _FREQUENT)
    counts = np.floor(place.units / _ZETA_2 / np.arange(1, vocabulary + 1, dtype=np.float64)**2).astype(int)
    if not counts[_FREQUENT] > counts[_FREQUENT + 1]:
        raise SizeError(f"length: got {place.length}, which holds {place.units} words, too few for rank 4 to occur more often than rank 5 in fwe")
    letters = string.ascii_lowercase
    words = ["...", *(_code(letters, 6, code) for code in draws.distinct(len(letters)**6, vocabulary - 1).tolist())]
    text = " ".join(draws.shuffled(np.repeat(np.array(words), counts).tolist()))
    prompt = (f"Below is a text in a secret language. Dots (...) stand for noise: leave them out. Find the {_FREQUENT} words that occur most often.\n{text}\n"
              f"Which {_FREQUENT} words occur most often in the text above, dots left out? The {_FREQUENT} words that occur most often are")
    used = int((counts > 0).sum())
    return Draft(prompt, tuple(words[1:1 + _FREQUENT]), tuple(words[1:used]), {"words": used - 1})


def _code(alphabet: str, length: int, number: int) -> str:
    """The `length` digits of `number` to the base of `alphabet`."""
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(alphabet))
        digits.append(alphabet[digit])
    return "".join(digits)
