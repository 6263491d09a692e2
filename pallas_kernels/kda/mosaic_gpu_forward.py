"""KDA's forward pass on Hopper: `prepare`, then a serial kernel. Notation as in `xla.py`; a chunk is 64 tokens.

`recur` walks the chunks of one head with the state in registers, each warpgroup owning 64 columns of the values:

    R = beta V - Kd S     D = T R     O = Qg S + P D     S <- e^(G_C) S + Kr^T D

A few long heads would leave most of the chip idle: their chunks are cut into parts that run side by side. What a part does to the state is an
affine map of it, and each of the state's columns evolves alone, so `transitions` carries the values' columns from zero and Dk more from the identity
through every part; the parts' initial states follow from those, exactly, and `recur` runs all parts at once.

Factors, masks and layouts are those of `mosaic_gpu_tiles`.
"""
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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


def keep_state(r: dict, wg: Array, state: tuple[Array, ...]) -> None:
    """The state in bfloat16, as the next chunk's products read it; they come after the next `commit_smem`."""
    for s, rows in enumerate(state):
        r["state"].at[wg, s][...] = rows.astype(BF16)


def copy_state(r: dict, wg: Array, at: tuple[Array, Array, Array], n: Array, inside: Any = True) -> None:
    """Starts the copies of what `keep_state` wrote as the state of chunk n, if that is one."""
    if "states_out" in r:
        b, h, column = at

        @pl.when(inside)
        def _():
            for s in range(r["state"].shape[1]):
                to = r["states_out"].at[b, h, n, pl.ds(s * SLAB, SLAB), column]
                plgpu.copy_smem_to_gmem(r["state"].at[wg, s], to, commit_group=False)


def multiply(accumulator: Any, *pairs: tuple[Any, Any]) -> None:
    """Issues the products of shared memory tiles that are to be added to an accumulator, each a group to wait for."""
    for a, b in pairs:
        plgpu.wgmma(accumulator, a, b)


def from_values(r: dict, slot: Array, wg: Array, erased: Callable[[], Array], from_column: Any = None) -> None:
    """D of a chunk, from what its keys erase: left in r["d"], and there for products when this returns."""
    beta = down(plgpu.load(r["beta"].at[slot], layout=ROWS, optimized=False))
    # Selected, not multiplied: v may hold anything at padding, NaN too.
    there = beta > 0.0 if from_column is None else (beta > 0.0) & (from_column < r["v_in"].shape[-1])
    values = jnp.where(there, beta * r["v"].at[slot, wg][...].astype(F32), 0.0)
    return solve(r, wg, values - erased(), r["t"].at[slot])


def solve(r: dict, wg: Array, x: Array, t: Any) -> None:
    """t times x in r["d"], there for products when this returns."""
    d = r["d"].at[wg]
    d[...] = x.astype(BF16)
    plgpu.commit_smem()
    result = product((t, d))
    # A warp may be done before its neighbours have read what it writes over.
    plgpu.commit_smem()
    d[...] = result.astype(BF16)
    plgpu.commit_smem()


def _recur_chunk(r: dict, slot: Array, wg: Array, state: tuple[Array, ...], n: Array, at: tuple[Array, Array, Array]) -> tuple[Array, ...]:
    """One chunk of one warpgroup: writes its columns of o, returns the state after it (Dk / 64 arrays [64, 64])."""
    b, h, column = at
    slabs, rows, saves = len(state), pl.ds(n * CHUNK, CHUNK), "d_out" in r
    stage = lambda name, *index: r[name].at[(slot, *index)]
    with_state = lambda name: [(stage(name, s), r["state"].at[wg, s]) for s in range(slabs)]
    plgpu.barrier_wait(r["arrived"].at[slot])

    def body(erased, o):
        multiply(erased, *with_state("kd"))
        multiply(o, *with_state("qg"))
        if saves:
            # The previous chunk's D has left.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        from_values(r, slot, wg, lambda: plgpu.wgmma_accumulator_load(erased, wait_n=slabs))
        if saves:
            plgpu.copy_smem_to_gmem(r["d"].at[wg], r["d_out"].at[b, rows, h, column])

        def finish(*after):
            for s in range(slabs):
                multiply(after[s], (transposed(stage("kr", s)), r["d"].at[wg]))
            multiply(o, (stage("p"), r["d"].at[wg]))
            decay = stage_decay(r, slot, slabs)
            new = tuple(state[s] * down(decay[s]) + plgpu.wgmma_accumulator_load(after[s], wait_n=1) for s in range(slabs))
            # The previous chunk's o and this one's state have left.
            plgpu.wait_smem_to_gmem(int(saves), wait_read_only=True)
            keep_state(r, wg, new)
            r["o"].at[wg][...] = o[...].astype(BF16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(r["consumed"].at[slot])
            plgpu.copy_smem_to_gmem(r["o"].at[wg], r["o_out"].at[b, rows, h, column], commit_group=False)
            copy_state(r, wg, at, n + 1, n + 1 < r["kd_in"].shape[2])
            plgpu.commit_smem_to_gmem_group()
            return new
        return pl.run_scoped(finish, *(plgpu.ACC((SLAB, SLAB), F32),) * slabs)
    return pl.run_scoped(body, plgpu.ACC((CHUNK, SLAB), F32), plgpu.ACC((CHUNK, SLAB), F32))


def stage_decay(r: dict, slot: Array, slabs: int) -> list[Array]:
    return [plgpu.load(r["decay"].at[slot, pl.ds(s * SLAB, SLAB)], layout=ROWS, optimized=False) for s in range(slabs)]


def _transition_chunk(r: dict, slot: Array, wg: Array, state: tuple[Array, ...], n: Array, at: tuple[Array, Array, Array]) -> tuple[Array, ...]:
    """`_recur_chunk` without its outputs, for columns of the values or, after them, columns without values."""
    slabs = len(state)
    stage = lambda name, *index: r[name].at[(slot, *index)]
    plgpu.barrier_wait(r["arrived"].at[slot])

    def body(erased):
        multiply(erased, *((stage("kd", s), r["state"].at[wg, s]) for s in range(slabs)))
        from_values(r, slot, wg, lambda: erased[...], at[2].start)

        def finish(*after):
            for s in range(slabs):
                multiply(after[s], (transposed(stage("kr", s)), r["d"].at[wg]))
            decay = stage_decay(r, slot, slabs)
            return tuple(state[s] * down(decay[s]) + after[s][...] for s in range(slabs))
        return pl.run_scoped(finish, *(plgpu.ACC((SLAB, SLAB), F32),) * slabs)
    new = pl.run_scoped(body, plgpu.ACC((CHUNK, SLAB), F32))
    keep_state(r, wg, new)
    plgpu.commit_smem()
    plgpu.barrier_arrive(r["consumed"].at[slot])
    return new


def _fetch(r: dict, slot: Any, n: Any, b: Array, h: Array, column: Array, slabs: int, groups: int) -> None:
    """Starts the copies of chunk n into a stage."""
    rows, value = pl.ds(n * CHUNK, CHUNK), r["v_in"].shape[-1]
    copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target, r["arrived"].at[slot])
    for name in ("kd", "qg", "kr"):
        for s in range(slabs if name in r else 0):
            copy(columns(r[f"{name}_in"].at[b, h, n], s), r[name].at[slot, s])
    for name in ("t", "p", "decay"):
        if name in r:
            copy(r[f"{name}_in"].at[b, h, n], r[name].at[slot])
    if "beta" in r:
        copy(r["beta_in"].at[b, h, rows], r["beta"].at[slot])
    for group in range(groups):
        # Columns past the values' are without any: what is read in their place is not used.
        copy(r["v_in"].at[b, rows, h, pl.ds(pl.multiple_of(lax.rem(column + group * SLAB, value), SLAB), SLAB)], r["v"].at[slot, group])


def _serial_body(chunk: Callable, reverse: bool, names: tuple[str, ...], key: int, groups: int, chunks: int, *refs: Any) -> None:
    """Carries a state through the chunks of one head: `groups` warpgroups compute, one fetches. A chunk finds its state in r["state"] and leaves the next."""
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
        keep_state(r, wg, state)
        plgpu.commit_smem()
        copy_state(r, wg, (b, h, column), number(0))
        plgpu.commit_smem_to_gmem_group()
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
           extra: dict[str, Any], unused: tuple[str, ...] = ()) -> tuple[Array, ...]:
    """Runs `chunk` over all chunks of every head. inputs: v_in, initial_in and others; outputs: final_out and others; extra: scratch by name;
    unused: fields of `prepared` that `chunk` does without."""
    batch, heads, chunks, key = prepared.decay.shape
    value = outputs["final_out"].shape[-1]
    slabs, groups = key // SLAB, warpgroups(batch * heads, value)
    inputs = {f"{name}_in": x for name, x in prepared._asdict().items() if name not in unused} | inputs
    wide, square = tiled(STAGES, slabs, CHUNK, SLAB), tiled(STAGES, CHUNK, CHUNK)
    scratch = dict(qg=wide, kd=wide, kr=wide, p=square, t=square, v=tiled(STAGES, groups, CHUNK, SLAB), decay=plgpu.SMEM((STAGES, key), F32),
                   state=tiled(groups, slabs, SLAB, SLAB), d=tiled(groups, CHUNK, SLAB), **{name: make(groups) for name, make in extra.items()})
    for name in unused:
        del scratch[name]
    arrivals = sum((slabs if name in ("qg", "kd", "kr") else 1) for name in (*Prepared._fields, "beta") if name in scratch) + groups
    scratch |= dict(arrived=plgpu.Barrier(num_arrivals=arrivals, num_barriers=STAGES),
                    consumed=plgpu.Barrier(num_arrivals=groups, num_barriers=STAGES), done=plgpu.Barrier(num_arrivals=groups + 1))
    names = (*inputs, *outputs, *scratch)
    return tuple(plgpu.kernel(functools.partial(_serial_body, chunk, reverse, names, key, groups, chunks), out_type=tuple(outputs.values()),
                              scratch_types=tuple(scratch.values()), grid=(batch, heads, value // SLAB // groups), grid_names=("b", "h", "tile"),
                              num_threads=groups + 1, thread_name="wg", compiler_params=PARAMS,
                              interpret=config.interpret or False)(*inputs.values()))


@functools.partial(jax.jit, static_argnums=(0, 5))
def recur(config: Config, prepared: Prepared, v: Float[Array, "B T H V"], beta: Float[Array, "B H T"], initial: Float[Array, "B H K V"],
          save: bool) -> tuple[Array, ...]:
    """-> o [B, T, H, V] bfloat16, final state [B, H, K, V] float32; if save, also bfloat16: the state before each chunk [B, H, N, K, V], D like o."""
    outputs = dict(o_out=jax.ShapeDtypeStruct(v.shape, BF16), final_out=jax.ShapeDtypeStruct(initial.shape, F32))
    if save:
        outputs["states_out"] = jax.ShapeDtypeStruct((*prepared.decay.shape, v.shape[-1]), BF16)
        outputs["d_out"] = jax.ShapeDtypeStruct(v.shape, BF16)
    extra = dict(beta=lambda groups: plgpu.SMEM((STAGES, CHUNK), F32), o=lambda groups: tiled(groups, CHUNK, SLAB))
    return serial(config, _recur_chunk, False, prepared, dict(v_in=v, initial_in=initial, beta_in=beta), outputs, extra)


# ---------------------------------------------------------------- parts of a sequence


def parts_of(sequences: int, chunks: int, multiprocessors: int = 132) -> int:
    """Into how many parts each of `sequences` (batch times heads) is cut: as many as fill the chip, if that is worth a first pass over them."""
    fitting = [parts for parts in range(1, chunks // SHORTEST_PART + 1) if chunks % parts == 0 and parts * sequences <= multiprocessors]
    return fitting[-1] if fitting and fitting[-1] >= FEWEST_PARTS else 1


SHORTEST_PART, FEWEST_PARTS = 16, 4
"""In chunks; below, the first pass costs more than it gains."""


def cut(x: Inputs, parts: int) -> Inputs:
    """Each sequence as `parts` sequences one after the other in the batch."""
    if parts == 1:
        return x
    tokens = lambda a: None if a is None else a.reshape(a.shape[0] * parts, a.shape[1] // parts, *a.shape[2:])
    batch, heads, length = x.beta.shape
    beta = jnp.swapaxes(x.beta.reshape(batch, heads, parts, length // parts), 1, 2).reshape(batch * parts, heads, length // parts)
    return Inputs(*(tokens(a) for a in (x.q, x.k, x.v, x.g)), beta, x.rate, x.bias, tokens(x.runs), tokens(x.edges))


def joined(x: Array, parts: int) -> Array:
    """Tokens first: the parts' sequences as one again."""
    return x.reshape(x.shape[0] // parts, x.shape[1] * parts, *x.shape[2:])


def chain(transition: Float[Array, "BS H K K"], added: Float[Array, "BS H K V"], start: Float[Array, "B H K V"], parts: int,
          reverse: bool = False) -> tuple[Array, Array]:
    """What enters each part [B S, H, K, V], and what leaves the last, where a part makes transition @ x + added of what enters; reverse: the last part
    is entered first, and makes transition^T @ x + added of it."""
    split = lambda a: jnp.moveaxis(a.reshape(-1, parts, *a.shape[1:]), 1, 0)
    equation = "bhlk,bhlv->bhkv" if reverse else "bhkl,bhlv->bhkv"

    def through(state, part):
        matrix, more = part
        return jnp.einsum(equation, matrix, state, precision=lax.Precision.HIGHEST) + more, state

    last, entering = lax.scan(through, start, (split(transition), split(added)), reverse=reverse, unroll=parts)
    return jnp.moveaxis(entering, 0, 1).reshape(added.shape), last


@functools.partial(jax.jit, static_argnums=0)
def transitions(config: Config, prepared: Prepared, v: Float[Array, "B T H V"], beta: Float[Array, "B H T"]) -> tuple[Array, Array]:
    """-> what each sequence does to the state it starts from: the matrix [B, H, K, K] that multiplies it, and what is added [B, H, K, V], float32."""
    batch, heads, _, key = prepared.decay.shape
    value = v.shape[-1]
    start = jnp.broadcast_to(jnp.concatenate([jnp.zeros((key, value)), jnp.eye(key)], axis=1), (batch, heads, key, value + key))
    extra = dict(beta=lambda groups: plgpu.SMEM((STAGES, CHUNK), F32))
    final, = serial(config, _transition_chunk, False, prepared, dict(v_in=v, initial_in=start, beta_in=beta),
                    dict(final_out=jax.ShapeDtypeStruct(start.shape, F32)), extra, unused=("qg", "p"))
    return final[..., value:], final[..., :value]


class Kept(NamedTuple):
    """What the backward pass needs of the forward one, by parts of sequences."""
    states: Float[Array, "BS H N K V"]
    """Before each chunk."""
    d: Float[Array, "BS T V"]
    transition: Float[Array, "BS H K K"] | None
    """Where sequences are cut."""
    prepared: Prepared | None
    """Where the call keeps it."""


def forward(config: Config, x: Inputs, initial: Float[Array, "B H K V"], save: bool = False) -> tuple[Array, Array, Kept | None]:
    """-> o [B, T, H, V] bfloat16, final state [B, H, K, V] float32; if save, what the backward pass needs."""
    batch, length, heads, _ = x.q.shape
    parts = parts_of(batch * heads, length // CHUNK)
    x = cut(x, parts)
    prepared, transition = prepare(config, x), None
    if parts > 1:
        transition, added = transitions(config, prepared, x.v, x.beta)
        initial, _ = chain(transition, added, initial, parts)
    o, final, *kept = recur(config, prepared, x.v, x.beta, initial, save)
    final = final.reshape(batch, parts, *final.shape[1:])[:, -1]
    return joined(o, parts), final, Kept(*kept, transition, prepared if config.keep else None) if save else None
