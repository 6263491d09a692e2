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

from pallas_kernels.kda.chunk import CHUNK, TILE
from pallas_kernels.kda.mosaic_gpu_forward import serial, stage_decay
from pallas_kernels.kda.mosaic_gpu_prepare import Prepared, prepare
from pallas_kernels.kda.mosaic_gpu_tiles import (
    BALANCE,
    BF16,
    COLUMNS,
    ENTERING,
    F32,
    LEAVING,
    LOG2E,
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
    column_sums,
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
    raw_gate,
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

# ---------------------------------------------------------------- serial kernel


def _reverse_chunk(r: dict, slot: Array, wg: Array, state: tuple[Array, ...], n: Array, at: tuple[Array, Array, Array]) -> tuple[Array, ...]:
    """One chunk of one warpgroup: from the gradient of the state after it to that of the state before it; writes its columns of W."""
    b, h, column = at
    slabs = len(state)
    stage = lambda name, *index: r[name].at[(slot, *index)]
    # The later chunk's copies must have left state and d.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for s in range(slabs):
        r["state"].at[wg, s][...] = state[s].astype(BF16)
    plgpu.commit_smem()
    for s in range(slabs):
        plgpu.copy_smem_to_gmem(r["state"].at[wg, s], r["states_out"].at[b, h, n, pl.ds(s * SLAB, SLAB), column])
    plgpu.barrier_wait(r["arrived"].at[slot])
    dd = product((transposed(stage("p")), stage("v", wg)), *((stage("kr", s), r["state"].at[wg, s]) for s in range(slabs)))
    decay = stage_decay(r, slot, slabs)
    r["d"].at[wg][...] = dd.astype(BF16)
    plgpu.commit_smem()
    w = -product((transposed(stage("t")), r["d"].at[wg]))
    r["d"].at[wg][...] = w.astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(r["d"].at[wg], r["w_out"].at[b, pl.ds(n * CHUNK, CHUNK), h, column])
    before = [state[s] * down(decay[s]) + product((transposed(stage("qg", s)), stage("v", wg)), (transposed(stage("kd", s)), r["d"].at[wg]))
              for s in range(slabs)]
    plgpu.barrier_arrive(r["consumed"].at[slot])
    return tuple(before)


def reverse(config: Config, prepared: Prepared, do: Float[Array, "B T H V"], dfinal: Float[Array, "B H K V"]) -> tuple[Array, ...]:
    """-> gradient of the initial state [B, H, K, V] float32; bfloat16: gradient of the state after each chunk [B, H, N, K, V], W like dO."""
    outputs = dict(final_out=jax.ShapeDtypeStruct(dfinal.shape, F32), states_out=jax.ShapeDtypeStruct((*prepared.decay.shape, do.shape[-1]), BF16),
                   w_out=jax.ShapeDtypeStruct(do.shape, BF16))
    return serial(config, _reverse_chunk, True, prepared, dict(v_in=do, initial_in=dfinal), outputs, {})


# ---------------------------------------------------------------- parallel kernel


def _load(r: dict, index: tuple[Array, Array, Array], groups: int, value_slabs: int) -> None:
    """Starts the copies of a chunk's tokens; called by one warpgroup, awaited by all."""
    b, h, n = index
    rows = pl.ds(n * CHUNK, CHUNK)
    copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target, r["barrier"])
    load_inputs(r, index, {name: r[name] for name in ("q", "k", "g")}, r["barrier"])
    for name, where in (("do", r["left"].at[0]), ("w", r["left"].at[1]), ("d", r["d"])):
        for s in range(value_slabs):
            copy(columns(r[f"{name}_in"].at[b, rows, h], s), where.at[s])
    for s in range(value_slabs):
        copy(columns(r["v_in"].at[b, rows, h], s), _v_tile(r, s % groups, s // groups))


def _v_tile(r: dict, wg: Any, i: int) -> Any:
    """Where the i-th of a warpgroup's slabs of v waits, until states take the place."""
    return r["tiles"].at[wg, 3] if i == 0 else r["left_k"].at[wg]


def _value_gradients(r: dict, m: Masks, index: tuple[Array, Array, Array], wg: Array, groups: int, value_slabs: int) -> Array:
    """dv = beta E, stored; -> sum over this warpgroup's values of E V, one entry per row."""
    b, h, n = index
    beta, dots = beta_rows(r), jnp.zeros((CHUNK,), F32)
    dots = plgpu.layout_cast(dots, ROWS)
    for i in range(max(1, value_slabs // groups)):
        # Fewer slabs of values than warpgroups: all work on the first, one of them counts.
        s = wg + i * groups if value_slabs >= groups else 0
        tile = _v_tile(r, wg if value_slabs >= groups else 0, i)
        e = -r["left"].at[1, s][...].astype(F32)
        product_rows = jnp.sum(e * kept(m.valid, tile[...].astype(F32)), axis=1)
        counts = 1.0 if value_slabs >= groups else jnp.where(wg == 0, 1.0, 0.0)
        dots = dots + product_rows * counts
        stage = r["tiles"].at[wg, i]
        stage[...] = kept(m.valid, e * down(beta)).astype(BF16)
        plgpu.commit_smem()

        def store(stage=stage, s=s):
            plgpu.copy_smem_to_gmem(stage, r["dv_out"].at[b, pl.ds(n * CHUNK, CHUNK), h, pl.ds(s * SLAB, SLAB)])

        store() if value_slabs >= groups else pl.when(wg == 0)(store)
    return dots


def _load_states(r: dict, index: tuple[Array, Array, Array], wg: Array, value_slabs: int) -> None:
    """This warpgroup's 64 rows of the states before the chunk -> tiles 0, 1; of the gradients after it -> tiles 2, 3."""
    b, h, n = index
    for i, name in ((0, "states_in"), (2, "dstates_in")):
        for s in range(value_slabs):
            source = r[name].at[b, h, n, pl.ds(wg * SLAB, SLAB), pl.ds(s * SLAB, SLAB)]
            plgpu.copy_gmem_to_smem(source, r["tiles"].at[wg, i + s], r["states_barrier"].at[wg])
    plgpu.barrier_wait(r["states_barrier"].at[wg])


def _state_terms(r: dict, m: Masks, c: Any, table: Any, wg: Array, k_scale: Array | None) -> tuple[Array, Array, Array]:
    """-> gradients from the states: of the reads' and of the writes' rows but for the left factor, of k as a column.

    Leaves in r["rows"][1] and [2] the two parts of the log decay's gradient that are one for the whole chunk.
    """
    value_slabs = r["d"].shape[0]
    tile = lambda i, s: r["tiles"].at[wg, i + s]
    pairs = lambda left, i: [(left.at[s], transposed(tile(i, s))) for s in range(value_slabs)]
    remaining = plgpu.layout_cast(jnp.zeros((SLAB,), F32), ROWS)
    for s in range(value_slabs):
        remaining = remaining + jnp.sum(tile(0, s)[...].astype(F32) * tile(2, s)[...].astype(F32), axis=1)
    r["rows"].at[wg, 0][...] = remaining
    dk = product(*pairs(r["d"], 2)) * kept(m.exit, jnp.exp2(by_tile(table, LEAVING) - running(c)))
    through = plgpu.load(r["rows"].at[wg, 0], layout=COLUMNS, optimized=False) * jnp.exp2(plgpu.load(table.at[WHOLE], layout=COLUMNS, optimized=False))
    through = through if m.carry is None else jnp.where(m.carry, through, 0.0)
    k = scaled(r["k"], wg, k_scale, m.valid)
    r["rows"].at[wg, 1][...] = through
    high, low, ends = tile(2, 0), r["tiles"].at[wg, 3], r["left_k"].at[wg]
    for ref, part in zip((high, low), split(jnp.where(iota(0) < CHUNK - 1, k * dk, 0.0))):
        ref[...] = part
    ends[...] = jnp.where(iota(0) <= iota(1), 1.0, 0.0).astype(BF16)
    plgpu.commit_smem()
    r["rows"].at[wg, 2][...] = column_sums(((high, low),), ends)[0]
    # Less the left factor of the scores, which multiplies all of a row's terms in the end.
    entering = kept(m.entry, jnp.exp2(by_tile(table, ENTERING) - BALANCE))
    return product(*pairs(r["left"].at[0], 0)) * entering, product(*pairs(r["left"].at[1], 0)) * entering, dk


def _score_gradients(r: dict, wg: Array, groups: int) -> None:
    """dP and dA below their diagonals, bfloat16, in place of the first slabs of dO and W; the diagonal of dP -> r["rows"][0, 3]. Joins the warpgroups."""
    value_slabs = r["d"].shape[0]
    shown = visible(r, iota(0) > iota(1))
    mine = [wg] if groups == 2 else [0, 1]
    results = []
    for i in mine:
        scores = product(*((r["left"].at[i, s], transposed(r["d"].at[s])) for s in range(value_slabs)))
        diagonal = jnp.sum(jnp.where(iota(0) == iota(1), scores, 0.0), axis=1)
        r["rows"].at[i if groups == 2 else 0, 3 + (groups == 1) * i][...] = diagonal
        results.append(jnp.where(shown, scores, 0.0).astype(BF16))
    join(r, groups)
    for i, scores in zip(mine, results):
        r["left"].at[i, 0][...] = scores
    join(r, groups)


def _score_terms(r: dict, config: Config, m: Masks, c: Any, table: Any, wg: Array, scales: tuple, sums: tuple[Array, Array, Array]) -> tuple[Array, ...]:
    """Adds what comes through the scores to `sums`, as `_state_terms` returns them."""
    tile = lambda i: r["tiles"].at[wg, i]
    apart = iota(0) // TILE - iota(1) // TILE
    keys = lambda: scaled(r["k"], wg, scales[1], m.valid)
    tile(3)[...] = (scaled(r["q"], wg, scales[0], m.valid) * config.scale * left_factor(running(c))).astype(BF16)
    r["left_k"].at[wg][...] = (keys() * down(beta_rows(r)) * left_factor(running(c))).astype(BF16)

    def step(distance, sums):
        dq, row, dk = sums
        for i in range(2):
            tile(i)[...] = jnp.where(apart == distance, r["left"].at[i, 0][...].astype(F32), 0.0).astype(BF16)
        tile(2)[...] = (keys() * right_factor(running(c), table, distance)).astype(BF16)
        plgpu.commit_smem()
        dk = dk + right_factor(running(c), table, distance) * product((transposed(tile(0)), tile(3)), (transposed(tile(1)), r["left_k"].at[wg]))
        return dq + product((tile(0), tile(2))), row + product((tile(1), tile(2))), dk

    # A loop, not unrolled: the compiler would hoist loads of all four distances and spill.
    dq, row, dk = lax.fori_loop(0, 4, step, sums)
    return dq * left_factor(running(c)), row * left_factor(running(c)), dk


def running(c: Any) -> Array:
    """The running sums, from shared memory each time: they would not fit into the registers beside all else."""
    return plgpu.load(c, layout=WGMMA, optimized=False)


def _gate_gradient(r: dict, config: Config, m: Masks, wg: Array, u: Array) -> None:
    """u -> the gradient of what `g` holds, in place of g; sums of the gate's parameters -> rows 0 and 1 of r["sums"]."""
    tile = lambda i: r["tiles"].at[wg, i]
    for i, part in enumerate(split(u)):
        tile(i)[...] = part
    tile(2)[...] = jnp.where(iota(0) <= iota(1), 1.0, 0.0).astype(BF16)
    plgpu.commit_smem()
    dg = product((tile(2), tile(0)), (tile(2), tile(1)))
    dg = dg + across(sum(plgpu.load(r["rows"].at[wg, i], layout=COLUMNS, optimized=False) for i in (1, 2)))
    if config.bound is not None:
        g, bias = raw_gate(r, wg, True)
        g = kept(m.valid, g)
        sigmoid = 1.0 / (1.0 + jnp.exp2((r["rate"] * g + across(bias)) * -LOG2E))
        dz = kept(m.valid, dg * (config.bound * sigmoid) * (1.0 - sigmoid))
        pairs = ((tile(0), tile(1)), (tile(3), r["left_k"].at[wg]))
        for pair, x in zip(pairs, (dz, dz * g)):
            for ref, part in zip(pair, split(x)):
                ref[...] = part
        plgpu.commit_smem()
        for i, total in enumerate(column_sums(pairs, tile(2))):
            r["sums"].at[wg, i][...] = total
        dg = r["rate"] * dz
    r["g"].at[wg][...] = kept(m.valid, dg).astype(r["g"].dtype)


def _gradients_body(config: Config, names: tuple[str, ...], key: int, value: int, *refs: Any) -> None:
    r = dict(zip(names, refs))
    groups, value_slabs = key // SLAB, value // SLAB
    b, h, n, wg = (lax.axis_index(name) for name in ("b", "h", "n", "wg"))
    index, rows = (b, h, n), pl.ds(n * CHUNK, CHUNK)
    if config.bound is not None:
        r["rate"] = r["rate_in"][h]
    pl.when(wg == 0)(lambda: _load(r, index, groups, value_slabs))
    plgpu.barrier_wait(r["barrier"])
    m = masks(r, index)
    scales = tuple(row_scale(r[name], config.normalize, groups) for name in ("q", "k"))
    values = _value_gradients(r, m, index, wg, groups, value_slabs)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    join(r, groups)
    c, table = columns(r["c"].at[wg], 0), r["sums"].at[wg]
    tile = lambda i: r["tiles"].at[wg, i]
    c[...] = running_sums(config, r, wg, m.valid, tile(0), tile(1), tile(2))
    plgpu.commit_smem()
    _load_states(r, index, wg, value_slabs)
    tile_sums(c, table)
    sums = _state_terms(r, m, c, table, wg, scales[1])
    _score_gradients(r, wg, groups)
    dq, row, dk = _score_terms(r, config, m, c, table, wg, scales, sums)
    beta = down(beta_rows(r))
    q, k = scaled(r["q"], wg, scales[0], m.valid), scaled(r["k"], wg, scales[1], m.valid)
    _gate_gradient(r, config, m, wg, q * config.scale * dq + k * beta * row - jnp.where(iota(0) < CHUNK - 1, k * dk, 0.0))
    k = scaled(r["k"], wg, scales[1], m.valid)
    diagonal = plgpu.load(r["rows"].at[0, 3], layout=ROWS, optimized=False)
    r["rows"].at[wg, 0][...] = values + jnp.sum(row * k, axis=1)
    dk = dk + beta * row + down(diagonal) * config.scale * scaled(r["q"], wg, scales[0], m.valid)
    dq = config.scale * (dq + down(diagonal) * k)
    dq, dk = _through_norms(r, config, m, wg, scales, dq, dk, groups)
    r["q"].at[wg][...], r["k"].at[wg][...] = kept(m.valid, dq).astype(BF16), kept(m.valid, dk).astype(BF16)
    total = sum(plgpu.load(r["rows"].at[i, 0], layout=ROWS, optimized=False) for i in range(groups))
    r["sums"].at[wg, 2][...] = total if m.valid is None else jnp.where(plgpu.load(r["beta"], layout=ROWS, optimized=False) >= 0.0, total, 0.0)
    plgpu.commit_smem()
    own = pl.ds(wg * SLAB, SLAB)
    for name in ("q", "k", "g"):
        plgpu.copy_smem_to_gmem(r[name].at[wg], r[f"d{name}_out"].at[b, rows, h, own])
    if config.bound is not None:
        for i, name in enumerate(("dbias", "drate")):
            plgpu.copy_smem_to_gmem(r["sums"].at[wg, i], r[f"{name}_out"].at[b, h, n, own])
    pl.when(wg == 0)(lambda: plgpu.copy_smem_to_gmem(r["sums"].at[0, 2], r["dbeta_out"].at[b, h, rows]))
    plgpu.wait_smem_to_gmem(0)


def _through_norms(r: dict, config: Config, m: Masks, wg: Array, scales: tuple, dq: Array, dk: Array, groups: int) -> tuple[Array, Array]:
    """Gradients of the normalised rows -> of the rows before: scale * (dx - x sum x dx), the sum over both warpgroups. Joins the warpgroups."""
    if config.normalize:
        for i, (name, dx) in enumerate((("q", dq), ("k", dk))):
            r["rows"].at[wg, 1 + i][...] = jnp.sum(dx * scaled(r[name], wg, scales[i], m.valid), axis=1)
    join(r, groups)
    if not config.normalize:
        return dq, dk
    result = []
    for i, (name, dx) in enumerate((("q", dq), ("k", dk))):
        dot = sum(plgpu.load(r["rows"].at[j, 1 + i], layout=ROWS, optimized=False) for j in range(groups))
        result.append(down(scales[i]) * (dx - scaled(r[name], wg, scales[i], m.valid) * down(dot)))
    return tuple(result)


def _scratch(key: int, value: int, g_dtype: Any, packed: bool, bounded: bool) -> dict[str, Any]:
    groups, value_slabs = key // SLAB, value // SLAB
    slabs = lambda *shape, dtype=BF16: tiled(*shape, CHUNK, SLAB, dtype=dtype)
    vector = lambda *shape, dtype=F32: plgpu.SMEM((*shape, SLAB), dtype)
    loads = dict(q=slabs(groups), k=slabs(groups), g=slabs(groups, dtype=g_dtype), left=slabs(2, value_slabs), d=slabs(value_slabs),
                 beta=plgpu.SMEM((CHUNK,), F32))
    if bounded:
        loads["bias"] = plgpu.SMEM((key,), F32)
    if packed:
        loads["runs"] = plgpu.SMEM((CHUNK,), jnp.int32)
    arrivals = 3 * groups + 4 * value_slabs + 1 + bounded + packed
    barriers = dict(barrier=plgpu.Barrier(num_arrivals=arrivals), states_barrier=plgpu.Barrier(num_arrivals=2 * value_slabs, num_barriers=groups),
                    join=plgpu.Barrier(num_arrivals=groups))
    return loads | dict(tiles=slabs(groups, 4), left_k=slabs(groups), c=plgpu.SMEM((groups, CHUNK, SLAB + 8), F32), sums=vector(groups, SUMS),
                        rows=vector(groups, 5)) | barriers


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
    results = plgpu.kernel(functools.partial(_gradients_body, config, names, key, value), out_type=tuple(outputs.values()),
                           scratch_types=tuple(scratch.values()), grid=(batch, heads, chunks), grid_names=("b", "h", "n"),
                           num_threads=key // SLAB, thread_name="wg", compiler_params=PARAMS,
                           interpret=config.interpret or False)(*inputs.values())
    dq, dk, dv, dg, dbeta, *parameters = results
    dbias, drate = (parameters[0].sum((0, 2)), parameters[1].sum((0, 2, 3))) if parameters else (None, None)
    return Inputs(dq, dk, dv, dg, dbeta, drate, dbias, None, None)


def backward(config: Config, x: Inputs, states: Array, d: Array, do: Array, dfinal: Array) -> tuple[Inputs, Array]:
    """-> gradients of x (None for its integers) and of the initial state."""
    dinitial, dstates, w = reverse(config, prepare(config, x), do, dfinal)
    return gradients(config, x, do, w, d, states, dstates), dinitial
