"""Intervals of scores, and how much context a model uses by them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RULER_THRESHOLD = 0.856
"""Llama-2-7B's average at 4K, which RULER takes as the least of a length in use (Hsieh et al., 2024, section 4)."""
RELATIVE_THRESHOLD = 0.85
Z95 = 1.959963984540054
STUDENT95 = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814)
"""Student's quantile of a two-sided 95 % interval for 1 to 10 degrees of freedom."""


@dataclass(frozen=True)
class Interval:
    """A mean of n figures and the bounds of its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int


def wilson(mean: float, n: int, z: float = Z95) -> Interval:
    """Wilson's score interval (1927) of a share `mean` of n.

    Also for means of scores between 0 and 1: their variance is at most that of a share with the same mean, so that the interval is then too wide, never
    too narrow. ValueError for n < 1 or a mean outside [0, 1].
    """
    if n < 1:
        raise ValueError(f"n: got {n}, wanted at least 1")
    if not 0 <= mean <= 1:
        raise ValueError(f"mean: got {mean}, wanted a number from 0 to 1")
    scale = 1 + z**2 / n
    centre = (mean + z**2 / (2 * n)) / scale
    half = z / scale * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
    return Interval(mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half)), n)


def student(values: Sequence[float], *, least: float = -math.inf, most: float = math.inf) -> Interval:
    """Student's t interval (1908) of the mean of a few independent figures, such as one a seed; bounds are NaN for one value, which says nothing of them.

    least, most: what the mean can be, such as 0 and 1 for a share; the interval's bounds go no further. ValueError for no value.
    """
    n = len(values)
    if not n:
        raise ValueError("values: got none, wanted at least one")
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = student95(n - 1) * math.sqrt(math.fsum((value - mean)**2 for value in values) / (n - 1) / n)
    return Interval(mean, max(least, mean - half), min(most, mean + half), n)


def student95(freedom: int) -> float:
    """Student's quantile of a two-sided 95 % interval; past 10 degrees of freedom by the normal quantile's expansion, right to four digits there."""
    if freedom <= len(STUDENT95):
        return STUDENT95[freedom - 1]
    z, v = Z95, freedom
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2) + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)


@dataclass(frozen=True)
class EffectiveContext:
    """The longest tested length that passes, 0 for none: by the mean, by the lower bound of its interval (low), by the upper one (high)."""

    length: int
    low: int
    high: int
    threshold: float


def effective_context(scores: Mapping[int, Interval], chance: Mapping[int, float], *, threshold: float | None = None) -> EffectiveContext:
    """From length -> interval of the mean score and length -> chance.

    threshold: RULER_THRESHOLD for RULER's rule; None takes RELATIVE_THRESHOLD of the model's own score at the shortest length. Either way the interval's lower
    bound has to lie above chance. Tested lengths alone are looked at.
    """
    if not scores or scores.keys() != chance.keys():
        raise ValueError(f"scores: got lengths {sorted(scores)} with chance of {sorted(chance)}, wanted at least one length, and the same of both")
    wanted = RELATIVE_THRESHOLD * scores[min(scores)].mean if threshold is None else threshold
    longest = lambda figure: max((length for length, score in scores.items() if score.low > chance[length] and figure(score) >= wanted), default=0)
    return EffectiveContext(longest(lambda s: s.mean), longest(lambda s: s.low), longest(lambda s: s.high), wanted)


def weighted_averages(scores: Mapping[int, float]) -> tuple[float, float]:
    """RULER's wAvg.: means over lengths with weights that rise by 1 a length (long contexts matter more), and that fall."""
    ordered: Sequence[float] = [scores[length] for length in sorted(scores)]
    rising = range(1, len(ordered) + 1)
    mean = lambda weights: sum(w * s for w, s in zip(weights, ordered)) / sum(rising)
    return mean(rising), mean(reversed(rising))
