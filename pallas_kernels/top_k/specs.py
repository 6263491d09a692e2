"""Static facts of a top_k call: argument checks, and what each implementation cannot do."""
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.dispatch import unmet_nothing, unmet_on_hopper

ROWS = 64
"""Rows of a block of the Hopper kernel."""
COLUMN_STEP, MOST_WIDTH = 8, 128
"""Columns of a chunk of the Hopper kernel: a multiple of the one, at most the other."""
MOST_KEPT = 32


def check_arguments(x: Array, k: int) -> None:
    """Raises ValueError naming the argument that does not fit."""
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x: got {x.dtype} {x.shape}, wanted numbers [rows, columns]")
    if not 1 <= k <= x.shape[1]:
        raise ValueError(f"k: got {k}, wanted 1 to {x.shape[1]}, the columns of x {x.shape}")


def chunk_width(columns: int) -> int:
    """The widest chunk that divides the columns."""
    return max(width for width in range(COLUMN_STEP, MOST_WIDTH + 1, COLUMN_STEP) if columns % width == 0)


def unmet_mosaic_gpu(**facts: Any) -> list[str]:
    """Every reason why the Hopper kernel cannot take the call."""
    return unmet_on_hopper() + unmet_by_shape(**facts)


def unmet_by_shape(*, rows: int, columns: int, k: int, dtype: Any) -> list[str]:
    """What the Hopper kernel wants of the arguments, whatever the device."""
    unmet = []
    if jnp.dtype(dtype) != jnp.float32:
        unmet.append(f"dtype: got {dtype}, wanted float32")
    for name, size, step in (("rows", rows, ROWS), ("columns", columns, COLUMN_STEP)):
        if size % step or not size:
            unmet.append(f"{name}: got {size}, wanted a multiple of {step}")
    if k > MOST_KEPT:
        unmet.append(f"k: got {k}, wanted at most {MOST_KEPT}")
    return unmet


EXAMPLE = dict(rows=8192, columns=896, k=17, dtype=jnp.dtype("float32"))
UNMET = dict(mosaic_gpu=unmet_mosaic_gpu, xla=unmet_nothing, reference=unmet_nothing)
