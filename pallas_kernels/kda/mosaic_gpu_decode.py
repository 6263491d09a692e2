"""One token of KDA on Hopper, for decoding: a Pallas Mosaic GPU kernel that reads each state once and writes it once, in its place.

A block has 64 columns of the state of one sequence and head, in registers: each column evolves alone, so blocks have nothing to tell each other.
What a token needs is

    e = (a k)^T S     S <- a S + k (beta (v - e))^T     o = scale S^T q,     a = exp(g)

The loads of the state are issued before anything else, and several blocks fit on a multiprocessor: while one computes, others' states are on their way.
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
from pallas_kernels.kda.gates import L2_EPS
from pallas_kernels.kda.mosaic_gpu_tiles import COLUMNS, F32, ROWS, SLAB, WGMMA, across, down, row_of

THREADS = 128
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
    inputs = dict(q=q, k=k, v=v, g=g, beta=beta)
    if call.gate != "log_decay":
        inputs |= dict(a_log=jnp.zeros((heads,)) if a_log is None else a_log.astype(F32),
                       dt_bias=jnp.zeros((heads, key)) if dt_bias is None else dt_bias.astype(F32))
    held = jax.new_ref(state)
    vector = lambda size: plgpu.SMEM((size,), F32)
    scratch = dict(decays=vector(key), erased=vector(key), keys=vector(key), queries=vector(key), totals=plgpu.SMEM((8, SLAB), F32), sums=vector(SLAB))
    names = (*inputs, "held", "o", *scratch)
    body = functools.partial(_body, call, names, interpret is not None)
    o = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(v.shape, v.dtype), scratch_types=tuple(scratch.values()),
                     grid=(batch, heads, v.shape[-1] // SLAB), grid_names=("b", "h", "tile"), compiler_params=PARAMS,
                     interpret=interpret or False)(*inputs.values(), held)
    return o, jax.freeze(held)


def _body(call: Call, names: tuple[str, ...], interpret: bool, *refs: Any) -> None:
    r = dict(zip(names, refs))
    b, h, tile = (lax.axis_index(name) for name in ("b", "h", "tile"))
    column, slabs = pl.ds(tile * SLAB, SLAB), r["k"].shape[-1] // SLAB
    held = [r["held"].at[b, h, pl.ds(i * SLAB, SLAB), column] for i in range(slabs)]
    state = [plgpu.load(x, layout=WGMMA, optimized=False) for x in held]
    decay = jnp.exp(_log_decay(call, r, b, h))
    k = _unit(_vector(r["k"].at[b, h]), call.normalize)
    q = _unit(_vector(r["q"].at[b, h]), call.normalize) * call.scale
    for name, x in (("decays", decay), ("erased", decay * k), ("keys", k), ("queries", q)):
        r[name][...] = x
    plgpu.commit_smem()
    rows = lambda name, i: down(plgpu.load(r[name].at[pl.ds(i * SLAB, SLAB)], layout=ROWS, optimized=False))

    def times(name, state):
        """name^T S, one entry per column."""
        lanes.sum_rows((sum(rows(name, i) * state[i] for i in range(slabs)),), r["totals"], (r["sums"],), interpret=interpret)
        return row_of(r["sums"])

    beta = r["beta"][b, h].astype(F32)
    beta = 1.0 / (1.0 + jnp.exp(-beta)) if call.beta_logits else beta
    v = plgpu.load(r["v"].at[b, h, column], layout=COLUMNS, optimized=False).astype(F32)
    delta = across(beta * (v - times("erased", state)))
    state = [rows("decays", i) * state[i] + rows("keys", i) * delta for i in range(slabs)]
    for x, new in zip(held, state):
        x[...] = new
    # All have read the first sums.
    plgpu.commit_smem()
    o = r["o"].at[b, h, column]
    o[...] = times("queries", state).astype(o.dtype)


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
