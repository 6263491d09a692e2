"""Which keys each query sees, and which tiles of keys and queries meet: causality and packed documents as contiguous ranges."""
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Ranges(NamedTuple):
    """Of the tiles on one side that a tile on the other side meets: [begin, end) at all, [inner_begin, inner_end) entirely, so that no mask is needed."""
    begin: Int[Array, "B N"]
    inner_begin: Int[Array, "B N"]
    inner_end: Int[Array, "B N"]
    end: Int[Array, "B N"]


def first_visible(runs: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """The first token that each token of a row sees, int32: that of its document, or for padding (run 0) the next token, so that it sees nothing.

    runs: `document_runs`. Never falls along a row.
    """
    positions = jnp.arange(runs.shape[1], dtype=jnp.int32)
    previous = jnp.pad(runs, ((0, 0), (1, 0)))[:, :-1]
    begins = jax.lax.cummax(jnp.where(runs != previous, positions, 0), axis=1)
    return jnp.where(runs > 0, begins, positions + 1)


def key_ranges(first: Int[Array, "B T"], start: Int[Array, ""], rows: int, keys: int, tiles: int) -> Ranges:
    """Which of `tiles` tiles of `keys` keys each tile of `rows` queries meets. first never falls along a row, query t is token start + t, rows divides T."""
    low, high = first[:, ::rows], first[:, rows - 1::rows]
    tile = start + rows * jnp.arange(low.shape[1])
    end = jnp.minimum((tile + rows - 1) // keys + 1, tiles)
    begin = jnp.minimum(low // keys, end)
    # The last query is the last to see a key from the left, the first query the last to see one from the right.
    inner_end = jnp.clip((tile + 1) // keys, begin, end)
    return _ranges(begin, -(-high // keys), inner_end, end)


def query_ranges(first: Int[Array, "B T"], start: Int[Array, ""], rows: int, keys: int, tiles: int) -> Ranges:
    """Tiles of `rows` queries that each of `tiles` tiles of `keys` keys meets."""
    count = first.shape[1] // rows
    low, high = first[:, ::rows], first[:, rows - 1::rows]
    tile = keys * jnp.arange(tiles)
    before = lambda bounds, sides, side: jax.vmap(lambda bounds, sides: jnp.searchsorted(bounds, sides, side=side))(bounds, sides)
    spread = lambda x: jnp.broadcast_to(x, (first.shape[0], tiles))
    end = before(low, spread(tile + keys), "left").astype(jnp.int32)
    begin = jnp.minimum(jnp.clip((tile - start) // rows, 0, count), end)
    inner_end = before(high, spread(tile), "right").astype(jnp.int32)
    inner_begin = -(-(tile + keys - 1 - start) // rows)
    return _ranges(begin, inner_begin, inner_end, end)


def _ranges(begin: Array, inner_begin: Array, inner_end: Array, end: Array) -> Ranges:
    """Arrays of one shape, with begin <= inner_begin <= inner_end <= end."""
    begin, inner_begin, inner_end, end = jnp.broadcast_arrays(begin, inner_begin, inner_end, end)
    inner_begin = jnp.clip(inner_begin, begin, end)
    return Ranges(begin, inner_begin, jnp.clip(inner_end, inner_begin, end), end)
