"""What both Hopper kernels share: register budgets, shared-memory layouts, the epilogue's strips."""
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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


def strip_columns(dtype: Any) -> int:
    """Columns of a staged strip."""
    return 128 // jnp.dtype(dtype).itemsize


def stage_strips(result: Any, mine: Any, store: Any) -> None:
    """Stages result [rows, cols] strip by strip in mine [slots, rows, strip] and calls store(staged strip, first column) for each.

    `store` must commit exactly one group of copies. A slot is written again when the copies out of it have been read.
    """
    slots, _, width = mine.shape
    for s in range(result.shape[1] // width):
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        mine[s % slots] = result[:, s * width:(s + 1) * width].astype(mine.dtype)
        plgpu.commit_smem()
        store(mine.at[s % slots], s * width)


def multiply_stages(acc: Any, operands: Any, wait: Any, empty: Any, at: Any, steps: Any, stages: int) -> None:
    """Adds to acc the `steps` products operands(slot) of pipeline stages at, at + 1, ... after wait(step, slot).

    A stage is handed back once the next one's product has been issued, so that the tensor cores always have work queued.
    """
    def one_step(step, _):
        slot = lax.rem(at + step, stages)
        wait(step, slot)
        plgpu.wgmma(acc, *operands(slot))
        plgpu.wgmma_wait(1)
        pl.when(step > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(at + step - 1, stages)]))
    lax.fori_loop(0, steps, one_step, None)
    plgpu.wgmma_wait(0)
    pl.when(steps > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(at + steps - 1, stages)]))


def await_all_freed(empty: Any, total: Any, stages: int) -> None:
    """The memory warpgroup's last act, after `total` steps: a block must not end while its neighbour in a cluster may still arrive on its barriers."""
    lax.fori_loop(jnp.maximum(total - stages, 0), total, lambda at, _: plgpu.barrier_wait(empty.at[lax.rem(at, stages)]), None)
