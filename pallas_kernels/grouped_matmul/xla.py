"""Portable implementation: a loop over row tiles that never cross a group, each one plain matmul with its group's weight.

Work, time and memory follow the live rows: the loop ends at the last live tile, the output is written in place, and nothing of size
M * G or G * K * N appears apart from the results themselves.

Numerics: products accumulate in float32 (float64 for float64 operands); float32 operands follow `jax_default_matmul_precision` like any
other matmul. The weight gradient sums a group's tiles in float32, first to last, and rounds once to rhs's dtype.
Second derivatives are `reference`'s alone.
"""
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.specs import accumulation_dtype, max_tiles, tile_rows, vary_alike, zeros_varying_like


class Schedule(NamedTuple):
    """One entry a tile, padded to the static bound; only the first `live` entries mean anything. Rows [start, stop) belong to `group`."""
    group: jax.Array
    start: jax.Array
    stop: jax.Array
    live: jax.Array


def make_schedule(group_sizes: jax.Array, rows: int, tile: int) -> Schedule:
    """Cuts every group into tiles of at most `tile` rows, in row order. Sizes that sum to more than `rows` are cut off there."""
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes.astype(jnp.int32), 0)), rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    tiles = (ends - starts + tile - 1) // tile
    last = jnp.cumsum(tiles)
    t = jnp.arange(max_tiles(rows, group_sizes.shape[0], tile), dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last, t, side="right").astype(jnp.int32), group_sizes.shape[0] - 1)
    start = starts[group] + (t - (last - tiles)[group]) * tile
    return Schedule(group, start, jnp.minimum(start + tile, ends[group]), last[-1])


def _tile_window(schedule: Schedule, t: jax.Array, rows: int, tile: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Group, first row to read, and mask [tile, 1] of the rows read that belong to the tile.

    A slice near the end is moved back to fit, so that operands never need padding; the mask says which rows are then the tile's own.
    """
    start = schedule.start[t]
    at = jnp.minimum(start, rows - tile)
    row = at + jnp.arange(tile, dtype=jnp.int32)
    return schedule.group[t], at, ((row >= start) & (row < schedule.stop[t]))[:, None]


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dtype = jnp.result_type(a, b)
    return lax.dot_general(a.astype(dtype), b.astype(dtype), (((contract[0],), (contract[1],)), ((), ())),
                           preferred_element_type=accumulation_dtype(dtype))


def _put_rows(buffer: jax.Array, values: jax.Array, at: jax.Array, mine: jax.Array) -> jax.Array:
    """Writes the masked rows of `values` and keeps the others: XLA fuses this read and write of one window into an update in place."""
    old = lax.dynamic_slice_in_dim(buffer, at, values.shape[0])
    return lax.dynamic_update_slice_in_dim(buffer, jnp.where(mine, values.astype(buffer.dtype), old), at, 0)


# With a batched loop bound vmap would advance all batch entries together and copy every buffer at every tile; in sequence none is.
@functools.partial(jax.custom_batching.sequential_vmap)
def _forward_loop(out, lhs, rhs, group_sizes):
    rows, tile = lhs.shape[0], tile_rows(lhs.shape[0], rhs.shape[0])
    schedule = make_schedule(group_sizes, rows, tile)

    def body(t, out):
        group, at, mine = _tile_window(schedule, t, rows, tile)
        weight = lax.dynamic_index_in_dim(rhs, group, keepdims=False)
        return _put_rows(out, _dot(lax.dynamic_slice_in_dim(lhs, at, tile), weight, (1, 0)), at, mine)

    return lax.fori_loop(0, schedule.live, body, out)


@functools.partial(jax.custom_batching.sequential_vmap)
def _backward_loop(dlhs, drhs, lhs, rhs, group_sizes, dout):
    """One pass gives both gradients. The float32 sum of the weight gradient holds one group at a time."""
    rows, tile = lhs.shape[0], tile_rows(lhs.shape[0], rhs.shape[0])
    schedule = make_schedule(group_sizes, rows, tile)

    def body(t, carry):
        dlhs, drhs, total = carry
        group, at, mine = _tile_window(schedule, t, rows, tile)
        weight = lax.dynamic_index_in_dim(rhs, group, keepdims=False)
        # Rows of other groups may hold NaN, which a product with zero would keep: both factors of the contraction over rows are masked.
        x = jnp.where(mine, lax.dynamic_slice_in_dim(lhs, at, tile), 0)
        dy = jnp.where(mine, lax.dynamic_slice_in_dim(dout, at, tile), 0)
        dlhs = _put_rows(dlhs, _dot(dy, weight, (1, 1)), at, mine)
        first = (t == 0) | (schedule.group[jnp.maximum(t - 1, 0)] != group)
        total = jnp.where(first, 0, total) + _dot(x, dy, (0, 0))
        drhs = lax.dynamic_update_index_in_dim(drhs, total.astype(drhs.dtype), group, 0)
        return dlhs, drhs, total

    total = zeros_varying_like(rhs.shape[1:], accumulation_dtype(lhs.dtype, dout.dtype), lhs, rhs, group_sizes, dout)
    return lax.fori_loop(0, schedule.live, body, (dlhs, drhs, total))[:2]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(lhs, rhs, group_sizes, out_dtype):
    out = zeros_varying_like((lhs.shape[0], rhs.shape[2]), out_dtype, lhs, rhs, group_sizes)
    return _forward_loop(out, lhs, rhs, group_sizes) if out.size else out


@functools.partial(jax.jit, static_argnums=3)
def _forward(lhs, rhs, group_sizes, out_dtype):
    return _grouped_matmul(lhs, rhs, group_sizes, out_dtype), (lhs, rhs, group_sizes)


@functools.partial(jax.jit, static_argnums=0)
def _backward(out_dtype, residuals, dout):
    lhs, rhs, group_sizes = residuals
    dlhs, drhs = (zeros_varying_like(x.shape, x.dtype, lhs, rhs, group_sizes, dout) for x in (lhs, rhs))
    if dout.size and lhs.size:
        dlhs, drhs = _backward_loop(dlhs, drhs, lhs, rhs, group_sizes, dout)
    return dlhs, drhs, None


_grouped_matmul.defvjp(_forward, _backward)


def grouped_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """lhs [M, K], rhs [G, K, N], group_sizes int32 [G] -> [M, N] of `out_dtype`."""
    return _grouped_matmul(*vary_alike(lhs, rhs, group_sizes), out_dtype)
