"""KDA's forward pass on Hopper: `prepare`, then a serial kernel. Notation as in `xla.py`; a chunk is 64 tokens.

`recur` walks the chunks of one head with the state in registers, each warpgroup owning 64 columns of the values:

    R = beta V - Kd S     D = T R     O = Qg S + P D     S <- e^(G_C) S + Kr^T D

Factors, masks and layouts are those of `mosaic_gpu_tiles`.
"""
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.kda.chunk import CHUNK
from pallas_kernels.kda.mosaic_gpu_prepare import Prepared, prepare
from pallas_kernels.kda.mosaic_gpu_tiles import (
    BF16,
    F32,
    PARAMS,
    ROWS,
    SLAB,
    WGMMA,
    Config,
    Inputs,
    columns,
    down,
    product,
    tiled,
    transposed,
)

STAGES = 2
"""Chunks in shared memory: one is worked on while the next arrives."""


def warpgroups(sequences: int, value: int, multiprocessors: int = 132) -> int:
    """Compute warpgroups per block, each with 64 columns of the state: two, unless there is one only or that leaves half of the chip idle."""
    return 1 if 2 * sequences <= multiprocessors or value // SLAB % 2 else 2


def _recur_chunk(r: dict, slot: Array, wg: Array, state: tuple[Array, ...], n: Array, at: tuple[Array, Array, Array]) -> tuple[Array, ...]:
    """One chunk of one warpgroup: writes its columns of o, returns the state after it (Dk / 64 arrays [64, 64])."""
    b, h, column = at
    slabs, rows = len(state), pl.ds(n * CHUNK, CHUNK)
    for s in range(slabs):
        r["state"].at[wg, s][...] = state[s].astype(BF16)
    plgpu.commit_smem()
    if "states_out" in r:
        for s in range(slabs):
            plgpu.copy_smem_to_gmem(r["state"].at[wg, s], r["states_out"].at[b, h, n, pl.ds(s * SLAB, SLAB), column])
    stage = lambda name, *index: r[name].at[(slot, *index)]
    plgpu.barrier_wait(r["arrived"].at[slot])
    erased = product(*((stage("kd", s), r["state"].at[wg, s]) for s in range(slabs)))
    # Ordinary reads of a stage come before a commit_smem, which orders them before the copy that overwrites it.
    decay = stage_decay(r, slot, slabs)
    beta = down(plgpu.load(r["beta"].at[slot], layout=ROWS, optimized=False))
    # Selected, not multiplied: v may hold anything at padding, NaN too.
    values = jnp.where(beta > 0.0, beta * stage("v", wg)[...].astype(F32), 0.0)
    r["d"].at[wg][...] = (values - erased).astype(BF16)
    plgpu.commit_smem()
    d = product((stage("t"), r["d"].at[wg]))
    # A warp may be done before its neighbours have read what it writes over.
    plgpu.commit_smem()
    r["d"].at[wg][...] = d.astype(BF16)
    plgpu.commit_smem()
    if "d_out" in r:
        plgpu.copy_smem_to_gmem(r["d"].at[wg], r["d_out"].at[b, rows, h, column])
    o = product(*((stage("qg", s), r["state"].at[wg, s]) for s in range(slabs)), (stage("p"), r["d"].at[wg]))
    # The previous chunk's o must have left its buffer, and this one's state and d theirs before the next chunk.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    r["o"].at[wg][...] = o.astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(r["o"].at[wg], r["o_out"].at[b, rows, h, column])
    after = [state[s] * down(decay[s]) + product((transposed(stage("kr", s)), r["d"].at[wg])) for s in range(slabs)]
    plgpu.barrier_arrive(r["consumed"].at[slot])
    return tuple(after)


def stage_decay(r: dict, slot: Array, slabs: int) -> list[Array]:
    return [plgpu.load(r["decay"].at[slot, pl.ds(s * SLAB, SLAB)], layout=ROWS, optimized=False) for s in range(slabs)]


def _fetch(r: dict, slot: Any, n: Any, b: Array, h: Array, column: Array, slabs: int, groups: int) -> None:
    """Starts the copies of chunk n into a stage."""
    rows = pl.ds(n * CHUNK, CHUNK)
    copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target, r["arrived"].at[slot])
    for name in ("kd", "qg", "kr"):
        for s in range(slabs):
            copy(columns(r[f"{name}_in"].at[b, h, n], s), r[name].at[slot, s])
    for name in ("t", "p", "decay"):
        copy(r[f"{name}_in"].at[b, h, n], r[name].at[slot])
    if "beta" in r:
        copy(r["beta_in"].at[b, h, rows], r["beta"].at[slot])
    for group in range(groups):
        copy(r["v_in"].at[b, rows, h, pl.ds(column + group * SLAB, SLAB)], r["v"].at[slot, group])


def _serial_body(chunk: Callable, reverse: bool, names: tuple[str, ...], key: int, groups: int, chunks: int, *refs: Any) -> None:
    """Carries a state through the chunks of one head: `groups` warpgroups compute, one fetches."""
    r = dict(zip(names, refs))
    slabs = key // SLAB
    b, h, tile, wg = (lax.axis_index(name) for name in ("b", "h", "tile", "wg"))
    first_column = tile * (groups * SLAB)
    number = lambda n: chunks - 1 - n if reverse else n

    def compute():
        if groups == 2:
            plgpu.set_max_registers(232, action="increase")
        column = pl.ds(first_column + wg * SLAB, SLAB)
        state = tuple(plgpu.load(r["initial_in"].at[b, h, pl.ds(s * SLAB, SLAB), column], layout=WGMMA, optimized=False) for s in range(slabs))
        step = lambda n, state: chunk(r, lax.rem(n, STAGES), wg, state, number(n), (b, h, column))
        state = lax.fori_loop(0, chunks, step, state)
        for s in range(slabs):
            r["final_out"].at[b, h, pl.ds(s * SLAB, SLAB), column][...] = state[s]
        plgpu.wait_smem_to_gmem(0)

    def produce():
        if groups == 2:
            plgpu.set_max_registers(40, action="decrease")
        for n in range(min(STAGES, chunks)):
            _fetch(r, n, number(n), b, h, first_column, slabs, groups)

        def step(n, _):
            slot = lax.rem(n, STAGES)
            plgpu.barrier_wait(r["consumed"].at[slot])
            _fetch(r, slot, number(n + STAGES), b, h, first_column, slabs, groups)
            return ()

        lax.fori_loop(0, chunks - STAGES, step, ())
        # Every arrival is waited for before the barriers go away.
        for n in range(max(chunks - STAGES, 0), chunks):
            plgpu.barrier_wait(r["consumed"].at[n % STAGES])

    # One if/else: only then does ptxas give each branch its own registers.
    lax.cond(wg < groups, compute, produce)
    # No warpgroup may leave while another still issues wgmma.
    plgpu.barrier_arrive(r["done"])
    plgpu.barrier_wait(r["done"])


def serial(config: Config, chunk: Callable, reverse: bool, prepared: Prepared, inputs: dict[str, Array], outputs: dict[str, Any],
           extra: dict[str, Any]) -> tuple[Array, ...]:
    """Runs `chunk` over all chunks of every head. inputs: v_in, initial_in and others; outputs: final_out and others; extra: scratch by name."""
    batch, heads, chunks, key = prepared.decay.shape
    value = inputs["v_in"].shape[-1]
    slabs, groups = key // SLAB, warpgroups(batch * heads, value)
    inputs = {f"{name}_in": x for name, x in prepared._asdict().items()} | inputs
    wide, square = tiled(STAGES, slabs, CHUNK, SLAB), tiled(STAGES, CHUNK, CHUNK)
    scratch = dict(qg=wide, kd=wide, kr=wide, p=square, t=square, v=tiled(STAGES, groups, CHUNK, SLAB), decay=plgpu.SMEM((STAGES, key), F32),
                   state=tiled(groups, slabs, SLAB, SLAB), d=tiled(groups, CHUNK, SLAB), **{name: make(groups) for name, make in extra.items()})
    arrivals = 3 * slabs + 3 + groups + ("beta" in scratch)
    scratch |= dict(arrived=plgpu.Barrier(num_arrivals=arrivals, num_barriers=STAGES),
                    consumed=plgpu.Barrier(num_arrivals=groups, num_barriers=STAGES), done=plgpu.Barrier(num_arrivals=groups + 1))
    names = (*inputs, *outputs, *scratch)
    return tuple(plgpu.kernel(functools.partial(_serial_body, chunk, reverse, names, key, groups, chunks), out_type=tuple(outputs.values()),
                              scratch_types=tuple(scratch.values()), grid=(batch, heads, value // SLAB // groups), grid_names=("b", "h", "tile"),
                              num_threads=groups + 1, thread_name="wg", compiler_params=PARAMS,
                              interpret=config.interpret or False)(*inputs.values()))


def recur(config: Config, prepared: Prepared, v: Float[Array, "B T H V"], beta: Float[Array, "B H T"], initial: Float[Array, "B H K V"],
          save: bool) -> tuple[Array, ...]:
    """-> o [B, T, H, V] bfloat16, final state [B, H, K, V] float32; if save, also bfloat16: the state before each chunk [B, H, N, K, V], D like o."""
    outputs = dict(o_out=jax.ShapeDtypeStruct(v.shape, BF16), final_out=jax.ShapeDtypeStruct(initial.shape, F32))
    if save:
        outputs["states_out"] = jax.ShapeDtypeStruct((*prepared.decay.shape, v.shape[-1]), BF16)
        outputs["d_out"] = jax.ShapeDtypeStruct(v.shape, BF16)
    extra = dict(beta=lambda groups: plgpu.SMEM((STAGES, CHUNK), F32), o=lambda groups: tiled(groups, CHUNK, SLAB))
    return serial(config, _recur_chunk, False, prepared, dict(v_in=v, initial_in=initial, beta_in=beta), outputs, extra)


def forward(config: Config, x: Inputs, initial: Float[Array, "B H K V"], save: bool = False) -> tuple[Array, ...]:
    """Both kernels: see `recur`."""
    return recur(config, prepare(config, x), x.v, x.beta, initial, save)
