"""Mathematics of one 64-token chunk: decay factors, decayed scores, the triangular inverse. Arrays are [..., C, D], C = 64.

A score sum_c x_ic k_jc exp(G_ic - G_jc), G the running sum of log decays, needs a matrix product of two factors (x * rho) and (k * kappa) whose
decays meet at an anchor between j and i. One anchor cannot serve the whole chunk, so the pairs i > j are split by the highest bit in which i and
j differ: at level s (32, 16, 8, ..., 1) the pair lies in one block of 2s tokens, j in its left half and i in its right half, and the anchor is the
middle. There rho_i = exp(sum from the middle to i) and kappa_j = exp(sum after j to the middle), both at most 1, whatever the gates are.

With a promised bound the levels below 16 become one dense product per 16-token tile, anchored just before the tile: rho spans [exp(16 lb), 1]
and kappa is its reciprocal. A constant power of two between them keeps both within exp(+-40) at lb = -5: without it, small components of a
decayed row would be flushed to zero. The anchor comes before every row that it serves and the constant is one, so that nothing later than a row
touches it; later tokens meet it only through exact zeros.

Decays are products of exp(g) rather than exp of differences of long sums: each factor then has a relative error of a few units in the last
place, where a difference of two sums near -80 would have 5e-6.
"""
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

CHUNK = 64
TILE = 16
FACTORED_BOUND = -5.46
"""Lowest bound for which exp(16 * bound) is a normal float32: below it, tiles are exact."""


BALANCE = 2.0 ** 57


class Term(NamedTuple):
    """Pairs (i, j) of `mask` have exp(G_i - G_j) = rho_i * kappa_j. kappa None means 1."""
    rho: Float[Array, "*b C K"]
    kappa: Float[Array, "*b C K"] | None
    mask: np.ndarray


class Decays(NamedTuple):
    terms: tuple[Term, ...]
    start: Float[Array, "*b C K"]
    """Decay from the chunk's start through token i."""
    end: Float[Array, "*b C K"]
    """Decay after token j to the chunk's end: exactly 1 at the last token."""
    total: Float[Array, "*b K"]
    """Decay of the whole chunk, from the sum of its log decays: this one is applied T/64 times in a row, and exp(g) would round g near 0 away."""


_INDEX = np.arange(CHUNK)
STRICT = _INDEX[:, None] > _INDEX


def _level_mask(size: int) -> np.ndarray:
    block, half = _INDEX // (2 * size), _INDEX // size % 2
    return (block[:, None] == block) & (half[:, None] == 1) & (half == 0)


LEVELS = {size: _level_mask(size) for size in (1, 2, 4, 8, 16, 32)}
TILES = STRICT & (_INDEX[:, None] // TILE == _INDEX // TILE)


def _merge(start, end, size):
    """Decays to the edges of blocks of `size` -> of 2 * size."""
    *batch, length, width = start.shape
    halves = (*batch, length // (2 * size), 2, size, width)
    start, end = start.reshape(halves), end.reshape(halves)
    whole = start[..., -1:, :]
    left, right = whole[..., :1, :, :], whole[..., 1:, :, :]
    one = jnp.ones_like(left)
    start = start * jnp.concatenate([one, left], -3)
    end = end * jnp.concatenate([right, one], -3)
    return start.reshape(*batch, length, width), end.reshape(*batch, length, width)


def decays(g: Float[Array, "*b C K"], factored: bool) -> Decays:
    """Factors of one chunk's decayed products from its log decays, in g's dtype (float32 or float64)."""
    start, end, size, terms = jnp.exp(g), None, 1, []
    end = jnp.ones_like(start)
    while size < CHUNK:
        if size == TILE and factored:
            terms = [Term(start * BALANCE, 1 / (start * BALANCE), TILES)]
        terms.append(Term(start, end, LEVELS[size]))
        start, end = _merge(start, end, size)
        size *= 2
    return Decays(tuple(terms), start, end, jnp.exp(jnp.sum(g, axis=-2)))


def inverse(a: Float[Array, "*b C C"]) -> Float[Array, "*b C C"]:
    """(I + a)^-1 for strictly lower triangular a.

    Substitution inside the 16-token tiles, all tiles side by side, then two merges by [[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]].
    """
    *batch, length, _ = a.shape
    tiles = jnp.stack([a[..., t:t + TILE, t:t + TILE] for t in range(0, length, TILE)], axis=-3)
    columns = jnp.moveaxis(tiles.reshape(-1, TILE, TILE), 0, -1)
    eye = jnp.broadcast_to(jnp.eye(TILE, dtype=a.dtype)[..., None], columns.shape) + 0 * columns

    def row(i, solved):
        lower = jax.lax.dynamic_index_in_dim(columns, i, keepdims=False)
        return solved.at[i].add(-jnp.sum(lower[:, None] * solved, axis=0))

    solved = jnp.moveaxis(jax.lax.fori_loop(1, TILE, row, eye), -1, 0).reshape(*batch, length // TILE, TILE, TILE)
    size = TILE
    while size < length:
        p, q = solved[..., 0::2, :, :], solved[..., 1::2, :, :]
        l = jnp.stack([a[..., t + size:t + 2 * size, t:t + size] for t in range(0, length, 2 * size)], axis=-3)
        corner = -_product(_product(q, l), p)
        solved = jnp.concatenate([jnp.concatenate([p, jnp.zeros_like(p)], -1), jnp.concatenate([corner, q], -1)], -2)
        size *= 2
    return solved.reshape(*batch, length, length)


def _product(a, b):
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
