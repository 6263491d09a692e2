"""KDA's chunk-parallel kernel on Hopper, the first of both passes. Notation as in `xla.py`; a chunk is 64 tokens, a tile 16 of them.

`prepare` forms, chunk by chunk: l2 norm, gate, cumulative decays, decayed scores P and A, T = (I + A)^-1. It leaves, in chunk-major order,

    Qg = scale q e^G     Kd = beta k e^G     Kr = k e^(G_C - G)     P     T     e^(G_C)

A team of warpgroups, one for each 64 channels of the keys, works on a chunk. Several teams share a multiprocessor and each walks over its chunks:
what one waits for, copies and synchronisation, is hidden behind the others' arithmetic, and the code stays in the instruction cache.
"""
import functools
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
    SLAB,
    SUMS,
    WHOLE,
    Config,
    Inputs,
    Masks,
    beta_rows,
    by_tile,
    columns,
    down,
    input_names,
    iota,
    join,
    kept,
    left_factor,
    load_inputs,
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

MULTIPROCESSORS = 132
TEAMS = 2
"""Teams of a block, at most. At 128 channels of the keys they leave 128 registers a thread."""
SHARED_MEMORY = 227 * 1024


class Prepared(NamedTuple):
    """What `prepare` leaves for the serial kernels, N chunks of a sequence and head."""
    qg: Float[Array, "B H N C K"]
    kd: Float[Array, "B H N C K"]
    kr: Float[Array, "B H N C K"]
    p: Float[Array, "B H N C C"]
    t: Float[Array, "B H N C C"]
    decay: Float[Array, "B H N K"]



def prepare(config: Config, x: Inputs) -> Prepared:
    batch, length, heads, key = x.q.shape
    chunks = length // CHUNK
    inputs = input_names(x)
    struct = lambda *shape, dtype=BF16: jax.ShapeDtypeStruct((batch, heads, chunks, *shape), dtype)
    outputs = Prepared(*(struct(CHUNK, key),) * 3, *(struct(CHUNK, CHUNK),) * 2, struct(key, dtype=F32))
    teams = teams_of(key, x.g.dtype)
    scratch = _scratch(teams, key, x.g.dtype, x.runs is not None, x.bias is not None)
    names = (*inputs, *(f"{name}_out" for name in Prepared._fields), *scratch)
    body = functools.partial(_body, config, names, (heads, chunks), batch * heads * chunks, teams)
    blocks = -(-batch * heads * chunks // teams)
    return Prepared(*plgpu.kernel(body, out_type=tuple(outputs), scratch_types=tuple(scratch.values()), grid=(blocks,), grid_names=("block",),
                                  num_threads=teams * key // SLAB, thread_name="warpgroup", compiler_params=PARAMS,
                                  interpret=config.interpret or False)(*inputs.values()))


def teams_of(key: int, g_dtype: Any) -> int:
    """Teams of a block: as many as its shared memory allows."""
    slabs = key // SLAB
    tiles = 5 * 2 + jnp.dtype(g_dtype).itemsize + 2 * (g_dtype != BF16)
    own = CHUNK * key * tiles + 4 * (SUMS * key + slabs * CHUNK * TILE) + 8 * key + 8 * CHUNK + 1024
    return min(TEAMS, SHARED_MEMORY // own)


def _scratch(teams: int, key: int, g_dtype: Any, packed: bool, bounded: bool) -> dict[str, Any]:
    """Shared memory by name; everything once a team."""
    slabs = key // SLAB
    wide = functools.partial(tiled, teams, slabs, CHUNK, SLAB)
    vector = lambda *shape, dtype=F32: plgpu.SMEM((teams, *shape), dtype)
    names = dict(left=tiled(teams, 2, slabs, CHUNK, SLAB), k=wide(), g=wide(dtype=g_dtype), beta=vector(CHUNK))
    if bounded:
        names["bias"] = vector(key)
    if packed:
        names["runs"] = vector(CHUNK, dtype=jnp.int32)
    names["arrived"] = plgpu.Barrier(num_arrivals=len(names) + 3 * (slabs - 1), num_barriers=teams)
    if g_dtype != BF16:
        names["x4"] = wide()
    return names | dict(x2=wide(), x3=wide(), running=vector(slabs, CHUNK, TILE), sums=vector(slabs, SUMS, SLAB), decay=vector(key),
                        join=plgpu.Barrier(num_arrivals=slabs, num_barriers=teams))


def _body(config: Config, names: tuple[str, ...], shape: tuple[int, int], total: int, teams: int, *refs: Any) -> None:
    every = dict(zip(names, refs))
    heads, chunks = shape
    slabs = every["k"].shape[1]
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    team, wg = lax.div(warpgroup, slabs), lax.rem(warpgroup, slabs)
    every.setdefault("x4", every["g"])
    r = {name: ref if name.endswith(("_in", "_out")) else ref.at[team] for name, ref in every.items()}
    item = block * teams + team

    @pl.when(item < total)
    def _():
        bh = lax.div(item, chunks)
        _chunk(config, r, (lax.div(bh, heads), lax.rem(bh, heads), lax.rem(item, chunks)), wg, slabs)


def _chunk(config: Config, r: dict, index: tuple[Array, Array, Array], wg: Array, slabs: int) -> None:
    """One chunk of a team; this warpgroup has slab `wg` of the keys' channels, then P or A and T."""
    b, h, n = index
    if config.bound is not None:
        r = r | dict(rate=r["rate_in"][h])
    pl.when(wg == 0)(lambda: load_inputs(r, index, dict(q=r["left"].at[0], k=r["k"], g=r["g"]), r["arrived"]))
    plgpu.barrier_wait(r["arrived"])
    m = masks(r, index)
    _factors(config, r, m, index, wg, tuple(row_scale(ref, config.normalize, slabs) for ref in (r["left"].at[0], r["k"])))
    join(r, slabs)
    beta = down(beta_rows(r))
    pl.when(wg == 0)(lambda: plgpu.copy_smem_to_gmem(r["decay"], r["decay_out"].at[b, h, n]))
    found = _scores(r, r["left"].at[wg if slabs > 1 else 0], slabs)
    if slabs == 1:
        _store_p(r, index, found)
        found = _scores(r, r["left"].at[1], slabs)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _store_t(r, index, found * beta)
    else:
        # All products have read their operands: each warpgroup may now write over them.
        join(r, slabs)
        lax.cond(wg == 0, lambda: _store_p(r, index, found), lambda: _store_t(r, index, found * beta))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    join(r, slabs)


def _factors(config: Config, r: dict, m: Masks, index: tuple[Array, Array, Array], s: Array, scales: tuple[Array | None, Array | None]) -> None:
    """Slab s of the keys' channels: writes Qg, Kd, Kr and e^(G_C), and leaves the factors of the scores.

    Left ones in r["left"]; k's right factors for tiles that are 0, 1, 2, 3 apart in x2, x3, x4 and in place of k.
    """
    b, h, n = index
    table = r["sums"].at[s]
    at = {name: r[name].at[s] for name in ("k", "x2", "x3", "x4", "running")} | dict(q=r["left"].at[0, s], x1=r["left"].at[1, s])
    c = running_sums(config, r, s, m.valid, at["x1"], at["x2"], at["x4"])
    # A few columns at a time: in shared memory the whole would take a team's place.
    for i in range(0, SLAB, TILE):
        at["running"][...] = lax.slice(c, (0, i), (CHUNK, i + TILE))
        tile_sums(at["running"], table.at[:, pl.ds(i, TILE)])
    q = scaled(r["left"].at[0], s, scales[0], m.valid) * config.scale
    k = lambda: scaled(r["k"], s, scales[1], m.valid)
    entering = jnp.exp2(c + by_tile(table, ENTERING))
    at["x1"][...] = kept(m.entry, q * entering).astype(BF16)
    at["x2"][...] = kept(m.entry, k() * down(beta_rows(r)) * entering).astype(BF16)
    at["q"][...] = (q * left_factor(c)).astype(BF16)
    at["x3"][...] = kept(m.exit, k() * jnp.exp2(by_tile(table, LEAVING) - c)).astype(BF16)
    whole = jnp.exp2(plgpu.load(table.at[WHOLE], layout=COLUMNS, optimized=False))
    columns(r["decay"], s)[...] = whole if m.carry is None else jnp.where(m.carry, whole, 0.0)
    plgpu.commit_smem()
    for name, tile in (("qg", "x1"), ("kd", "x2"), ("kr", "x3")):
        plgpu.copy_smem_to_gmem(at[tile], columns(r[f"{name}_out"].at[b, h, n], s))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    keys = k()
    at["x1"][...] = (keys * left_factor(c)).astype(BF16)
    for distance, right in enumerate(("x2", "x3", "x4", "k")):
        at[right][...] = (keys * right_factor(c, table, distance)).astype(BF16)
    plgpu.commit_smem()


def _scores(r: dict, left: Any, slabs: int) -> Array:
    """Products of a left factor with the right factors of every distance, float32 [64, 64]; above the diagonal tiles: nothing of use."""
    apart, result = iota(0) // TILE - iota(1) // TILE, None
    for distance, right in enumerate(("x2", "x3", "x4", "k")):
        pairs = [(left.at[s], transposed(r[right].at[s])) for s in range(slabs)]
        result = product(*pairs) if result is None else jnp.where(apart == distance, product(*pairs), result)
    return result


def _store_p(r: dict, index: tuple[Array, Array, Array], scores: Array) -> None:
    tile = r["left"].at[0, 0]
    tile[...] = kept(visible(r, iota(0) >= iota(1)), scores).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, r["p_out"].at[index])


def _store_t(r: dict, index: tuple[Array, Array, Array], scores: Array) -> None:
    tile = r["left"].at[1, 0]
    free = [r[name].at[0] for name in ("k", "x2", "x3", "x4")] + [r["left"].at[1, 1] if r["k"].shape[0] > 1 else r["left"].at[0, 0]]
    t = inverse(kept(visible(r, iota(0) > iota(1)), scores), [tile, *free])
    tile[...] = t.astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, r["t_out"].at[index])


def inverse(a: Array, tiles: list[Any]) -> Array:
    """(I + A)^-1 of a strictly lower triangular float32 [64, 64] in registers.

    tiles: six [64, 64] bfloat16 scratch tiles. Neighbouring blocks of inverses merge, from pairs of tokens up to the halves of the chunk,

        [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]] = [[P, 0], [L, Q]]^-1,

    all pairs at once: T - T A T, of which only the corners L count. Operands are split in two bfloat16 parts, without the product of the small ones.
    """
    row, column = iota(0), iota(1)
    corner = lambda bits: (row >> bits == (column >> bits) + 1) & (row >> (bits + 1) == column >> (bits + 1))
    a_high, a_low, t_high, t_low, p_high, p_low = tiles
    for ref, part in zip((a_high, a_low), split(a)):
        ref[...] = part

    def merge(step, t):
        for ref, part in zip((t_high, t_low), split(t)):
            ref[...] = part
        plgpu.commit_smem()
        left = product((t_high, a_high), (t_low, a_high), (t_high, a_low))
        for ref, part in zip((p_high, p_low), split(left)):
            ref[...] = part
        plgpu.commit_smem()
        return t - jnp.where(corner(step + 1), product((p_high, t_high), (p_low, t_high), (p_high, t_low)), 0.0)

    pairs = jnp.where(row == column, 1.0, jnp.where(corner(0), -a, 0.0))
    return lax.fori_loop(0, 5, merge, pairs)
