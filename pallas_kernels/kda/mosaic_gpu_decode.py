"""One token of KDA on Hopper, for decoding: a Pallas Mosaic GPU kernel that reads each state once and writes it once, in its place.

A block has 64 columns of the state of one sequence and head, in registers: each column evolves alone, so blocks have nothing to tell each other.
What a token needs is

    e = (a k)^T S     d = beta (v - e)     S <- a S + k d^T     o = scale (q^T S) = scale ((a q)^T S + (q . k) d),     a = exp(g)

so both sums over the rows are of the old state, and made together. What has one number a row (decays, unit keys and queries) is XLA's work, a hundredth of
the state's traffic: in the kernel it would be done for every 64 columns again, while the state waits.
"""
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.kda import gates
from pallas_kernels.kda import mosaic_gpu_lanes as lanes
from pallas_kernels.kda.mosaic_gpu_tiles import COLUMNS, F32, ROWS, SLAB, WGMMA, across, down, row_of

# The state keeps every rounding, so nothing is approximate here: the step waits for memory, not for arithmetic.
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
    batch, heads, _ = q.shape
    held = jax.new_ref(state)
    inputs = _vectors(call, q, k, g, a_log, dt_bias) | dict(v=v, beta=jax.nn.sigmoid(beta.astype(F32)) if call.beta_logits else beta.astype(F32))
    vector = plgpu.SMEM((SLAB,), F32)
    scratch = dict(totals=plgpu.SMEM((8, SLAB), F32), erased=vector, read=vector)
    names = (*inputs, "held", "o", *scratch)
    body = functools.partial(_body, names, interpret is not None)
    o = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(v.shape, v.dtype), scratch_types=tuple(scratch.values()),
                     grid=(batch, heads, v.shape[-1] // SLAB), grid_names=("b", "h", "tile"), compiler_params=PARAMS,
                     interpret=interpret or False)(*inputs.values(), held)
    return o, jax.freeze(held)


def _vectors(call: Call, q: Array, k: Array, g: Array, a_log: Array | None, dt_bias: Array | None) -> dict[str, Array]:
    """What multiplies the state's rows, float32 [B, H, K]: the decays, what erases, what is written, what reads; and q . k [B, H]."""
    q, k, g = (x.astype(F32) for x in (q, k, g))
    if call.normalize:
        q, k = gates.l2_normalize(q), gates.l2_normalize(k)
    decays, q = jnp.exp(gates.log_decay(g, call.gate, a_log, dt_bias, call.bound)), q * call.scale
    return dict(decays=decays, erasing=decays * k, keys=k, reading=decays * q, matches=jnp.sum(q * k, axis=-1))


def _body(names: tuple[str, ...], interpret: bool, *refs: Any) -> None:
    r = dict(zip(names, refs))
    b, h, tile = (lax.axis_index(name) for name in ("b", "h", "tile"))
    column, slabs = pl.ds(tile * SLAB, SLAB), r["keys"].shape[-1] // SLAB
    held = [r["held"].at[b, h, pl.ds(i * SLAB, SLAB), column] for i in range(slabs)]
    state = [plgpu.load(x, layout=WGMMA, optimized=False) for x in held]
    rows = lambda name, i: down(plgpu.load(r[name].at[b, h, pl.ds(i * SLAB, SLAB)], layout=ROWS, optimized=False))
    times = lambda name: sum(rows(name, i) * state[i] for i in range(slabs))
    v = plgpu.load(r["v"].at[b, h, column], layout=COLUMNS, optimized=False).astype(F32)
    lanes.sum_rows((times("erasing"), times("reading")), r["totals"], (r["erased"], r["read"]), interpret=interpret)
    delta = r["beta"][b, h] * (v - row_of(r["erased"]))
    for i, x in enumerate(held):
        x[...] = rows("decays", i) * state[i] + rows("keys", i) * across(delta)
    o = r["o"].at[b, h, column]
    o[...] = (row_of(r["read"]) + r["matches"][b, h] * delta).astype(o.dtype)
