"""Cross-entropy over a large vocabulary without ever holding [tokens, vocabulary]."""
import functools

import jax
import jax.numpy as jnp

from longmoe.configs import ModelConfig
from longmoe.model.layers import float_dtype, precision
from longmoe.model.lm import project
from longmoe.parallel.context import ranks_as_rows
from longmoe.shapes import Array, Float, Int

Sums = tuple[Array, Array]


def chunked_cross_entropy(config: ModelConfig, hidden: Float[Array, "B T D"], head: Float[Array, "D V"], targets: Int[Array, "B T"],
                          weights: Float[Array, "B T"], *, chunk: int, z_loss: float = 0.0) -> Sums:
    """(objective, nll): sums over tokens of weight * (nll + z_loss * log_partition^2) and of weight * nll, float32, nats.

    The objective is differentiable in hidden and head; nll is for logs and carries no gradient. Logits of about `chunk` tokens exist at a time: each chunk's
    gradient is taken while its logits are there, so that nothing is computed twice. A token of weight 0 reaches nothing, whatever its target.
    """
    # Chunks of whole rows would move every token between the devices that share out a sequence.
    hidden, targets, weights = (ranks_as_rows(x) for x in (hidden, targets, weights))
    batch, tokens, _ = hidden.shape
    step = min(tokens, max(1, chunk // batch))
    count = -(-tokens // step)

    def cut(x: Array) -> Array:                                        # [count, B, step, ...]
        x = jnp.pad(x, [(0, 0), (0, count * step - tokens)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, count, step, *x.shape[2:]), 1, 0)

    weights = jax.lax.stop_gradient(weights.astype(float_dtype(config)))
    targets = jnp.where(weights > 0, targets, 0)
    return _sums(config, z_loss, cut(hidden), head.astype(hidden.dtype), cut(targets), cut(weights))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(config: ModelConfig, z_loss: float, hidden: Array, head: Array, targets: Array, weights: Array) -> Sums:
    def body(total: Sums, chunk: tuple[Array, Array, Array]) -> tuple[Sums, None]:
        _, _, objective, nll = _chunk(config, z_loss, chunk, head)
        return (total[0] + objective, total[1] + nll), None

    zero = jnp.zeros((), weights.dtype)
    return jax.lax.scan(body, (zero, zero), (hidden, targets, weights))[0]


def _chunk(config: ModelConfig, z_loss: float, chunk: tuple[Array, Array, Array], head: Array) -> tuple[Array, Array, Array, Array]:
    """(logits, log partition, objective, nll) of one chunk."""
    hidden, target, weight = chunk
    logits = project(config, hidden, head)
    partition = jax.nn.logsumexp(logits, axis=-1)
    nll = partition - jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    weigh = lambda x: jnp.sum(jnp.where(weight > 0, weight * x, 0))
    return logits, partition, weigh(nll + z_loss * jnp.square(partition)), weigh(nll)


def _sums_fwd(config: ModelConfig, z_loss: float, hidden: Array, head: Array, targets: Array, weights: Array) -> tuple[Sums, tuple[Array, Array]]:
    product = functools.partial(jnp.einsum, precision=precision(config), preferred_element_type=weights.dtype)

    def body(carry: tuple[Array, Array, Array], chunk: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array, Array], Array]:
        objective, nll, d_head = carry
        h, target, weight = chunk
        logits, partition, more_objective, more_nll = _chunk(config, z_loss, chunk, head)
        probability = jnp.exp(logits - partition[..., None]) * (1 + 2 * z_loss * partition[..., None])
        hit = jax.lax.broadcasted_iota(target.dtype, logits.shape, logits.ndim - 1) == target[..., None]
        d_logits = jnp.where(weight[..., None] > 0, weight[..., None] * (probability - hit), 0).astype(h.dtype)
        d_hidden = product("btv,dv->btd", d_logits, head).astype(h.dtype)
        # Where weight is 0 the hidden state may be anything, and 0 * infinity is not 0.
        trained = jnp.where(weight[..., None] > 0, h, 0)
        return (objective + more_objective, nll + more_nll, d_head + product("btd,btv->dv", trained, d_logits)), d_hidden

    zero = jnp.zeros((), weights.dtype)
    (objective, nll, d_head), d_hidden = jax.lax.scan(body, (zero, zero, jnp.zeros(head.shape, weights.dtype)), (hidden, targets, weights))
    return (objective, nll), (d_hidden, d_head.astype(head.dtype))


def _sums_bwd(config: ModelConfig, z_loss: float, gradients: tuple[Array, Array], cotangent: Sums) -> tuple[Array, Array, None, None]:
    d_hidden, d_head = gradients
    return (cotangent[0] * d_hidden).astype(d_hidden.dtype), (cotangent[0] * d_head).astype(d_head.dtype), None, None


_sums.defvjp(_sums_fwd, _sums_bwd)
