"""KDA's backward pass on Hopper: `prepare` once more, then two kernels. Notation as in `xla.py`; W = -E, so that d[P; A] = [dO; W] D^T.

`reverse` walks the chunks of one head backwards with the state's gradient in registers, each warpgroup owning 64 columns of the values:

    dD = P^T dO + Kr dS'     W = -T^T dD     dS = Qg^T dO + e^(G_C) dS' + Kd^T W

`gradients` is parallel over chunks; a warpgroup owns 64 channels of the keys. It forms dP = dO D^T, dA = W D^T, dQg = dO S^T, dKd = W S^T and
dKr = D dS'^T, carries them through the score factors of `mosaic_gpu_forward`, and ends at the raw inputs: q and k before their norm, the raw gate
with its parameters, beta. Sums over tokens of the parameters' gradients leave as one row per chunk, added by XLA in a fixed order.

The log decay's gradient follows from finished row and column gradients: with u_i = x_i dx_i - k_i dk_i, where the diagonal of P and the last
row's own Kr are in neither, dg_t = sum_{i >= t} u_i + e^(G_C) sum_v S dS' + sum_{i < C - 1} Kr_i dKr_i.
"""
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.kda import mosaic_gpu_lanes as lanes
from pallas_kernels.kda import mosaic_gpu_warps as warps
from pallas_kernels.kda.chunk import CHUNK
from pallas_kernels.kda.mosaic_gpu_forward import Kept, chain, copy_state, cut, joined, keep_state, multiply, serial, solve, stage_decay
from pallas_kernels.kda.mosaic_gpu_prepare import MULTIPROCESSORS, Prepared, prepare
from pallas_kernels.kda.mosaic_gpu_tiles import (
    BF16,
    F32,
    PARAMS,
    ROWS,
    SLAB,
    Config,
    Inputs,
    Masks,
    across,
    beta_rows,
    columns,
    down,
    gate_sigmoid,
    input_names,
    iota,
    join,
    kept,
    left_factor,
    load_inputs,
    log2_decay,
    masks,
    place_of,
    product,
    raw_gate,
    right_factor,
    row_of,
    row_scales,
    same_document,
    scaled,
    store_squares,
    tiled,
    transposed,
)

# ---------------------------------------------------------------- serial kernel


def _reverse_chunk(r: dict, slot: Array, wg: Array, state: tuple[Array, ...], n: Array, at: tuple[Array, Array, Array]) -> tuple[Array, ...]:
    """One chunk of one warpgroup: from the gradient of the state after it to that of the state before it; writes its columns of W."""
    b, h, column = at
    slabs, saves = len(state), "w_out" in r
    stage = lambda name, *index: r[name].at[(slot, *index)]
    plgpu.barrier_wait(r["arrived"].at[slot])

    def body(dd, *before):
        multiply(dd, (transposed(stage("p")), stage("v", wg)), *((stage("kr", s), r["state"].at[wg, s]) for s in range(slabs)))
        for s in range(slabs):
            multiply(before[s], (transposed(stage("qg", s)), stage("v", wg)))
        if saves:
            # The later chunk's W has left.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        solve(r, wg, -plgpu.wgmma_accumulator_load(dd, wait_n=slabs), transposed(stage("t")))
        if saves:
            plgpu.copy_smem_to_gmem(r["d"].at[wg], r["w_out"].at[b, pl.ds(n * CHUNK, CHUNK), h, column])
        for s in range(slabs):
            multiply(before[s], (transposed(stage("kd", s)), r["d"].at[wg]))
        decay = stage_decay(r, slot, slabs)
        return tuple(state[s] * down(decay[s]) + before[s][...] for s in range(slabs))
    new = pl.run_scoped(body, plgpu.ACC((CHUNK, SLAB), F32), *(plgpu.ACC((SLAB, SLAB), F32),) * slabs)
    # This chunk's state has left.
    plgpu.wait_smem_to_gmem(int(saves), wait_read_only=True)
    keep_state(r, wg, new)
    plgpu.commit_smem()
    plgpu.barrier_arrive(r["consumed"].at[slot])
    copy_state(r, wg, at, n - 1, n > 0)
    plgpu.commit_smem_to_gmem_group()
    return new


@functools.partial(jax.jit, static_argnums=(0, 4))
def reverse(config: Config, prepared: Prepared, do: Float[Array, "B T H V"], dfinal: Float[Array, "B H K V"], save: bool = True) -> tuple[Array, ...]:
    """-> gradient of the initial state [B, H, K, V] float32; if save, also bfloat16: gradient of the state after each chunk [B, H, N, K, V], W like dO."""
    outputs = dict(final_out=jax.ShapeDtypeStruct(dfinal.shape, F32))
    if save:
        outputs |= dict(states_out=jax.ShapeDtypeStruct((*prepared.decay.shape, do.shape[-1]), BF16), w_out=jax.ShapeDtypeStruct(do.shape, BF16))
    return serial(config, _reverse_chunk, True, prepared, dict(v_in=do, initial_in=dfinal), outputs, {})


# ---------------------------------------------------------------- parallel kernel


def _load_values(r: dict, index: tuple[Array, Array, Array], slabs: int, value_slabs: int) -> None:
    """Starts the copies of what has channels of the values. States before the chunk -> tiles 0, 1; gradients after it -> tiles 2, 3."""
    b, h, n = index
    copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target, r["values_barrier"])
    for name, where in (("w", r["left"].at[1]), ("v", r["v"]), ("do", r["left"].at[0]), ("d", r["d"])):
        for s in range(value_slabs):
            copy(columns(r[f"{name}_in"].at[b, pl.ds(n * CHUNK, CHUNK), h], s), where.at[s])
    for i, name in ((0, "states_in"), (2, "dstates_in")):
        for wg in range(slabs):
            for s in range(value_slabs):
                copy(r[name].at[b, h, n, pl.ds(wg * SLAB, SLAB), pl.ds(s * SLAB, SLAB)], r["tiles"].at[wg, i + s])


def _value_gradients(r: dict, m: Masks, index: tuple[Array, Array, Array], wg: Array, slabs: int, value_slabs: int) -> Array:
    """dv = beta E, stored; -> sum over this warpgroup's values of E V, one entry per row."""
    b, h, n = index
    beta, dots = beta_rows(r), plgpu.layout_cast(jnp.zeros((CHUNK,), F32), ROWS)
    for i in range(max(1, value_slabs // slabs)):
        s = wg + i * slabs

        def one_slab(s=s):
            e, tile = -r["left"].at[1, s][...].astype(F32), r["v"].at[s]
            found = jnp.sum(e * kept(m.valid, tile[...].astype(F32)), axis=1)
            tile[...] = kept(m.valid, e * down(beta)).astype(BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, r["dv_out"].at[b, pl.ds(n * CHUNK, CHUNK), h, pl.ds(s * SLAB, SLAB)])
            return found

        # Fewer slabs of values than warpgroups: the others have none.
        dots = dots + (one_slab() if value_slabs >= slabs else lax.cond(s < value_slabs, one_slab, lambda: plgpu.layout_cast(jnp.zeros((CHUNK,), F32), ROWS)))
    return dots


def _state_terms(r: dict, config: Config, m: Masks, wg: Array) -> tuple[Array, Array, Array]:
    """-> gradients from the states: of q's and of k's rows but for the left factor, of k's columns but for the right one.

    Leaves in r["rows"][1] what the decay of the whole chunk adds to the log decay's gradient.
    """
    value_slabs, interpret, table = r["d"].shape[0], config.interpret is not None, r["factors"].at[wg]
    tile = lambda i, s: r["tiles"].at[wg, i + s]
    pairs = lambda left, i: [(left.at[s], transposed(tile(i, s))) for s in range(value_slabs)]
    remaining = plgpu.layout_cast(jnp.zeros((SLAB,), F32), ROWS)
    for s in range(value_slabs):
        remaining = remaining + jnp.sum(tile(0, s)[...].astype(F32) * tile(2, s)[...].astype(F32), axis=1)
    r["rows"].at[wg, 0][...] = remaining
    plgpu.commit_smem()
    through = row_of(r["rows"].at[wg, 0]) * row_of(table.at[lanes.WHOLE])
    r["rows"].at[wg, 1][...] = through if m.carry is None else jnp.where(m.carry, through, 0.0)
    entering = kept(m.entry, lanes.of_tiles(table, lanes.ENTERING, interpret=interpret))
    dk = product(*pairs(r["d"], 2)) * kept(m.exit, lanes.of_tiles(table, lanes.LEAVING, interpret=interpret))
    return product(*pairs(r["left"].at[0], 0)) * entering, product(*pairs(r["left"].at[1], 0)) * entering, dk


def _score_gradients(r: dict, wg: Array, slabs: int) -> None:
    """dP and dA below their diagonals, bfloat16, in place of the first slabs of dO and W; the diagonal of dP -> r["rows"][0, 3]. Joins the warpgroups."""
    value_slabs = r["d"].shape[0]
    mine = [wg] if slabs == 2 else [0, 1]
    results = []
    for i in mine:
        scores = product(*((r["left"].at[i, s], transposed(r["d"].at[s])) for s in range(value_slabs)))
        diagonal = jnp.sum(jnp.where(iota(0) == iota(1), scores, 0.0), axis=1)
        r["rows"].at[i if slabs == 2 else 0, 3 + (slabs == 1) * i][...] = diagonal
        results.append(same_document(r, jnp.where(iota(0) > iota(1), scores, 0.0)).astype(BF16))
    plgpu.commit_smem()
    join(r, slabs)
    for i, scores in zip(mine, results):
        r["left"].at[i, 0][...] = scores


def _score_terms(r: dict, config: Config, sums: Array, wg: Array, q: Array, k: Array, beta: Array, terms: tuple[Array, ...]) -> tuple[Array, ...]:
    """Adds what comes through the scores to `terms`, as `_state_terms` returns them, and the factors of rows and columns. Joins the warpgroups.

    -> these three, and u, of whose sums over later tokens the log decay's gradient is made. A pair of tokens adds to the u of one and takes from the u of the
    other: the same operands, rounded alike, make both, or their rounding would be left in all sums that hold both.
    Leaves in r["rows"][2] what the writes' decay to the chunk's end adds to the log decay's gradient, one for the whole chunk.
    """
    tiles = reads, erasers, writes = tuple(r["tiles"].at[wg, i] for i in range(3))
    interpret, left = config.interpret is not None, left_factor(sums)
    # All products with the states have been awaited by the whole warpgroup.
    for tile, x in zip(tiles, (q * left, k * (beta * left), k * right_factor(sums))):
        tile[...] = x.astype(BF16)
    not_last = iota(0) < CHUNK - 1
    written = jnp.where(not_last, writes[...].astype(F32) * terms[2], 0.0)
    lanes.sum_rows((written,), r["totals"].at[wg], (r["rows"].at[wg, 2],), interpret=interpret)
    plgpu.commit_smem()
    join(r, r["k"].shape[0])
    dp, da = (r["left"].at[i, 0] for i in range(2))
    dq, row, dk = warps.score_gradients(terms, dp, da, *tiles, r["factors"].at[wg], interpret=interpret)
    reads, erasers, writes = (tile[...].astype(F32) for tile in tiles)
    u = reads * dq + erasers * row - jnp.where(not_last, writes * dk, 0.0)
    # Made once more: kept, these two would take a third of the registers meanwhile.
    sums = lanes.anew(sums, interpret=interpret)
    left = left_factor(sums)
    return dq * left, row * left, dk * right_factor(sums), u


def _gate_gradient(r: dict, config: Config, m: Masks, wg: Array, u: Array) -> None:
    """u -> the gradient of what `g` holds, in place of g; sums of the gate's parameters -> rows 0 and 1 of r["sums"]."""
    interpret, totals = config.interpret is not None, r["totals"].at[wg]
    dg = lanes.suffix_sums(u, totals, interpret=interpret)
    dg = dg + across(row_of(r["rows"].at[wg, 1]) + row_of(r["rows"].at[wg, 2]))
    if config.bound is not None:
        g, bias = raw_gate(r, wg, True)
        g = kept(m.valid, g)
        sigmoid = gate_sigmoid(g, bias, r["rate"], interpret)
        dz = kept(m.valid, dg * (config.bound * sigmoid) * (1.0 - sigmoid))
        plgpu.commit_smem()
        lanes.sum_rows((dz, dz * g), totals, tuple(r["sums"].at[wg, i] for i in range(2)), interpret=interpret)
        dg = r["rate"] * dz
    r["g"].at[wg][...] = kept(m.valid, dg).astype(r["g"].dtype)


def _gradients_body(config: Config, names: tuple[str, ...], key: int, value: int, shape: tuple[int, int], total: int, blocks: int, *refs: Any) -> None:
    """Chunks block, block + blocks, ... of `total`: while one's gradients go through gate and norms, the next one's values and states arrive."""
    every = dict(zip(names, refs))
    slabs, value_slabs = key // SLAB, value // SLAB
    block, warpgroup = lax.axis_index("block"), lax.axis_index("wg")

    def references(warpgroup):
        """All of this block's, by an index that is 0: an address that the compiler knows ahead of the loop would be kept in a register, one for each."""
        zero = lax.div(warpgroup, slabs)
        return {name: ref if name.endswith(("_in", "_out")) else ref.at[zero] for name, ref in every.items()}

    def fetch(item, wg, r, values):
        load = lambda: _load_values(r, place_of(item, shape), slabs, value_slabs) if values else \
            load_inputs(r, place_of(item, shape), {name: r[name] for name in ("q", "k", "g")}, r["arrived"])
        pl.when((wg == 0) & (item < total))(load)

    def step(turn, _):
        wg = lanes.in_this_turn(warpgroup, interpret=config.interpret is not None)
        item, r = block + turn * blocks, references(wg)
        _chunk(config, r, place_of(item, shape), wg, lambda: fetch(item + blocks, wg, r, True))
        # Both warpgroups' results have left the places of the inputs.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()
        join(r, slabs)
        fetch(item + blocks, wg, r, False)
        return ()

    for values in (False, True):
        fetch(block, warpgroup, references(warpgroup), values)
    lax.fori_loop(0, lax.div(total - block + blocks - 1, blocks), step, ())


def _chunk(config: Config, r: dict, index: tuple[Array, Array, Array], wg: Array, fetch_values: Any) -> None:
    slabs, value_slabs = r["k"].shape[0], r["d"].shape[0]
    interpret = config.interpret is not None
    if config.bound is not None:
        r = r | dict(rate=r["rate_in"][index[1]])
    plgpu.barrier_wait(r["arrived"])
    m, beta = masks(r, index), down(beta_rows(r))
    sums = lanes.tile_sums(log2_decay(config, *raw_gate(r, wg, config.bound is not None), r.get("rate"), m.valid), interpret=interpret)
    store_squares(r, config, wg, m.valid)
    lanes.tile_factors(sums, r["totals"].at[wg], r["factors"].at[wg], interpret=interpret)
    plgpu.barrier_wait(r["values_barrier"])
    values = _value_gradients(r, m, index, wg, slabs, value_slabs)
    terms = _state_terms(r, config, m, wg)
    _score_gradients(r, wg, slabs)
    scales = row_scales(r, config)
    q_scale, k_scale = (1.0 if x is None else down(x) for x in scales)
    q_scale = q_scale * config.scale
    raw = lambda name: scaled(r[name], wg, None, m.valid)
    dq, row, dk, u = _score_terms(r, config, sums, wg, raw("q") * q_scale, raw("k") * k_scale, beta, terms)
    # The values' gradient has left, and the other warpgroup needs nothing of the values any more either.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.commit_smem()
    join(r, slabs)
    fetch_values()
    _gate_gradient(r, config, m, wg, u)
    _through_norms(r, config, m, wg, scales, raw("q"), raw("k"), values, dq, row, dk)
    _store(r, config, index, wg)


def _through_norms(r: dict, config: Config, m: Masks, wg: Array, scales: tuple[Array | None, Array | None], q: Array, k: Array, values: Array,
                   dq: Array, row: Array, dk: Array) -> None:
    """Gradients of q and k, the rows before their norms, in their places; of beta in row 2 of r["sums"]. Joins the warpgroups.

    Of the rows as the scores see them, x / |x|, the gradients are dq and, from the diagonal of P, k's row; dk, beta `row` and q's row. Taken through the norm
    each becomes a sum of q, k and these with one factor a row; the factors need a few sums over all channels.
    """
    slabs = r["k"].shape[0]
    # The slowest warp still reads the rows that hold parts of the gate's gradient.
    plgpu.commit_smem()
    for i, x in enumerate((jnp.sum(row * k, axis=1), jnp.sum(dq * q, axis=1), jnp.sum(dk * k, axis=1), jnp.sum(q * k, axis=1), values)):
        r["dots"].at[wg, i][...] = x
    join(r, slabs)
    row_k, dq_q, dk_k, q_k, values = (sum(plgpu.load(r["dots"].at[s, i], layout=ROWS, optimized=False) for s in range(slabs)) for i in range(5))
    beta, diagonal = beta_rows(r), plgpu.load(r["rows"].at[0, 3], layout=ROWS, optimized=False)
    q_scale, k_scale = (1.0 if x is None else x for x in scales)
    dbeta = values + k_scale * row_k
    r["sums"].at[wg, 2][...] = dbeta if m.valid is None else jnp.where(plgpu.load(r["beta"], layout=ROWS, optimized=False) >= 0.0, dbeta, 0.0)
    read, both = config.scale * q_scale, config.scale * q_scale * k_scale * diagonal
    new_q, new_k = down(read) * dq if config.normalize else read * dq, row * down(k_scale * beta) + (down(k_scale) * dk if config.normalize else dk)
    new_q, new_k = new_q + down(both) * k, new_k + down(both) * q
    if config.normalize:
        new_q = new_q - down(q_scale * q_scale * (read * dq_q + both * q_k)) * q
        new_k = new_k - down(k_scale * k_scale * (k_scale * (dk_k + beta * row_k) + both * q_k)) * k
    r["q"].at[wg][...], r["k"].at[wg][...] = kept(m.valid, new_q).astype(BF16), kept(m.valid, new_k).astype(BF16)


def _store(r: dict, config: Config, index: tuple[Array, Array, Array], wg: Array) -> None:
    b, h, n = index
    rows, own = pl.ds(n * CHUNK, CHUNK), pl.ds(wg * SLAB, SLAB)
    plgpu.commit_smem()
    for name in ("q", "k", "g"):
        plgpu.copy_smem_to_gmem(r[name].at[wg], r[f"d{name}_out"].at[b, rows, h, own])
    if config.bound is not None:
        for i, name in enumerate(("dbias", "drate")):
            plgpu.copy_smem_to_gmem(r["sums"].at[wg, i], r[f"{name}_out"].at[b, h, n, own])
    pl.when(wg == 0)(lambda: plgpu.copy_smem_to_gmem(r["sums"].at[0, 2], r["dbeta_out"].at[b, h, rows]))


def _scratch(key: int, value: int, g_dtype: Any, packed: bool, bounded: bool) -> dict[str, Any]:
    """Shared memory by name, behind one index that is 0."""
    slabs, value_slabs = key // SLAB, value // SLAB
    tiles = lambda *shape, dtype=BF16: tiled(1, *shape, CHUNK, SLAB, dtype=dtype)
    vector = lambda *shape, dtype=F32: plgpu.SMEM((1, *shape, SLAB), dtype)
    barrier = lambda arrivals: plgpu.Barrier(num_arrivals=arrivals, num_barriers=1)
    loads = dict(q=tiles(slabs), k=tiles(slabs), g=tiles(slabs, dtype=g_dtype), beta=vector())
    if bounded:
        loads["bias"] = plgpu.SMEM((1, key), F32)
    if packed:
        loads["runs"] = vector(dtype=jnp.int32)
    barriers = dict(arrived=barrier(3 * slabs + 1 + bounded + packed), values_barrier=barrier(4 * value_slabs + 2 * slabs * value_slabs),
                    join=barrier(slabs))
    return loads | barriers | dict(left=tiles(2, value_slabs), d=tiles(value_slabs), v=tiles(value_slabs), tiles=tiles(slabs, 4),
                                   factors=vector(slabs, lanes.FACTORS), totals=vector(slabs, 8), sums=vector(slabs, 3), rows=vector(slabs, 5),
                                   dots=vector(slabs, 5), squares=vector(slabs, 2))


@functools.partial(jax.jit, static_argnums=0)
def gradients(config: Config, x: Inputs, do: Array, w: Array, d: Array, states: Array, dstates: Array) -> Inputs:
    """Gradients of x from dO, W, D [B, T, H, V] and the states before, and their gradients after, each chunk [B, H, N, K, V].

    They are sums over the columns of the values, of which shared memory holds 128 at a time (`kda_segment` has more).
    """
    parts = [_gradients_of_columns(config, x._replace(v=v), *columns) for v, *columns in
             zip(*(jnp.split(a, list(range(2 * SLAB, a.shape[-1], 2 * SLAB)), axis=-1) for a in (x.v, do, w, d, states, dstates)))]
    if len(parts) == 1:
        return parts[0]
    total = lambda *terms: sum(term.astype(F32) for term in terms).astype(terms[0].dtype)
    dv = jnp.concatenate([part.v for part in parts], axis=-1)
    return jax.tree.map(total, *(part._replace(v=None) for part in parts))._replace(v=dv)


def _gradients_of_columns(config: Config, x: Inputs, do: Array, w: Array, d: Array, states: Array, dstates: Array) -> Inputs:
    batch, length, heads, key = x.q.shape
    value, chunks = x.v.shape[-1], length // CHUNK
    inputs = input_names(x) | dict(v_in=x.v, do_in=do, w_in=w, d_in=d, states_in=states, dstates_in=dstates)
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    outputs = dict(dq_out=like(x.q), dk_out=like(x.k), dv_out=like(x.v), dg_out=like(x.g), dbeta_out=like(x.beta))
    if config.bound is not None:
        outputs |= {name: jax.ShapeDtypeStruct((batch, heads, chunks, key), F32) for name in ("dbias_out", "drate_out")}
    scratch = _scratch(key, value, x.g.dtype, x.runs is not None, x.bias is not None)
    names = (*inputs, *outputs, *scratch)
    total = batch * heads * chunks
    blocks = min(total, MULTIPROCESSORS)
    body = functools.partial(_gradients_body, config, names, key, value, (heads, chunks), total, blocks)
    results = plgpu.kernel(body, out_type=tuple(outputs.values()), scratch_types=tuple(scratch.values()), grid=(blocks,), grid_names=("block",),
                           num_threads=key // SLAB, thread_name="wg", compiler_params=PARAMS,
                           interpret=config.interpret or False)(*inputs.values())
    dq, dk, dv, dg, dbeta, *parameters = results
    dbias, drate = (parameters[0].sum((0, 2)), parameters[1].sum((0, 2, 3))) if parameters else (None, None)
    return Inputs(dq, dk, dv, dg, dbeta, drate, dbias, None, None)


def backward(config: Config, x: Inputs, kept: Kept, do: Float[Array, "B T H V"], dfinal: Float[Array, "B H K V"]) -> tuple[Inputs, Array]:
    """-> gradients of x (None for its integers) and of the initial state. Sequences are cut as they were in the forward pass."""
    batch, heads, length = x.beta.shape
    parts = kept.states.shape[0] // batch
    x, do = cut(x, parts), do.reshape(batch * parts, length // parts, *do.shape[2:])
    if (prepared := kept.prepared) is None:
        # Without the barrier XLA would find the forward pass's call equal and keep its results until here.
        x, do = lax.optimization_barrier((x, do))
        prepared = prepare(config, x)
    if parts > 1:
        added, = reverse(config, prepared, do, jnp.zeros((batch * parts, *dfinal.shape[1:])), save=False)
        dfinal, dinitial = chain(kept.transition, added, dfinal, parts, reverse=True)
        _, dstates, w = reverse(config, prepared, do, dfinal)
    else:
        dinitial, dstates, w = reverse(config, prepared, do, dfinal)
    dx = gradients(config, x, do, w, kept.d, kept.states, dstates)
    dbeta = jnp.swapaxes(dx.beta.reshape(batch, parts, heads, length // parts), 1, 2).reshape(batch, heads, length)
    return dx._replace(beta=dbeta, **{name: joined(getattr(dx, name), parts) for name in ("q", "k", "v", "g")}), dinitial
