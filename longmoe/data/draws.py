"""Random choices for generated examples, from counter-based bits: the same under every version of NumPy and Python."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from longmoe.data.hashing import random_bits

T = TypeVar("T")


class Draws:
    """A stream of choices that depends on `key` (any integers) and on the order of the calls, on nothing else."""

    def __init__(self, *key: int):
        self._key, self._calls = key, 0

    def bits(self, *shape: int) -> np.ndarray:
        """uint64 of `shape`."""
        self._calls += 1
        return random_bits(*self._key, self._calls, shape=shape)

    def integers(self, bound: int, *shape: int) -> np.ndarray:
        """int64 of `shape`, uniform over range(bound)."""
        return (self.bits(*shape) % np.uint64(bound)).astype(np.int64)

    def integer(self, bound: int) -> int:
        """One of range(bound)."""
        return int(self.integers(bound, 1)[0])

    def uniform(self, *shape: int) -> np.ndarray:
        """float64 of `shape` in (0, 1), neither end included."""
        return ((self.bits(*shape) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def permutation(self, size: int) -> np.ndarray:
        """int64 [size]: range(size) in random order."""
        return np.argsort(self.bits(size), kind="stable")

    def distinct(self, bound: int, count: int) -> np.ndarray:
        """int64 [count]: different members of range(bound) in random order. ValueError when there are fewer.

        Up to half of them, a smaller `count` gives the first ones of a larger.
        """
        if count > bound:
            raise ValueError(f"count: got {count}, wanted at most the {bound} there are to choose from")
        if 2 * count > bound:
            return self.permutation(bound)[:count]
        self._calls += 1
        size = count + count // 4 + 8
        while True:      # a stream in which numbers come back now and then; a longer one begins with the shorter
            found = (random_bits(*self._key, self._calls, shape=(size,)) % np.uint64(bound)).astype(np.int64)
            first = np.unique(found, return_index=True)[1]
            if len(first) >= count:
                return found[np.sort(first)][:count]
            size *= 2

    def choose(self, items: Sequence[T], count: int) -> list[T]:
        """`count` of `items`, each place at most once, in random order."""
        return [items[place] for place in self.distinct(len(items), count).tolist()]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """All of `items` in random order."""
        return self.choose(items, len(items))

    def text(self, alphabet: str, length: int) -> str:
        """`length` characters of `alphabet`."""
        return "".join(alphabet[place] for place in self.integers(len(alphabet), length).tolist())
