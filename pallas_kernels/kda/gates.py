"""What may happen to the inputs before the recurrence: gates, l2 normalisation, the sigmoid of beta. Plain differentiable functions."""
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

GATES = ("log_decay", "bounded", "softplus")
DEFAULT_LOWER_BOUND = -5.0
L2_EPS = 1e-6


def log_decay(g: Float[Array, "*b H Dk"], gate: str, a_log: Float[Array, "H"] | None, dt_bias: Float[Array, "H Dk"] | None,
              lower_bound: float | None) -> Float[Array, "*b H Dk"]:
    """The log decay of each channel, in g's dtype (the caller brings float32 or float64; in bfloat16 every decay above 0.998 becomes 1).

    "log_decay": g itself. "bounded": lower_bound * sigmoid(exp(a_log) * (g + dt_bias)), in (lower_bound, 0).
    "softplus": -exp(a_log) * softplus(g + dt_bias), unbounded. The two are different models, not a clamp of each other.
    """
    if gate == "log_decay":
        return g
    rate = 1.0 if a_log is None else jnp.exp(a_log.astype(g.dtype))[:, None]
    raw = g if dt_bias is None else g + dt_bias.astype(g.dtype)
    if gate == "bounded":
        return (DEFAULT_LOWER_BOUND if lower_bound is None else lower_bound) * jax.nn.sigmoid(rate * raw)
    return -rate * jax.nn.softplus(raw)


def bound_of(gate: str, lower_bound: float | None) -> float | None:
    """The bound that the log decays are known to keep, from static facts alone; None when there is none."""
    if gate == "bounded":
        return DEFAULT_LOWER_BOUND if lower_bound is None else lower_bound
    return lower_bound if gate == "log_decay" else None


def l2_normalize(x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
    """x * rsqrt(sum x^2 + 1e-6): the eps is inside the root and added to the sum, as the released models have it."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + L2_EPS)
