"""Intervals of scores, and how much context a model uses by them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RULER_THRESHOLD = 0.856
"""Llama-2-7B's average at 4K, which RULER takes as the least of a length in use (Hsieh et al., 2024, section 4)."""
RELATIVE_THRESHOLD = 0.85
Z95 = 1.959963984540054
T95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""The same of Student's t with 1 to 10 degrees of freedom."""


@dataclass(frozen=True)
class Interval:
    """A mean of n scores (in [0, 1], or what a function says otherwise) and the bounds of its 95 % interval."""

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


def student(values: Sequence[float]) -> Interval:
    """Student's t interval (1908) of the mean of n runs that differ in their seed, from any range of numbers; not cut at 0 and 1.

    Wide for few runs: 2.5 standard deviations either side for three. ValueError for n < 2, which say nothing about their spread.
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"values: got {n}, wanted at least 2")
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((x - mean)**2 for x in values) / (n - 1))
    # Past the table, the first terms of Student's quantile in powers of 1 / (n - 1): within 1e-3.
    t = T95[n - 2] if n - 2 < len(T95) else Z95 + (Z95**3 + Z95) / (4 * (n - 1)) + (5 * Z95**5 + 16 * Z95**3 + 3 * Z95) / (96 * (n - 1)**2)
    half = t * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


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
