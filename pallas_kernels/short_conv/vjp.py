"""The short convolution on Hopper with its gradient, which keeps the inputs alone."""
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.short_conv import mosaic_gpu


def short_conv(x: Float[Array, "B T C"], taps: Float[Array, "W C"], runs: Int[Array, "B T"] | None, interpret: Any = None) -> Float[Array, "B T C"]:
    """interpret: `plgpu.InterpretGPUParams`, for tests."""
    return _short_conv(interpret, x, taps, jnp.ones(x.shape[:2], jnp.int32) if runs is None else runs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _short_conv(interpret: Any, x: Array, taps: Array, runs: Array) -> Array:
    return mosaic_gpu.forward(x, taps, runs, interpret)


def _backward(interpret: Any, residuals: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array, None]:
    dx, dtaps = mosaic_gpu.backward(*residuals, gradient, interpret)
    return dx, dtaps.astype(residuals[1].dtype), None


_short_conv.defvjp(lambda interpret, *arguments: (_short_conv(interpret, *arguments), arguments), _backward)
