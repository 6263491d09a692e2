"""Causal attention on Hopper: FlashAttention's online softmax (Dao, 2023, arXiv 2307.08691) in three Mosaic GPU kernels, o and the gradients of q and of k, v.

A block has one memory and two compute warpgroups of 64 rows each: queries in `forward` and `query_gradient`, keys in `key_gradients`. The memory
warpgroup brings in tiles of the other side that the block's rows meet (`visible.Ranges`), those that need a mask first; an online softmax takes tiles in any
order. What one warpgroup does between its products hides behind the other's. No atomics: two runs agree to the bit.

Scores are in bits: c = scale log2(e) times q k^T, and `log_sum` is log2 of the sum of 2^c.
"""
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.visible import Ranges, key_ranges, query_ranges
from pallas_kernels.shared_memory import tiled

ROWS, WARPGROUPS = 64, 2
BLOCK = ROWS * WARPGROUPS
"""Rows of a block; T and S are multiples of it."""
QUERIES = 64
"""Queries of a turn of `key_gradients`."""
LOWEST = -1e30
"""Stands for minus infinity: differences of it are numbers."""
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232
PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
WGMMA = plgpu.Layout.WGMMA
DOWN, ACROSS = WGMMA.reduce(1), WGMMA.reduce(0)
"""Layouts of a vector with one entry per row, per column of a register array."""
F32 = jnp.float32


class Config(NamedTuple):
    """Static facts of a call."""
    scale: float
    interpret: Any = None
    """`plgpu.InterpretGPUParams` to run on a CPU, for tests."""

    @property
    def bits(self) -> float:
        return self.scale * math.log2(math.e)


def iota(dimension: int, columns: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, columns), dimension, layout=WGMMA)


def down(vector: Array, columns: int) -> Array:
    """One entry per row, spread over the columns."""
    return lax.broadcast_in_dim(vector, (ROWS, columns), (0,))


def across(vector: Array) -> Array:
    """One entry per column, spread over the rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (ROWS, vector.shape[0]), (1,)), WGMMA)


def load(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def full(value: float, *shape: int) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, F32), WGMMA if len(shape) == 2 else DOWN)


def product(a: Any, b: Any) -> Array:
    """a [64, K] times b [K, N] from shared memory, float32."""
    def body(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]
    return pl.run_scoped(body, plgpu.ACC((ROWS, b.shape[1]), F32))


def add_product(config: Config, accumulator: Array, a: Array, b: Any) -> Array:
    """accumulator + a b, a in registers."""
    if config.interpret is not None:
        # The interpreter knows neither factors in registers nor accumulators that begin with a value.
        return accumulator + jnp.dot(a.astype(F32), b[...].astype(F32))
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(accumulator))


def transposed(ref: Any) -> Any:
    return ref.transpose((1, 0))


class Turns(NamedTuple):
    """The tiles that a block takes, those that need a mask first."""
    begin: Array
    inner_begin: Array
    inner_end: Array
    end: Array

    @classmethod
    def of(cls, ranges: Any, batch: Array, tile: Array) -> "Turns":
        return cls(*(ranges[batch, i, tile] for i in range(4)))

    @property
    def masked(self) -> Array:
        return self.inner_begin - self.begin + self.end - self.inner_end

    @property
    def total(self) -> Array:
        return self.end - self.begin

    def tile(self, turn: Array) -> Array:
        """The side at `inner_end` comes first: there each query sees itself, so that its sums begin with a number."""
        after = self.end - self.inner_end
        return jnp.where(turn < after, self.inner_end + turn, jnp.where(turn < self.masked, self.begin + turn - after, self.inner_begin + turn - self.masked))


def feed(turns: Turns, stages: int, copies: Any, arrived: dict[str, Any], freed: dict[str, Any]) -> None:
    """The memory warpgroup: for each turn copies(tile, slot) is {name: a function that starts its copies on the barrier arrived[name][slot]}, made once
    the compute warpgroups have handed the slot of that name back."""
    plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

    def one(turn, _):
        slot = lax.rem(turn, stages)
        for name, start in copies(turns.tile(turn), slot).items():
            pl.when(turn >= stages)(lambda name=name: plgpu.barrier_wait(freed[name].at[slot]))
            start(arrived[name].at[slot])
    lax.fori_loop(0, turns.total, one, None)

    def drain(turn, _):
        # A block must not end while its own barriers are arrived at.
        for name in freed:
            plgpu.barrier_wait(freed[name].at[lax.rem(turn, stages)])
    lax.fori_loop(jnp.maximum(turns.total - stages, 0), turns.total, drain, None)


def over_turns(turns: Turns, stages: int, step: Any, carry: Any) -> Any:
    """step(tile, slot, carry, masked) over a block's tiles."""
    def body(masked):
        return lambda turn, carry: step(turns.tile(turn), lax.rem(turn, stages), carry, masked)
    carry = lax.fori_loop(0, turns.masked, body(True), carry)
    return lax.fori_loop(turns.masked, turns.total, body(False), carry)


def keys_of_turn(key: int, value: int) -> int:
    """Keys of a turn of the kernels whose blocks are queries."""
    return 128 if key + value <= 256 else 64


def stages_for(rows: int, key: int, value: int) -> int:
    """Stages of `rows` rows of both widths, 16 bit, that fit beside a block's own rows."""
    own = 2 * BLOCK * (key + value)
    return min(4 * BLOCK // rows, (220 * 1024 - own) // (2 * rows * (key + value)))


def barriers(stages: int, names: tuple[str, ...], arrivals: int = 1) -> dict[str, Any]:
    ring = {f"{name}_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages) for name in names}
    return ring | {f"{name}_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages) for name in names}


# ---------------------------------------------------------------- queries against keys


def _query_block(tile: Array, wg: Array) -> tuple[Array, Array, Any]:
    """Batch, head, and rows of this warpgroup, of the block's tile of queries."""
    return lax.axis_index("batch"), lax.axis_index("head"), pl.ds(tile * BLOCK + wg * ROWS, ROWS)


def _seen(r: dict, wg: Array, first_row: Array, key_tile: Array) -> Array:
    """Whether each query sees each key of a tile."""
    size = r["k"].shape[1]
    keys = key_tile * size + iota(1, size)
    return (keys >= down(load(r["first"].at[wg], DOWN), size)) & (keys <= first_row + iota(0, size))


def _masked_scores(r: dict, config: Config, wg: Array, first_row: Array, key_tile: Array, slot: Array, masked: bool) -> Array:
    """Scores in bits of this warpgroup's queries against a tile of keys."""
    plgpu.barrier_wait(r["k_full"].at[slot])
    scores = product(r["q"].at[wg], transposed(r["k"].at[slot])) * config.bits
    return jnp.where(_seen(r, wg, first_row, key_tile), scores, LOWEST) if masked else scores


def _queries_against_keys(names: tuple[str, ...], stages: int, compute: Any, *refs: Any) -> None:
    """Body of a kernel whose blocks are queries: compute(r, tile, turns, wg) in the compute warpgroups."""
    r = dict(zip(names, refs))
    wg, tile = lax.axis_index("wg"), r["first_in"].shape[1] // BLOCK - 1 - lax.axis_index("tile")
    turns = Turns.of(r["ranges_in"], lax.axis_index("batch"), tile)

    def memory():
        b, h, _ = _query_block(tile, wg)

        def copies(key_tile, slot):
            rows = pl.ds(key_tile * r["k"].shape[1], r["k"].shape[1])
            return {name: lambda barrier, name=name: plgpu.copy_gmem_to_smem(r[f"{name}_in"].at[b, rows, h], r[name].at[slot], barrier) for name in ("k", "v")}
        feed(turns, stages, copies, dict(k=r["k_full"], v=r["v_full"]), dict(k=r["k_free"], v=r["v_free"]))

    def work():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        compute(r, tile, turns, wg)
    lax.cond(wg == WARPGROUPS, memory, work)


def _forward_block(config: Config, stages: int, r: dict, tile: Array, turns: Turns, wg: Array) -> None:
    b, h, rows = _query_block(tile, wg)
    keys, value = r["v"].shape[1:]
    plgpu.copy_gmem_to_smem(r["q_in"].at[b, rows, h], r["q"].at[wg], r["own"].at[wg])
    plgpu.copy_gmem_to_smem(r["first_in"].at[b, rows], r["first"].at[wg], r["own"].at[wg])
    first_row = r["start_in"][0] + tile * BLOCK + wg * ROWS
    plgpu.barrier_wait(r["own"].at[wg])

    def step(key_tile, slot, carry, masked):
        mixed, largest, total = carry
        scores = _masked_scores(r, config, wg, first_row, key_tile, slot, masked)
        plgpu.barrier_arrive(r["k_free"].at[slot])
        new = jnp.maximum(largest, jnp.max(scores, axis=1))
        rescale, weights = jnp.exp2(largest - new), jnp.exp2(scores - down(new, keys))
        total, mixed = total * rescale + jnp.sum(weights, axis=1), mixed * down(rescale, value)
        plgpu.barrier_wait(r["v_full"].at[slot])
        mixed = add_product(config, mixed, weights.astype(r["v"].dtype), r["v"].at[slot])
        plgpu.barrier_arrive(r["v_free"].at[slot])
        return mixed, new, total

    mixed, largest, total = over_turns(turns, stages, step, (full(0, ROWS, value), full(LOWEST, ROWS), full(0, ROWS)))
    some = largest > LOWEST / 2
    r["o"].at[wg][...] = jnp.where(down(some, value), mixed * down(1 / jnp.where(some, total, 1.0), value), 0.0).astype(r["o"].dtype)
    r["scalars"].at[wg, 0][...] = jnp.where(some, largest + jnp.log2(jnp.where(some, total, 1.0)), 0.0)
    r["scalars"].at[wg, 1][...] = largest
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(r["o"].at[wg], r["o_out"].at[b, rows, h])
    for i, name in enumerate(("log_sum_out", "largest_out")):
        plgpu.copy_smem_to_gmem(r["scalars"].at[wg, i], r[name].at[b, h, rows])
    plgpu.wait_smem_to_gmem(0)


def _query_gradient_block(config: Config, stages: int, r: dict, tile: Array, turns: Turns, wg: Array) -> None:
    b, h, rows = _query_block(tile, wg)
    for name in ("q", "do"):
        plgpu.copy_gmem_to_smem(r[f"{name}_in"].at[b, rows, h], r[name].at[wg], r["own"].at[wg])
    plgpu.copy_gmem_to_smem(r["first_in"].at[b, rows], r["first"].at[wg], r["own"].at[wg])
    for i, name in enumerate(("log_sum_in", "delta_in")):
        plgpu.copy_gmem_to_smem(r[name].at[b, h, rows], r["scalars"].at[wg, i], r["own"].at[wg])
    first_row = r["start_in"][0] + tile * BLOCK + wg * ROWS
    plgpu.barrier_wait(r["own"].at[wg])
    log_sum, delta = (down(load(r["scalars"].at[wg, i], DOWN), r["k"].shape[1]) for i in range(2))

    def step(key_tile, slot, dq, masked):
        weights = jnp.exp2(_masked_scores(r, config, wg, first_row, key_tile, slot, masked) - log_sum)
        plgpu.barrier_wait(r["v_full"].at[slot])
        dweights = product(r["do"].at[wg], transposed(r["v"].at[slot]))
        plgpu.barrier_arrive(r["v_free"].at[slot])
        dscores = weights * (dweights - delta)
        dq = add_product(config, dq, dscores.astype(r["k"].dtype), r["k"].at[slot])
        plgpu.barrier_arrive(r["k_free"].at[slot])
        return dq

    dq = over_turns(turns, stages, step, full(0, ROWS, r["q"].shape[-1]))
    r["q"].at[wg][...] = (dq * config.scale).astype(r["q"].dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(r["q"].at[wg], r["dq_out"].at[b, rows, h])
    plgpu.wait_smem_to_gmem(0)


# ---------------------------------------------------------------- keys against queries


def _key_gradients_body(config: Config, names: tuple[str, ...], stages: int, *refs: Any) -> None:
    r = dict(zip(names, refs))
    wg, tile, b, h = (lax.axis_index(name) for name in ("wg", "tile", "batch", "head"))
    turns = Turns.of(r["ranges_in"], b, tile)

    def memory():
        def copies(query_tile, slot):
            rows = pl.ds(query_tile * QUERIES, QUERIES)

            def start(barrier):
                for name in ("q", "do"):
                    plgpu.copy_gmem_to_smem(r[f"{name}_in"].at[b, rows, h], r[name].at[slot], barrier)
                for i, name in enumerate(("log_sum_in", "delta_in")):
                    plgpu.copy_gmem_to_smem(r[name].at[b, h, rows], r["scalars"].at[slot, i], barrier)
                plgpu.copy_gmem_to_smem(r["first_in"].at[b, rows], r["first"].at[slot], barrier)
            return dict(q=start)
        feed(turns, stages, copies, dict(q=r["q_full"]), dict(q=r["q_free"]))

    def work():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        _key_gradients_block(config, stages, r, tile, turns, wg)
    lax.cond(wg == WARPGROUPS, memory, work)


def _key_gradients_block(config: Config, stages: int, r: dict, tile: Array, turns: Turns, wg: Array) -> None:
    b, h = lax.axis_index("batch"), lax.axis_index("head")
    first_key = tile * BLOCK + wg * ROWS
    rows, start = pl.ds(first_key, ROWS), r["start_in"][0]
    for name in ("k", "v"):
        plgpu.copy_gmem_to_smem(r[f"{name}_in"].at[b, rows, h], r[name].at[wg], r["own"].at[wg])
    plgpu.barrier_wait(r["own"].at[wg])

    def step(query_tile, slot, carry, masked):
        dk, dv = carry
        plgpu.barrier_wait(r["q_full"].at[slot])
        log_sum, delta = (load(r["scalars"].at[slot, i], ACROSS) for i in range(2))
        weights = jnp.exp2(product(r["k"].at[wg], transposed(r["q"].at[slot])) * config.bits - across(log_sum))
        if masked:
            keys, queries = first_key + iota(0, QUERIES), start + query_tile * QUERIES + iota(1, QUERIES)
            weights = jnp.where((keys >= across(load(r["first"].at[slot], ACROSS))) & (keys <= queries), weights, 0.0)
        dv = add_product(config, dv, weights.astype(r["do"].dtype), r["do"].at[slot])
        dweights = product(r["v"].at[wg], transposed(r["do"].at[slot]))
        dscores = weights * (dweights - across(delta))
        dk = add_product(config, dk, dscores.astype(r["q"].dtype), r["q"].at[slot])
        plgpu.barrier_arrive(r["q_free"].at[slot])
        return dk, dv

    dk, dv = over_turns(turns, stages, step, (full(0, ROWS, r["k"].shape[-1]), full(0, ROWS, r["v"].shape[-1])))
    r["k"].at[wg][...], r["v"].at[wg][...] = (dk * config.scale).astype(r["k"].dtype), dv.astype(r["v"].dtype)
    plgpu.commit_smem()
    for name in ("k", "v"):
        plgpu.copy_smem_to_gmem(r[name].at[wg], r[f"d{name}_out"].at[b, rows, h])
    plgpu.wait_smem_to_gmem(0)


# ---------------------------------------------------------------- calls


def _call(config: Config, body: Any, inputs: dict[str, Array], outputs: dict[str, Any], scratch: dict[str, Any], tiles: int, name: str) -> list[Array]:
    batch, _, heads, _ = inputs["q_in"].shape
    body = functools.partial(body, tuple((*inputs, *outputs, *scratch)))
    return plgpu.kernel(body, out_type=tuple(outputs.values()), scratch_types=tuple(scratch.values()), grid=(heads, tiles, batch),
                        grid_names=("head", "tile", "batch"), num_threads=WARPGROUPS + 1, thread_name="wg", compiler_params=PARAMS,
                        kernel_name=name, interpret=config.interpret or False)(*inputs.values())


def _own(key: int, value: int, dtype: Any, gradient: bool, keys: int, stages: int) -> dict[str, Any]:
    """Scratch of a kernel whose blocks are queries."""
    beside = dict(do=tiled(WARPGROUPS, ROWS, value, dtype=dtype)) if gradient else dict(o=tiled(WARPGROUPS, ROWS, value, dtype=dtype))
    return dict(q=tiled(WARPGROUPS, ROWS, key, dtype=dtype), k=tiled(stages, keys, key, dtype=dtype), v=tiled(stages, keys, value, dtype=dtype), **beside,
                first=plgpu.SMEM((WARPGROUPS, ROWS), jnp.int32), scalars=plgpu.SMEM((WARPGROUPS, 2, ROWS), F32),
                own=plgpu.Barrier(num_arrivals=5 if gradient else 2, num_barriers=WARPGROUPS)) | barriers(stages, ("k", "v"))


def _stacked(ranges: Ranges) -> Int[Array, "B 4 N"]:
    return jnp.stack(ranges, axis=1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def forward(config: Config, q: Float[Array, "B T H D"], k: Float[Array, "B S H D"], v: Float[Array, "B S H Dv"], first: Int[Array, "B T"],
            start: Int[Array, "1"]) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"], Float[Array, "B H T"]]:
    """-> o, log2 of the sum of 2^c over the keys that a query sees (0 where there are none), the largest c (LOWEST where there are none)."""
    (batch, length, heads, key), value, dtype = q.shape, v.shape[-1], q.dtype
    keys = keys_of_turn(key, value)
    stages = stages_for(keys, key, value)
    ranges = key_ranges(first, start[0], BLOCK, keys, k.shape[1] // keys)
    inputs = dict(ranges_in=_stacked(ranges), start_in=start, first_in=first, q_in=q, k_in=k, v_in=v)
    scalars = jax.ShapeDtypeStruct((batch, heads, length), F32)
    outputs = dict(o_out=jax.ShapeDtypeStruct((batch, length, heads, value), dtype), log_sum_out=scalars, largest_out=scalars)
    body = lambda names, *refs: _queries_against_keys(names, stages, functools.partial(_forward_block, config, stages), *refs)
    return tuple(_call(config, body, inputs, outputs, _own(key, value, dtype, False, keys, stages), length // BLOCK, "attention_forward"))


@functools.partial(jax.jit, static_argnums=0)
def query_gradient(config: Config, q: Array, k: Array, v: Array, first: Array, start: Array, do: Array, log_sum: Float[Array, "B H T"],
                   delta: Float[Array, "B H T"]) -> Float[Array, "B T H D"]:
    """delta: sum over channels of o times its gradient."""
    (_, length, _, key), value, dtype = q.shape, v.shape[-1], q.dtype
    keys = keys_of_turn(key, value)
    stages = stages_for(keys, key, value)
    ranges = key_ranges(first, start[0], BLOCK, keys, k.shape[1] // keys)
    inputs = dict(ranges_in=_stacked(ranges), start_in=start, first_in=first, q_in=q, k_in=k, v_in=v, do_in=do,
                  log_sum_in=log_sum, delta_in=delta)
    body = lambda names, *refs: _queries_against_keys(names, stages, functools.partial(_query_gradient_block, config, stages), *refs)
    outputs = dict(dq_out=jax.ShapeDtypeStruct(q.shape, dtype))
    return _call(config, body, inputs, outputs, _own(key, value, dtype, True, keys, stages), length // BLOCK, "attention_query_gradient")[0]


@functools.partial(jax.jit, static_argnums=0)
def key_gradients(config: Config, q: Array, k: Array, v: Array, first: Array, start: Array, do: Array, log_sum: Array,
                  delta: Array) -> tuple[Float[Array, "B S H D"], Float[Array, "B S H Dv"]]:
    key, value, dtype, tiles = q.shape[-1], v.shape[-1], q.dtype, k.shape[1] // BLOCK
    stages = stages_for(QUERIES, key, value)
    inputs = dict(ranges_in=_stacked(query_ranges(first, start[0], QUERIES, BLOCK, tiles)), start_in=start, first_in=first, q_in=q, k_in=k, v_in=v, do_in=do,
                  log_sum_in=log_sum, delta_in=delta)
    outputs = dict(dk_out=jax.ShapeDtypeStruct(k.shape, dtype), dv_out=jax.ShapeDtypeStruct(v.shape, dtype))
    scratch = dict(k=tiled(WARPGROUPS, ROWS, key, dtype=dtype), v=tiled(WARPGROUPS, ROWS, value, dtype=dtype), q=tiled(stages, QUERIES, key, dtype=dtype),
                   do=tiled(stages, QUERIES, value, dtype=dtype), first=plgpu.SMEM((stages, QUERIES), jnp.int32), scalars=plgpu.SMEM((stages, 2, QUERIES), F32),
                   own=plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS)) | barriers(stages, ("q",), arrivals=5)
    body = lambda names, *refs: _key_gradients_body(config, names, stages, *refs)
    return tuple(_call(config, body, inputs, outputs, scratch, tiles, "attention_key_gradients"))
