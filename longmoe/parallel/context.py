"""Context parallelism: token mixers on a mesh, each device with its own rows, heads and tokens, and what they send along the axis `context`.

Ranks of that axis hold contiguous stretches of every row, in order; documents may begin, end and span anywhere. A rank needs of the ranks before it

    KDA                one affine map of the state each, [H, Dk, Dk + Dv] numbers a row whatever the length (Kimi K3 report, KCP)
    short convolution  the width - 1 tokens before its first
    latent attention   the latents of all tokens (keys and values are expanded from them where they are used)

Derivatives are JAX's own: that of a gather is a reduce-scatter.
"""
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import pallas_kernels
from longmoe.parallel.mesh import BATCH_AXES, TOKEN_AXES, axis_size, check_divides, check_tokens, constrain, is_distributed
from longmoe.shapes import Array, Float, Int

ROWS = PartitionSpec(BATCH_AXES, "context")
"""[B, T], and [B, T, ...] whose other axes every device holds whole."""
HEADS = PartitionSpec(BATCH_AXES, "context", "tensor")
"""[B, T, H, ...], or [B, T, C] with a head's channels side by side."""
NONE_YET = jnp.iinfo(jnp.int32).max

Convolution = Callable[[Array, Array, Array | None, Array | None, Array | None], Array]
"""(x [B, T, C], taps [W, C], runs [B, T], history [B, W - 1, C], the history's runs [B, W - 1]) -> [B, T, C]; no history: the row begins here."""
Attention = Callable[[Array, Array, Array, Array | None, Array | None, Array], tuple[Array, Array | None]]
"""(q [B, T, H, D], latents [B, S, R], kv_b [Z, H, N], the queries' runs [B, T], the latents' runs [B, S], position of the first query among the
latents) -> (o [B, T, H, Dv], largest logits [H] without gradient, or None)."""


def sharded_kda(q: Float[Array, "B T H Dk"], k: Float[Array, "B T H Dk"], v: Float[Array, "B T H Dv"], g: Float[Array, "B T H Dk"],
                beta: Float[Array, "B T H"], *, a_log: Float[Array, "H"] | None, dt_bias: Float[Array, "H Dk"] | None,
                runs: Int[Array, "B T"] | None, initial_state: Float[Array, "B H Dk Dv"] | None = None,
                **keywords: Any) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float[Array, "B H Dk Dv"]]:
    """Outputs of `pallas_kernels.kda` for its keywords; on a mesh of several devices each runs it on its own shard. From a zero state, or, where devices do
    not share out rows, from initial_state: then (outputs, final state).

    runs: `pallas_kernels.document_runs` of whole rows, not segment ids: a number that comes back after padding would continue a document.

    Raises ValueError where the mesh does not share out rows, tokens or heads evenly.
    """
    arguments = (q, k, v, g, beta, a_log, dt_bias, runs, initial_state)
    if not is_distributed():
        return _kda_on_shard(keywords, *arguments)
    check_tokens(q)
    check_divides("kda.num_heads", q.shape[2], "tensor")
    if initial_state is not None and axis_size("context") > 1:
        raise ValueError(f"initial_state: got one on {axis_size('context')} devices that share out rows, wanted None: rows begin on the first of them")
    return _kda_on_mesh(tuple(keywords.items()), *arguments)


# Jitted, here and below, so that a model's many layers trace and lower it once. Without varying-axes checks: operators with derivative rules of their own
# return gradients of shared parameters that vary over the token axes, and they are summed where the parameters enter.
@functools.partial(jax.jit, static_argnums=0)
def _kda_on_mesh(keywords: tuple[tuple[str, Any], ...], *arguments: Array | None) -> Any:
    state = PartitionSpec(BATCH_AXES, "tensor")
    specs = (HEADS,) * 5 + (PartitionSpec("tensor"),) * 2 + (ROWS, state)
    results = HEADS if arguments[-1] is None else (HEADS, state)
    on_shard = functools.partial(_kda_on_shard, dict(keywords))
    return jax.shard_map(on_shard, in_specs=specs, out_specs=results, check_vma=False)(*arguments)


def _kda_on_shard(keywords: Mapping[str, Any], q: Array, k: Array, v: Array, g: Array, beta: Array, a_log: Array | None, dt_bias: Array | None,
                  runs: Array | None, state: Array | None) -> Any:
    common, carried = dict(a_log=a_log, dt_bias=dt_bias, segment_ids=runs, **keywords), state is not None
    if axis_size("context") > 1:
        state = entering_state(*pallas_kernels.kda_segment(k, v, g, beta, **common), runs)
    o, final_state = pallas_kernels.kda(q, k, v, g, beta, initial_state=state, **common)
    return (o, final_state) if carried else o


def entering_state(transition: Float[Array, "B H Dk Dk"], state: Float[Array, "B H Dk Dv"], runs: Int[Array, "B T"] | None) -> Float[Array, "B H Dk Dv"]:
    """Inside shard_map: the state in which this rank's first document arrives from the ranks before; zero where it begins here.

    transition, state: `kda_segment` of this rank's tokens, final_state(S) = transition @ S + state for an S that belongs to the rank's first document.
    runs: documents of this rank's tokens in the numbering of the whole row; None: one document a row.

    One gather of every rank's pair (and of two integers a row, the first and the last document of a rank), then a fold over the ranks before.
    """
    ranks, rank = axis_size("context"), jax.lax.axis_index("context")
    pairs = jax.lax.all_gather(jnp.concatenate([transition, state], axis=-1), "context")
    if runs is None:
        continues = jnp.ones((ranks, state.shape[0]), bool)
    else:
        edges = jnp.stack([jnp.min(jnp.where(runs > 0, runs, NONE_YET), axis=1), jnp.max(runs, axis=1)])
        continues = _continues(*jnp.moveaxis(jax.lax.all_gather(edges, "context"), 1, 0))
    reset = lambda continues, state: jnp.where(continues[:, None, None, None], state, 0)

    def step(entering: Array, earlier: tuple[Array, Array, Array]) -> tuple[Array, None]:
        index, pair, continues = earlier
        transition, state = jnp.split(pair, [transition_width], axis=-1)
        leaving = jnp.matmul(transition, reset(continues, entering), precision=jax.lax.Precision.HIGHEST) + state
        return jnp.where(index < rank, leaving, entering), None

    transition_width = transition.shape[-1]
    entering, _ = jax.lax.scan(step, jnp.zeros_like(state), (jnp.arange(ranks - 1), pairs[:-1], continues[:-1]))
    return reset(continues[rank], entering)


def _continues(first: Int[Array, "ranks B"], last: Int[Array, "ranks B"]) -> Array:
    """Whether the state that reaches a rank goes on there: its first document is the one before, or it holds padding alone. bool [ranks, B].

    Runs are numbered in order, so the last document before a rank is the largest number of the ranks before it.
    """
    before = jnp.pad(jax.lax.cummax(last, axis=0), ((1, 0), (0, 0)))[:-1]
    return (last == 0) | (first == before)


def sharded_convolutions(convolution: Convolution, inputs: Sequence[Float[Array, "B T C"]], taps: Sequence[Float[Array, "W C"]],
                         runs: Int[Array, "B T"] | None) -> list[Float[Array, "B T C"]]:
    """`convolution` of each input with its taps, all of one width; on a mesh each device convolves its own shard behind the tokens before it.

    Raises ValueError where the mesh does not share out rows, tokens or channels evenly.
    """
    if not is_distributed():
        return _convolve_on_shard(convolution, inputs, taps, runs)
    check_tokens(inputs[0])
    check_divides("channels of the convolution", inputs[0].shape[2], "tensor")
    return _convolve_on_mesh(convolution, list(inputs), list(taps), runs)


@functools.partial(jax.jit, static_argnums=0)
def _convolve_on_mesh(convolution: Convolution, inputs: list[Array], taps: list[Array], runs: Array | None) -> list[Array]:
    specs = ([HEADS] * len(inputs), [PartitionSpec(None, "tensor")] * len(taps), ROWS)
    on_shard = functools.partial(_convolve_on_shard, convolution)
    return jax.shard_map(on_shard, in_specs=specs, out_specs=[HEADS] * len(inputs), check_vma=False)(inputs, taps, runs)


def _convolve_on_shard(convolution: Convolution, inputs: Sequence[Array], taps: Sequence[Array], runs: Array | None) -> list[Array]:
    histories, history_runs, halo = [None] * len(inputs), None, taps[0].shape[0] - 1
    if axis_size("context") > 1 and halo > 0:
        ends = jnp.concatenate([x[:, -halo:] for x in inputs], axis=-1)
        histories = jnp.split(previous_tokens(ends, halo), len(inputs), axis=-1)
        history_runs = None if runs is None else previous_tokens(runs, halo)
    return [convolution(x, weights, runs, history, history_runs) for x, weights, history in zip(inputs, taps, histories)]


def previous_tokens(x: Array, count: int) -> Array:
    """Inside shard_map: the `count` tokens (axis 1) before this rank's first one; zeros before the beginning of the row.

    A rank with fewer tokens than that needs the ranks before its neighbour too: one message for each.
    """
    ranks, own = axis_size("context"), min(count, x.shape[1])
    end = x[:, x.shape[1] - own:]
    hops = range(-(-count // own), 0, -1)
    parts = [jax.lax.ppermute(end, "context", [(i, i + hop) for i in range(ranks - hop)]) for hop in hops]
    return jnp.concatenate(parts, axis=1)[:, -count:]


def sharded_attention(attention: Attention, q: Float[Array, "B T H D"], latent: Float[Array, "B T R"], kv_b: Float[Array, "Z H N"],
                      runs: Int[Array, "B T"] | None) -> tuple[Float[Array, "B T H Dv"], Float[Array, "H"] | None]:
    """`attention` of each device's own queries to the latents of whole rows, gathered over `context`; the largest logits are of all devices.

    Raises ValueError where the mesh does not share out rows, tokens or heads evenly.
    """
    def on_shard(q: Array, latent: Array, kv_b: Array, runs: Array | None) -> tuple[Array, Array | None]:
        start = jax.lax.axis_index("context") * q.shape[1]
        whole_rows = lambda x: jax.lax.all_gather(x, "context", axis=1, tiled=True)
        o, largest = attention(q, whole_rows(latent), kv_b, runs, None if runs is None else whole_rows(runs), start)
        return o, None if largest is None else jax.lax.pmax(largest, TOKEN_AXES)

    check_tokens(q)
    check_divides("mla.num_heads", q.shape[2], "tensor")
    specs = (HEADS, ROWS, PartitionSpec(None, "tensor"), ROWS)
    return jax.shard_map(on_shard, in_specs=specs, out_specs=(HEADS, PartitionSpec("tensor")), check_vma=False)(q, latent, kv_b, runs)


def ranks_as_rows(x: Array) -> Array:
    """[B, T, ...] -> [ranks * B, T / ranks, ...], each rank's stretch of a row as a row of its own: for work on tokens that cuts T into pieces.

    Rank by rank, so that every device keeps what it has. Raises ValueError where the mesh does not share out tokens evenly.
    """
    ranks = axis_size("context")
    if ranks == 1:
        return x
    check_divides("tokens of a row", x.shape[1], "context")
    apart = jnp.moveaxis(x.reshape(x.shape[0], ranks, x.shape[1] // ranks, *x.shape[2:]), 1, 0)
    return constrain(apart.reshape(-1, *apart.shape[2:]), PartitionSpec(("context", *BATCH_AXES)))
