"""Packed rows whose documents begin and end at every awkward place of a sequence that eight ranks share out, and a mesh's way of calling a function."""
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

RANKS = 8


def packed_rows(own: int) -> np.ndarray:
    """Segment ids int32 [4, 8 * own] for `own` tokens a rank (at least 2); 0 = padding.

    Row 0: ends on an edge; spans three ranks and ends inside the third; padding over a whole rank; the last document ends with the row. Row 1: one
    document. Row 2: begins with padding; ends on an edge; exactly three ranks; documents of one token; a rank of padding at the end. Row 3: one id
    before and after a rank of padding, which makes two documents; padding inside a rank; two ranks of padding at the end.
    """
    rows = [[(1, own), (2, 3 * own - 1), (0, 2 * own), (3, None)],
            [(1, None)],
            [(0, own + 1), (1, own - 1), (2, 3 * own), (3, 1), (4, 1), (5, 2 * own - 2), (0, None)],
            [(1, own), (0, own), (1, 2 * own - 1), (0, 1), (2, own + 1), (3, own - 1), (0, None)]]
    ids = np.zeros((len(rows), RANKS * own), np.int32)
    for row, documents in zip(ids, rows):
        start = 0
        for number, length in documents:
            stop = RANKS * own if length is None else start + length
            row[start:stop], start = number, stop
    return ids


def on_mesh(mesh: jax.sharding.Mesh, function: Callable) -> Callable:
    """`function` of arrays, called with the mesh in use and the arrays on all of its devices."""
    def call(*arguments, **named):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            arguments, named = jax.lax.with_sharding_constraint((arguments, named), NamedSharding(mesh, PartitionSpec()))
            return function(*arguments, **named)
    return call
