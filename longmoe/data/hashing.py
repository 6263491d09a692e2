"""Hashes that stand in for randomness: counter-based random bits, and the choice of held-out documents. The same on every machine and NumPy version.

NumPy keeps the streams of its bit generators but not those of `Generator.permutation` and friends, and a resumed run must see the
same data under a newer NumPy.
"""

import hashlib

import numpy as np

HELDOUT_PERCENT = 8

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), elementwise on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_bits(*key: int, shape: tuple[int, ...]) -> np.ndarray:
    """uint64 array of `shape`: element i depends on `key` (any integers) and on i, on nothing else."""
    start = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for part in key:
            start = _mix(start + _GOLDEN + np.uint64(part & 0xFFFFFFFFFFFFFFFF))
        count = np.arange(1, int(np.prod(shape, dtype=np.int64)) + 1, dtype=np.uint64)
        return _mix(start + count * _GOLDEN).reshape(shape)


def permutation(size: int, *key: int) -> np.ndarray:
    """int64 [size]: a permutation of range(size) that depends on `key` alone."""
    return np.argsort(random_bits(*key, shape=(size,)), kind="stable")


def text_key(text: str) -> int:
    """A string as an integer part of a key, 64 bits of its SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def is_held_out(name: str, percent: int = HELDOUT_PERCENT) -> bool:
    """Whether the document of this name is held out: a fixed hash of the name alone, so that the choice stays when documents come or go."""
    return text_key(name) % 100 < percent
