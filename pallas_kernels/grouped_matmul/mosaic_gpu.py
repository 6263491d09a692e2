"""Hopper implementation: three persistent Mosaic GPU products, forward, gradient of lhs and gradient of rhs, under one gradient rule.

Numerics: 16-bit operands, float32 sums in a fixed order, one rounding. The incoming gradient of a float32 result is rounded to the operands' dtype
first, since the tensor cores take 16-bit operands only. Second derivatives are `reference`'s alone.
"""
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.mosaic_gpu_rows import rows_matmul
from pallas_kernels.grouped_matmul.mosaic_gpu_weights import weights_matmul
from pallas_kernels.grouped_matmul.specs import vary_alike
from pallas_kernels.grouped_matmul.tiles import RowTiles, WeightTiles, choose_tiles

H200_MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static choices of one call. sms: blocks to launch. interpret: None to compile, or the parameters of Mosaic GPU's interpreter (tests)."""
    forward: RowTiles
    dlhs: RowTiles
    drhs: WeightTiles
    sms: int = H200_MULTIPROCESSORS
    interpret: Any = None


def make_plan(rows: int, k: int, n: int, groups: int) -> Plan:
    """The plan for this machine's default device; on a machine without a GPU (compilation ahead of time) for an H200."""
    device = jax.devices()[0]
    kind = device.device_kind if device.platform == "gpu" else "NVIDIA H200"
    sms = device.core_count if device.platform == "gpu" else H200_MULTIPROCESSORS
    tiles = {operation: choose_tiles(kind, operation, rows=rows, k=k, n=n, groups=groups) for operation in ("forward", "dlhs", "drhs")}
    # Clusters take blocks in pairs.
    return Plan(**tiles, sms=sms // 2 * 2)


def grouped_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, out_dtype: jnp.dtype, plan: Plan | None = None) -> jax.Array:
    """lhs [M, K], rhs [G, K, N], group_sizes int32 [G] -> [M, N] of `out_dtype`. See `specs.unmet_by_shape` for what the arguments must be."""
    plan = plan or make_plan(*lhs.shape, rhs.shape[2], rhs.shape[0])
    return _grouped_matmul(*vary_alike(lhs, rhs, group_sizes), jnp.dtype(out_dtype), plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped_matmul(lhs, rhs, group_sizes, out_dtype, plan):
    return _rows(plan.forward, plan, out_dtype, False, lhs, rhs, group_sizes)


def _forward(lhs, rhs, group_sizes, out_dtype, plan):
    return _grouped_matmul(lhs, rhs, group_sizes, out_dtype, plan), (lhs, rhs, group_sizes)


def _backward(out_dtype, plan, residuals, dout):
    lhs, rhs, group_sizes = residuals
    dout = dout.astype(lhs.dtype)
    return (_rows(plan.dlhs, plan, lhs.dtype, True, dout, rhs, group_sizes),
            _weights(plan.drhs, plan, rhs.dtype, lhs, dout, group_sizes), None)


_grouped_matmul.defvjp(_forward, _backward)


def _rows(tiles, plan, out_dtype, transpose_rhs, *arrays):
    return _run(functools.partial(rows_matmul, out_dtype=out_dtype, tiles=tiles, transpose_rhs=transpose_rhs, sms=plan.sms, interpret=plan.interpret), arrays)


def _weights(tiles, plan, out_dtype, *arrays):
    return _run(functools.partial(weights_matmul, out_dtype=out_dtype, tiles=tiles, sms=plan.sms, interpret=plan.interpret), arrays)


def _run(kernel, arrays):
    # One batch entry after another: each fills the device by itself. Inside `shard_map` a kernel's result does not say by itself that it varies.
    return vary_alike(jax.custom_batching.sequential_vmap(lambda *arrays: kernel(*arrays))(*arrays), *arrays)[0]
