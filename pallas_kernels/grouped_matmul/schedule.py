"""What each block of the GPU kernels works on, computed by XLA in O(groups^2 + tiles * groups) trivial operations and a handful of small kernels.

A kernel that looked its group up itself would unroll over groups (896 of them spill registers) or search in a chain of dependent loads. So
the kernels read plain lists, one entry an item of work. Sums and searches are masked reductions over the group axis: XLA makes one kernel of
each, where a scan or a binary search would be a loop of kernel launches.
"""
from typing import NamedTuple

import jax
import jax.numpy as jnp

ROW_ALIGNMENT = 8
"""Row offsets that the copy engine takes into a tiled shared-memory buffer: a tile starts at its group's start, rounded down to this."""


class RowSchedule(NamedTuple):
    """Items of the forward product and of the gradient of lhs, int32.

    Item i multiplies rows [row[i], row[i] + tile) with column tile col[i] of the weight of group[i]; rows [row[i] + low[i], row[i] + high[i]) are the
    group's. last: [G] row tiles of the groups up to each, ends: [G] rows up to the end of each; the kernel needs their last entries, and a list that is there
    costs no kernel launch. Entries past the live items mean nothing.
    """
    last: jax.Array
    ends: jax.Array
    group: jax.Array
    row: jax.Array
    col: jax.Array
    low: jax.Array
    high: jax.Array


class GroupSchedule(NamedTuple):
    """For the gradient of rhs, int32 [G]: the groups from longest to shortest, with the first and last row of each.

    Long groups first, so that what is left for the end of the kernel is short.
    """
    group: jax.Array
    start: jax.Array
    end: jax.Array


def group_bounds(group_sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """First row and end of each group, int32 [G]. Sizes that sum to more than `rows` are cut off there."""
    # Clipped first, so that the sum of sizes beyond all bounds cannot wrap around.
    sizes = jnp.clip(group_sizes, 0, rows).astype(jnp.int32)
    ends = _running_sum(sizes)
    return jnp.minimum(ends - sizes, rows), jnp.minimum(ends, rows)


def max_row_tiles(rows: int, groups: int, tile: int) -> int:
    """The most row tiles that any split can need. A non-empty group wastes at most ROW_ALIGNMENT - 1 rows before it and tile - 1 behind it."""
    return (rows + min(groups, rows) * (ROW_ALIGNMENT - 1 + tile - 1)) // tile


def row_schedule(group_sizes: jax.Array, rows: int, tile: int, col_tiles: int, band: int) -> RowSchedule:
    """Order of items: group by group; inside a group bands of `band` row tiles; inside a band row tiles run fastest.

    So blocks that run at one time share few column tiles of one weight and at most a band of rows, and both stay in the L2 cache.
    """
    starts, ends = group_bounds(group_sizes, rows)
    base = starts // ROW_ALIGNMENT * ROW_ALIGNMENT
    tiles = jnp.where(ends > starts, (ends - base + tile - 1) // tile, 0)
    last = _running_sum(tiles)
    bound = max_row_tiles(rows, group_sizes.shape[0], tile)
    tile_group = jnp.sum(last[None, :] <= jnp.arange(bound, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    item = jnp.arange(bound * col_tiles, dtype=jnp.int32)
    group = jnp.minimum(tile_group, group_sizes.shape[0] - 1)[item // col_tiles]
    within = item - (last - tiles)[group] * col_tiles
    of_band, within = within // (band * col_tiles), within % (band * col_tiles)
    width = jnp.clip(tiles[group] - of_band * band, 1, band)
    row = base[group] + (of_band * band + within % width) * tile
    return RowSchedule(last, ends, group, row, within // width,
                       jnp.maximum(starts[group] - row, 0), jnp.minimum(ends[group] - row, tile))


def group_schedule(group_sizes: jax.Array, rows: int) -> GroupSchedule:
    """See GroupSchedule. Ties keep the groups' order, so that two runs do the same."""
    starts, ends = group_bounds(group_sizes, rows)
    sizes = ends - starts
    index = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    before = (sizes[None, :] > sizes[:, None]) | ((sizes[None, :] == sizes[:, None]) & (index[None, :] < index[:, None]))
    rank = jnp.sum(before, axis=1, dtype=jnp.int32)
    order = jnp.sum(jnp.where(rank[None, :] == index[:, None], index[None, :], 0), axis=1, dtype=jnp.int32)
    return GroupSchedule(order, starts[order], ends[order])


def _running_sum(x: jax.Array) -> jax.Array:
    index = jnp.arange(x.shape[0])
    return jnp.sum(jnp.where(index[None, :] <= index[:, None], x[None, :], 0), axis=1, dtype=jnp.int32)
