"""Chunked KDA in plain JAX: the portable implementation, with a hand-written backward pass.

Notation, one chunk of C = 64 tokens and one head (rows are tokens; S [K, V] enters the chunk):

    X = [scale q; beta k]      the two kinds of rows, stacked: reads of the state and writes to it
    [P; A] = X K^T, decayed    P with its diagonal, A strictly lower
    T = (I + A)^-1             D = T (beta V - (beta k e^G) S)         the values that are written
    O = (scale q e^G) S + P D           S' = e^(G_C) S + (k e^(G_C - G))^T D

Backward, with dD = P^T dO + (k e^(G_C - G)) dS' and E = T^T dD:

    W = [dO; -E]               d[P; A] = W D^T: no gradient of T is ever formed, since dA = -T^T dT T^T = -E D^T
    dS = X_G^T W + e^(G_C) dS',  dX_G = W S^T,  d(k e^(G_C - G)) = D dS'^T,  dV = beta E

The gradient of the log decays sums, at token t, every product whose decay spans t: reads and writes of the state from X dX at and after t,
k dk of the outgoing state before t, and scores across t as the sum from t on of X dX - k dk. Terms that would cancel exactly, a token against
itself, are in none of the sums: in float32 with all gates at -5 they cost a factor of hundreds in accuracy.
"""
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.chunk import CHUNK, STRICT, Decays, decays, inverse

HIGHEST = jax.lax.Precision.HIGHEST


class Plan(NamedTuple):
    """Static facts of a call."""
    scale: float
    factored: bool
    """The gates keep a promised bound: dense products on diagonal tiles."""
    save: bool
    """Keep D and T for the backward pass, besides the state of each chunk."""
    group: int
    """Chunks that are worked on together."""


class Tokens(NamedTuple):
    """A group of n chunks of Z = B * H sequences. `run` is the owner of the state after each token, `run_in` the one before the chunk."""
    q: Float[Array, "n Z C K"]
    k: Float[Array, "n Z C K"]
    v: Float[Array, "n Z C V"]
    g: Float[Array, "n Z C K"]
    beta: Float[Array, "n Z C"]
    run: Int[Array, "n Z C"] | None
    run_in: Int[Array, "n Z"] | None


class Chunks(NamedTuple):
    """What both passes need of a group."""
    decay: Decays
    x: Float[Array, "n Z 2 C K"]
    from_state: Float[Array, "n Z C K"]
    """Decay of the incoming state up to token i; 0 where the token belongs to another document."""
    to_state: Float[Array, "n Z C K"]
    """Decay of token j's write up to the chunk's end; 0 where the chunk ends in another document."""
    carry: Float[Array, "n Z K"]
    """Decay of the state over the chunk; 0 where its document ends inside."""
    same: Array | None
    """bool [n, Z, C, C]: both tokens in one document."""


def forward(plan: Plan, q, k, v, g, beta, state, owner):
    """-> o [B, T, H, Dv], final state, residuals. See `kda` for the arrays; `owner` is documents.state_owner."""
    o, state, saved = _scan_groups(plan, q, k, v, g, beta, owner, state, _forward_group)
    return o, state, saved


def _dot(spec: str, a: Array, b: Array, dtype, out) -> Array:
    """Product with operands in `dtype` and sums in `out`."""
    return jnp.einsum(spec, a.astype(dtype), b.astype(dtype), precision=HIGHEST, preferred_element_type=out)


def prepare(plan: Plan, x: Tokens) -> Chunks:
    acc = x.g.dtype
    decay = decays(x.g, plan.factored)
    rows = jnp.stack([plan.scale * x.q.astype(acc), x.beta[..., None] * x.k.astype(acc)], axis=-3)
    if x.run is None:
        return Chunks(decay, rows, decay.start, decay.end, decay.total, None)
    last = x.run[..., -1:]
    return Chunks(decay, rows, jnp.where((x.run == x.run_in[..., None])[..., None], decay.start, 0),
                  jnp.where((x.run == last)[..., None], decay.end, 0), jnp.where(last == x.run_in[..., None], decay.total, 0),
                  x.run[..., :, None] == x.run[..., None, :])


def scores(c: Chunks, k: Array, op) -> tuple[Array, Array]:
    """-> P [n, Z, C, C] with its diagonal, A strictly lower."""
    total = 0
    for rho, kappa, mask in c.decay.terms:
        part = _dot("...ick,...jk->...icj", c.x * rho[..., None, :, :], k * kappa, op, rho.dtype)
        total = total + jnp.where(mask, part, 0)
    if c.same is not None:
        total = jnp.where(c.same[..., None, :, :], total, 0)
    diagonal = jnp.sum(c.x[..., 0, :, :] * k, axis=-1)
    p = total[..., 0, :, :] + jnp.where(np.eye(CHUNK, dtype=bool), diagonal[..., None], 0)
    return p, total[..., 1, :, :]


def _forward_group(plan: Plan, x: Tokens, state: Array):
    """-> (state after the group), (o, residuals)."""
    op, acc = x.k.dtype, state.dtype
    dot = partial(_dot, dtype=op, out=acc)
    c = prepare(plan, x)
    k = x.k.astype(acc)
    p, a = scores(c, k, op)
    t = inverse(a)
    reads = c.x * c.from_state[..., None, :, :]
    values = x.beta[..., None] * x.v.astype(acc)
    writes = k * c.to_state

    def chunk(state, inputs):
        reads, t, values, writes, carry = inputs
        d = dot("zij,zjv->ziv", t, values - dot("zik,zkv->ziv", reads, state))
        return carry[..., None] * state + dot("zik,ziv->zkv", writes, d), (state, d)

    after, (states, d) = jax.lax.scan(chunk, state, (reads[..., 1, :, :], t, values, writes, c.carry))
    o = dot("nzik,nzkv->nziv", reads[..., 0, :, :], states) + dot("nzij,nzjv->nziv", p, d)
    saved = (states.astype(op), d.astype(op), t.astype(op)) if plan.save else (states.astype(op),)
    return after, (o, saved)


def _backward_group(plan: Plan, x: Tokens, saved, do: Array, dstate: Array):
    """dstate: gradient of the state after the group. -> (gradient of the state before it), gradients of (q, k, v, g, beta)."""
    op, acc = x.k.dtype, dstate.dtype
    dot = partial(_dot, dtype=op, out=acc)
    c = prepare(plan, x)
    k, v, beta = x.k.astype(acc), x.v.astype(acc), x.beta[..., None]
    p, a = scores(c, k, op)
    reads = c.x * c.from_state[..., None, :, :]
    writes = k * c.to_state
    states = saved[0].astype(acc)
    if plan.save:
        d, t = saved[1].astype(acc), saved[2].astype(acc)
    else:
        t = inverse(a)
        d = dot("nzij,nzjv->nziv", t, beta * v - dot("nzik,nzkv->nziv", reads[..., 1, :, :], states))
    dd = dot("nzij,nziv->nzjv", p, do)
    ds = dot("nzik,nziv->nzkv", reads[..., 0, :, :], do)

    def chunk(dstate, inputs):
        dd, ds, t, writes, reads, carry = inputs
        e = dot("zij,ziv->zjv", t, dd + dot("zjk,zkv->zjv", writes, dstate))
        return ds + carry[..., None] * dstate - dot("zik,ziv->zkv", reads, e), (dstate, e)

    before, (dstates, e) = jax.lax.scan(chunk, dstate, (dd, ds, t, writes, reads[..., 1, :, :], c.carry), reverse=True)
    dx, dx_self, dk, dk_state = _row_gradients(c, k, states, dstates, d, do, e, dot)
    through = c.carry * jnp.sum(states * dstates, axis=-1)
    dg = _sum_from(jnp.sum(c.x * dx, axis=-3) - k * dk) + _sum_before(k * dk_state) + through[..., None, :]
    dq = plan.scale * (dx[..., 0, :, :] + dx_self * k)
    dk = dk + dk_state + dx_self * c.x[..., 0, :, :] + beta * dx[..., 1, :, :]
    dbeta = jnp.sum(dx[..., 1, :, :] * k, axis=-1) + jnp.sum(e * v, axis=-1)
    return before, (dq, dk, beta * e, dg, dbeta)


def _row_gradients(c, k, states, dstates, d, do, e, dot):
    """-> d x without P's diagonal, that diagonal's gradient [n, Z, C, 1], d k as a column of the scores, d k from the outgoing state."""
    w = jnp.stack([do, -e], axis=-3)
    dscores = dot("...icv,...jv->...icj", w, d)
    keep = STRICT if c.same is None else STRICT & c.same[..., None, :, :]
    dscores = jnp.where(keep, dscores, 0)
    dx = c.from_state[..., None, :, :] * dot("...icv,...kv->...ick", w, states)
    dk_state = c.to_state * dot("...jv,...kv->...jk", d, dstates)
    dk = 0
    for rho, kappa, mask in c.decay.terms:
        part = jnp.where(mask, dscores, 0)
        dx = dx + rho[..., None, :, :] * dot("...icj,...jk->...ick", part, k * kappa)
        dk = dk + kappa * dot("...icj,...ick->...jk", part, c.x * rho[..., None, :, :])
    dx_self = jnp.sum(do * d, axis=-1, keepdims=True)
    return dx, dx_self, dk, dk_state


def _sum_from(x):
    """Row t: the sum of rows t, t + 1, ... of the chunk."""
    return jax.lax.cumsum(x, axis=x.ndim - 2, reverse=True)


def _sum_before(x):
    """Row t: the sum of rows 0, ..., t - 1 of the chunk."""
    return jnp.pad(jax.lax.cumsum(x, axis=x.ndim - 2)[..., :-1, :], ((0, 0),) * (x.ndim - 2) + ((1, 0), (0, 0)))


# ---------------------------------------------------------------- sequences of groups


def _cut(x: Array, group: Array, size: int) -> Array:
    """Group number `group` of a [B, T, H, ...] array, as [n, B * H, C, ...]."""
    x = jax.lax.dynamic_slice_in_dim(x, group * size * CHUNK, size * CHUNK, axis=1)
    batch, _, heads, *rest = x.shape
    x = x.reshape(batch, size, CHUNK, heads, *rest)
    return jnp.moveaxis(x, (1, 0, 3, 2), (0, 1, 2, 3)).reshape(size, batch * heads, CHUNK, *rest)


def _join(x: Array, batch: int) -> Array:
    """[groups, n, B * H, C, ...] -> [B, T, H, ...]."""
    groups, size, both, _, *rest = x.shape
    x = x.reshape(groups, size, batch, both // batch, CHUNK, *rest)
    return jnp.moveaxis(x, (2, 0, 1, 4, 3), (0, 1, 2, 3, 4)).reshape(batch, groups * size * CHUNK, both // batch, *rest)


def _tokens(plan: Plan, q, k, v, g, beta, owner, group) -> Tokens:
    cut = lambda x: _cut(x, group, plan.group)
    heads = q.shape[2]
    if owner is None:
        run = run_in = None
    else:
        spread = lambda x: jnp.broadcast_to(x[..., None], (*x.shape, heads))
        before = jnp.pad(owner, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
        run, run_in = cut(spread(owner)), cut(spread(before))[..., 0]
    return Tokens(cut(q), cut(k), cut(v), cut(g), cut(beta), run, run_in)


def _scan_groups(plan: Plan, q, k, v, g, beta, owner, state, body: Callable):
    batch, length = q.shape[:2]

    def step(state, group):
        return body(plan, _tokens(plan, q, k, v, g, beta, owner, group), state)

    state, (o, saved) = jax.lax.scan(step, state, jnp.arange(length // CHUNK // plan.group))
    return _join(o, batch), state, saved


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked(plan: Plan, q, k, v, g, beta, initial_state, owner):
    """The operator on whole groups of chunks. q, k, v in the operands' dtype, g, beta and states in float32 (or all float64). -> o, final state."""
    state = initial_state.reshape(-1, *initial_state.shape[2:])
    o, state, _ = forward(plan, q, k, v, g, beta, state, owner)
    return o.astype(v.dtype), state.reshape(initial_state.shape)


def _chunked_forward(plan, q, k, v, g, beta, initial_state, owner):
    state = initial_state.reshape(-1, *initial_state.shape[2:])
    o, state, saved = forward(plan, q, k, v, g, beta, state, owner)
    return (o.astype(v.dtype), state.reshape(initial_state.shape)), (q, k, v, g, beta, owner, saved)


def _chunked_backward(plan, residuals, cotangents):
    q, k, v, g, beta, owner, saved = residuals
    do, dfinal = cotangents
    batch, length, heads, _ = q.shape

    def step(dstate, inputs):
        group, saved = inputs
        x = _tokens(plan, q, k, v, g, beta, owner, group)
        return _backward_group(plan, x, saved, _cut(do, group, plan.group).astype(dstate.dtype), dstate)

    groups = jnp.arange(length // CHUNK // plan.group)
    dstate, grads = jax.lax.scan(step, dfinal.reshape(-1, *dfinal.shape[2:]), (groups, saved), reverse=True)
    grads = [_join(dx, batch).astype(x.dtype) for dx, x in zip(grads, (q, k, v, g, beta))]
    return *grads, dstate.reshape(dfinal.shape), None


chunked.defvjp(_chunked_forward, _chunked_backward)

GROUP_HEADS = 64
"""Chunk-heads in a group: enough to fill a batched product, few enough that a group's intermediates stay in a CPU's cache."""


def kda(q, k, v, g, beta, initial_state, owner, *, scale: float, factored: bool, save: bool):
    """Pads T to whole groups of chunks and runs `chunked`. Padding writes nothing and leaves the state alone."""
    batch, length, heads, _ = q.shape
    chunks = max(1, -(-length // CHUNK))
    groups = -(-chunks * batch * heads // GROUP_HEADS)
    group = -(-chunks // max(1, min(groups, chunks)))
    padding = -length % (group * CHUNK)
    if padding:
        pad = lambda x: jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
        q, k, v, g, beta = (pad(x) for x in (q, k, v, g, beta))
        owner = None if owner is None else jnp.pad(owner, ((0, 0), (0, padding)), mode="edge")
    o, state = chunked(Plan(scale, factored, save, group), q, k, v, g, beta, initial_state, owner)
    return o[:, :length], state
