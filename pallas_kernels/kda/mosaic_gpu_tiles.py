"""What KDA's Mosaic GPU kernels share: tiles in shared memory, decays of a chunk, factors of its scores, document masks.

A warpgroup works on register arrays of 64 tokens by 64 channels (a slab). Scores of tokens i >= j are products of (x_i e^(c_i) between) and (k_j e^-c_j), c the
running sum of log decays inside a tile of 16 and `between` the decay from the start of j's tile to that of i's: both factors are anchored just before
the token's own tile, and nothing later than i enters its row or the columns that are kept. Decays are in bits (log2).

Documents need no branch: `runs` are the owners of the state (`documents.state_owner`), and a padding token has beta = -1.
"""
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kda import mosaic_gpu_lanes as lanes
from pallas_kernels.kda.chunk import CHUNK
from pallas_kernels.kda.gates import L2_EPS

SLAB = 64
"""Channels that one register array holds, and columns of the state per warpgroup."""
LOG2E = math.log2(math.e)
PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True)
"""No scratch for sums over rows: with it they would compile, and race (`mosaic_gpu_lanes.sum_rows` makes them). No barriers around every store: a
warp reads its own rows of what it wrote, and whoever reads other warps' rows comes after a `commit_smem`."""
WGMMA = plgpu.Layout.WGMMA
ROWS, COLUMNS = WGMMA.reduce(1), WGMMA.reduce(0)
"""Layouts of a vector with one entry per row, per column of a register array."""
BF16, F32 = jnp.bfloat16, jnp.float32


class Config(NamedTuple):
    """Static facts of a call, from which the kernels are built."""
    scale: float
    bound: float | None
    """Lower bound of the bounded gate; None: `g` is the log decay itself."""
    normalize: bool
    keep: bool = False
    """Whether the backward pass finds what `prepare` made, or makes it again."""
    interpret: Any = None
    """`plgpu.InterpretGPUParams` to run on a CPU, for tests."""


def tiled(*shape: int, dtype=BF16) -> Any:
    """Shared memory whose last two dimensions are laid out for TMA and wgmma."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)))


def iota(dimension: int, columns: int = CHUNK) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, columns), dimension, layout=WGMMA)


def down(vector: Array, columns: int = CHUNK) -> Array:
    """One entry per row, spread over the columns."""
    return lax.broadcast_in_dim(vector, (CHUNK, columns), (0,))


def across(vector: Array) -> Array:
    """One entry per column, spread over the rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (CHUNK, vector.shape[0]), (1,)), WGMMA)


def product(*pairs: tuple[Any, Any]) -> Array:
    """Sum of products of shared memory tiles, float32 [M, N]."""
    def body(accumulator):
        for a, b in pairs:
            plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(body, plgpu.ACC((pairs[0][0].shape[0], pairs[0][1].shape[1]), F32))


def row_of(ref: Any) -> Array:
    """A vector in shared memory as one entry per column."""
    return plgpu.load(ref, layout=COLUMNS, optimized=False)


def transposed(ref: Any) -> Any:
    return ref.transpose((1, 0))


def columns(ref: Any, s: int) -> Any:
    """Slab s of a reference with channels last."""
    return ref.at[..., pl.ds(s * SLAB, SLAB)]


def split(x: Array) -> tuple[Array, Array]:
    """x as a sum of two bfloat16 arrays, to 16 bits. The first is cut off, not rounded: that is one instruction, a rounding to bfloat16 and back are many."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    high = lax.bitcast_convert_type(bits & jnp.int32(-65536), F32)
    return high.astype(BF16), (x - high).astype(BF16)


# ---------------------------------------------------------------- decays and factors


def store_squares(refs: dict, config: Config, s: Any, valid: Array | None) -> None:
    """Leaves the sums of squares of the rows of q and k over slab s for `row_scales`, which comes after the next `join`."""
    if config.normalize:
        for i, name in enumerate(("q", "k")):
            # Padding may hold anything, NaN too, and its norm multiplies rows that are zero.
            x = kept(valid, refs[name].at[s][...].astype(F32))
            refs["squares"].at[s, i][...] = jnp.sum(x * x, axis=1)


def row_scales(refs: dict, config: Config) -> tuple[Array | None, Array | None]:
    """1 / norm of the rows of q and of k, one entry per row, or None."""
    if not config.normalize:
        return None, None
    squares = lambda i: sum(plgpu.load(refs["squares"].at[s, i], layout=ROWS, optimized=False) for s in range(refs["k"].shape[0]))
    return lax.rsqrt(squares(0) + L2_EPS), lax.rsqrt(squares(1) + L2_EPS)


def log2_decay(config: Config, g: Array, bias: Array | None, rate: Array | None, valid: Array | None) -> Array:
    """Log decay in bits of one [64, 64] slab from what `g` holds. bias: rate * dt_bias, one entry per column."""
    if config.bound is None:
        decay = g * LOG2E
    else:
        decay = (config.bound * LOG2E) * gate_sigmoid(g, bias, rate, config.interpret is not None)
    return decay if valid is None else jnp.where(valid, decay, 0.0)


def gate_sigmoid(g: Array, bias: Array, rate: Array, interpret: bool) -> Array:
    return lanes.reciprocal(1.0 + jnp.exp2((rate * -LOG2E) * g + across(bias * -LOG2E)), interpret=interpret)


def left_factor(sums: Array) -> Array:
    """What multiplies row i of the scores, from the running sums."""
    return jnp.exp2(sums + lanes.BALANCE)


def right_factor(sums: Array) -> Array:
    """What multiplies column j of scores inside a tile."""
    return jnp.exp2(-lanes.BALANCE - sums)


def raw_gate(refs: dict, s: Any, bounded: bool) -> tuple[Array, Array | None]:
    """Slab s of `g` in float32, and of the bounded gate's bias, one entry per column."""
    bias = plgpu.load(columns(refs["bias"], s), layout=COLUMNS, optimized=False) if bounded else None
    return refs["g"].at[s][...].astype(F32), bias


def scaled(ref: Any, s: int, scale: Array | None, keep: Array | None = None) -> Array:
    """Slab s of a tile in float32, each row times its entry of `scale`, zero where not kept."""
    x = kept(keep, ref.at[s][...].astype(F32))
    return x if scale is None else x * down(scale)


# ---------------------------------------------------------------- arguments and masks


class Inputs(NamedTuple):
    """Arguments of the operator, T a multiple of 64. beta: -1 at padding. rate, bias of the bounded gate: lower_bound * sigmoid(rate * g + bias)."""
    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    g: Float[Array, "B T H K"]
    beta: Float[Array, "B H T"]
    rate: Float[Array, "H"] | None
    bias: Float[Array, "H K"] | None
    runs: Int[Array, "B T"] | None
    """Owner of the state after each token."""
    edges: Int[Array, "B N 2"] | None
    """Owner of the state before and after each chunk."""


def place_of(item: Array, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Sequence, head and number of chunk `item`, counted through all of them. shape: heads, chunks of a sequence."""
    heads, chunks = shape
    sequence_head = lax.div(item, chunks)
    return lax.div(sequence_head, heads), lax.rem(sequence_head, heads), lax.rem(item, chunks)


def input_names(x: Inputs) -> dict[str, Array]:
    names = dict(q_in=x.q, k_in=x.k, g_in=x.g, beta_in=x.beta, rate_in=x.rate, bias_in=x.bias, runs_in=x.runs, edges_in=x.edges)
    return {name: array for name, array in names.items() if array is not None}


class Masks(NamedTuple):
    """Of one chunk. None: everywhere."""
    valid: Array | None
    """Rows that are no padding, bool [64, 64]."""
    entry: Array | None
    """Rows that the incoming state belongs to."""
    exit: Array | None
    """Rows that the outgoing state belongs to."""
    carry: Array | None
    """Scalar: the incoming and the outgoing state belong together."""


def load_inputs(refs: dict, index: tuple[Array, Array, Array], wide: dict[str, Any], barrier: Any) -> None:
    """Starts the copies of what a chunk's decays and scores are made of: q, k and g by slabs into `wide`; beta, bias and runs where there are any."""
    b, h, n = index
    rows = pl.ds(n * CHUNK, CHUNK)
    for name, target in wide.items():
        for s in range(target.shape[0]):
            plgpu.copy_gmem_to_smem(columns(refs[f"{name}_in"].at[b, rows, h], s), target.at[s], barrier)
    for name, where in (("beta", (b, h, rows)), ("bias", (h,)), ("runs", (b, rows))):
        if name in refs:
            plgpu.copy_gmem_to_smem(refs[f"{name}_in"].at[where], refs[name], barrier)


def masks(refs: dict, index: tuple[Array, Array, Array]) -> Masks:
    if "runs" not in refs:
        return Masks(None, None, None, None)
    b, _, n = index
    runs = down(plgpu.load(refs["runs"], layout=ROWS, optimized=False))
    first, last = refs["edges_in"][b, n, 0], refs["edges_in"][b, n, 1]
    return Masks(down(plgpu.load(refs["beta"], layout=ROWS, optimized=False)) >= 0.0, runs == first, runs == last, first == last)


def beta_rows(refs: dict) -> Array:
    """beta, one entry per row, 0 at padding."""
    return jnp.maximum(plgpu.load(refs["beta"], layout=ROWS, optimized=False), 0.0)


def same_document(refs: dict, scores: Array) -> Array:
    """Scores [64, 64], zero where row and column are in two documents."""
    if "runs" not in refs:
        return scores
    runs = [plgpu.load(refs["runs"], layout=layout, optimized=False) for layout in (ROWS, COLUMNS)]
    return jnp.where(down(runs[0]) == across(runs[1]), scores, 0.0)


def join(refs: dict, groups: int) -> None:
    """Waits for the other warpgroups that work on the same chunk."""
    if groups > 1:
        plgpu.barrier_arrive(refs["join"])
        plgpu.barrier_wait(refs["join"])


def kept(keep: Array | None, x: Array) -> Array:
    return x if keep is None else jnp.where(keep, x, 0.0)
