"""The short convolution on Hopper: Pallas Mosaic GPU kernels that read their inputs once and write their results once, forward and backward.

A block is one warpgroup with some columns of a tile of tokens. Each thread has its own columns and goes from token to token; what it needs of the tokens before
is in its registers, and results go where their inputs stood. No atomics: a tile's part of the taps' gradient is a result of its own, and two runs agree to
the bit.
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

from pallas_kernels.short_conv.specs import EDGE, TILE, block_shape

UNROLL = 4
"""Tokens of a turn of the loop."""
F32 = jnp.float32
# A thread reads and writes its own columns alone: no barriers but those of the copies.
PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


# Jitted, here and below, so that a model's many layers trace and lower each kernel once.
@functools.partial(jax.jit, static_argnames="interpret")
def forward(x: Float[Array, "B T C"], taps: Float[Array, "W C"], runs: Int[Array, "B T"], interpret: Any = None) -> Float[Array, "B T C"]:
    """interpret: `plgpu.InterpretGPUParams`, for tests; also below."""
    return _call(_forward, "short_conv", (x,), taps, runs, interpret)[0].reshape(x.shape)


@functools.partial(jax.jit, static_argnames="interpret")
def backward(x: Float[Array, "B T C"], taps: Float[Array, "W C"], runs: Int[Array, "B T"], gradient: Float[Array, "B T C"],
             interpret: Any = None) -> tuple[Float[Array, "B T C"], Float[Array, "W C"]]:
    """-> gradients of x and of the taps, float32."""
    dx, parts = _call(_backward, "short_conv_backward", (x, gradient), taps, runs, interpret)
    return dx.reshape(x.shape), jnp.sum(parts, axis=(0, 1)).reshape(taps.shape)


def _call(compute: Any, name: str, rows: tuple[Array, ...], taps: Array, runs: Array, interpret: Any) -> tuple[Array, ...]:
    """rows: x, and the gradient in the backward pass. Channels are two axes to the kernel, for the copy engine takes 256 numbers along one."""
    (batch, tokens, channels), block = rows[0].shape, block_shape(rows[0].shape[2])
    split = lambda x: x.reshape(*x.shape[:-1], channels // block[1], block[1])
    inputs = dict(zip("xg", map(split, rows))) | dict(runs=runs.astype(jnp.int32))
    outputs = [jax.ShapeDtypeStruct(inputs["x"].shape, rows[0].dtype)]
    pieces, size = {"x": ("before", "here"), "runs": ("here",)}, {"before": EDGE, "here": TILE, "after": EDGE}
    if "g" in inputs:
        pieces = {"x": ("before", "here", "after"), "g": ("here", "after"), "runs": ("here",)}
        outputs.append(jax.ShapeDtypeStruct((batch, tokens // TILE, *split(taps).shape), F32))
    needed = tuple((name, piece) for name in pieces for piece in pieces[name])
    scratch = {f"{name}_{piece}": plgpu.SMEM((size[piece], *(() if name == "runs" else block)), inputs[name].dtype) for name, piece in needed}
    scratch["arrived"] = plgpu.Barrier(num_arrivals=len(needed))
    names = (*inputs, "taps", *(f"out_{i}" for i in range(len(outputs))), *scratch)
    kernel = plgpu.kernel(functools.partial(_body, compute, names, needed), out_type=tuple(outputs), scratch_types=tuple(scratch.values()),
                          grid=(channels // math.prod(block), tokens // TILE, batch), grid_names=("columns", "tile", "batch"), compiler_params=PARAMS,
                          kernel_name=name, interpret=interpret or False)
    # Members of a vmap take turns: each fills the device by itself.
    return jax.custom_batching.sequential_vmap(lambda *arrays: kernel(*arrays))(*inputs.values(), split(taps.astype(F32)))


class Place(NamedTuple):
    """What a block works on."""
    batch: Array
    tile: Array
    start: Array
    """First token."""
    columns: Any

    @property
    def tokens(self) -> Any:
        return pl.ds(self.start, TILE)

    def run(self, r: dict, token: Array) -> Array:
        """Document of a token that may lie beyond the row's ends: there nobody's before it, padding behind it."""
        last = r["runs"].shape[1] - 1
        found = r["runs"][self.batch, jnp.clip(token, 0, last)]
        return jnp.where(token < 0, -1, jnp.where(token > last, 0, found))


def _body(compute: Any, names: tuple[str, ...], needed: tuple[tuple[str, str], ...], *refs: Any) -> None:
    r = dict(zip(names, refs))
    tile, tokens, width = lax.axis_index("tile"), r["x"].shape[1], r["x_here"].shape[1]
    start = tile * TILE
    place = Place(lax.axis_index("batch"), tile, start, pl.ds(lax.axis_index("columns") * width, width))
    # Beyond a row's ends other tokens are taken, whose documents `Place.run` makes nobody's.
    begins = dict(before=pl.ds(jnp.maximum(start - EDGE, 0), EDGE), here=place.tokens, after=pl.ds(jnp.minimum(start + TILE, tokens - EDGE), EDGE))
    for name, piece in needed:
        source = r[name].at[place.batch, begins[piece]] if name == "runs" else r[name].at[place.batch, begins[piece], place.columns]
        plgpu.copy_gmem_to_smem(source, r[f"{name}_{piece}"], r["arrived"])
    plgpu.barrier_wait(r["arrived"])
    taps = [_load(r["taps"].at[tap, place.columns]) for tap in range(r["taps"].shape[0])]
    compute(r, place, taps)


class Window(NamedTuple):
    """The tokens before the present one, oldest first: their inputs, float32, and documents."""
    inputs: tuple[Array, ...]
    runs: tuple[Array, ...]

    @classmethod
    def before(cls, r: dict, place: Place, count: int) -> "Window":
        at = range(-count, 0)
        return cls(tuple(_load(r["x_before"].at[EDGE + i]) for i in at), tuple(place.run(r, place.start + i) for i in at))

    def push(self, x: Array, run: Array) -> "Window":
        return Window((*self.inputs, x)[1:], (*self.runs, run)[1:])

    def seen(self, x: Array, run: Array) -> tuple[list[Array], list[Array]]:
        """(input that each tap meets, 0 where it is another document's; whether it is the same)."""
        same = [other == run for other in self.runs]
        return [*(jnp.where(one, y, 0.0) for one, y in zip(same, self.inputs)), x], same


def _load(ref: Any) -> Array:
    """A thread's columns are consecutive ones."""
    shape = ref.shape
    return plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED(shape, vec_size=math.prod(shape) // 128)).astype(F32)


def _sigmoid(y: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-y))


def _dot(inputs: list[Array], taps: list[Array]) -> Array:
    return functools.reduce(jnp.add, (x * tap for x, tap in zip(inputs, taps)))


def _over_tokens(step: Any, carry: Any) -> Any:
    """step(token, carry) over a tile."""
    def turn(i, carry):
        for j in range(UNROLL):
            carry = step(i * UNROLL + j, carry)
        return carry
    return lax.fori_loop(0, TILE // UNROLL, turn, carry)


def _leave(source: Any, target: Any) -> None:
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0)


def _forward(r: dict, place: Place, taps: list[Array]) -> None:
    def step(t, window):
        x, run = _load(r["x_here"].at[t]), r["runs_here"][t]
        y = _dot(window.seen(x, run)[0], taps)
        y = jnp.where(run > 0, y * _sigmoid(y), 0.0)
        r["x_here"].at[t][...] = y.astype(r["x_here"].dtype)
        return window.push(x, run)

    _over_tokens(step, Window.before(r, place, len(taps) - 1))
    _leave(r["x_here"], r["out_0"].at[place.batch, place.tokens, place.columns])


def _backward(r: dict, place: Place, taps: list[Array]) -> None:
    zero = taps[0] * 0.0

    def token(x, g, run, window, pending):
        """-> gradient of the convolution's output, inputs that the taps meet, gradients of this token's and of the inputs before it so far."""
        seen, same = window.seen(x, run)
        y = _dot(seen, taps)
        s = _sigmoid(y)
        dy = jnp.where(run > 0, g * s * (1.0 + y * (1.0 - s)), 0.0)
        parts = [*(jnp.where(one, dy * tap, 0.0) for one, tap in zip(same, taps)), dy * taps[-1]]
        return dy, seen, tuple(before + part for before, part in zip((*pending, zero), parts))

    def step(t, carry):
        window, pending, sums = carry
        x, g, run = _load(r["x_here"].at[t]), _load(r["g_here"].at[t]), r["runs_here"][t]
        dy, seen, gradients = token(x, g, run, window, pending)
        # The oldest one is done. In the first turns it is the tile's before: what they write is written over.
        r["g_here"].at[jnp.maximum(t - len(pending), 0)][...] = gradients[0].astype(r["g_here"].dtype)
        return window.push(x, run), gradients[1:], tuple(total + dy * y for total, y in zip(sums, seen))

    before = len(taps) - 1
    window, pending, sums = _over_tokens(step, (Window.before(r, place, before), (zero,) * before, (zero,) * len(taps)))
    for i in range(before):
        x, g, run = _load(r["x_after"].at[i]), _load(r["g_after"].at[i]), place.run(r, place.start + TILE + i)
        _, _, gradients = token(x, g, run, window, pending)
        r["g_here"].at[TILE - before + i][...] = gradients[0].astype(r["g_here"].dtype)
        window, pending = window.push(x, run), gradients[1:]
    for tap, total in enumerate(sums):
        r["out_1"].at[place.batch, place.tile, tap, place.columns][...] = total
    _leave(r["g_here"], r["out_0"].at[place.batch, place.tokens, place.columns])
