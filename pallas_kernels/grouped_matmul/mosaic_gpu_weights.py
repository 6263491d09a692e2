"""The Hopper kernel of the gradient of rhs: for each group lhs[rows].T @ dout[rows], persistent, with one memory and two compute warpgroups.

Contraction runs over rows in blocks that start at the group's start, rounded down to 8. Both operands stay as they lie: the tensor cores read the
left one transposed from shared memory. Rows of other groups in the first and last block may hold NaN, so they are zeroed in both operands: by the memory
warpgroup in shared memory, `lag` steps behind its loads and ahead of the compute warpgroups. Blocks in the middle are left alone. (A fourth
warpgroup for that would leave the others 128 registers a thread, too few for a 64 x 256 accumulator.)

Groups are short, so an item is a few steps only. A 16-bit result therefore stays in registers (64 beside the accumulator's 128) and is stored
strip by strip while the next item's first products run: the tensor cores do not wait for it.
"""
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_parts import (
    COMPILER_PARAMS,
    COMPUTE_WARPGROUPS,
    await_all_freed,
    columns_left,
    freed_barrier,
    launch,
    load_pair,
    multiply_stages,
    operand_transforms,
    staging,
    strip_stores,
)
from pallas_kernels.grouped_matmul.schedule import ROW_ALIGNMENT, group_schedule
from pallas_kernels.grouped_matmul.tiles import WeightTiles

MEMORY_REGISTERS, COMPUTE_REGISTERS = 72, 216
"""Registers a thread: 128 * (72 + 2 * 216) = 64,512 of the multiprocessor's 65,536. The memory warpgroup's are for masking."""

MASK_ROWS = 32
"""Rows that are masked at a time: four of the tiles of 8 rows in which operands lie, one for each warp."""


class Item(NamedTuple):
    """One block's tile, from [row, col], of one group's result. Contraction starts at row `base`; rows [base + begin, base + stop) are the group's.

    at: steps of this block before it.
    """
    real: jax.Array
    group: jax.Array
    row: jax.Array
    col: jax.Array
    base: jax.Array
    begin: jax.Array
    stop: jax.Array
    at: jax.Array
    steps: jax.Array


@functools.partial(jax.jit, static_argnames=("out_dtype", "tiles", "sms", "interpret"))
def weights_matmul(lhs: jax.Array, dout: jax.Array, group_sizes: jax.Array, out_dtype: Any, tiles: WeightTiles, *, sms: int,
                   interpret: Any = None) -> jax.Array:
    """lhs [M, K], dout [M, N] of one dtype -> [G, K, N] of `out_dtype`, zero for empty groups. K and N: multiples of 64."""
    (rows, k), n, groups = lhs.shape, dout.shape[1], group_sizes.shape[0]
    schedule = group_schedule(group_sizes, rows)
    stages, depth, dtype = tiles.stages, tiles.depth, lhs.dtype
    # The tensor cores contract as many rows of such operands at a time as a row in shared memory has elements, here all of a stage (64 at most).
    transforms = operand_transforms(depth, dtype)
    return plgpu.kernel(
        functools.partial(_body, tiles=tiles, blocks=sms // tiles.cluster),
        out_type=jax.ShapeDtypeStruct((groups, k, n), out_dtype),
        scratch_types=dict(
            lhs_smem=plgpu.SMEM((stages, depth, tiles.rows), dtype, transforms=transforms),
            dout_smem=plgpu.SMEM((stages, depth, tiles.cols), dtype, transforms=transforms),
            out_smem=staging(tiles.out_slots, tiles.warpgroup_rows, out_dtype, single_rows=False),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=stages), masked=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            empty=freed_barrier(tiles)),
        **launch(tiles, sms), interpret=interpret, kernel_name="grouped_matmul_weights", compiler_params=COMPILER_PARAMS,
    )(schedule.group, schedule.start, schedule.end, lhs, dout)


def _body(group, start, end, lhs, dout, out, *, lhs_smem, dout_smem, out_smem, loaded, masked, empty, tiles, blocks):
    block, warpgroup, peer = lax.axis_index("sm"), lax.axis_index("warpgroup"), lax.axis_index("cluster")
    row_tiles, col_tiles = -(-out.shape[1] // tiles.item_rows), -(-out.shape[2] // tiles.item_cols)
    items = out.shape[0] * row_tiles * col_tiles
    turns = -(-items // blocks)

    def for_each_item(visit, carry):
        """carry = visit(item, carry) for each item of this block, and a few that are none and have no steps; returns the total of steps and the last carry."""
        def ahead(turn):
            # Back and forth over the blocks: in rounds of ever shorter items nobody always gets the longest of the round.
            i = turn * blocks + jnp.where(lax.rem(turn, 2) == 0, block, blocks - 1 - block)
            rank = jnp.minimum(i, items - 1) // (row_tiles * col_tiles)
            return i, group[rank], start[rank], end[rank]

        def one_item(turn, state):
            at, (i, of_group, first, last), carry = state
            # Read an item ahead: a read takes longer than a step of the pipeline, and at the start of an item all would wait for it.
            following = ahead(turn + 1)
            base = first // ROW_ALIGNMENT * ROW_ALIGNMENT
            begin, stop = first - base, last - base
            steps = jnp.where((i < items) & (stop > begin), (stop + tiles.depth - 1) // tiles.depth, 0)
            row_tile, col_tile = _tile_of(lax.rem(i, row_tiles * col_tiles), row_tiles, col_tiles, tiles.band)
            row, col = (tile * size + (peer * mine if size > mine else 0) for tile, size, mine in (
                (row_tile, tiles.item_rows, tiles.rows), (col_tile, tiles.item_cols, tiles.cols)))
            item = Item(i < items, of_group, row, col, base, begin, stop, at, steps)
            return at + steps, following, visit(item, carry)
        total, _, carry = lax.fori_loop(0, turns, one_item, (jnp.int32(0), ahead(jnp.int32(0)), carry))
        return total, carry

    def is_edge(begin, stop):
        return (begin > 0) | (stop < tiles.depth)

    def memory():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

        def check(at, begin, stop):
            """Masks step `at` if it is an edge: rows of its block outside [begin, stop) are another group's."""
            slot = lax.rem(at, tiles.stages)
            plgpu.barrier_wait(loaded.at[slot])

            @pl.when(is_edge(begin, stop))
            def _():
                _keep_rows(lhs_smem.at[slot], begin, stop)
                _keep_rows(dout_smem.at[slot], begin, stop)
                plgpu.commit_smem()
                plgpu.barrier_arrive(masked.at[slot])

        def visit(item, waiting):
            left, right = (pl.ds(pl.multiple_of(first, size), size) for first, size in ((item.row, tiles.rows), (item.col, tiles.cols)))

            def one_step(step, waiting):
                at = item.at + step
                slot = lax.rem(at, tiles.stages)
                contracted = pl.ds(pl.multiple_of(item.base + step * tiles.depth, ROW_ALIGNMENT), tiles.depth)
                pl.when(at >= tiles.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                load_pair(lhs.at[contracted, left], dout.at[contracted, right], lhs_smem.at[slot], dout_smem.at[slot], loaded.at[slot], tiles)
                pl.when(at >= tiles.lag)(lambda: check(at - tiles.lag, *waiting[0]))
                return *waiting[1:], (item.begin - step * tiles.depth, item.stop - step * tiles.depth)
            return lax.fori_loop(0, item.steps, one_step, waiting)

        nobody = (jnp.int32(0), jnp.int32(tiles.depth))
        total, waiting = for_each_item(visit, (nobody,) * tiles.lag)
        for i, rows in enumerate(waiting):
            pl.when(total >= tiles.lag - i)(lambda i=i, rows=rows: check(total - tiles.lag + i, *rows))
        await_all_freed(empty, total, tiles.stages)

    def compute():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        row_offset = warpgroup * tiles.warpgroup_rows if tiles.split == "rows" else 0
        col_offset = warpgroup * tiles.warpgroup_cols if tiles.split == "cols" else 0

        def operands(slot):
            a = lhs_smem.at[slot, :, pl.ds(row_offset, tiles.warpgroup_rows)].transpose((1, 0))
            return a, dout_smem.at[slot, :, pl.ds(col_offset, tiles.warpgroup_cols)]

        def wait(item, step, slot):
            plgpu.barrier_wait(loaded.at[slot])
            edge = is_edge(item.begin - step * tiles.depth, item.stop - step * tiles.depth)
            pl.when(edge)(lambda: plgpu.barrier_wait(masked.at[slot]))

        def stores(result, item):
            to, row = out.at[item.group], pl.multiple_of(item.row + row_offset, tiles.warpgroup_rows)

            def store(strip, offset):
                col = pl.multiple_of(item.col + col_offset + offset, strip.shape[1])
                plgpu.copy_smem_to_gmem(strip, to.at[pl.ds(row, strip.shape[0]), pl.ds(col, strip.shape[1])])
            return [functools.partial(pl.when(item.real), do) for do in strip_stores(
                result, out_smem.at[warpgroup], store, columns_left(out, tiles, item.col + col_offset))]

        def visit(item, before):
            """before: the result and item whose stores are still to be done, or () where a result is stored at once."""
            def with_accumulator(acc):
                multiply_stages(acc, operands, functools.partial(wait, item), empty, item.at, item.steps, tiles.stages, before and stores(*before))
                return acc[...].astype(out.dtype)
            now = pl.run_scoped(with_accumulator, accumulator), item
            if before:
                return now
            for store in stores(*now):
                store()
            return ()

        accumulator = plgpu.ACC((tiles.warpgroup_rows, tiles.warpgroup_cols), jnp.float32)
        # Its group is read, so that inside `shard_map` it varies over devices as those of later items do.
        no_item = Item(jnp.bool(False), group[0], *[jnp.int32(0)] * 7)
        nothing = plgpu.layout_cast(jnp.zeros(accumulator.shape, out.dtype), plgpu.Layout.WGMMA), no_item
        # There are not the registers to keep a float32 result.
        _, last = for_each_item(visit, nothing if jnp.dtype(out.dtype).itemsize == 2 else ())
        for store in last and stores(*last):
            store()
        plgpu.wait_smem_to_gmem(0)

    lax.cond(warpgroup == COMPUTE_WARPGROUPS, memory, compute)


def _tile_of(within, row_tiles, col_tiles, band):
    """Bands of `band` row tiles; inside a band row tiles run fastest, so that concurrent blocks share operands in the L2 cache."""
    of_band, within = within // (band * col_tiles), lax.rem(within, band * col_tiles)
    width = jnp.minimum(band, row_tiles - of_band * band)
    return of_band * band + lax.rem(within, width), within // width


def _keep_rows(block, begin, stop):
    """Zeroes rows of block [depth, cols] outside [begin, stop); pieces of MASK_ROWS rows that are all inside are not touched."""
    shape = MASK_ROWS, block.shape[1]
    layout = plgpu.Layout.SMEM_GMEM_COPY(shape, block.dtype, plgpu.find_swizzle(block.shape[0] * 16))
    row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), layout)
    for at in range(0, block.shape[0], MASK_ROWS):
        def zero(at=at):
            piece = block.at[pl.ds(at, MASK_ROWS)]
            piece[...] = jnp.where((row >= begin - at) & (row < stop - at), piece[...], jnp.zeros((), block.dtype))
        pl.when((begin > at) | (stop < at + MASK_ROWS))(zero)
