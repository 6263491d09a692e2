"""KDA's chunk-parallel kernel on Hopper, the first of both passes. Notation as in `xla.py`; a chunk is 64 tokens, a tile 16 of them.

`prepare` forms, chunk by chunk: l2 norm, gate, cumulative decays, decayed scores P and A, T = (I + A)^-1. It leaves, in chunk-major order,

    Qg = scale q e^G     Kd = beta k e^G     Kr = k e^(G_C - G)     P     T     e^(G_C)

A team of warpgroups, one for each 64 channels of the keys, walks over its chunks: while one is inverted and stored, the next one's q, k and g
arrive. Teams share a block, which has a multiprocessor: what one waits for is hidden behind the other's arithmetic.
"""
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.kda import mosaic_gpu_lanes as lanes
from pallas_kernels.kda import mosaic_gpu_warps as warps
from pallas_kernels.kda.chunk import CHUNK, TILE
from pallas_kernels.kda.mosaic_gpu_tiles import (
    BF16,
    F32,
    PARAMS,
    SLAB,
    Config,
    Inputs,
    Masks,
    beta_rows,
    columns,
    down,
    input_names,
    join,
    kept,
    left_factor,
    load_inputs,
    log2_decay,
    masks,
    place_of,
    raw_gate,
    right_factor,
    row_of,
    row_scales,
    same_document,
    scaled,
    split,
    store_squares,
    tiled,
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


@functools.partial(jax.jit, static_argnums=0)
def prepare(config: Config, x: Inputs) -> Prepared:
    """A program of its own, like every kernel: a model lowers and compiles it once, however many layers call it."""
    batch, length, heads, key = x.q.shape
    chunks = length // CHUNK
    inputs = input_names(x)
    struct = lambda *shape, dtype=BF16: jax.ShapeDtypeStruct((batch, heads, chunks, *shape), dtype)
    outputs = Prepared(*(struct(CHUNK, key),) * 3, *(struct(CHUNK, CHUNK),) * 2, struct(key, dtype=F32))
    teams = teams_of(key, x.g.dtype)
    scratch = _scratch(teams, key, x.g.dtype, x.runs is not None, x.bias is not None)
    names = (*inputs, *(f"{name}_out" for name in Prepared._fields), *scratch)
    total = batch * heads * chunks
    blocks = min(-(-total // teams), MULTIPROCESSORS)
    body = functools.partial(_body, config, names, (heads, chunks), total, blocks * teams)
    return Prepared(*plgpu.kernel(body, out_type=tuple(outputs), scratch_types=tuple(scratch.values()), grid=(blocks,), grid_names=("block",),
                                  num_threads=teams * key // SLAB, thread_name="warpgroup", compiler_params=PARAMS,
                                  interpret=config.interpret or False)(*inputs.values()))


def teams_of(key: int, g_dtype: Any) -> int:
    """Teams of a block: as many as its shared memory allows."""
    slabs = key // SLAB
    tiles = 5 * 2 + jnp.dtype(g_dtype).itemsize + 2 * (g_dtype != BF16)
    own = CHUNK * key * tiles + 4 * slabs * (2 * CHUNK + (CHUNK // TILE + lanes.FACTORS) * SLAB) + 8 * key + 8 * CHUNK + 64
    return min(TEAMS, SHARED_MEMORY // own)


def _scratch(teams: int, key: int, g_dtype: Any, packed: bool, bounded: bool) -> dict[str, Any]:
    """Shared memory by name; everything once a team."""
    slabs = key // SLAB
    wide = functools.partial(tiled, teams, slabs, CHUNK, SLAB)
    vector = lambda *shape, dtype=F32: plgpu.SMEM((teams, *shape), dtype)
    names = dict(q=wide(), k=wide(), g=wide(dtype=g_dtype), beta=vector(CHUNK))
    if bounded:
        names["bias"] = vector(key)
    if packed:
        names["runs"] = vector(CHUNK, dtype=jnp.int32)
    names["arrived"] = plgpu.Barrier(num_arrivals=len(names) + 3 * (slabs - 1), num_barriers=teams)
    if g_dtype != BF16:
        names["writes"] = wide()
    return names | dict(leaving=wide(), parts=tiled(teams, slabs, 2, CHUNK, SLAB), squares=vector(slabs, 2, CHUNK), totals=vector(slabs, CHUNK // TILE, SLAB),
                        factors=vector(slabs, lanes.FACTORS, SLAB), decay=vector(key), join=plgpu.Barrier(num_arrivals=slabs, num_barriers=teams))


def _body(config: Config, names: tuple[str, ...], shape: tuple[int, int], total: int, workers: int, *refs: Any) -> None:
    every = dict(zip(names, refs))
    # Once its log decays are known, g gives its place to k's columns of the scores.
    every.setdefault("writes", every["g"])
    teams, slabs = every["k"].shape[:2]
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")

    def team_of(warpgroup):
        """-> this warpgroup's team's first item, its place in the team, the team's references."""
        team = lax.div(warpgroup, slabs)
        return block * teams + team, lax.rem(warpgroup, slabs), {name: ref if name.endswith(("_in", "_out")) else ref.at[team] for name, ref in every.items()}

    def fetch(item, wg, r):
        pl.when((wg == 0) & (item < total))(lambda: load_inputs(r, place_of(item, shape), dict(q=r["q"], k=r["k"], g=r["g"]), r["arrived"]))

    def step(turn, _):
        first, wg, r = team_of(lanes.in_this_turn(warpgroup, interpret=config.interpret is not None))
        item = first + turn * workers
        _chunk(config, r, place_of(item, shape), wg, lambda: fetch(item + workers, wg, r))
        return ()

    first = team_of(warpgroup)[0]
    fetch(*team_of(warpgroup))
    lax.fori_loop(0, lax.div(total - first + workers - 1, workers), step, ())
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _chunk(config: Config, r: dict, index: tuple[Array, Array, Array], wg: Array, fetch_next: Any) -> None:
    """One chunk; this warpgroup has slab `wg` of the keys' channels, then P or A and T."""
    slabs = r["k"].shape[0]
    _, h, _ = index
    if config.bound is not None:
        r = r | dict(rate=r["rate_in"][h])
    plgpu.barrier_wait(r["arrived"])
    m, beta = masks(r, index), beta_rows(r)
    reads, erasers = _slab(config, r, m, index, wg, beta)
    interpret = config.interpret is not None
    scores = lambda rows: same_document(r, warps.scores(rows, r["writes"].at[wg], r["factors"].at[wg], interpret=interpret))
    lower = functools.partial(warps.lower, interpret=interpret)
    # Each warpgroup has sums over its channels: the first makes P whole, the second A.
    if slabs == 2:
        r["parts"].at[wg, 0][...], r["parts"].at[wg, 1][...] = split(scores(jnp.where(wg == 0, erasers, reads)))
        mine = scores(jnp.where(wg == 0, reads, erasers))
    else:
        p, a = lower(scores(reads), False), lower(scores(erasers), True) * down(beta)
    # What was staged has left its place, and the inputs have been read for the last time.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.commit_smem()
    join(r, slabs)
    fetch_next()
    if slabs == 2:
        mine = mine + sum(r["parts"].at[1 - wg, i][...].astype(F32) for i in range(2))
        lax.cond(wg == 0, lambda: _store_p(r, index, lower(mine, False)), lambda: _store_t(config, r, index, lower(mine, True) * down(beta)))
    else:
        _store_p(r, index, p)
        _store_t(config, r, index, a)


def _slab(config: Config, r: dict, m: Masks, index: tuple[Array, Array, Array], s: Array, beta: Array) -> tuple[Array, Array]:
    """Slab s of the keys' channels: Qg, Kd, Kr and e^(G_C) on their way out, -> q's and k's rows of the scores; k's columns are left in r["writes"]."""
    b, h, n = index
    interpret, slabs = config.interpret is not None, r["k"].shape[0]
    at = {name: r[name].at[s] for name in ("q", "k", "writes", "leaving")}
    table = r["factors"].at[s]
    sums = lanes.tile_sums(log2_decay(config, *raw_gate(r, s, config.bound is not None), r.get("rate"), m.valid), interpret=interpret)
    store_squares(r, config, s, m.valid)
    # What this warpgroup stored of the last chunk has left, and the other's too: its places are written again from here on.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    lanes.tile_factors(sums, r["totals"].at[s], table, interpret=interpret)
    join(r, slabs)
    of_tiles = lambda first: lanes.of_tiles(table, first, interpret=interpret)
    scales = row_scales(r, config)
    left, entering = left_factor(sums), of_tiles(lanes.ENTERING)
    k = scaled(r["k"], s, scales[1], m.valid)
    erasers, writes = k * left, k * right_factor(sums)
    reads = scaled(r["q"], s, scales[0], m.valid) * (config.scale * left)
    # In the places of q and k, which a warp reads and writes only in its own rows.
    at["q"][...] = kept(m.entry, reads * entering).astype(BF16)
    at["k"][...] = kept(m.entry, erasers * down(beta) * entering).astype(BF16)
    at["leaving"][...] = kept(m.exit, writes * of_tiles(lanes.LEAVING)).astype(BF16)
    at["writes"][...] = writes.astype(BF16)
    whole = row_of(table.at[lanes.WHOLE])
    columns(r["decay"], s)[...] = whole if m.carry is None else jnp.where(m.carry, whole, 0.0)
    plgpu.commit_smem()
    for name, tile in (("qg", "q"), ("kd", "k"), ("kr", "leaving")):
        plgpu.copy_smem_to_gmem(at[tile], columns(r[f"{name}_out"].at[b, h, n], s))
    plgpu.copy_smem_to_gmem(columns(r["decay"], s), columns(r["decay_out"].at[b, h, n], s))
    return reads, erasers


def _store_p(r: dict, index: tuple[Array, Array, Array], p: Array) -> None:
    tile = r["leaving"].at[0]
    tile[...] = p.astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, r["p_out"].at[index])


def _store_t(config: Config, r: dict, index: tuple[Array, Array, Array], a: Array) -> None:
    high, low = (r["parts"].at[0, i] for i in range(2))
    t = inverse(a, high, low, interpret=config.interpret is not None)
    plgpu.commit_smem()
    high[...] = t.astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(high, r["t_out"].at[index])


def inverse(a: Array, high: Any, low: Any, *, interpret: bool) -> Array:
    """(I + A)^-1 of a strictly lower triangular float32 [64, 64] in registers. high, low: bfloat16 scratch tiles."""
    blocks = warps.block_inverses(a, interpret=interpret)
    high[...], low[...] = split(blocks)
    plgpu.commit_smem()
    return warps.merge_blocks(blocks, high, low, interpret=interpret)
