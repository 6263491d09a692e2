"""Three token mixers that differ in one thing each, and a small model on them that is trained many times over at once.

`kda`: a decay per channel and the delta rule. `scalar_decay`: the same operator with one decay a head (the gated delta rule). `no_delta_rule`: one decay a
head, and values are added without being compared with what is stored (linear attention as in Mamba-2): S <- a S + beta k v^T. Projections, short
convolutions, normalised queries and keys, decay and write strength in their bounds, gated norm: alike in all three, as in `longmoe.model.kda`.

Members (seeds and learning rates) have parameters of their own, [M, ...], and rows of their own. What has parameters is mapped over them; the operator is
not, since a compiled kernel cannot be: it takes members as heads, which a head's own a_log and dt_bias allow, in one call of M * H heads.
"""
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from longmoe.model.kda import init_dt_bias, init_mimetic_conv
from longmoe.model.layers import rms_normalize
from longmoe.shapes import Array, Float, Int
from pallas_kernels.dispatch import Implementation
from pallas_kernels.kda.documents import document_runs, state_owner
from pallas_kernels.kda.gates import l2_normalize, log_decay

Arm = Literal["kda", "scalar_decay", "no_delta_rule"]
ARMS: tuple[Arm, ...] = ("kda", "scalar_decay", "no_delta_rule")
Params = dict[str, Any]
CHUNK, TAPS, EPS = 64, 4, 1e-5


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """The model: pre-norm layers of a mixer and a feed-forward. The head is the embedding, as in the first MQAR models, so that a value that was found need
    not be learnt twice."""

    vocab_size: int
    width: int = 256
    num_layers: int = 2
    num_heads: int = 2
    head_dim: int = 128
    expansion: int = 4
    """Hidden width of the feed-forward over the model's."""
    dtype: str = "bfloat16"
    implementation: Implementation = "auto"


def mix(arm: Arm, q: Float[Array, "B T H Dk"], k: Float[Array, "B T H Dk"], v: Float[Array, "B T H Dv"], g: Float[Array, "B T H *Dk"],
        beta: Float[Array, "B T H"], *, a_log: Float[Array, "H"], dt_bias: Float[Array, "H *Dk"], segment_ids: Int[Array, "B T"],
        implementation: Implementation = "auto") -> Float[Array, "B T H Dv"]:
    """Raw q, k, v, decay gate and logits of beta -> output in v's dtype. g and dt_bias have a channel axis under "kda" alone. 0 at padding (segment 0)."""
    if arm == "no_delta_rule":
        g = log_decay(g.astype(jnp.float32)[..., None], "bounded", a_log, dt_bias[:, None], None)[..., 0]
        q, k = (l2_normalize(x.astype(jnp.float32)).astype(v.dtype) for x in (q, k))
        return linear_attention(q, k, v, g, jax.nn.sigmoid(beta.astype(jnp.float32)), segment_ids)
    if arm == "scalar_decay":
        g, dt_bias = jnp.broadcast_to(g[..., None], k.shape), jnp.broadcast_to(dt_bias[:, None], k.shape[2:])
    return pallas_kernels.kda(q, k, v, g, beta, gate="bounded", a_log=a_log, dt_bias=dt_bias, beta_logits=True, qk_l2norm=True,
                              segment_ids=segment_ids, implementation=implementation)[0]


def linear_attention(q: Float[Array, "B T H Dk"], k: Float[Array, "B T H Dk"], v: Float[Array, "B T H Dv"], g: Float[Array, "B T H"],
                     beta: Float[Array, "B T H"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T H Dv"]:
    """S <- exp(g_t) S + beta_t k_t v_t^T; o_t = Dk^-0.5 S^T q_t, from S = 0 at each document, in chunks of CHUNK tokens.

    Inside a chunk, with G the running sum of g: o_i = sum over j <= i of exp(G_i - G_j) (q_i . k_j) beta_j v_j, plus exp(G_i) S^T q_i of the state that
    enters. Products have operands in v's dtype and sums in float32; g, beta and states are float32. Exponents are at most 0, whatever g is.
    """
    batch, length, heads, width = k.shape
    runs = document_runs(segment_ids)
    owner, valid = state_owner(runs), (runs > 0)[..., None]
    q, k = q * (width**-0.5), k * valid.astype(k.dtype)[..., None]
    written = (jnp.where(valid, beta, 0)[..., None] * v).astype(v.dtype)
    padding = -length % CHUNK
    before = jnp.pad(owner, ((0, 0), (1, 0)), constant_values=1)[:, :-1]

    def chunks(x: Array, mode: str = "constant") -> Array:
        x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)), mode=mode)
        return x.reshape(batch, -1, CHUNK, *x.shape[2:])

    q, k, written, owner = chunks(q), chunks(k), chunks(written), chunks(owner, "edge")
    total = jnp.cumsum(chunks(jnp.where(valid, g, 0)), axis=2)                                          # [B, N, C, H]
    entering, leaving = chunks(before, "edge")[:, :, :1], owner[:, :, -1:]
    precision = jax.lax.Precision.HIGHEST if v.dtype == jnp.float32 else None
    dot = lambda spec, a, b: jnp.einsum(spec, a.astype(v.dtype), b.astype(v.dtype), precision=precision, preferred_element_type=jnp.float32)

    pairs = (owner[:, :, :, None] == owner[:, :, None]) & jnp.tril(jnp.ones((CHUNK, CHUNK), bool))      # [B, N, C, C]
    # Selected before the exponential: later tokens have positive exponents, and infinity times 0 would be NaN in the gradient.
    decay = jnp.exp(jnp.where(pairs[..., None], total[:, :, :, None] - total[:, :, None], -jnp.inf))
    inside = dot("bnijh,bnjhv->bnihv", decay * dot("bnihk,bnjhk->bnijh", q, k), written)
    to_state = jnp.where((owner == leaving)[..., None], jnp.exp(total[:, :, -1:] - total), 0)
    added = dot("bnjhk,bnjhv->bnhkv", to_state[..., None] * k, written)
    carried = jnp.where(entering == leaving, jnp.exp(total[:, :, -1]), 0)                               # [B, N, H]

    def chunk(state: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        carried, added = x
        return carried[..., None, None] * state + added, state

    _, states = jax.lax.scan(chunk, jnp.zeros_like(added[:, 0]), (jnp.moveaxis(carried, 1, 0), jnp.moveaxis(added, 1, 0)))
    from_state = jnp.where((owner == entering)[..., None], jnp.exp(total), 0)
    o = inside + dot("bnihk,nbhkv->bnihv", from_state[..., None] * q, states)
    o = o.reshape(batch, -1, heads, v.shape[-1])[:, :length]
    return jnp.where(valid[..., None], o, 0).astype(v.dtype)


def init_params(seed: int, size: ModelSize, arm: Arm) -> Params:
    """Float32 parameters of one member, those of layers along a leading axis. Matrices are normal with variance 1 / fan-in (the embedding's as a head).

    A layer's mixer has the names of `longmoe.model.kda` and, under every arm, its mimetic start: keys with the queries' projection and a token late, output as
    the values' transpose. What differs is then what a state can hold, and not how long it takes to find out that keys should look for what followed them:
    from weights all drawn alike KDA has 0.1% of MQAR's answers right after 750 steps at 8,192 ids, with this start 99% after 100.

    Drawn by NumPy: a program that draws them takes longer to compile than these to train.
    """
    draw = np.random.default_rng(seed)
    width, heads, features = size.width, size.num_heads, size.num_heads * size.head_dim

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (draw.normal(size=(rows, columns)) * rows**-0.5).astype(np.float32)

    def layer(key: Array) -> Params:
        keys = jax.random.split(key, 4)
        out: Params = {f"{name}_proj": matrix(width, features) for name in "qkvg"}
        out |= dict(k_proj=out["q_proj"], o_proj=out["v_proj"].T)
        out |= {f"{name}_conv": init_mimetic_conv(name)(key, (TAPS, features)) for name, key in zip("qkv", keys)}
        out |= dict(b_proj=matrix(width, heads), up_proj=matrix(width, size.expansion * width),
                    down_proj=matrix(size.expansion * width, width), a_log=np.zeros(heads, np.float32), mixer_norm=np.ones(width, np.float32),
                    mlp_norm=np.ones(width, np.float32), o_norm=np.ones(size.head_dim, np.float32))
        if arm == "kda":
            return out | dict(f_a_proj=matrix(width, size.head_dim), f_b_proj=matrix(size.head_dim, features),
                              dt_bias=init_dt_bias(keys[3], (heads, size.head_dim)))
        return out | dict(f_proj=matrix(width, heads), dt_bias=init_dt_bias(keys[3], (heads,)))

    layers = [layer(key) for key in jax.random.split(jax.random.key(seed), size.num_layers)]
    return dict(embedding=matrix(width, size.vocab_size).T, norm=np.ones(width, np.float32), layers=stack(layers))


def stack(trees: Sequence[Params]) -> Params:
    """Trees of one structure -> one with a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def apply(params: Params, tokens: Int[Array, "M B T"], segment_ids: Int[Array, "B T"], places: Int[Array, "M B K"], size: ModelSize,
          arm: Arm) -> Float[Array, "M B K V"]:
    """Float32 logits at `places` alone: the tokens that are asked about are few and the vocabulary may be large.

    params: a member's along a leading axis M. places: none twice in a row. segment_ids are those of all members, as the operator's heads share them.
    """
    # Float32 until it is looked up: sums of gradients in bfloat16 would be rounded at each of the thousands of places of a token.
    x = jax.vmap(lambda embedding, tokens: (size.width**0.5 * embedding[tokens]).astype(size.dtype))(params["embedding"], tokens)
    runs = document_runs(segment_ids)
    body = lambda x, layer: (jax.vmap(_feed_forward)(layer, apply_mixer(layer, x, runs, size, arm)), None)
    x, _ = jax.lax.scan(body, x, jax.tree.map(lambda p: jnp.swapaxes(p, 0, 1), params["layers"]))

    def logits(embedding: Array, norm: Array, x: Array, places: Array) -> Array:
        x = x.at[jnp.arange(len(x))[:, None], places].get(unique_indices=True, mode="promise_in_bounds")
        return _linear(rms_normalize(x, norm, EPS), embedding.T).astype(jnp.float32)

    return jax.vmap(logits)(params["embedding"], params["norm"], x, places)


def apply_mixer(layer: Params, x: Float[Array, "M B T D"], runs: Int[Array, "B T"], size: ModelSize, arm: Arm) -> Float[Array, "M B T D"]:
    """x plus the mixer's output for its norm, all members in one call of the operator."""
    members, batch, tokens, _ = x.shape

    def inputs(layer: Params, x: Array) -> tuple[Array, ...]:
        x = rms_normalize(x, layer["mixer_norm"], EPS)
        q, k, v = (pallas_kernels.short_conv(_linear(x, layer[f"{name}_proj"]), layer[f"{name}_conv"], runs, implementation="xla") for name in "qkv")
        g = _linear(_linear(x, layer["f_a_proj"]), layer["f_b_proj"]) if arm == "kda" else _linear(x, layer["f_proj"])
        q, k, v, g = (y.reshape(*y.shape[:2], size.num_heads, -1) for y in (q, k, v, g))
        return q, k, v, g if arm == "kda" else g[..., 0], _linear(x, layer["b_proj"]).astype(jnp.float32)

    def outputs(layer: Params, x: Array, o: Array) -> Array:
        gate = jax.nn.sigmoid(_linear(rms_normalize(x, layer["mixer_norm"], EPS), layer["g_proj"]).astype(jnp.float32))
        o = (rms_normalize(o, layer["o_norm"], EPS) * gate.reshape(o.shape)).astype(x.dtype)
        return x + _linear(o.reshape(*o.shape[:2], -1), layer["o_proj"])

    heads = lambda y: y.reshape(batch, tokens, members * size.num_heads, *y.shape[4:])                 # [B, T, M, H, ...] -> [B, T, M * H, ...]
    together = lambda y: y.reshape(members * size.num_heads, *y.shape[2:])
    arrays = [heads(y) for y in jax.vmap(inputs, in_axes=(0, 0), out_axes=2)(layer, x)]
    o = mix(arm, *arrays, a_log=together(layer["a_log"]), dt_bias=together(layer["dt_bias"]), segment_ids=runs, implementation=size.implementation)
    return jax.vmap(outputs, in_axes=(0, 0, 2))(layer, x, o.reshape(batch, tokens, members, size.num_heads, -1))


def _feed_forward(layer: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return x + _linear(jax.nn.gelu(_linear(rms_normalize(x, layer["mlp_norm"], EPS), layer["up_proj"])), layer["down_proj"])


def _linear(x: Array, weights: Float[Array, "I O"]) -> Array:
    return jnp.matmul(x, weights.astype(x.dtype), precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)
