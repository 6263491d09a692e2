"""`grouped_matmul`: one matmul per group of consecutive rows, the expert product of a mixture of experts."""
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, Operator, choose, register
from pallas_kernels.grouped_matmul import reference, specs, xla

_OPERATOR = register(Operator(name="grouped_matmul", unmet=specs.UNMET, example=specs.EXAMPLE))


def _mosaic_gpu(lhs: Array, rhs: Array, group_sizes: Array, out_dtype: jnp.dtype) -> Array:
    # Pallas is a heavy import, and of no use where the kernels cannot run.
    from pallas_kernels.grouped_matmul import mosaic_gpu
    return mosaic_gpu.grouped_matmul(lhs, rhs, group_sizes, out_dtype)


_IMPLEMENTATIONS = dict(mosaic_gpu=_mosaic_gpu, xla=xla.grouped_matmul, reference=reference.grouped_matmul)


def grouped_matmul(lhs: Float[Array, "M K"], rhs: Float[Array, "G K N"], group_sizes: Int[Array, " G"], *,
                   preferred_element_type: Any = None, implementation: Implementation = "auto") -> Float[Array, "M N"]:
    """Multiplies each group of consecutive rows of `lhs` with its own matrix of `rhs`.

    Row m of group g gives `lhs[m] @ rhs[g]`. Rows past `sum(group_sizes)` are zero in the result and in the gradient of `lhs`, whatever
    `lhs` or the incoming gradient holds there, NaN included. An empty group has a zero gradient.

    Args:
      lhs: rows sorted by group; bfloat16, float16, float32 or float64.
      rhs: one matrix a group.
      group_sizes: int32 rows of each group, sum at most M (not checked, the values are data: rows past M are cut off).
      preferred_element_type: dtype of the result; None: the result type of lhs and rhs. Sums are float32 (float64 with a float64 operand).
      implementation: "auto", a name, or a tuple tried in order. See `pallas_kernels.kernel_report`.

    Returns: [M, N]. Differentiable in lhs and rhs, works under jit, vmap (one batch entry after another), `jax.checkpoint` and `shard_map`,
    where an operand that is replicated over a mesh axis gets its gradient summed over it.

    Raises:
      ValueError: a shape or dtype that does not fit, by argument name.
      UnsupportedError: no named implementation can take the call.
    """
    lhs, rhs, group_sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    out_dtype = specs.check_arguments(lhs, rhs, group_sizes, preferred_element_type)
    (rows, k), (groups, _, n) = lhs.shape, rhs.shape
    chosen = choose(_OPERATOR, implementation, rows=rows, k=k, n=n, groups=groups,
                    lhs_dtype=lhs.dtype, rhs_dtype=rhs.dtype, out_dtype=out_dtype)
    return _IMPLEMENTATIONS[chosen](lhs, rhs, group_sizes, out_dtype)
