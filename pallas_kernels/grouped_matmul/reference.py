"""The definition, written for reading: every group multiplies every row, and a row keeps the product of its own group.

Costs G times the work of the real thing. Gradients come from plain autodiff, so they are independent of `xla`'s hand-written ones.
"""
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.specs import accumulation_dtype, zeros_varying_like


def grouped_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """lhs [M, K], rhs [G, K, N], group_sizes int32 [G] -> [M, N] of `out_dtype`."""
    dtype = accumulation_dtype(lhs.dtype, rhs.dtype)
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(lhs.shape[0])

    @jax.checkpoint
    def add_group(out, group):
        weight, start, end = group
        mine = ((row >= start) & (row < end))[:, None]
        # The inner mask matters as much as the outer one: 0 * NaN would reach the gradient of the weight.
        product = jnp.matmul(jnp.where(mine, lhs, 0).astype(dtype), weight.astype(dtype), precision=lax.Precision.HIGHEST)
        return jnp.where(mine, product, out), None

    out = zeros_varying_like((lhs.shape[0], rhs.shape[2]), dtype, lhs, rhs, group_sizes)
    out, _ = lax.scan(add_group, out, (rhs, ends - group_sizes, ends))
    return out.astype(out_dtype)
