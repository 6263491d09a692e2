"""`attention`: causal softmax attention over packed documents, for rows of any length."""
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import specs, xla
from pallas_kernels.dispatch import Implementation, Operator, choose, register

OPERATOR = register(Operator(name="attention", unmet=specs.UNMET, example=specs.EXAMPLE))


def chosen_attention(q: Array, k_width: int, v_width: int, implementation: Implementation = "auto") -> str:
    """Name of the implementation that runs `attention` for queries like q and such keys and values: a caller who would make these piece by piece asks first."""
    return choose(OPERATOR, implementation, key=k_width, value=v_width, dtypes=(q.dtype,) * 3)


def attention(q: Float[Array, "B T H D"], k: Float[Array, "B S H D"], v: Float[Array, "B S H Dv"], *, first: Int[Array, "B T"] | None = None,
              start: Int[Array, ""] | int = 0, scale: float | None = None, precision: jax.lax.Precision | None = None,
              implementation: Implementation = "auto") -> tuple[Float[Array, "B T H Dv"], Float[Array, "H"]]:
    """softmax(scale q k^T) v over the keys that each query sees, and the largest scale q k^T of each head over those pairs.

    Args:
      q, k, v: bfloat16, float16, float32 or float64. Sums are float32 (float64 for float64).
      first: query t sees keys first[t] to start + t, both included; must not fall along a row. `first_visible` makes it of documents. None: 0.
      start: the key at which query 0 stands.
      scale: None: D ** -0.5.
      precision: of the products of `xla` and `reference`, as in `jax.numpy.einsum`; the kernels take 16-bit operands.
      implementation: "auto", a name, or a tuple tried in order. "mosaic_gpu" needs memory for T + S rows only, the others hold T x S scores.

    Returns o in v's dtype, 0 where a query sees nothing, and the largest logits in float32 (float64 for float64), without gradient: the dtype's lowest number
    for a head without pairs. Differentiable in q, k and v. A key that a query does not see reaches neither its output nor its gradient, unless it is NaN or
    infinite and shares a tile of 128 tokens with keys that are seen.

    Raises ValueError for arguments that do not fit, UnsupportedError (a ValueError) when a named implementation cannot take the call.
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    specs.check_arguments(q, k, v, first)
    chosen = choose(OPERATOR, implementation, key=q.shape[-1], value=v.shape[-1], dtypes=(q.dtype, k.dtype, v.dtype))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    first = jnp.zeros(q.shape[:2], jnp.int32) if first is None else first
    start = jnp.asarray(start, jnp.int32)
    if 0 in (q.size, k.size, v.size):
        wide = jnp.promote_types(q.dtype, jnp.float32)
        return jnp.zeros((*q.shape[:3], v.shape[-1]), v.dtype), jnp.full(q.shape[2], jnp.finfo(wide).min, wide)
    if chosen == "mosaic_gpu":
        # Pallas is a heavy import, and of no use where the kernels cannot run.
        from pallas_kernels.attention import vjp
        o, largest = vjp.attention(q, k, v, first, start, scale=scale)
    else:
        o, largest = xla.attention(q, k, v, first, start, scale, precision)
    return o, jax.lax.stop_gradient(largest)
