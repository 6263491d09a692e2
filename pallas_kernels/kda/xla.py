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
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.kda.chunk import CHUNK, HALF, Decays, assemble, decays, inverse, sums_before, sums_from

HIGHEST = jax.lax.Precision.HIGHEST
_STRICT = ~np.eye(HALF, dtype=bool)


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
    """A group of n chunks of Z = B * H sequences, in halves of L = 32 tokens. `run` owns the state after each token, `run_in` before the chunk."""
    q: Float[Array, "n Z 2 L K"]
    k: Float[Array, "n Z 2 L K"]
    v: Float[Array, "n Z 2 L V"]
    g: Float[Array, "n Z 2 L K"]
    beta: Float[Array, "n Z 2 L"]
    run: Int[Array, "n Z 2 L"] | None
    run_in: Int[Array, "n Z"] | None


class Chunks(NamedTuple):
    """What both passes need of a group."""
    decay: Decays
    x: Float[Array, "n Z 2 2 L K"]
    """Rows: half, then read or write, then token."""
    k: Float[Array, "n Z 2 L K"]
    from_state: Float[Array, "n Z 2 L K"]
    """Decay of the incoming state up to token i; 0 where the token belongs to another document."""
    to_state: Float[Array, "n Z 2 L K"]
    """Decay of token j's write up to the chunk's end; 0 where the chunk ends in another document."""
    carry: Float[Array, "n Z K"]
    """Decay of the state over the chunk; 0 where its document ends inside."""
    same: Bool[Array, "n Z 2 1 L L"] | None
    """Both tokens of one half in one document."""
    same_corner: Bool[Array, "n Z 1 L L"] | None
    """Token i of the second half and j of the first in one document."""


def _dot(spec: str, a: Array, b: Array, dtype, out) -> Array:
    """Product with operands in `dtype` and sums in `out`."""
    return jnp.einsum(spec, a.astype(dtype), b.astype(dtype), precision=HIGHEST, preferred_element_type=out)


def _whole(x: Array) -> Array:
    """[n, Z, 2, L, D] -> [n, Z, C, D]."""
    return x.reshape(*x.shape[:2], CHUNK, x.shape[-1])


def _halves(x: Array) -> Array:
    return x.reshape(*x.shape[:2], 2, HALF, x.shape[-1])


def _times(x: Array, factor: Array | None) -> Array:
    return x if factor is None else x * factor


def _prepare(plan: Plan, x: Tokens) -> Chunks:
    acc = x.g.dtype
    decay = decays(x.g, plan.factored)
    k = x.k.astype(acc)
    rows = jnp.stack([plan.scale * x.q.astype(acc), x.beta[..., None] * k], axis=3)
    if x.run is None:
        return Chunks(decay, rows, k, decay.start, decay.end, decay.total, None, None)
    last, before = x.run[:, :, -1, -1], x.run_in
    spread = lambda run: run[:, :, None, None]
    return Chunks(decay, rows, k, jnp.where((x.run == spread(before))[..., None], decay.start, 0),
                  jnp.where((x.run == spread(last))[..., None], decay.end, 0), jnp.where((last == before)[..., None], decay.total, 0),
                  (x.run[..., :, None] == x.run[..., None, :])[:, :, :, None],
                  (x.run[:, :, 1, :, None] == x.run[:, :, 0, None, :])[:, :, None])


def _where(same: Array | None, x: Array) -> Array:
    return x if same is None else jnp.where(same, x, 0)


def _scores(c: Chunks, dot: Callable) -> tuple[Array, Array, Array, Array]:
    """-> P, A inside the halves [n, Z, 2, L, L]; P, A of the second half's rows on the first half's tokens [n, Z, L, L]."""
    inside = 0
    for rho, kappa, mask in c.decay.terms:
        rho = None if rho is None else rho[:, :, :, None]
        inside = jnp.where(mask, dot("nzhaik,nzhjk->nzhaij", _times(c.x, rho), _times(c.k, kappa)), inside)
    inside = _where(c.same, inside)
    corner = dot("nzaik,nzjk->nzaij", c.x[:, :, 1] * c.decay.half_start[:, :, None], c.k[:, :, 0] * c.decay.half_end)
    corner = _where(c.same_corner, corner)
    return inside[:, :, :, 0], inside[:, :, :, 1], corner[:, :, 0], corner[:, :, 1]


def _forward_group(plan: Plan, x: Tokens, state: Array):
    """-> (state after the group), (o [n, Z, C, V], residuals)."""
    op, acc = x.k.dtype, state.dtype
    dot = partial(_dot, dtype=op, out=acc)
    c = _prepare(plan, x)
    p, a, p_corner, a_corner = _scores(c, dot)
    t = inverse(a, a_corner)
    reads, erases = (_whole(c.x[:, :, :, kind] * c.from_state) for kind in (0, 1))
    values = _whole(x.beta[..., None] * x.v.astype(acc))
    writes = _whole(c.k * c.to_state)

    def chunk(state, inputs):
        erases, t, values, writes, carry = inputs
        d = dot("zij,zjv->ziv", t, values - dot("zik,zkv->ziv", erases, state))
        return carry[..., None] * state + dot("zik,ziv->zkv", writes, d), (state, d)

    after, (states, d) = jax.lax.scan(chunk, state, (erases, t, values, writes, c.carry))
    o = dot("nzik,nzkv->nziv", reads, states) + dot("nzij,nzjv->nziv", assemble(p, p_corner), d)
    saved = (states.astype(op), d.astype(op), t.astype(op)) if plan.save else (states.astype(op),)
    return after, (o, saved)


def _backward_group(plan: Plan, x: Tokens, saved, do: Array, dstate: Array):
    """dstate: gradient of the state after the group. -> (gradient of the state before it), gradients of (q, k, v, g, beta)."""
    op, acc = x.k.dtype, dstate.dtype
    dot = partial(_dot, dtype=op, out=acc)
    c = _prepare(plan, x)
    v, beta = x.v.astype(acc), x.beta[..., None]
    p, a, p_corner, a_corner = _scores(c, dot)
    reads, erases = (_whole(c.x[:, :, :, kind] * c.from_state) for kind in (0, 1))
    writes = _whole(c.k * c.to_state)
    states = saved[0].astype(acc)
    if plan.save:
        d, t = saved[1].astype(acc), saved[2].astype(acc)
    else:
        t = inverse(a, a_corner)
        d = dot("nzij,nzjv->nziv", t, _whole(beta * v) - dot("nzik,nzkv->nziv", erases, states))
    dd = dot("nzij,nziv->nzjv", assemble(p, p_corner), _whole(do))
    ds = dot("nzik,nziv->nzkv", reads, _whole(do))

    def chunk(dstate, inputs):
        dd, ds, t, writes, erases, carry = inputs
        e = dot("zij,ziv->zjv", t, dd + dot("zjk,zkv->zjv", writes, dstate))
        return ds + carry[..., None] * dstate - dot("zik,ziv->zkv", erases, e), (dstate, e)

    before, (dstates, e) = jax.lax.scan(chunk, dstate, (dd, ds, t, writes, erases, c.carry), reverse=True)
    d, e = _halves(d), _halves(e)
    dx, dx_self, dk, dg = _row_gradients(c, states, dstates, d, do, e, dot)
    dq = plan.scale * (dx[:, :, :, 0] + dx_self * c.k)
    dk = dk + dx_self * c.x[:, :, :, 0] + beta * dx[:, :, :, 1]
    dbeta = jnp.sum(dx[:, :, :, 1] * c.k, axis=-1) + jnp.sum(e * v, axis=-1)
    return before, (dq, dk, beta * e, dg, dbeta)


def _both(rows: Array) -> Array:
    """Reads plus writes, written out: XLA's CPU reduction over an inner axis of two is slow."""
    return rows[:, :, :, 0] + rows[:, :, :, 1]


def _row_gradients(c: Chunks, states, dstates, d, do, e, dot):
    """-> d x without P's diagonal, that diagonal's gradient [n, Z, 2, L, 1], d k as a column of the products, d g."""
    w = jnp.stack([do, -e], axis=3)
    inside = _where(c.same, dot("nzhaiv,nzhjv->nzhaij", w, d))
    corner = _where(c.same_corner, dot("nzaiv,nzjv->nzaij", w[:, :, 1], d[:, :, 0]))
    dx, dk = 0, 0
    for rho, kappa, mask in c.decay.terms:
        if not (mask & _STRICT).any():
            continue
        part = jnp.where(mask & _STRICT, inside, 0)
        dx = dx + rho[:, :, :, None] * dot("nzhaij,nzhjk->nzhaik", part, c.k * kappa)
        dk = dk + kappa * dot("nzhaij,nzhaik->nzhjk", part, c.x * rho[:, :, :, None])
    dx_corner = c.decay.half_start[:, :, None] * dot("nzaij,nzjk->nzaik", corner, c.k[:, :, 0] * c.decay.half_end)
    dk_corner = c.decay.half_end * dot("nzaij,nzaik->nzjk", corner, c.x[:, :, 1] * c.decay.half_start[:, :, None])
    dx_state = c.from_state[:, :, :, None] * dot("nzhaiv,nzkv->nzhaik", w, states)
    dk_state = c.to_state * _halves(dot("nzjv,nzkv->nzjk", _whole(d), dstates))
    first = lambda y: jnp.stack([y, jnp.zeros_like(y)], axis=2)
    second = lambda y: jnp.stack([jnp.zeros_like(y), y], axis=2)
    dx_far = dx_state + second(dx_corner)
    dk_far = dk_state + first(dk_corner)
    # Per half: what spans t and ends in this half, what starts in this half before t; then what crosses the other half whole.
    from_here = sums_from(_both(c.x * (dx + dx_far)) - c.k * dk)
    before_here = sums_before(c.k * dk_far)
    later = jnp.sum(_both(c.x * dx_state)[:, :, 1], axis=2)
    earlier = jnp.sum(c.k[:, :, 0] * dk_state[:, :, 0], axis=2)
    # A product with ones: XLA's CPU reduction takes several times as long. Its operands keep full precision whatever q, k, v have.
    kept = _dot("nzkv,v->nzk", states * dstates, jnp.ones(states.shape[-1:]), dstates.dtype, dstates.dtype)
    across = jnp.stack([later, earlier], axis=2) + (c.carry * kept)[:, :, None]
    dx_self = jnp.sum(do * d, axis=-1, keepdims=True)
    return dx + dx_far, dx_self, dk + dk_far, from_here + before_here + across[:, :, :, None]


# ---------------------------------------------------------------- sequences of groups


def _cut(x: Array, group: Array, size: int) -> Array:
    """Group number `group` of a [B, T, H, ...] array, as [n, B * H, 2, L, ...]."""
    x = jax.lax.dynamic_slice_in_dim(x, group * size * CHUNK, size * CHUNK, axis=1)
    batch, _, heads, *rest = x.shape
    x = x.reshape(batch, size, CHUNK, heads, *rest)
    return jnp.moveaxis(x, (1, 0, 3, 2), (0, 1, 2, 3)).reshape(size, batch * heads, 2, HALF, *rest)


def _join(x: Array, batch: int, *rest: int) -> Array:
    """[groups, n, B * H, C (as one axis or two), ...] -> [B, T, H, *rest]."""
    groups, size, both = x.shape[:3]
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
        run, run_in = cut(spread(owner)), cut(spread(before))[..., 0, 0]
    return Tokens(cut(q), cut(k), cut(v), cut(g), cut(beta), run, run_in)


def _scan_groups(plan: Plan, q, k, v, g, beta, owner, state):
    """-> o [B, T, H, Dv], final state [Z, Dk, Dv], what the backward pass keeps of each group."""
    batch, length = q.shape[:2]

    def step(state, group):
        return _forward_group(plan, _tokens(plan, q, k, v, g, beta, owner, group), state)

    state, (o, saved) = jax.lax.scan(step, state, jnp.arange(length // CHUNK // plan.group))
    return _join(o, batch, v.shape[-1]), state, saved


# Each of the three is a jitted function of its own, so that a model's many layers trace and lower it once.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
@partial(jax.jit, static_argnums=0)
def chunked(plan: Plan, q, k, v, g, beta, initial_state, owner):
    """The operator on whole groups of chunks. q, k, v in the operands' dtype, g, beta and states in float32 (or all float64). -> o, final state."""
    state = initial_state.reshape(-1, *initial_state.shape[2:])
    o, state, _ = _scan_groups(plan, q, k, v, g, beta, owner, state)
    return o.astype(v.dtype), state.reshape(initial_state.shape)


@partial(jax.jit, static_argnums=0)
def _chunked_forward(plan, q, k, v, g, beta, initial_state, owner):
    state = initial_state.reshape(-1, *initial_state.shape[2:])
    o, state, saved = _scan_groups(plan, q, k, v, g, beta, owner, state)
    return (o.astype(v.dtype), state.reshape(initial_state.shape)), (q, k, v, g, beta, owner, saved)


@partial(jax.jit, static_argnums=0)
def chunked_backward(plan, residuals, cotangents):
    q, k, v, g, beta, owner, saved = residuals
    do, dfinal = cotangents
    batch, length, heads, _ = q.shape

    def step(dstate, inputs):
        group, saved = inputs
        x = _tokens(plan, q, k, v, g, beta, owner, group)
        return _backward_group(plan, x, saved, _cut(do, group, plan.group).astype(dstate.dtype), dstate)

    groups = jnp.arange(length // CHUNK // plan.group)
    dstate, grads = jax.lax.scan(step, dfinal.reshape(-1, *dfinal.shape[2:]), (groups, saved), reverse=True)
    grads = [_join(dx, batch, *x.shape[3:]).astype(x.dtype) for dx, x in zip(grads, (q, k, v, g, beta))]
    return *grads, dstate.reshape(dfinal.shape), None


chunked.defvjp(_chunked_forward, chunked_backward)

GROUP = {"cpu": 32}
GROUP_ELSEWHERE = 512
"""Chunks times sequences in a group. On a CPU a group's intermediates should stay in cache: 64 took 1.35 times the time of 32 at D = 64, 16 as long
as 32. An accelerator wants few, large launches."""


def kda(q, k, v, g, beta, initial_state, owner, *, scale: float, factored: bool, save: bool):
    """Pads T to whole groups of chunks and runs `chunked`. Padding writes nothing and leaves the state alone."""
    batch, length, heads, _ = q.shape
    chunks = -(-length // CHUNK)
    groups = -(-chunks * batch * heads // GROUP.get(jax.default_backend(), GROUP_ELSEWHERE))
    group = -(-chunks // min(groups, chunks))
    padding = -length % (group * CHUNK)
    if padding:
        pad = lambda x: jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
        q, k, v, g, beta = (pad(x) for x in (q, k, v, g, beta))
        owner = None if owner is None else jnp.pad(owner, ((0, 0), (0, padding)), mode="edge")
    o, state = chunked(Plan(scale, factored, save, group), q, k, v, g, beta, initial_state, owner)
    return o[:, :length], state
