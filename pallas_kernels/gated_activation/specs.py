"""Static facts of a gated activation: which one, argument checks, and what each implementation cannot do."""
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.dispatch import unmet_nothing, unmet_on_hopper

LANES = 64
"""Features along the last axis of a block; the features of a call are a multiple of it."""
VECTOR, THREADS = 2, 128
"""Numbers that a thread loads at a time; threads of a block."""
SLAB_SIZE, TILE_SIZE = 1024, 8192
"""Numbers of a branch that are in registers at a time, at least; that a block has in shared memory, at most where a slab is smaller."""


class Gate(NamedTuple):
    """SwiGLU, or SiTU-GLU with its bounds."""
    kind: Literal["situ", "swiglu"]
    beta: float = 4.0
    linear_beta: float | None = 25.0
    """None leaves the linear branch as it is."""


def check_arguments(branches: Sequence[Array]) -> None:
    """Raises ValueError naming the argument that does not fit."""
    if len(branches) not in (1, 2) or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in branches):
        raise ValueError(f"branches: got {', '.join(f'{x.dtype} {x.shape}' for x in branches)}, wanted one or two arrays of numbers")
    first = branches[0]
    if len(branches) == 1 and (not first.ndim or first.shape[-1] % 2):
        raise ValueError(f"branches: got one of shape {first.shape}, wanted an even last axis: the gate, then the linear branch")
    if len(branches) == 2 and (branches[1].shape, branches[1].dtype) != (first.shape, first.dtype):
        raise ValueError(f"branches: got {first.dtype} {first.shape} and {branches[1].dtype} {branches[1].shape}, wanted the same for both")


def block_rows(features: int) -> tuple[int, int]:
    """(rows of a block, rows of a slab of it): powers of two, a slab's numbers a multiple of what the threads load at a time."""
    slab = 1
    while slab * features < SLAB_SIZE or slab * features % (VECTOR * THREADS):
        slab *= 2
    return max(slab, 1 << (TILE_SIZE // features).bit_length() - 1 if features <= TILE_SIZE else 1), slab


def unmet_mosaic_gpu(**facts: Any) -> list[str]:
    """Every reason why the Hopper kernels cannot take the call."""
    return unmet_on_hopper() + unmet_by_shape(**facts)


def unmet_by_shape(*, shape: tuple[int, ...], dtype: Any) -> list[str]:
    """What the Hopper kernels want of the arguments, whatever the device. shape: of the result."""
    unmet = []
    if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
        unmet.append(f"dtype: got {dtype}, wanted bfloat16 or float16")
    rows, features = math.prod(shape[:-1]), shape[-1] if shape else 0
    if features % LANES or not 0 < features <= TILE_SIZE:
        unmet.append(f"features: got {features}, wanted a multiple of {LANES} of at most {TILE_SIZE}")
    elif rows % block_rows(features)[0] or not rows:
        unmet.append(f"rows: got {rows}, wanted a multiple of {block_rows(features)[0]}")
    return unmet


EXAMPLE = dict(shape=(262144, 512), dtype=jnp.dtype("bfloat16"))
UNMET = dict(mosaic_gpu=unmet_mosaic_gpu, xla=unmet_nothing, reference=unmet_nothing)
