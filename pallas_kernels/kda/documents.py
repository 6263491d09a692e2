"""Packed documents: numbering the runs of equal ids in a row of `segment_ids`."""
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def document_runs(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Numbers the documents of each row in order of appearance.

    segment_ids: integers [B, T], 0 = padding. Returns int32 [B, T]: 0 at padding, else the run's number, from 1. A run starts at a non-zero id
    that differs from the entry just before it, so an id that comes back, after another document or after padding, starts a new run:

        1 1 2 2 1 1  ->  1 1 2 2 3 3            1 1 0 0 1 1  ->  1 1 0 0 2 2
    """
    previous = jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]
    starts = (segment_ids != 0) & (segment_ids != previous)
    return jnp.where(segment_ids != 0, jnp.cumsum(starts, axis=1, dtype=jnp.int32), 0)


def state_owner(runs: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The run that owns the recurrent state after each token: `runs` with padding filled from the left, and 1 before the first token.

    Never falls, because runs are numbered in order. Padding that is filled this way needs no mask of its own, as long as it writes nothing.
    """
    return jnp.maximum(jax.lax.cummax(runs, axis=1), 1)
