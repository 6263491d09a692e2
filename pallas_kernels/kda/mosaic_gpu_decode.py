"""One token of KDA on Hopper, for decoding: a Pallas Mosaic GPU kernel that reads each state once and writes it once, in its place.

A block has the state of one sequence and head in shared memory, a thread works on one column of it. What a token needs is

    e = (a k)^T S     S <- a S + k (beta (v - e))^T     o = scale S^T q,     a = exp(g)

so the sums over key channels stay inside a thread. With 64 columns, the 128 threads take two key channels at a time, and the two halves of
a sum meet in shared memory. Three blocks fit on a multiprocessor: while one computes, others' states are on their way.
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

from pallas_kernels.kda.gates import L2_EPS
from pallas_kernels.kda.mosaic_gpu_tiles import F32, ROWS

THREADS = 128
UNROLL = 8
# The state keeps every rounding of a decay, so nothing is approximate here: the step waits for memory, not for arithmetic.
PARAMS = plgpu.CompilerParams(approx_math=False, lowering_semantics=plgpu.LoweringSemantics.Lane)


class Call(NamedTuple):
    """Static facts of a call of `kda_step`."""
    gate: str
    bound: float | None
    """Of the bounded gate."""
    beta_logits: bool
    normalize: bool
    scale: float


def step(call: Call, q: Float[Array, "B H K"], k: Float[Array, "B H K"], v: Float[Array, "B H V"], g: Float[Array, "B H K"],
         beta: Float[Array, "B H"], state: Float[Array, "B H K V"], a_log: Float[Array, "H"] | None, dt_bias: Float[Array, "H K"] | None,
         interpret: Any = None) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """-> o, next state. K and V 64 or 128, the state float32, the others float32 or bfloat16. interpret: `plgpu.InterpretGPUParams`, for tests.

    The state's buffer is written over where the caller gives it up (donation), else XLA copies it first.
    """
    batch, heads, key = q.shape
    tile = (key * v.shape[-1] // THREADS, THREADS)
    inputs = dict(q=q, k=k, v=v, g=g, beta=beta)
    if call.gate != "log_decay":
        inputs |= dict(a_log=jnp.zeros((heads,)) if a_log is None else a_log.astype(F32),
                       dt_bias=jnp.zeros((heads, key)) if dt_bias is None else dt_bias.astype(F32))
    held = jax.new_ref(state.reshape(batch, heads, *tile))
    vector = lambda size: plgpu.SMEM((size,), F32)
    scratch = dict(decays=vector(key), erased=vector(key), keys=vector(key), queries=vector(key), values=vector(THREADS), halves=vector(2 * THREADS),
                   state=plgpu.SMEM(tile, F32), arrived=plgpu.Barrier())
    names = (*inputs, "held", "o", *scratch)
    o = plgpu.kernel(functools.partial(_body, call, names), out_type=jax.ShapeDtypeStruct(v.shape, v.dtype), scratch_types=tuple(scratch.values()),
                     grid=(batch, heads), grid_names=("b", "h"), compiler_params=PARAMS, interpret=interpret or False)(*inputs.values(), held)
    return o, jax.freeze(held).reshape(state.shape)


def _body(call: Call, names: tuple[str, ...], *refs: Any) -> None:
    r = dict(zip(names, refs))
    b, h = lax.axis_index("b"), lax.axis_index("h")
    key, value = r["k"].shape[-1], r["v"].shape[-1]
    per_row = THREADS // value
    rows = key // per_row
    plgpu.copy_gmem_to_smem(r["held"].at[b, h], r["state"], r["arrived"])
    decay = jnp.exp(_log_decay(call, r, b, h))
    k = _unit(_vector(r["k"].at[b, h]), call.normalize)
    q = _unit(_vector(r["q"].at[b, h]), call.normalize) * call.scale
    for name, x in (("decays", decay), ("erased", decay * k), ("keys", k), ("queries", q)):
        r[name][...] = x
    for copy in range(per_row):
        r["values"].at[pl.ds(copy * value, value)][...] = _vector(r["v"].at[b, h])
    plgpu.commit_smem()
    beta = r["beta"][b, h].astype(F32)
    beta = 1.0 / (1.0 + jnp.exp(-beta)) if call.beta_logits else beta
    first = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=_layout(THREADS)) < value
    # Entry of each thread's key channel in row j.
    at = lambda name, j: r[name][j] if per_row == 1 else jnp.where(first, r[name][2 * j], r[name][2 * j + 1])
    plgpu.barrier_wait(r["arrived"])
    erased = _sum_of_rows(lambda j: at("erased", j) * _vector(r["state"].at[j]), rows, r["halves"], per_row)
    delta = beta * (_vector(r["values"]) - erased)

    def update(j):
        after = at("decays", j) * _vector(r["state"].at[j]) + at("keys", j) * delta
        r["state"].at[j][...] = after
        return at("queries", j) * after

    r["values"][...] = _sum_of_rows(update, rows, r["halves"], per_row)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(r["state"], r["held"].at[b, h])
    o = r["o"].at[b, h]
    o[...] = _vector(r["values"].at[pl.ds(0, value)]).astype(o.dtype)
    plgpu.wait_smem_to_gmem(0)


def _layout(width: int) -> Any:
    """One entry a thread; of 64 entries each in several threads."""
    return plgpu.Layout.WG_STRIDED((width,), vec_size=1) if width == THREADS else ROWS


def _vector(ref: Any) -> Array:
    """A row of 64 or 128 in float32, one entry a thread."""
    return plgpu.load(ref, layout=_layout(ref.shape[-1]), optimized=False).astype(F32)


def _log_decay(call: Call, refs: dict, b: Array, h: Array) -> Array:
    g = _vector(refs["g"].at[b, h])
    if call.gate == "log_decay":
        return g
    g, rate = g + _vector(refs["dt_bias"].at[h]), jnp.exp(refs["a_log"][h])
    if call.gate == "bounded":
        return call.bound / (1.0 + jnp.exp(-rate * g))
    # softplus without overflow; log(1 + x) by way of what 1 + x rounds to, which keeps the small ones' digits.
    x = jnp.exp(-jnp.abs(g))
    one_more = 1.0 + x
    return -rate * (jnp.maximum(g, 0.0) + jnp.where(one_more == 1.0, x, jnp.log(one_more) * x / jnp.where(one_more == 1.0, 1.0, one_more - 1.0)))


def _unit(x: Array, normalize: bool) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x) + L2_EPS) if normalize else x


def _sum_of_rows(term: Callable[[Array], Array], rows: int, halves: Any, per_row: int) -> Array:
    """Sum over j of the arrays term(j), one entry a thread; with two key channels a row, of both halves of the threads, in each."""
    def step(i, sums):
        return tuple(total + term(UNROLL * i + n) for n, total in enumerate(sums))

    # As many sums as additions in flight.
    zero = plgpu.layout_cast(jnp.zeros((THREADS,), F32), _layout(THREADS))
    sums = list(lax.fori_loop(0, rows // UNROLL, step, (zero,) * UNROLL))
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
    if per_row == 1:
        return sums[0]
    for start in (0, THREADS):
        halves.at[pl.ds(start, THREADS)][...] = sums[0]
    plgpu.commit_smem()
    return sums[0] + _vector(halves.at[pl.ds(THREADS // 2, THREADS)])
