"""What both Hopper kernels share: register budgets, shared-memory layouts, the epilogue's strips."""
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.tiles import Tiles

COMPUTE_WARPGROUPS = 2
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def operand_transforms(minor: int, dtype: Any) -> tuple[Any, ...]:
    """Shared-memory layout of an operand of the tensor cores with `minor` elements in its minor dimension."""
    swizzle = plgpu.find_swizzle(minor * jnp.dtype(dtype).itemsize * 8)
    return plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)


def staging(slots: int, rows: int, dtype: Any, *, single_rows: bool) -> Any:
    """Shared memory in which each compute warpgroup stages strips of its result: 128 bytes wide, the widest swizzle.

    single_rows: a strip may be copied out from any row on, else whole only.
    """
    columns = strip_columns(dtype)
    transforms = (plgpu.TilingTransform((1 if single_rows else 8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((COMPUTE_WARPGROUPS, slots, rows, columns), dtype, transforms=transforms)


def freed_barrier(tiles: Tiles) -> Any:
    """On which compute warpgroups hand stages back: in a cluster to both blocks' memory warpgroups, since a multicast writes into both."""
    barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",)) if tiles.cluster > 1 else plgpu.Barrier
    return barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=tiles.stages)


def launch(tiles: Tiles, sms: int) -> dict[str, Any]:
    """Grid of persistent blocks, in clusters, and their warpgroups, as keywords of plgpu.kernel."""
    return dict(grid=(sms // tiles.cluster,), grid_names=("sm",), cluster=(tiles.cluster,), cluster_names=("cluster",),
                num_threads=COMPUTE_WARPGROUPS + 1, thread_name="warpgroup")


def load_pair(left: Any, right: Any, left_smem: Any, right_smem: Any, barrier: Any, tiles: Tiles) -> None:
    """Loads one stage. Neighbours along columns share the left operand, neighbours along rows the right one: each block fetches half for both."""
    plgpu.copy_gmem_to_smem(left, left_smem, barrier, collective_axes="cluster" if tiles.cluster_along == "cols" else None)
    plgpu.copy_gmem_to_smem(right, right_smem, barrier, collective_axes="cluster" if tiles.cluster_along == "rows" else None)


def strip_columns(dtype: Any) -> int:
    """Columns of a staged strip."""
    return 128 // jnp.dtype(dtype).itemsize


def strip_stores(result: Any, mine: Any, store: Any, room: Any = None) -> list[Any]:
    """A function for each strip of result [rows, cols], to be called in order: it stages the strip in mine [slots, rows, strip] and calls
    store(staged strip, first column).

    `store` must commit exactly one group of copies. A slot is written again when the copies out of it have been read. room: how many of the columns
    there are in the result's array, None for all. Strips past those must not be left to the copy engine to drop: where the array is as wide as
    one strip, its descriptor has no dimension that could tell.
    """
    slots, _, width = mine.shape
    strips = result.shape[1] // width

    def one_strip(s):
        # The last result's last strip may have used the slot that this one starts with.
        plgpu.wait_smem_to_gmem(0 if s == 0 and strips % slots else slots - 1, wait_read_only=True)
        mine[s % slots] = result[:, s * width:(s + 1) * width].astype(mine.dtype)
        plgpu.commit_smem()
        store(mine.at[s % slots], s * width)

    def strip_with_room(s):
        pl.when(s * width < room)(lambda: one_strip(s))
        # Then fewer groups are in flight than the next result counts on.
        pl.when(s * width >= room)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
    return [functools.partial(one_strip if room is None else strip_with_room, s) for s in range(strips)]


def columns_left(out: Any, tiles: Tiles, column: Any) -> Any:
    """`room` of `strip_stores` for a result that starts at `column`: None where blocks cover the columns exactly."""
    return None if out.shape[-1] % tiles.item_cols == 0 else out.shape[-1] - column


def multiply_stages(acc: Any, operands: Any, wait: Any, empty: Any, at: Any, steps: Any, stages: int, meanwhile: Any = ()) -> None:
    """Adds to acc the `steps` products operands(slot) of pipeline stages at, at + 1, ... after wait(step, slot).

    A stage is handed back once the next one's product has been issued, so that the tensor cores always have work queued. meanwhile: functions to be
    called in order, one while each of the first products runs; after the last product what is left of them.
    """
    def one_step(step, _):
        slot = lax.rem(at + step, stages)
        wait(step, slot)
        plgpu.wgmma(acc, *operands(slot))
        for i, do in enumerate(meanwhile):
            pl.when(step == i)(do)
        plgpu.wgmma_wait(1)
        pl.when(step > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(at + step - 1, stages)]))
    lax.fori_loop(0, steps, one_step, None)
    plgpu.wgmma_wait(0)
    pl.when(steps > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(at + steps - 1, stages)]))
    for i, do in enumerate(meanwhile):
        pl.when(steps <= i)(do)


def await_all_freed(empty: Any, total: Any, stages: int) -> None:
    """The memory warpgroup's last act, after `total` steps: a block must not end while its neighbour in a cluster may still arrive on its barriers."""
    lax.fori_loop(jnp.maximum(total - stages, 0), total, lambda at, _: plgpu.barrier_wait(empty.at[lax.rem(at, stages)]), None)
