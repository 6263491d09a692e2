"""`top_k`: the k largest of each row and where they stand."""
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, Operator, choose, register
from pallas_kernels.top_k import specs

OPERATOR = register(Operator(name="top_k", unmet=specs.UNMET, example=specs.EXAMPLE))


def top_k(x: Float[Array, "N E"], k: int, *, implementation: Implementation = "auto") -> tuple[Float[Array, "N K"], Int[Array, "N K"]]:
    """The k largest of each row, largest first, and their columns (int32); of equal numbers the one in the first column comes first.

    Without gradient. NaN counts as larger than any number; "mosaic_gpu" (float32, k at most 32) takes it as equal to infinity, -0 as equal to 0 and minus
    infinity as equal to the lowest finite number.

    Raises ValueError for arguments that do not fit, UnsupportedError (a ValueError) when a named implementation cannot take the call.
    """
    specs.check_arguments(x, k)
    x = jax.lax.stop_gradient(x)
    chosen = choose(OPERATOR, implementation, rows=x.shape[0], columns=x.shape[1], k=k, dtype=x.dtype)
    if chosen == "xla":
        values, ids = jax.lax.top_k(x, k)
        return values, ids
    if chosen == "mosaic_gpu":
        # Pallas is a heavy import, and of no use where the kernels cannot run.
        from pallas_kernels.top_k import mosaic_gpu
        ids = mosaic_gpu.top_k_ids(x, k)
    else:
        ids = jnp.argsort(x, axis=-1, stable=True, descending=True)[:, :k].astype(jnp.int32)
    return jnp.take_along_axis(x, ids, axis=-1), ids
