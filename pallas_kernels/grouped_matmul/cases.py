"""Inputs with float64 results on which every implementation is checked; CASES are those of the GPU kernels, in the interpreter and on a GPU."""
from typing import Any

import jax.numpy as jnp
import numpy as np

CASES = {  # rows, K, N, group sizes
    "uneven, empty inside, dead tail": (304, 128, 256, [7, 0, 150, 1, 64]),
    "first and last empty": (304, 64, 192, [0, 0, 131, 169, 0]),
    "every remainder of 8": (288, 64, 128, [1, 10, 19, 28, 37, 46, 55, 64]),
    "every tail of a step": (264, 64, 128, [72, 30, 101, 60]),
    "around 64": (256, 128, 64, [63, 64, 65, 1, 63]),
    "around 128": (520, 64, 128, [127, 128, 129, 2]),
    "around 256": (784, 64, 64, [255, 256, 257]),
    "one group takes all": (400, 192, 320, [0, 400, 0]),
    "one group, dead tail": (152, 64, 64, [141]),
    "nothing live": (64, 64, 64, [0, 0, 0]),
    "many groups": (264, 64, 64, [int(g % 3 == 0) * (1 + g % 11) for g in range(100)]),
    "one row": (8, 64, 64, [0, 1, 0]),
}
ON_HARDWARE = {
    "896 groups": (8192, 256, 320, [int(s) for s in np.random.default_rng(0).multinomial(8000, np.random.default_rng(1).dirichlet(np.ones(896)))]),
    "columns past the end": (2048, 320, 448, [700, 0, 601, 64, 500]),
}
"""Too much for the interpreter."""


def inputs(rows: int, k: int, n: int, sizes: list[int], dtype: Any = "bfloat16", seed: int = 0, poisoned: int | None = None) -> tuple[list, list]:
    """([lhs, rhs, group_sizes, dout], [out, dlhs, drhs] in float64 at the rounded inputs). lhs and dout are NaN in dead rows.

    poisoned: a group whose rows are NaN in lhs and dout; its part of the results is NaN, the others' are not.
    """
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(len(sizes)), sizes)
    lhs, rhs, dout = (np.asarray(jnp.asarray(rng.normal(size=shape), dtype)).copy() for shape in ((rows, k), (len(sizes), k, n), (rows, n)))
    for x in (lhs, dout):
        x[len(group):] = np.nan
        if poisoned is not None:
            x[np.flatnonzero(group == poisoned)] = np.nan
    wide = [x.astype(np.float64) for x in (lhs, rhs, dout)]
    out, dlhs, drhs = np.zeros((rows, n)), np.zeros((rows, k)), np.zeros((len(sizes), k, n))
    for g in range(len(sizes)):
        mine = np.flatnonzero(group == g)
        out[mine], dlhs[mine] = wide[0][mine] @ wide[1][g], wide[2][mine] @ wide[1][g].T
        drhs[g] = wide[0][mine].T @ wide[2][mine]
    return [jnp.asarray(x) for x in (lhs, rhs, np.asarray(sizes, np.int32), dout)], [out, dlhs, drhs]
