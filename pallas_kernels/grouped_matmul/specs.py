"""Static facts of a grouped matmul: validation, accumulation dtype, tile size, and what each implementation cannot do."""
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import unmet_nothing, unmet_on_hopper

FLOATS = ("bfloat16", "float16", "float32", "float64")


def check_arguments(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, preferred_element_type: Any) -> jnp.dtype:
    """Raises ValueError naming the argument that does not fit; returns the output dtype."""
    if lhs.ndim != 2:
        raise ValueError(f"lhs: got shape {lhs.shape}, wanted [M, K]: flatten batch and time into rows sorted by group")
    if rhs.ndim != 3:
        raise ValueError(f"rhs: got shape {rhs.shape}, wanted [G, K, N]")
    if rhs.shape[1] != lhs.shape[1]:
        raise ValueError(f"rhs: got K={rhs.shape[1]} in shape {rhs.shape}, wanted K={lhs.shape[1]} as in lhs {lhs.shape}")
    if group_sizes.shape != rhs.shape[:1]:
        raise ValueError(f"group_sizes: got shape {group_sizes.shape}, wanted [{rhs.shape[0]}], one size for each group of rhs {rhs.shape}")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes: got dtype {group_sizes.dtype}, wanted int32 row counts")
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if x.dtype.name not in FLOATS:
            raise ValueError(f"{name}: got dtype {x.dtype}, wanted one of {', '.join(FLOATS)}")
    if rhs.shape[0] == 0:
        raise ValueError(f"rhs: got shape {rhs.shape}, wanted at least one group")
    out_dtype = jnp.dtype(preferred_element_type or jnp.result_type(lhs, rhs))
    if out_dtype.name not in FLOATS:
        raise ValueError(f"preferred_element_type: got {out_dtype}, wanted one of {', '.join(FLOATS)}")
    return out_dtype


def accumulation_dtype(*dtypes: jnp.dtype) -> jnp.dtype:
    """float64 as soon as one operand is float64, float32 otherwise."""
    return jnp.promote_types(jnp.result_type(*dtypes), jnp.float32)


def tile_rows(rows: int, groups: int, backend: str | None = None) -> int:
    """Rows a tile of `xla`: the average group's size rounded up to a power of two, within limits that differ by backend (None: the default one).

    Static, since actual sizes are not known when the program is built. On a GPU a tile costs some 30 us of launches, as much as thousands of
    rows of arithmetic, so tiles are as long as groups. On a CPU a tile costs next to nothing and the rows that it pads are what one pays for.
    """
    low, high = (16, 128) if (backend or jax.default_backend()) == "cpu" else (128, 2048)
    average = -(-rows // groups)
    return min(rows, max(low, min(high, 1 << max(average - 1, 0).bit_length())))


def max_tiles(rows: int, groups: int, tile: int) -> int:
    """The most tiles that any split of `rows` rows into `groups` groups can need: each non-empty group wastes less than one tile."""
    return (rows + min(groups, rows) * (tile - 1)) // tile


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Inside `shard_map`: every array typed as varying over each mesh axis that any of them varies over. Elsewhere: unchanged.

    Done before the hand-written gradient rule, so that autodiff itself inserts the sum over devices for an array that came in replicated.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    missing = [tuple(frozenset().union(*varying) - axes) for axes in varying]
    return tuple(lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, missing))


def zeros_varying_like(shape: tuple[int, ...], dtype: Any, *arrays: jax.Array) -> jax.Array:
    """Zeros to start a loop's carry: inside `shard_map` they must be typed as varying like what the loop writes into them."""
    return vary_alike(jnp.zeros(shape, dtype), *arrays)[0]


def unmet_mosaic_gpu(*, rows: int, k: int, n: int, groups: int, lhs_dtype: Any, rhs_dtype: Any, out_dtype: Any) -> list[str]:
    """Every reason why the Mosaic GPU kernels cannot take the call."""
    return unmet_on_hopper() + unmet_by_shape(rows=rows, k=k, n=n, groups=groups, lhs_dtype=lhs_dtype, rhs_dtype=rhs_dtype, out_dtype=out_dtype)


def unmet_by_shape(*, rows: int, k: int, n: int, groups: int, lhs_dtype: Any, rhs_dtype: Any, out_dtype: Any) -> list[str]:
    """What the Mosaic GPU kernels want of the arguments, whatever the device."""
    unmet = []
    lhs_name, rhs_name, out_name = (jnp.dtype(x).name for x in (lhs_dtype, rhs_dtype, out_dtype))
    if lhs_name != rhs_name or lhs_name not in ("bfloat16", "float16"):
        unmet.append(f"needs lhs and rhs both bfloat16 or both float16, got {lhs_name} and {rhs_name}; nearest: bfloat16")
    if out_name not in (lhs_name, "float32"):
        unmet.append(f"needs preferred_element_type to be lhs's dtype or float32, got {out_name}; nearest: float32")
    # Rows are addressed in tiles of 8 by 128 bytes, which must divide the arrays.
    for name, size, multiple in (("M", rows, 8), ("K", k, 64), ("N", n, 64)):
        if size % multiple or not size:
            unmet.append(f"needs {name} to be a positive multiple of {multiple}, got {size}; nearest: {max(-(-size // multiple), 1) * multiple}")
    if max(groups * (k // 64), rows // 8 + groups) * (max(k, n) // 64) >= 2**31:
        unmet.append(f"needs the number of tiles to fit 32 bits, got M={rows}, K={k}, N={n}, G={groups}; nearest: split rows or groups over several calls")
    return unmet


EXAMPLE = dict(rows=262144, k=1024, n=1024, groups=64, lhs_dtype="bfloat16", rhs_dtype="bfloat16", out_dtype="bfloat16")
UNMET = dict(mosaic_gpu=unmet_mosaic_gpu, xla=unmet_nothing, reference=unmet_nothing)
