"""One token of KDA on Hopper, for decoding: a Pallas Mosaic GPU kernel that reads each state once and writes it once, in its place.

A block takes 64 columns of the state of one sequence and head at a time: each column evolves alone, so blocks have nothing to tell each other. What a
token needs is

    e = (a k)^T S     d = beta (v - e)     o = scale ((a q)^T S + (k . q) d)     S <- a S + k d^T,     a = exp(g)

with both sums over the state in one pass. Two blocks stay on each multiprocessor and go from one item to the next, while the states of those that follow
are on their way to shared memory and the last one is on its way back.
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

from pallas_kernels.kda import mosaic_gpu_lanes as lanes
from pallas_kernels.kda.gates import L2_EPS
from pallas_kernels.kda.mosaic_gpu_tiles import F32, ROWS, SLAB, across, down, row_of, tiled

STAGES = 3
"""States [K, 64] in shared memory: one that is worked on, one that leaves, one that arrives."""
BLOCKS = 2 * 132
"""That run at a time, two on each multiprocessor: one computes while the other waits at a barrier."""
# The state keeps every rounding of a decay, so nothing is approximate here. Threads meet where they read what others wrote, not after every store.
PARAMS = plgpu.CompilerParams(approx_math=False, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


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

    The next state takes the old one's buffer where XLA gives them one (donation, a loop's carry) and another one where it does not: the kernel reads the
    operand and writes the result. One that writes its operand, as a mutable reference would, loses what it writes where XLA fuses the call with the slices
    of a scan over layers, which keeps neither the operand nor the promise that they are one buffer.
    """
    from jax._src.pallas import mpmd  # what plgpu.kernel calls, which takes no input_output_aliases itself

    (batch, heads, key), value = q.shape, v.shape[-1]
    inputs = dict(q=q, k=k, v=v, g=g, beta=beta)
    if call.gate != "log_decay":
        inputs |= dict(a_log=jnp.zeros((heads,)) if a_log is None else a_log.astype(F32),
                       dt_bias=jnp.zeros((heads, key)) if dt_bias is None else dt_bias.astype(F32))
    fetched = {name: x for name, x in inputs.items() if name not in ("beta", "a_log")}
    items, slabs = batch * heads * (value // SLAB), key // SLAB
    vector = lambda size: plgpu.SMEM((size,), F32)
    scratch = {f"{name}_here": plgpu.SMEM((STAGES, SLAB if name == "v" else key), x.dtype) for name, x in fetched.items()} | dict(
        state=tiled(STAGES, slabs, SLAB, SLAB, dtype=F32), totals=plgpu.SMEM((8, SLAB), F32), erased=vector(SLAB), read=vector(SLAB),
        arrived=plgpu.Barrier(num_arrivals=slabs + len(fetched), num_barriers=STAGES))
    blocks = min(items, BLOCKS)
    body = functools.partial(_body, call, (*inputs, "held", "o", "next", *scratch), tuple(fetched), (items, blocks), interpret is not None)
    mesh = plgpu.Mesh(grid=(blocks,), grid_names=("block",))
    kernel = mpmd._mpmd_map([(mesh, lambda *refs: pl.run_scoped(functools.partial(body, *refs), *scratch.values()))],
                            tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v, state)), input_output_aliases={len(inputs): 1},
                            compiler_params=PARAMS, interpret=interpret or False, name="kda_step")
    return _mapped(kernel)(*inputs.values(), state)


def _mapped(kernel: Callable[..., tuple[Array, Array]]) -> Callable[..., tuple[Array, Array]]:
    """The kernel with a rule for `jax.vmap`, which its primitive has none of: members take turns."""
    mapped = jax.custom_batching.custom_vmap(kernel)

    @mapped.def_vmap
    def rule(size: int, batched: list[bool], *arrays: Array) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
        members = [x if of_each else jnp.broadcast_to(x, (size, *x.shape)) for x, of_each in zip(arrays, batched)]
        return lax.map(lambda member: mapped(*member), tuple(members)), (True, True)

    return mapped


def _body(call: Call, names: tuple[str, ...], fetched: tuple[str, ...], sizes: tuple[int, int], interpret: bool, *refs: Any) -> None:
    r, (items, blocks) = dict(zip(names, refs)), sizes
    block = lax.axis_index("block")
    count = lax.div(items - 1 - block, blocks) + 1

    def place(n):
        """Sequence, head and columns of this block's item n."""
        tiles, heads = r["v"].shape[-1] // SLAB, r["v"].shape[1]
        item = block + n * blocks
        row = lax.div(item, tiles)
        return lax.div(row, heads), lax.rem(row, heads), pl.ds(lax.rem(item, tiles) * SLAB, SLAB)

    def parts(n, name):
        """(in global memory, in shared memory) of each slab of item n's state; name: "held" or "next"."""
        (b, h, column), state = place(n), r["state"].at[lax.rem(n, STAGES)]
        return [(r[name].at[b, h, pl.ds(i * SLAB, SLAB), column], state.at[i]) for i in range(state.shape[0])]

    def fetch(n):
        @pl.when(n < count)
        def _():
            (b, h, column), slot = place(n), lax.rem(n, STAGES)
            where = dict(v=(b, h, column), dt_bias=(h,))
            for source, target in (*parts(n, "held"), *((r[name].at[where.get(name, (b, h))], r[f"{name}_here"].at[slot]) for name in fetched)):
                plgpu.copy_gmem_to_smem(source, target, r["arrived"].at[slot])

    for n in range(STAGES):
        fetch(jnp.int32(n))

    def turn(n, _):
        _token(call, r, lax.rem(n, STAGES), place(n), interpret)
        for outside, inside in parts(n, "next"):
            plgpu.copy_smem_to_gmem(inside, outside, commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        # The state before this one has left: its place is free.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        pl.when(n > 0)(lambda: fetch(n - 1 + STAGES))
        return ()

    lax.fori_loop(0, count, turn, ())
    plgpu.wait_smem_to_gmem(0)


def _token(call: Call, r: dict, slot: Array, at: tuple[Array, Array, Any], interpret: bool) -> None:
    """The next state in place of the one in a stage, ready to be copied; writes o. Decays and keys of a row are made by all threads that hold some of it."""
    b, h, column = at
    beta = r["beta"][b, h].astype(F32)
    a_log = r["a_log"][h] if "a_log" in r else None
    plgpu.barrier_wait(r["arrived"].at[slot])
    vector, held = (lambda name: r[f"{name}_here"].at[slot]), r["state"].at[slot]
    slabs = range(held.shape[0])
    state = [held.at[i][...] for i in slabs]
    rows = lambda name: [plgpu.load(vector(name).at[pl.ds(i * SLAB, SLAB)], layout=ROWS, optimized=False).astype(F32) for i in slabs]
    bias = rows("dt_bias") if call.gate != "log_decay" else [None] * len(slabs)
    decay = [jnp.exp(_log_decay(call, g, bias, a_log)) for g, bias in zip(rows("g"), bias)]
    k, q = rows("k"), rows("q")
    kk, kq, qq = lanes.dots(vector("k"), vector("q"), interpret=interpret)
    k_scale, q_scale = (lax.rsqrt(x + L2_EPS) if call.normalize else jnp.float32(1.0) for x in (kk, qq))
    q_scale = q_scale * call.scale

    def times(x):
        return sum(down(decay[i] * x[i]) * state[i] for i in slabs)

    lanes.sum_rows((times(k), times(q)), r["totals"], (r["erased"], r["read"]), interpret=interpret)
    beta = 1.0 / (1.0 + jnp.exp(-beta)) if call.beta_logits else beta
    v = row_of(vector("v")).astype(F32)
    delta = beta * (v - row_of(r["erased"]) * k_scale)
    o = row_of(r["read"]) * q_scale + delta * (kq * k_scale * q_scale)
    written = across(delta * k_scale)
    for i in slabs:
        held.at[i][...] = down(decay[i]) * state[i] + down(k[i]) * written
    # The next state is there for the copies, and all have read the sums.
    plgpu.commit_smem()
    r["o"].at[b, h, column][...] = o.astype(r["o"].dtype)


def _log_decay(call: Call, g: Array, bias: Array | None, a_log: Array | None) -> Array:
    if call.gate == "log_decay":
        return g
    g, rate = g + bias, jnp.exp(a_log)
    if call.gate == "bounded":
        return call.bound / (1.0 + jnp.exp(-rate * g))
    # softplus without overflow; log(1 + x) by way of what 1 + x rounds to, which keeps the small ones' digits.
    x = jnp.exp(-jnp.abs(g))
    one_more = 1.0 + x
    return -rate * (jnp.maximum(g, 0.0) + jnp.where(one_more == 1.0, x, jnp.log(one_more) * x / jnp.where(one_more == 1.0, 1.0, one_more - 1.0)))
