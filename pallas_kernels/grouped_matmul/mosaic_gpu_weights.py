"""The Hopper kernel of the gradient of rhs: for each group lhs[rows].T @ dout[rows], persistent, with two compute, one memory and one masking warpgroup.

Contraction runs over rows in blocks that start at the group's start, rounded down to 8. Both operands stay as they lie: the tensor cores read the
left one transposed from shared memory. Rows of other groups in the first and last block, which may hold NaN, are zeroed in shared memory in both
operands by a warpgroup of its own, ahead of the compute warpgroups; blocks in the middle pass through it untouched.
"""
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_parts import COMPILER_PARAMS, COMPUTE_WARPGROUPS, multiply_stages, operand_transforms, stage_strips, staging
from pallas_kernels.grouped_matmul.schedule import ROW_ALIGNMENT, group_schedule
from pallas_kernels.grouped_matmul.tiles import WeightTiles

MEMORY_REGISTERS, MASK_REGISTERS, COMPUTE_REGISTERS = 40, 56, 208
"""Registers a thread: 128 * (40 + 56 + 2 * 208) = 65,536, all of the multiprocessor's."""

MEMORY, MASK = COMPUTE_WARPGROUPS, COMPUTE_WARPGROUPS + 1
MASK_COLUMNS = 64


def weights_matmul(lhs: jax.Array, dout: jax.Array, group_sizes: jax.Array, out_dtype: Any, tiles: WeightTiles, *, sms: int,
                   interpret: Any = None) -> jax.Array:
    """lhs [M, K], dout [M, N] of one dtype -> [G, K, N] of `out_dtype`, zero for empty groups. K and N: multiples of 64."""
    (rows, k), n, groups = lhs.shape, dout.shape[1], group_sizes.shape[0]
    schedule = group_schedule(group_sizes, rows)
    stages, depth, dtype = tiles.stages, tiles.depth, lhs.dtype
    return plgpu.kernel(
        functools.partial(_body, tiles=tiles, blocks=sms),
        out_type=jax.ShapeDtypeStruct((groups, k, n), out_dtype),
        scratch_types=dict(
            lhs_smem=plgpu.SMEM((stages, depth, tiles.rows), dtype, transforms=operand_transforms(tiles.rows, dtype)),
            dout_smem=plgpu.SMEM((stages, depth, tiles.cols), dtype, transforms=operand_transforms(tiles.cols, dtype)),
            out_smem=staging(tiles.out_slots, tiles.warpgroup_rows, out_dtype, single_rows=False),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=stages), full=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages)),
        grid=(sms,), grid_names=("sm",), num_threads=COMPUTE_WARPGROUPS + 2, thread_name="warpgroup", interpret=interpret,
        kernel_name="grouped_matmul_weights", compiler_params=COMPILER_PARAMS,
    )(schedule.group, schedule.start, schedule.end, lhs, dout)


def _body(group, start, end, lhs, dout, out, *, lhs_smem, dout_smem, out_smem, loaded, full, empty, tiles, blocks):
    block, warpgroup = lax.axis_index("sm"), lax.axis_index("warpgroup")
    row_tiles, col_tiles = -(-out.shape[1] // tiles.rows), -(-out.shape[2] // tiles.cols)
    items = out.shape[0] * row_tiles * col_tiles
    turns = -(-items // blocks)

    def for_each_item(visit):
        """visit(at, group rank, row tile, col tile, steps) for each item of this block; `at` counts steps since the start."""
        def one_item(turn, at):
            # Back and forth over the blocks: in rounds of ever shorter items nobody always gets the longest of the round.
            i = turn * blocks + jnp.where(lax.rem(turn, 2) == 0, block, blocks - 1 - block)
            rank, within = jnp.minimum(i, items - 1) // (row_tiles * col_tiles), lax.rem(i, row_tiles * col_tiles)
            steps = jnp.where(i < items, _steps(start[rank], end[rank], tiles.depth), 0)
            pl.when(i < items)(lambda: visit(at, rank, *_tile_of(within, row_tiles, col_tiles, tiles.band), steps))
            return at + steps
        return lax.fori_loop(0, turns, one_item, jnp.int32(0))

    def memory():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

        def visit(at, rank, row_tile, col_tile, steps):
            base = start[rank] // ROW_ALIGNMENT * ROW_ALIGNMENT
            cut = lambda tile, size: pl.ds(pl.multiple_of(tile * size, size), size)

            def one_step(step, _):
                slot = lax.rem(at + step, tiles.stages)
                contracted = pl.ds(pl.multiple_of(base + step * tiles.depth, ROW_ALIGNMENT), tiles.depth)
                pl.when(at + step >= tiles.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                plgpu.copy_gmem_to_smem(lhs.at[contracted, cut(row_tile, tiles.rows)], lhs_smem.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(dout.at[contracted, cut(col_tile, tiles.cols)], dout_smem.at[slot], loaded.at[slot])
            lax.fori_loop(0, steps, one_step, None)
        total = for_each_item(visit)
        lax.fori_loop(jnp.maximum(total - tiles.stages, 0), total, lambda at, _: plgpu.barrier_wait(empty.at[lax.rem(at, tiles.stages)]), None)

    def mask():
        plgpu.set_max_registers(MASK_REGISTERS, action="decrease")

        def visit(at, rank, row_tile, col_tile, steps):
            base = start[rank] // ROW_ALIGNMENT * ROW_ALIGNMENT

            def one_step(step, _):
                slot = lax.rem(at + step, tiles.stages)
                plgpu.barrier_wait(loaded.at[slot])
                begin, stop = start[rank] - base - step * tiles.depth, end[rank] - base - step * tiles.depth

                @pl.when((begin > 0) | (stop < tiles.depth))
                def _():
                    _keep_rows(lhs_smem.at[slot], begin, stop)
                    _keep_rows(dout_smem.at[slot], begin, stop)
                    plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot])
            lax.fori_loop(0, steps, one_step, None)
        for_each_item(visit)

    def compute():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        row_offset = warpgroup * tiles.warpgroup_rows if tiles.split == "rows" else 0
        col_offset = warpgroup * tiles.warpgroup_cols if tiles.split == "cols" else 0

        def operands(slot):
            a = lhs_smem.at[slot, :, pl.ds(row_offset, tiles.warpgroup_rows)].transpose((1, 0))
            return a, dout_smem.at[slot, :, pl.ds(col_offset, tiles.warpgroup_cols)]

        def visit(at, rank, row_tile, col_tile, steps):
            to = out.at[group[rank]]
            row = pl.multiple_of(row_tile * tiles.rows + row_offset, tiles.warpgroup_rows)

            def store(strip, offset):
                col = pl.multiple_of(col_tile * tiles.cols + col_offset + offset, strip.shape[1])
                plgpu.copy_smem_to_gmem(strip, to.at[pl.ds(row, strip.shape[0]), pl.ds(col, strip.shape[1])])

            def with_accumulator(acc):
                multiply_stages(acc, operands, full, empty, at, steps, tiles.stages)
                stage_strips(acc[...].astype(out.dtype), out_smem.at[warpgroup], store)
            pl.run_scoped(with_accumulator, plgpu.ACC((tiles.warpgroup_rows, tiles.warpgroup_cols), jnp.float32))
        for_each_item(visit)
        plgpu.wait_smem_to_gmem(0)

    lax.cond(warpgroup == MEMORY, memory, lambda: lax.cond(warpgroup == MASK, mask, compute))


def _steps(start, end, depth):
    return jnp.where(end > start, (end - start // ROW_ALIGNMENT * ROW_ALIGNMENT + depth - 1) // depth, 0)


def _tile_of(within, row_tiles, col_tiles, band):
    """Bands of `band` row tiles; inside a band row tiles run fastest, so that concurrent blocks share operands in the L2 cache."""
    of_band, within = within // (band * col_tiles), lax.rem(within, band * col_tiles)
    width = jnp.minimum(band, row_tiles - of_band * band)
    return of_band * band + lax.rem(within, width), within // width


def _keep_rows(block, begin, stop):
    """Zeroes rows of block [depth, cols] outside [begin, stop)."""
    depth, cols = block.shape
    row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (depth, MASK_COLUMNS), 0), plgpu.Layout.WGMMA)
    for at in range(0, cols, MASK_COLUMNS):
        part = block.at[:, pl.ds(at, MASK_COLUMNS)]
        part[...] = jnp.where((row >= begin) & (row < stop), part[...], jnp.zeros((), block.dtype))
