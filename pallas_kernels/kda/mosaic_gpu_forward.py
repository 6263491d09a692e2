"""KDA's forward pass on Hopper, in two Pallas Mosaic GPU kernels. Notation as in `xla.py`; a chunk is 64 tokens, a tile 16 of them.

`prepare` is parallel over chunks: l2 norm, gate, cumulative decays, decayed scores P and A, T = (I + A)^-1. It leaves, in chunk-major order,

    Qg = scale q e^G     Kd = beta k e^G     Kr = k e^(G_C - G)     P     T     e^(G_C)

`recur` walks the chunks of one head with the state in registers, each warpgroup owning 64 columns of the values:

    R = beta V - Kd S     D = T R     O = Qg S + P D     S <- e^(G_C) S + Kr^T D

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

from pallas_kernels.kda.chunk import CHUNK, TILE
from pallas_kernels.kda.mosaic_gpu_tiles import (
    BF16,
    COLUMNS,
    ENTERING,
    F32,
    LEAVING,
    PARAMS,
    ROWS,
    SLAB,
    SUMS,
    WGMMA,
    WHOLE,
    Config,
    Inputs,
    Masks,
    across,
    beta_rows,
    by_tile,
    columns,
    down,
    input_names,
    iota,
    kept,
    left_factor,
    masks,
    product,
    right_factor,
    row_scale,
    running_sums,
    scaled,
    split,
    tile_sums,
    tiled,
    transposed,
    visible,
)

# ---------------------------------------------------------------- kernel 1


def inverse(a: Array, a_s: Any, tiles: list[Any]) -> Array:
    """(I + A)^-1 of a strictly lower triangular float32 [64, 64] in registers.

    a_s: float32 scratch [64, 24]; tiles: four [64, 64] bfloat16 scratch tiles. Elimination in float32 inside the 16-token tiles, from the right:
    column k of T is final once all later ones are, and then leaves A[k, j] times itself in the columns j < k. Two merges of neighbouring blocks
    follow, [[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]], on the whole matrix at once: T - T L T with T split in two bfloat16 parts.
    """
    tile, column = iota(0, TILE) // TILE, iota(1, TILE)
    stacked = lax.slice(a, (0, 3 * TILE), (CHUNK, 4 * TILE))
    for i in reversed(range(3)):
        stacked = jnp.where(tile <= i, lax.slice(a, (0, i * TILE), (CHUNK, (i + 1) * TILE)), stacked)
    a_s.at[:, pl.ds(0, TILE)][...] = stacked

    def eliminate(step, x):
        k, rows = TILE - 1 - step, None
        for i in reversed(range(4)):
            row = across(plgpu.load(a_s.at[TILE * i + k, pl.ds(0, TILE)], layout=COLUMNS, optimized=False))
            rows = row if rows is None else jnp.where(tile <= i, row, rows)
        final = jnp.sum(jnp.where(column == k, x, 0.0), axis=1)
        return x - down(final, TILE) * rows

    # A loop, as everywhere in this kernel where it can be one: it runs once per block, and what it waits for is its own instructions.
    x = lax.fori_loop(0, TILE - 1, eliminate, jnp.where(iota(0, TILE) - tile * TILE == column, 1.0, 0.0))
    t = jnp.concatenate([jnp.where(tile == i, x, 0.0) for i in range(4)], axis=1)
    for size in (TILE, 2 * TILE):
        row, column = iota(0) // size, iota(1) // size
        corner = jnp.where((row == column + 1) & (column // 2 == row // 2), a, 0.0)
        t_high, t_low, c_high, c_low = tiles
        for ref, part in zip(tiles, (*split(t), *split(corner))):
            ref[...] = part
        plgpu.commit_smem()
        left = product((t_high, c_high), (t_low, c_high), (t_high, c_low))
        for ref, part in zip((c_high, c_low), split(left)):
            ref[...] = part
        plgpu.commit_smem()
        t = t - product((c_high, t_high), (c_low, t_high), (c_high, t_low))
    return t


def load_chunk(refs: dict, index: tuple[Array, Array, Array], wide: tuple[str, ...], slabs: int) -> None:
    """Starts the copies of one chunk's inputs, those in `wide` by slabs, and waits for them."""
    b, h, n = index
    rows = pl.ds(n * CHUNK, CHUNK)
    for name in wide:
        for s in range(slabs):
            plgpu.copy_gmem_to_smem(columns(refs[f"{name}_in"].at[b, rows, h], s), refs[name].at[s], refs["barrier"])
    for name, where in (("beta", (b, h, rows)), ("bias", (h,)), ("runs", (b, rows))):
        if name in refs:
            plgpu.copy_gmem_to_smem(refs[f"{name}_in"].at[where], refs[name], refs["barrier"])
    plgpu.barrier_wait(refs["barrier"])


def _slab(config: Config, refs: dict, m: Masks, index: tuple[Array, Array, Array], scales: tuple[Array | None, Array | None], s: Any) -> None:
    """Slab s of the keys' channels: writes Qg, Kd, Kr and e^(G_C), and leaves the factors of the scores.

    Left ones in place of q and in x1; k's right factors for tiles that are 0, 1, 2, 3 apart in x2, x3, x4 and in place of k.
    """
    b, h, n = index
    table, at = refs["sums"], {name: refs[name].at[s] for name in ("q", "k", "x1", "x2", "x3", "x4")}
    # In registers from here on: with it in shared memory a multiprocessor would hold one block.
    c = running_sums(config, refs, s, m.valid, at["x1"], at["x2"], at["x4"])
    half = refs["half"].shape[-1]
    for i in range(SLAB // half):
        refs["half"][...] = lax.slice(c, (0, i * half), (CHUNK, (i + 1) * half))
        tile_sums(refs["half"], table.at[:, pl.ds(i * half, half)])
    q = scaled(refs["q"], s, scales[0], m.valid) * config.scale
    k = lambda: scaled(refs["k"], s, scales[1], m.valid)
    entering = jnp.exp2(c + by_tile(table, ENTERING))
    at["x1"][...] = kept(m.entry, q * entering).astype(BF16)
    at["x2"][...] = kept(m.entry, k() * down(beta_rows(refs)) * entering).astype(BF16)
    at["q"][...] = (q * left_factor(c)).astype(BF16)
    at["x3"][...] = kept(m.exit, k() * jnp.exp2(by_tile(table, LEAVING) - c)).astype(BF16)
    whole = jnp.exp2(plgpu.load(table.at[WHOLE], layout=COLUMNS, optimized=False))
    columns(refs["decay"], s)[...] = whole if m.carry is None else jnp.where(m.carry, whole, 0.0)
    plgpu.commit_smem()
    for name, tile in (("qg", "x1"), ("kd", "x2"), ("kr", "x3")):
        plgpu.copy_smem_to_gmem(at[tile], columns(refs[f"{name}_out"].at[b, h, n], s))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    keys = k()
    at["x1"][...] = (keys * left_factor(c)).astype(BF16)
    for distance, right in enumerate(("x2", "x3", "x4", "k")):
        at[right][...] = (keys * right_factor(c, table, distance)).astype(BF16)


def scores(refs: dict, left: str, slabs: int) -> Array:
    """Products of a left factor with the right factors of every distance, float32 [64, 64]; above the diagonal tiles: nothing of use."""
    apart, result = iota(0) // TILE - iota(1) // TILE, None
    for distance, right in enumerate(("x2", "x3", "x4", "k")):
        pairs = [(refs[left].at[s], transposed(refs[right].at[s])) for s in range(slabs)]
        result = product(*pairs) if result is None else jnp.where(apart == distance, product(*pairs), result)
    return result


def _prepare_body(config: Config, names: tuple[str, ...], key: int, *refs: Any) -> None:
    refs = dict(zip(names, refs))
    refs.setdefault("x4", refs["g"])
    refs["x3"], a_s = refs["x3"]
    slabs = key // SLAB
    index = b, h, n = tuple(lax.axis_index(name) for name in ("b", "h", "n"))
    if config.bound is not None:
        refs["rate"] = refs["rate_in"][h]
    load_chunk(refs, index, ("q", "k", "g"), slabs)
    m = masks(refs, index)
    scales = tuple(row_scale(refs[name], config.normalize, slabs) for name in ("q", "k"))
    one_slab = functools.partial(_slab, config, refs, m, index, scales)
    lax.fori_loop(0, slabs, lambda s, _: one_slab(s), None)
    plgpu.copy_smem_to_gmem(refs["decay"], refs["decay_out"].at[b, h, n])
    plgpu.commit_smem()
    p = scores(refs, "q", slabs)
    refs["q"].at[0][...] = kept(visible(refs, iota(0) >= iota(1)), p).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs["q"].at[0], refs["p_out"].at[b, h, n])
    a = scores(refs, "x1", slabs) * down(beta_rows(refs))
    t = inverse(kept(visible(refs, iota(0) > iota(1)), a), a_s, [refs[name].at[0] for name in ("k", "x1", "x2", "x4")])
    refs["x1"].at[0][...] = t.astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs["x1"].at[0], refs["t_out"].at[b, h, n])
    plgpu.wait_smem_to_gmem(0)


class Prepared(NamedTuple):
    """What `prepare` leaves for the serial kernels, N chunks of a sequence and head."""
    qg: Float[Array, "B H N C K"]
    kd: Float[Array, "B H N C K"]
    kr: Float[Array, "B H N C K"]
    p: Float[Array, "B H N C C"]
    t: Float[Array, "B H N C C"]
    decay: Float[Array, "B H N K"]


def prepare_scratch(key: int, g_dtype: Any, packed: bool, bounded: bool) -> dict[str, Any]:
    """Shared memory of a kernel that forms decays and scores, by name."""
    slabs = key // SLAB
    wide = functools.partial(tiled, slabs, CHUNK, SLAB)
    names = dict(q=wide(), k=wide(), g=wide(dtype=g_dtype), beta=plgpu.SMEM((CHUNK,), F32))
    if bounded:
        names["bias"] = plgpu.SMEM((key,), F32)
    if packed:
        names["runs"] = plgpu.SMEM((CHUNK,), jnp.int32)
    names["barrier"] = plgpu.Barrier(num_arrivals=len(names) + 3 * (slabs - 1))
    if g_dtype != BF16:
        names["x4"] = wide()
    # The padding of 8 columns spreads the rows over the banks.
    spare = plgpu.RefUnion(wide(), plgpu.SMEM((CHUNK, TILE + 8), F32))
    return names | dict(x1=wide(), x2=wide(), x3=spare, half=plgpu.SMEM((CHUNK, SLAB // 2), F32), sums=plgpu.SMEM((SUMS, SLAB), F32),
                        decay=plgpu.SMEM((key,), F32))


def prepare(config: Config, x: Inputs) -> Prepared:
    batch, length, heads, key = x.q.shape
    chunks = length // CHUNK
    inputs = input_names(x)
    struct = lambda *shape, dtype=BF16: jax.ShapeDtypeStruct((batch, heads, chunks, *shape), dtype)
    outputs = Prepared(*(struct(CHUNK, key),) * 3, *(struct(CHUNK, CHUNK),) * 2, struct(key, dtype=F32))
    scratch = prepare_scratch(key, x.g.dtype, x.runs is not None, x.bias is not None)
    names = (*inputs, *(f"{name}_out" for name in Prepared._fields), *scratch)
    return Prepared(*plgpu.kernel(functools.partial(_prepare_body, config, names, key), out_type=tuple(outputs),
                                  scratch_types=tuple(scratch.values()), grid=(batch, heads, chunks), grid_names=("b", "h", "n"),
                                  compiler_params=PARAMS, interpret=config.interpret or False)(*inputs.values()))


# ---------------------------------------------------------------- kernel 2

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
