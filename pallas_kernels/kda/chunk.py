"""Mathematics of one 64-token chunk: decay factors, decayed scores, the triangular inverse.

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

The chunk is stored as two halves of 32 tokens, [..., 2, 32, D]. Levels up to 16 are products of 32 by 32 tokens with a mask: on a CPU they run
at the speed of 64 by 64, which tiles of 16 do not, at half the work.
"""
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

CHUNK = 64
HALF = 32
TILE = 16
FACTORED_BOUND = -5.45
"""Lowest bound at which tiles are factored; below it they are exact. exp(16 * bound) is a normal float32 down to -5.458: what is smaller is flushed to zero,
whose inverse is infinite."""
BALANCE = 2.0 ** 57


class Term(NamedTuple):
    """Pairs (i, j) of `mask` inside one half have exp(G_i - G_j) = rho_i * kappa_j. None means 1."""
    rho: Float[Array, "*b 2 L K"] | None
    kappa: Float[Array, "*b 2 L K"] | None
    mask: np.ndarray
    """bool [2, L, L]: for reads, which see their own token's write, and for writes, which do not."""


class Decays(NamedTuple):
    terms: tuple[Term, ...]
    """Pairs inside a half, each in one term."""
    half_start: Float[Array, "*b L K"]
    """Second half: decay from the middle of the chunk through token i."""
    half_end: Float[Array, "*b L K"]
    """First half: decay after token j to the middle of the chunk."""
    start: Float[Array, "*b 2 L K"]
    """Decay from the chunk's start through token i."""
    end: Float[Array, "*b 2 L K"]
    """Decay after token j to the chunk's end: exactly 1 at the last token."""
    total: Float[Array, "*b K"]
    """Decay of the whole chunk, from the sum of its log decays: this one is applied T/64 times in a row, and exp(g) would round g near 0 away."""


_I = np.arange(HALF)
_EARLIER = _I[:, None] > _I
_SELF = _I[:, None] == _I
_NOTHING = np.zeros_like(_SELF)
_TILES = _I[:, None] // TILE == _I // TILE


def _level_mask(size: int) -> np.ndarray:
    block, side = _I // (2 * size), _I // size % 2
    mask = (block[:, None] == block) & (side[:, None] == 1) & (side == 0)
    return np.stack([mask, mask])


def _merge(start, end, size):
    """Decays to the edges of blocks of `size` tokens -> of 2 * size."""
    *batch, length, width = start.shape
    halves = (*batch, length // (2 * size), 2, size, width)
    start, end = start.reshape(halves), end.reshape(halves)
    whole = start[..., -1:, :]
    left, right = whole[..., :1, :, :], whole[..., 1:, :, :]
    one = jnp.ones_like(left)
    start = start * jnp.concatenate([one, left], -3)
    end = end * jnp.concatenate([right, one], -3)
    return start.reshape(*batch, length, width), end.reshape(*batch, length, width)


def decays(g: Float[Array, "*b 2 L K"], factored: bool) -> Decays:
    """Factors of one chunk's decayed products from its log decays, in g's dtype (float32 or float64)."""
    *batch, _, _, width = g.shape
    start = jnp.exp(g).reshape(*batch, CHUNK, width)
    end, size = jnp.ones_like(start), 1
    halves = lambda x: x.reshape(g.shape)
    terms = [] if factored else [Term(None, None, np.stack([_SELF, _NOTHING]))]
    while size < HALF:
        if size == TILE and factored:
            balanced = BALANCE * start
            terms.append(Term(halves(balanced), halves(1 / balanced), np.stack([_TILES & (_EARLIER | _SELF), _TILES & _EARLIER])))
        if size == TILE or not factored:
            terms.append(Term(halves(start), halves(end), _level_mask(size)))
        start, end = _merge(start, end, size)
        size *= 2
    middle = halves(start)[..., 1, :, :], halves(end)[..., 0, :, :]
    start, end = _merge(start, end, HALF)
    return Decays(tuple(terms), *middle, halves(start), halves(end), jnp.exp(jnp.sum(g, axis=(-3, -2))))


def inverse(a: Float[Array, "*b 2 L L"], corner: Float[Array, "*b L L"]) -> Float[Array, "*b C C"]:
    """(I + A)^-1 for the strictly lower triangular A with diagonal blocks `a` and lower left block `corner`.

    Elimination inside the 16-token tiles, all tiles side by side, then two merges by [[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]].
    Elimination is stable where products of powers of A are not: with equal keys and beta = 1 those grow like binomials.
    """
    *batch, _, _, _ = a.shape
    tiles = jnp.stack([a[..., :TILE, :TILE], a[..., TILE:, TILE:]], axis=-3)
    columns = jnp.moveaxis(tiles.reshape(-1, TILE, TILE), 0, -1)
    eye = jnp.broadcast_to(jnp.eye(TILE, dtype=a.dtype)[..., None], columns.shape)

    def eliminate(j, solved):
        return solved - jax.lax.dynamic_index_in_dim(columns, j, axis=1) * jax.lax.dynamic_index_in_dim(solved, j, axis=0)

    # The first step, on the identity, also makes the carry vary over the mesh axes that `a` varies over.
    solved = jax.lax.fori_loop(1, TILE - 1, eliminate, eliminate(0, eye))
    solved = jnp.moveaxis(solved, -1, 0).reshape(*batch, 2, 2, TILE, TILE)
    halves = assemble(solved, below(solved, a[..., TILE:, :TILE]))
    return assemble(halves, below(halves, corner))


def below(solved: Float[Array, "*b 2 S S"], corner: Float[Array, "*b S S"]) -> Float[Array, "*b S S"]:
    """Lower left block of the inverse of [[P, 0], [L, Q]], from P^-1, Q^-1 and L."""
    product = lambda a, b: jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return -product(product(solved[..., 1, :, :], corner), solved[..., 0, :, :])


def assemble(diagonal: Float[Array, "*b 2 S S"], corner: Float[Array, "*b S S"]) -> Float[Array, "*b D D"]:
    """[[first, 0], [corner, second]], D = 2 S."""
    first, second = diagonal[..., 0, :, :], diagonal[..., 1, :, :]
    top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([top, jnp.concatenate([corner, second], -1)], -2)


def sums_from(x: Float[Array, "*b L D"]) -> Float[Array, "*b L D"]:
    """Row t: the sum of rows t, t + 1, ..., L - 1, as a product with a triangle of ones."""
    return _triangle_times(_EARLIER.T | _SELF, x)


def sums_before(x: Float[Array, "*b L D"]) -> Float[Array, "*b L D"]:
    """Row t: the sum of rows 0, ..., t - 1."""
    return _triangle_times(_EARLIER, x)


def _triangle_times(triangle: np.ndarray, x: Array) -> Array:
    ones = jnp.broadcast_to(jnp.asarray(triangle, x.dtype), (*x.shape[:-2], HALF, HALF))
    return jnp.matmul(ones, x, precision=jax.lax.Precision.HIGHEST)
