"""The k largest of each row on Hopper: a Pallas Mosaic GPU kernel that reads the rows once.

A block has 64 rows, one warpgroup, and takes their columns chunk by chunk, up to 128 at a time. A round finds the largest number of each row among the chunk
and the best of the chunks before it, four threads a row, takes it out and notes its column; k rounds a chunk. The next chunk is on its way meanwhile.
"""
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.shared_memory import tiled
from pallas_kernels.top_k.specs import COLUMN_STEP, ROWS, chunk_width

STAGES = 2
"""Chunks in shared memory: one that is worked on, one that arrives."""
WGMMA = plgpu.Layout.WGMMA
TAKEN, LOWEST = -jnp.inf, float(jnp.finfo(jnp.float32).min)
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


# Jitted so that a model's many layers trace and lower the kernel once.
@functools.partial(jax.jit, static_argnames=("k", "interpret"))
def top_k_ids(x: Float[Array, "N E"], k: int, interpret: Any = None) -> Int[Array, "N K"]:
    """Columns of the k largest of each row, largest first, of equal ones the first first. interpret: `plgpu.InterpretGPUParams`, for tests."""
    rows, columns = x.shape
    width, kept = chunk_width(columns), -(-k // COLUMN_STEP) * COLUMN_STEP
    stages = min(STAGES, columns // width)
    scratch = (tiled(stages, ROWS, width, dtype=jnp.float32), tiled(ROWS, kept, dtype=jnp.int32), plgpu.Barrier(num_barriers=stages))
    kernel = plgpu.kernel(functools.partial(_body, k), out_type=jax.ShapeDtypeStruct((rows, kept), jnp.int32), scratch_types=scratch,
                          grid=(rows // ROWS,), grid_names=("block",), compiler_params=PARAMS, kernel_name="top_k", interpret=interpret or False)
    # Members of a vmap take turns: each fills the device by itself.
    return jax.custom_batching.sequential_vmap(lambda x: kernel(x))(x)[:, :k]


def _body(k: int, x: Any, ids: Any, here: Any, out: Any, arrived: Any) -> None:
    block = pl.ds(lax.axis_index("block") * ROWS, ROWS)
    (stages, _, width), kept = here.shape, out.shape[-1]
    chunks = x.shape[-1] // width
    iota = lambda columns: plgpu.broadcasted_iota(jnp.int32, (ROWS, columns), 1, layout=WGMMA)
    full = lambda value, columns, dtype: plgpu.layout_cast(jnp.full((ROWS, columns), value, dtype), WGMMA)
    wide = lambda vector, columns: lax.broadcast_in_dim(vector, (ROWS, columns), (0,))

    def fetch(chunk):
        slot = lax.rem(chunk, stages)
        plgpu.copy_gmem_to_smem(x.at[block, pl.ds(chunk * width, width)], here.at[slot], arrived.at[slot])

    for chunk in range(stages):
        fetch(jnp.int32(chunk))

    def of_chunk(chunk, best):
        slot = lax.rem(chunk, stages)
        plgpu.barrier_wait(arrived.at[slot])
        fresh = here.at[slot][...]
        # All threads have read before the copy engine writes there again.
        plgpu.commit_smem()
        pl.when(chunk + stages < chunks)(lambda: fetch(chunk + stages))
        # What a taken number becomes must be below all others.
        fresh = jnp.where(fresh != fresh, jnp.inf, jnp.maximum(fresh, LOWEST))
        fresh_ids = iota(width) + chunk * width

        def one(place, carry):
            fresh, (best, best_ids), (found, found_ids) = carry
            largest = jnp.maximum(jnp.max(fresh, axis=1), jnp.max(best, axis=1))
            first = jnp.minimum(jnp.min(jnp.where(fresh == wide(largest, width), fresh_ids, x.shape[-1]), axis=1),
                                jnp.min(jnp.where(best == wide(largest, kept), best_ids, x.shape[-1]), axis=1))
            take = lambda values, its_ids: jnp.where(its_ids == wide(first, values.shape[1]), TAKEN, values)
            here = iota(kept) == place
            return (take(fresh, fresh_ids), (take(best, best_ids), best_ids),
                    (jnp.where(here, wide(largest, kept), found), jnp.where(here, wide(first, kept), found_ids)))

        nothing = (full(TAKEN, kept, jnp.float32), full(0, kept, jnp.int32))
        return lax.fori_loop(0, k, one, (fresh, best, nothing))[2]

    _, best_ids = lax.fori_loop(0, chunks, of_chunk, (full(TAKEN, kept, jnp.float32), full(0, kept, jnp.int32)))
    out[...] = best_ids
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out, ids.at[block])
    plgpu.wait_smem_to_gmem(0)
