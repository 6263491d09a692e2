"""Static facts of an attention call: argument checks, and what each implementation cannot do."""
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.dispatch import unmet_nothing, unmet_on_hopper

WIDTH_STEP, MOST_WIDTH = 32, 192
MOST_BYTES = 227 * 1024
FLOATS = ("bfloat16", "float16", "float32", "float64")


def check_arguments(q: Array, k: Array, v: Array, first: Array | None) -> None:
    """Raises ValueError naming the argument that does not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {x.shape}, wanted [batch, tokens, heads, width]")
        if x.dtype.name not in FLOATS:
            raise ValueError(f"{name}: got dtype {x.dtype}, wanted one of {', '.join(FLOATS)}")
    batch, tokens, heads, key = q.shape
    if k.shape != (batch, k.shape[1], heads, key):
        raise ValueError(f"k: got shape {k.shape}, wanted [{batch}, S, {heads}, {key}] as in q {q.shape}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: got shape {v.shape}, wanted {list(k.shape[:3])} in its first three axes, as in k {k.shape}")
    if first is not None and (first.shape != (batch, tokens) or not jnp.issubdtype(first.dtype, jnp.integer)):
        raise ValueError(f"first: got {first.dtype} {first.shape}, wanted int32 [{batch}, {tokens}], one entry for each query")


def unmet_mosaic_gpu(*, key: int, value: int, dtypes: tuple[Any, ...]) -> list[str]:
    """Every reason why the Mosaic GPU kernels cannot take the call."""
    return unmet_on_hopper() + unmet_by_shape(key=key, value=value, dtypes=dtypes)


def unmet_by_shape(*, key: int, value: int, dtypes: tuple[Any, ...]) -> list[str]:
    """What the Mosaic GPU kernels want of the arguments, whatever the device."""
    unmet = []
    names = {jnp.dtype(x).name for x in dtypes}
    if len(names) > 1 or not names <= {"bfloat16", "float16"}:
        unmet.append(f"dtypes of q, k, v: got {', '.join(sorted(names))}, wanted bfloat16 or float16 for all")
    for name, width in (("key", key), ("value", value)):
        if width % WIDTH_STEP or not 0 < width <= MOST_WIDTH:
            unmet.append(f"{name} width: got {width}, wanted a multiple of {WIDTH_STEP} of at most {MOST_WIDTH}")
    return unmet


EXAMPLE = dict(key=192, value=128, dtypes=(jnp.dtype("bfloat16"),) * 3)
UNMET = dict(mosaic_gpu=unmet_mosaic_gpu, xla=unmet_nothing, reference=unmet_nothing)
