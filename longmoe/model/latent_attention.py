"""Causal attention on latents: with the kernels of `pallas_kernels.attention` on keys and values expanded from them, elsewhere expanding a chunk at a time.

In the second form nothing of size T x T or T x heads of keys is ever held: the online softmax of FlashAttention (Dao, 2023, arXiv 2307.08691) in plain JAX,
forwards and backwards, over pairs of chunks with the keys in the outer loop, so that each key is expanded once. A pair of chunks that causality or documents
keep apart is passed over.
"""
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels
from longmoe.parallel.context import NONE_YET
from longmoe.shapes import Array, Float, Int
from pallas_kernels.dispatch import Implementation

QUERY_CHUNK = 1024
KEY_CHUNK = 1024


class Plan(NamedTuple):
    """Static facts of a call."""
    scale: float
    precision: jax.lax.Precision | None
    query_chunk: int
    key_chunk: int


class Queries(NamedTuple):
    """One chunk of queries, or several along a further first axis."""
    q: Float[Array, "*n B Q H D"]
    runs: Int[Array, "*n B Q"]
    positions: Int[Array, "*n Q"]


class Keys(NamedTuple):
    """One chunk of latents, or several along a further first axis."""
    latent: Float[Array, "*n B S R"]
    runs: Int[Array, "*n B S"]
    positions: Int[Array, "*n S"]


def expand(latent: Float[Array, "B S R"], kv_b: Float[Array, "Z H N"], key_dim: int,
           precision: jax.lax.Precision | None) -> tuple[Float[Array, "B S H D"], Float[Array, "B S H Dv"]]:
    """Keys and values of latents: of R = Z + rope numbers the first Z go through kv_b to D - rope key and Dv value columns a head, and the others are
    key columns that all heads share."""
    rank, heads = kv_b.shape[:2]
    compressed, shared = latent[..., :rank], latent[..., rank:]
    own = key_dim - shared.shape[-1]
    kv = jnp.einsum("bsz,zhn->bshn", compressed, kv_b, precision=precision)
    shared = jnp.broadcast_to(shared[:, :, None], (*shared.shape[:2], heads, shared.shape[-1]))
    return jnp.concatenate([kv[..., :own], shared], axis=-1), kv[..., own:]


def latent_attention(q: Float[Array, "B T H D"], latent: Float[Array, "B S R"], kv_b: Float[Array, "Z H N"], runs: Int[Array, "B T"] | None,
                     key_runs: Int[Array, "B S"] | None, start: Int[Array, ""] | int, *, scale: float, precision: jax.lax.Precision | None = None,
                     query_chunk: int = QUERY_CHUNK, key_chunk: int = KEY_CHUNK, return_max_logits: bool = False,
                     implementation: Implementation = "auto") -> tuple[Float[Array, "B T H Dv"], Float[Array, "H"] | None]:
    """(softmax(scale q k^T) v over earlier tokens of the same document, None or the largest scale q k^T of each head); the first in float32 or, from the
    kernels, in q's dtype.

    latent: those of S tokens (`expand`); query 0 is token `start` of them. runs, key_runs: document of each query and of each latent in one numbering,
    ascending along a row but for 0 = padding (output 0); None: one document a row. The largest logits are over the pairs that the softmax sees, carry no
    gradient, and are float32's lowest number where there is no pair. Differentiable in q, latent and kv_b.
    """
    one_document = lambda x: jnp.ones(x.shape[:2], jnp.int32)
    runs, key_runs = (one_document(x) if given is None else given for x, given in ((q, runs), (latent, key_runs)))
    value_dim = kv_b.shape[-1] - q.shape[-1] + latent.shape[-1] - kv_b.shape[0]
    if pallas_kernels.chosen_attention(q, q.shape[-1], value_dim, implementation) == "mosaic_gpu":
        k, v = expand(latent, kv_b, q.shape[-1], precision)
        first = jax.lax.dynamic_slice_in_dim(pallas_kernels.first_visible(key_runs), start, q.shape[1], axis=1)
        o, largest = pallas_kernels.attention(q, k, v, first=first, start=start, scale=scale, implementation=implementation)
        return o, largest if return_max_logits else None
    plan = Plan(scale, precision, min(query_chunk, q.shape[1]), min(key_chunk, latent.shape[1]))
    o, largest = _attention(plan, q, latent, kv_b, runs, key_runs, jnp.asarray(start, jnp.int32))
    return o, jax.lax.stop_gradient(largest) if return_max_logits else None


def into_chunks(x: Array, size: int) -> Array:
    """[B, T, ...] -> [chunks, B, size, ...], zeros behind."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def from_chunks(x: Array, length: int) -> Array:
    """The inverse of into_chunks."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length]


def _chunks(plan: Plan, q: Array, latent: Array, runs: Array, key_runs: Array, start: Array) -> tuple[Queries, Keys]:
    """What is filled up with zeros belongs to no document."""
    runs, key_runs = into_chunks(runs, plan.query_chunk), into_chunks(key_runs, plan.key_chunk)
    count = lambda runs: jnp.arange(runs.shape[0] * runs.shape[2], dtype=jnp.int32).reshape(runs.shape[0], -1)
    return Queries(into_chunks(q, plan.query_chunk), runs, start + count(runs)), Keys(into_chunks(latent, plan.key_chunk), key_runs, count(key_runs))


def _may_meet(queries: Queries, keys: Keys) -> Array:
    """Whether a chunk of queries may see anything of a chunk of keys, from the ends of their positions and documents."""
    least = lambda runs: jnp.min(jnp.where(runs > 0, runs, NONE_YET), axis=1)
    most = lambda runs: jnp.max(runs, axis=1)
    documents = (least(keys.runs) <= most(queries.runs)) & (least(queries.runs) <= most(keys.runs))
    return (keys.positions[0] <= queries.positions[-1]) & jnp.any(documents)


def _scores(plan: Plan, queries: Queries, keys: Keys, k: Array) -> tuple[Array, Array]:
    """Scaled scores [B, H, Q, S] in float32, and where they count [B, 1, Q, S]."""
    wide = jnp.promote_types(k.dtype, jnp.float32)
    scores = jnp.einsum("bqhd,bshd->bhqs", queries.q, k, preferred_element_type=wide, precision=plan.precision) * plan.scale
    mask = (keys.positions <= queries.positions[:, None]) & (queries.runs[:, :, None] == keys.runs[:, None, :]) & (keys.runs > 0)[:, None, :]
    return scores, mask[:, None]


class Sums(NamedTuple):
    """The online softmax of a chunk of queries, float32: with `largest` the largest score so far, sums of exp(score - largest) and of that times values."""
    largest: Float[Array, "B H Q 1"]
    total: Float[Array, "B H Q 1"]
    mixed: Float[Array, "B H Q Dv"]


def _add(plan: Plan, sums: Sums, queries: Queries, keys: Keys, k: Array, v: Array) -> Sums:
    scores, mask = _scores(plan, queries, keys, k)
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    largest = jnp.maximum(sums.largest, jnp.max(scores, axis=-1, keepdims=True))
    weights, rescale = jnp.where(mask, jnp.exp(scores - largest), 0), jnp.exp(sums.largest - largest)
    mixed = jnp.einsum("bhqs,bshd->bhqd", weights.astype(v.dtype), v, preferred_element_type=scores.dtype, precision=plan.precision)
    return Sums(largest, rescale * sums.total + jnp.sum(weights, axis=-1, keepdims=True), rescale * sums.mixed + mixed)


def _forward(plan: Plan, q: Array, latent: Array, kv_b: Array, runs: Array, key_runs: Array, start: Array) -> tuple[Array, Array, Array]:
    """o [B, T, H, Dv], the log-sum-exp of each query's scores in chunks [n, B, H, Q, 1], the largest score of each head [H]."""
    queries, keys = _chunks(plan, q, latent, runs, key_runs, start)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    chunks, batch, size, heads, key_dim = queries.q.shape
    expanded = functools.partial(expand, kv_b=kv_b, key_dim=key_dim, precision=plan.precision)
    value_dim = jax.eval_shape(expanded, keys.latent[0])[1].shape[-1]
    scalars = (chunks, batch, heads, size, 1)
    nothing = Sums(jnp.full(scalars, jnp.finfo(wide).min, wide), jnp.zeros(scalars, wide), jnp.zeros((*scalars[:-1], value_dim), wide))

    def over_keys(sums: Sums, keys: Keys) -> tuple[Sums, None]:
        k, v = expanded(keys.latent)

        def over_queries(_: None, part: tuple[Queries, Sums]) -> tuple[None, Sums]:
            queries, sums = part
            return None, jax.lax.cond(_may_meet(queries, keys), lambda sums: _add(plan, sums, queries, keys, k, v), lambda sums: sums, sums)

        return jax.lax.scan(over_queries, None, (queries, sums))[1], None

    (largest, total, mixed), _ = jax.lax.scan(over_keys, nothing, keys)
    total = jnp.where(total > 0, total, 1)
    o = jnp.moveaxis(mixed / total, 3, 2)
    return from_chunks(o, q.shape[1]), largest + jnp.log(total), jnp.max(largest, axis=(0, 1, 3, 4))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: Plan, q: Array, latent: Array, kv_b: Array, runs: Array, key_runs: Array, start: Array) -> tuple[Array, Array]:
    o, _, largest = _forward(plan, q, latent, kv_b, runs, key_runs, start)
    return o, largest


def _attention_forward(plan: Plan, *arguments: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    o, log_sum, largest = _forward(plan, *arguments)
    return (o, largest), (*arguments, o, log_sum)


def _pair_gradients(plan: Plan, queries: Queries, keys: Keys, k: Array, v: Array, do: Array, log_sum: Array, delta: Array) -> tuple[Array, Array, Array]:
    """Gradients of the queries, keys and values of one pair of chunks, float32. delta: sum of o * do of each query."""
    scores, mask = _scores(plan, queries, keys, k)
    product = functools.partial(jnp.einsum, preferred_element_type=scores.dtype, precision=plan.precision)
    weights = jnp.where(mask, jnp.exp(scores - log_sum), 0)
    d_v = product("bhqs,bqhd->bshd", weights.astype(v.dtype), do)
    d_scores = (plan.scale * weights * (product("bqhd,bshd->bhqs", do, v) - delta)).astype(k.dtype)
    return product("bhqs,bshd->bqhd", d_scores, k), product("bhqs,bqhd->bshd", d_scores, queries.q), d_v


def _attention_backward(plan: Plan, residuals: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple[Array | None, ...]:
    q, latent, kv_b, runs, key_runs, start, o, log_sum = residuals
    queries, keys = _chunks(plan, q, latent, runs, key_runs, start)
    do, key_dim = cotangents[0], q.shape[-1]
    delta = jnp.moveaxis(into_chunks(jnp.sum(do * o, axis=-1, keepdims=True), plan.query_chunk), 3, 2)
    do = into_chunks(do.astype(q.dtype), plan.query_chunk)
    add = lambda a, b: jax.tree.map(jnp.add, a, b)
    zeros = lambda x: jnp.zeros(x.shape, o.dtype)

    def over_keys(carry: tuple[Array, Array], keys: Keys) -> tuple[tuple[Array, Array], Array]:
        d_q, d_kv_b = carry
        (k, v), pull = jax.vjp(lambda latent, kv_b: expand(latent, kv_b, key_dim, plan.precision), keys.latent, kv_b)

        def over_queries(d_kv: tuple[Array, Array], part: tuple[Queries, Array, Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
            queries, do, log_sum, delta, d_q = part

            def met(d_kv: tuple[Array, Array], d_q: Array) -> tuple[tuple[Array, Array], Array]:
                more_q, more_k, more_v = _pair_gradients(plan, queries, keys, k, v, do, log_sum, delta)
                return add(d_kv, (more_k, more_v)), d_q + more_q

            return jax.lax.cond(_may_meet(queries, keys), met, lambda *unchanged: unchanged, d_kv, d_q)

        (d_k, d_v), d_q = jax.lax.scan(over_queries, (zeros(k), zeros(v)), (queries, do, log_sum, delta, d_q))
        d_latent, more_kv_b = pull((d_k.astype(k.dtype), d_v.astype(v.dtype)))
        return (d_q, d_kv_b + more_kv_b), d_latent

    (d_q, d_kv_b), d_latent = jax.lax.scan(over_keys, (zeros(queries.q), zeros(kv_b)), keys)
    return from_chunks(d_q, q.shape[1]).astype(q.dtype), from_chunks(d_latent, latent.shape[1]), d_kv_b.astype(kv_b.dtype), None, None, None


_attention.defvjp(_attention_forward, _attention_backward)
