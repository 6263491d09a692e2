"""Shared memory of Mosaic GPU kernels, for operators whose widths differ."""
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def tiled(*shape: int, dtype: Any) -> Any:
    """Shared memory whose last two dimensions are laid out for TMA and wgmma."""
    swizzle = plgpu.find_swizzle(shape[-1] * jnp.dtype(dtype).itemsize * 8)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)))
