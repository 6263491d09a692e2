"""The Hopper kernel of the forward product and of the gradient of lhs: persistent blocks, one memory and two compute warpgroups.

The memory warpgroup fills a ring of shared-memory stages and never stops at the border between items, so the first operands of the next item arrive
while the compute warpgroups store the last result. They store through shared memory; rows of a tile that belong to another group are not
stored, by a ladder of copies of 64, 32, ... 1 rows. A warpgroup whose rows are all another group's leaves the tensor cores to its neighbour.
No atomics and no order of arrival: two runs agree to the bit.
"""
import functools
from typing import Any

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
from pallas_kernels.grouped_matmul.schedule import ROW_ALIGNMENT, row_schedule
from pallas_kernels.grouped_matmul.tiles import RowTiles

MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232
"""Registers a thread: 128 * (40 + 2 * 232) = 64,512 of the multiprocessor's 65,536."""


@functools.partial(jax.jit, static_argnames=("out_dtype", "tiles", "transpose_rhs", "sms", "interpret"))
def rows_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, out_dtype: Any, tiles: RowTiles, *, transpose_rhs: bool,
                sms: int, interpret: Any = None) -> jax.Array:
    """lhs [M, K] times rhs[group] [K, N] (transpose_rhs: [N, K], read as it lies) -> [M, N] of `out_dtype`; dead rows are zero.

    K: a multiple of tiles.depth; N: of 64. sms: blocks to launch, at most the multiprocessors of the device, a multiple of tiles.cluster.
    """
    rows, k = lhs.shape
    n = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    schedule = row_schedule(group_sizes, rows, tiles.item_rows, -(-n // tiles.item_cols), tiles.band)
    dtype, stages, depth = lhs.dtype, tiles.stages, tiles.depth
    weight_block = (tiles.cols, depth) if transpose_rhs else (depth, tiles.cols)
    return plgpu.kernel(
        functools.partial(_body, tiles=tiles, transpose_rhs=transpose_rhs, blocks=sms // tiles.cluster),
        out_type=jax.ShapeDtypeStruct((rows, n), out_dtype),
        scratch_types=dict(
            lhs_smem=plgpu.SMEM((stages, tiles.rows, depth), dtype, transforms=operand_transforms(depth, dtype)),
            rhs_smem=plgpu.SMEM((stages, *weight_block), dtype, transforms=operand_transforms(weight_block[1], dtype)),
            out_smem=staging(tiles.out_slots, tiles.warpgroup_rows, out_dtype, single_rows=True),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=stages), empty=freed_barrier(tiles)),
        **launch(tiles, sms), interpret=interpret, kernel_name="grouped_matmul_rows", compiler_params=COMPILER_PARAMS,
    )(schedule.last, schedule.ends, schedule.group, schedule.row, schedule.col, schedule.low, schedule.high, lhs, rhs)


def _body(last, ends, group, row, col, low, high, lhs, rhs, out, *, lhs_smem, rhs_smem, out_smem, full, empty, tiles, transpose_rhs, blocks):
    block, warpgroup, peer = lax.axis_index("sm"), lax.axis_index("warpgroup"), lax.axis_index("cluster")
    steps = lhs.shape[1] // tiles.depth
    live_items = last[last.shape[0] - 1] * -(-out.shape[1] // tiles.item_cols)
    items = (live_items - block + blocks - 1) // blocks

    def for_each_item(visit, *lists):
        """visit(turn, row, col, *entries): this block's rows and columns of each item, and the item's entry of each list.

        Entries are read an item ahead: a read takes longer than a step of the pipeline, and at the start of an item all would wait for it.
        """
        def entries(turn):
            i = jnp.minimum(block + turn * blocks, group.shape[0] - 1)
            return row[i], col[i], *(x[i] for x in lists)

        def one_item(turn, now):
            ahead = entries(turn + 1)
            first_row = now[0] + (peer * tiles.rows if tiles.cluster_along == "rows" else 0)
            tile = now[1] * tiles.cluster + peer if tiles.cluster_along == "cols" else now[1]
            visit(turn, pl.multiple_of(first_row, ROW_ALIGNMENT), pl.multiple_of(tile * tiles.cols, tiles.cols), *now[2:])
            return ahead
        lax.fori_loop(0, items, one_item, entries(0))

    def memory():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

        def visit(turn, from_row, from_col, of_group):
            weight, outer = rhs.at[of_group], pl.ds(from_col, tiles.cols)

            def one_step(step, _):
                at = turn * steps + step
                slot = lax.rem(at, tiles.stages)
                inner = pl.ds(pl.multiple_of(step * tiles.depth, tiles.depth), tiles.depth)
                pl.when(at >= tiles.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                load_pair(lhs.at[pl.ds(from_row, tiles.rows), inner], weight.at[outer, inner] if transpose_rhs else weight.at[inner, outer],
                          lhs_smem.at[slot], rhs_smem.at[slot], full.at[slot], tiles)
            lax.fori_loop(0, steps, one_step, None)
        for_each_item(visit, group)
        await_all_freed(empty, items * steps, tiles.stages)

    def compute():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        row_offset = warpgroup * tiles.warpgroup_rows if tiles.split == "rows" else 0
        col_offset = warpgroup * tiles.warpgroup_cols if tiles.split == "cols" else 0
        operands = functools.partial(_operands, lhs_smem, rhs_smem, row_offset, col_offset, tiles, transpose_rhs)
        mine = out_smem.at[warpgroup]

        def visit(turn, from_row, from_col, low, high):
            first, out_col = from_row + row_offset, from_col + col_offset
            skipped = row_offset + (peer * tiles.rows if tiles.cluster_along == "rows" else 0)
            begin, end = (jnp.clip(x - skipped, 0, tiles.warpgroup_rows) for x in (low, high))

            @pl.when(end > begin)
            def _():
                def with_accumulator(acc):
                    multiply_stages(acc, operands, lambda _, slot: plgpu.barrier_wait(full.at[slot]), empty, turn * steps, steps, tiles.stages)
                    for store in strip_stores(acc[...].astype(out.dtype), mine, lambda strip, at: _store_rows(strip, out, first, out_col + at, begin, end),
                                              columns_left(out, tiles, out_col)):
                        store()
                pl.run_scoped(with_accumulator, plgpu.ACC((tiles.warpgroup_rows, tiles.warpgroup_cols), jnp.float32))

            @pl.when(end <= begin)
            def _():
                def pass_over(step, _):
                    slot = lax.rem(turn * steps + step, tiles.stages)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.barrier_arrive(empty.at[slot])
                lax.fori_loop(0, steps, pass_over, None)
        for_each_item(visit, low, high)
        plgpu.wait_smem_to_gmem(0)
        workers = blocks * tiles.cluster * COMPUTE_WARPGROUPS
        _zero_dead_rows(out, mine, ends[ends.shape[0] - 1], (block * tiles.cluster + peer) * COMPUTE_WARPGROUPS + warpgroup, workers)

    lax.cond(warpgroup == COMPUTE_WARPGROUPS, memory, compute)


def _operands(lhs_smem, rhs_smem, row_offset, col_offset, tiles, transpose_rhs, slot):
    """This warpgroup's factors [rows, depth] and [depth, cols] in a stage."""
    a, b = lhs_smem.at[slot], rhs_smem.at[slot]
    if tiles.split == "rows":
        a = a.at[pl.ds(row_offset, tiles.warpgroup_rows)]
    if tiles.split == "cols":
        mine = pl.ds(col_offset, tiles.warpgroup_cols)
        b = b.at[mine] if transpose_rhs else b.at[:, mine]
    return a, b.transpose((1, 0)) if transpose_rhs else b


def _store_rows(strip, out, row, col, begin, end):
    """Rows [begin, end) of a staged strip, at least one, to out[row + begin:, col:], as one group of copies."""
    size, count = strip.shape[0], end - begin
    cols = pl.ds(pl.multiple_of(col, strip.shape[1]), strip.shape[1])
    while size:
        def copy(size=size, begin=begin):
            plgpu.copy_smem_to_gmem(strip.at[pl.ds(begin, size)], out.at[pl.ds(row + begin, size), cols], commit_group=False)
        pl.when((count & size) != 0)(copy)
        begin, size = begin + (count & size), size // 2
    plgpu.commit_smem_to_gmem_group()


def _zero_dead_rows(out, mine, live, worker, workers):
    """Zeros to out[live:], strips dealt out to all compute warpgroups. Rows past the end fall away in the copy engine."""
    rows, width = mine.shape[1:]
    columns = out.shape[1] // width
    mine[0] = jnp.zeros((rows, width), out.dtype)
    plgpu.commit_smem()
    pieces = (out.shape[0] - live + rows - 1) // rows * columns

    def one_piece(turn, _):
        piece = worker + turn * workers
        row, col = live + piece // columns * rows, lax.rem(piece, columns) * width
        plgpu.copy_smem_to_gmem(mine.at[0], out.at[pl.ds(row, rows), pl.ds(pl.multiple_of(col, width), width)])
    lax.fori_loop(0, (pieces - worker + workers - 1) // workers, one_piece, None)
    plgpu.wait_smem_to_gmem(0)
