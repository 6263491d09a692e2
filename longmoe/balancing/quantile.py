"""Quantile Balancing (Kimi K3 technical report, section 2.3.3 and appendix D): once an optimizer step an expert's bias is set to the value
with which the expert would have been chosen by its fair share of the step's tokens.

    selection = select(scores, bias, k)                                       # in the forward pass: the router's own top-k
    total = statistics_from_selection(scores, bias, selection, valid)         # integer sums; `merge` adds micro-batches and devices
    bias = solve(total, bias, k)                                              # once a step, in use from the next step on

Token i with cutoff alpha_i (the best biased score that was not chosen) chooses expert j as soon as b_j > r_ij = alpha_i - s_ij, so the new
b_j is the (k / E)-quantile of r_:j over the valid tokens. Quantiles do not add up over devices; histograms do. Bins widen like sinh with
their distance from the present bias: 4e-5 at the centre, 7 % of the distance further out. A bias that is about right is told apart from
its neighbours finely, one that is off by 1 lands within a few percent, and each further solve gains a factor of ten or more.

The rule corrects a crowded expert at once, a starved one only up to a point: tokens for which it came (k+1)-th have r_ij = b_j exactly,
so once those tokens would fill its share the bias stays. Exact quantiles behave alike; MaxVio sees crowded experts only.

Cost on an H200 at N = 32768, E = 896, k = 16: 1.4 ms for `select` with `jax.lax.top_k`, 0.3 ms with `pallas_kernels.top_k` (a router's
top-k that the layer needs anyhow), 0.5 ms for the statistics (N * E atomic additions into 0.9 MB), 0.1 ms for `solve`. On two CPU cores at
N = 2048, E = 32: 1.5, 1 and 0.2 ms.

Selection only: nothing here carries a gradient, and combine weights must come from the scores without the bias.
"""
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BINS = 256
RANGE = 2.2
WARP = 9.0
"""Bin edges lie at bias + RANGE * sinh(WARP * u) / sinh(WARP) with u even in [-1, 1]. Scores lie in (0, 1), so RANGE covers every required
bias while biases stay within 1.2 of each other; beyond it a solve moves by RANGE and the next one goes on from there."""

_OFFSETS = tuple(RANGE * math.sinh(WARP * (2 * i / BINS - 1)) / math.sinh(WARP) for i in range(BINS + 1))


TopK = Callable[[Array, int], tuple[Array, Array]]
"""(x [N, E], k) -> the k largest of each row, largest first and equal ones in the order of their columns, and their columns."""


class Selection(NamedTuple):
    """What one top-(k+1) pass gives."""
    expert_ids: Int[Array, "N k"]
    """Chosen experts, best first; equal biased scores go to the lower index."""
    cutoff: Float[Array, " N"]
    """The (k+1)-th biased score; with k = E, where no expert is left out, the k-th."""


class Statistics(NamedTuple):
    """Sums over valid tokens under one bias, all int32 (a step of up to 2**31 - 1 tokens). A leading axis for layers is fine everywhere."""
    load: Int[Array, "*layers E"]
    """Tokens that chose each expert."""
    histogram: Int[Array, "*layers E bins"]
    """Required biases by bin, BINS + 1 of them: the first is for those below every edge, those above count in the last. Rows sum to `tokens`."""
    tokens: Int[Array, "*layers"]


def init_bias(num_experts: int) -> Float[Array, " E"]:
    """float32 [E] zeros."""
    if num_experts < 1:
        raise ValueError(f"num_experts: got {num_experts}, wanted at least 1")
    return jnp.zeros(num_experts, jnp.float32)


def select(scores: Float[Array, "N E"], bias: Float[Array, " E"], k: int, *, top_k: TopK = jax.lax.top_k) -> Selection:
    """Chooses k experts a token by `scores + bias`, in the one pass that the statistics need too.

    Args:
      scores: in (0, 1), [N, E]; float32 is compared, other dtypes are converted first.
      bias: [E].
      k: experts a token, 1 to E.
      top_k: what finds the k + 1 best.
    Returns: Selection, without gradient.
    Raises: ValueError where shapes or k do not fit.
    """
    _check(scores, bias, k)
    scores, bias = _constants(scores, bias)
    values, ids = top_k(scores + bias, min(k + 1, scores.shape[1]))
    return Selection(ids[:, :k], values[:, -1])


def statistics_from_selection(scores: Float[Array, "N E"], bias: Float[Array, " E"], selection: Selection,
                              valid: Bool[Array, " N"] | None = None) -> Statistics:
    """Statistics of a selection that `select` made from the same scores and bias.

    Sums of parts equal the whole exactly, however the tokens are split and on whatever device: a bin is decided by comparing float32
    numbers with a constant table.

    Args:
      valid: bool [N], False for padding; None: all valid.
    Raises: ValueError where shapes do not fit.

    Memory: the largest intermediate is [N, E] int32; nothing has size N * E * bins.
    """
    _check(scores, bias, selection.expert_ids.shape[1])
    scores, bias = _constants(scores, bias)
    tokens, experts = scores.shape
    valid = jnp.ones(tokens, bool) if valid is None else valid
    if valid.shape != (tokens,):
        raise ValueError(f"valid: got shape {valid.shape}, wanted [{tokens}], one flag for each row of scores {scores.shape}")
    # Index `experts` is past the end: the scatter drops it.
    ids = jnp.where(valid[:, None], selection.expert_ids, experts)
    load = jnp.zeros(experts, jnp.int32).at[ids].add(1, mode="drop")
    required = jax.lax.stop_gradient(selection.cutoff)[:, None] - scores
    cell = jnp.arange(experts, dtype=jnp.int32) * (BINS + 1) + _bin(required - bias)
    cell = jnp.where(valid[:, None], cell, experts * (BINS + 1))
    histogram = jnp.zeros(experts * (BINS + 1), jnp.int32).at[cell].add(1, mode="drop")
    return Statistics(load, histogram.reshape(experts, BINS + 1), jnp.sum(valid, dtype=jnp.int32))


def statistics(scores: Float[Array, "N E"], bias: Float[Array, " E"], k: int, valid: Bool[Array, " N"] | None = None) -> Statistics:
    """`select` and `statistics_from_selection` in one call; see there. A router that needs the selection itself calls the two."""
    return statistics_from_selection(scores, bias, select(scores, bias, k), valid)


def merge(a: Statistics, b: Statistics) -> Statistics:
    """Adds statistics that were taken under one bias: micro-batches, devices, hosts."""
    return jax.tree.map(jnp.add, a, b)


def solve(statistics: Statistics, bias: Float[Array, "*layers E"], k: int) -> Float[Array, "*layers E"]:
    """The next bias from a whole step's statistics and the bias that they were taken under.

    Args:
      statistics: sums over the global batch.
      bias: [E] or [layers, E], the very bias given to `select`: the bins follow from it.
      k: experts a token.
    Returns: float32, shaped like `bias`, mean zero over experts; `bias` itself where no token was valid or k = E leaves nothing to balance.
    Raises: ValueError where shapes or k do not fit.
    """
    if statistics.load.shape != bias.shape or statistics.histogram.shape != (*bias.shape, BINS + 1):
        raise ValueError(f"bias: got shape {bias.shape}, wanted the shape of the load, {statistics.load.shape}, "
                         f"with a histogram of shape [..., {BINS + 1}], got {statistics.histogram.shape}")
    experts = bias.shape[-1]
    _check_k(k, experts)
    (bias,) = _constants(bias)
    if k == experts:
        return bias
    target = statistics.tokens[..., None].astype(jnp.float32) * (k / experts)
    count = statistics.histogram.astype(jnp.float32)
    upto = jnp.cumsum(statistics.histogram, axis=-1).astype(jnp.float32)
    at = jnp.argmax(upto >= target[..., None], axis=-1)
    pick = lambda x: jnp.take_along_axis(x, at[..., None], axis=-1)[..., 0]
    inside = jnp.clip((target - pick(upto - count)) / jnp.maximum(pick(count), 1), 0, 1)
    edges = jnp.asarray(_OFFSETS, jnp.float32)
    # Below the first edge nothing is known but that: the first edge itself is the safe step.
    low, high = edges[jnp.maximum(at - 1, 0)], edges[at]
    new = bias + low + inside * (high - low)
    new -= jnp.mean(new, axis=-1, keepdims=True)
    return jnp.where(statistics.tokens[..., None] > 0, new, bias)


def max_violation(load: Int[Array, "*layers E"]) -> Float[Array, "*layers"]:
    """max / mean - 1 over experts, float32: 0 is even, E / k - 1 the worst. 0 where nothing was routed."""
    load = jnp.asarray(load, jnp.float32)
    mean = jnp.mean(load, axis=-1)
    return jnp.where(mean > 0, jnp.max(load, axis=-1) / jnp.where(mean > 0, mean, 1) - 1, 0)


def _bin(offset: Float[Array, "N E"]) -> Int[Array, "N E"]:
    """0 below the first edge, otherwise 1 + the index of the last edge at or below `offset`, at most BINS."""
    guess = jnp.arcsinh(offset * (math.sinh(WARP) / RANGE)) * (BINS / 2 / WARP) + BINS / 2
    guess = jnp.clip(jnp.floor(guess), 0, BINS - 1).astype(jnp.int32)
    # arcsinh differs in its last bits between devices and vector widths; the table does not, and a guess is at most one bin off.
    edges = jnp.asarray(_OFFSETS, jnp.float32)
    guess = guess + (offset >= edges[guess + 1]) - (offset < edges[guess])
    return jnp.minimum(guess + 1, BINS)


def _constants(*arrays: Array) -> tuple[Array, ...]:
    return tuple(jax.lax.stop_gradient(jnp.asarray(x, jnp.float32)) for x in arrays)


def _check(scores: Array, bias: Array, k: int) -> None:
    if scores.ndim != 2:
        raise ValueError(f"scores: got shape {scores.shape}, wanted [N, E]: flatten batch and time, vmap over layers")
    if bias.shape != scores.shape[1:]:
        raise ValueError(f"bias: got shape {bias.shape}, wanted [{scores.shape[1]}], one for each expert of scores {scores.shape}")
    _check_k(k, scores.shape[1])


def _check_k(k: int, experts: int) -> None:
    if not 1 <= k <= experts:
        raise ValueError(f"k: got {k}, wanted 1 to {experts}, the number of experts")
