"""Cross-entropy over a large vocabulary without ever holding [tokens, vocabulary]."""
import jax
import jax.numpy as jnp

from longmoe.configs import ModelConfig
from longmoe.model.lm import project
from longmoe.shapes import Array, Float, Int


def chunked_cross_entropy(config: ModelConfig, hidden: Float[Array, "B T D"], head: Float[Array, "D V"], targets: Int[Array, "B T"],
                          weights: Float[Array, "B T"], *, chunk: int, z_loss: float = 0.0) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(objective, nll): sums over tokens of weight * (nll + z_loss * log_partition^2) and of weight * nll, float32, nats.

    Logits of about `chunk` tokens exist at a time, forward and backward: each chunk's are computed again for its gradient. Targets of weight 0 are not read.
    """
    batch, tokens, _ = hidden.shape
    step = min(tokens, max(1, chunk // batch))
    count = -(-tokens // step)
    targets = jnp.where(weights > 0, targets, 0)

    def cut(x: Array) -> Array:                                        # [count, B, step, ...]
        x = jnp.pad(x, [(0, 0), (0, count * step - tokens)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, count, step, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(head: Array, chunk: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        h, target, weight = chunk
        logits = project(config, h, head)
        partition = jax.nn.logsumexp(logits, axis=-1)
        nll = partition - jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        # A weight of 0 selects the term out, so that nothing untrained, finite or not, reaches the loss.
        return (jnp.sum(jnp.where(weight > 0, weight * (nll + z_loss * jnp.square(partition)), 0)), jnp.sum(jnp.where(weight > 0, weight * nll, 0)))

    def body(total: tuple[Array, Array], chunk: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], None]:
        objective, nll = one(head, chunk)
        return (total[0] + objective, total[1] + nll), None

    zero = jnp.zeros((), jnp.promote_types(hidden.dtype, jnp.float32))
    head = head.astype(hidden.dtype)
    total, _ = jax.lax.scan(body, (zero, zero), (cut(hidden), cut(targets), cut(weights.astype(zero.dtype))))
    return total
