"""Gated activations on Hopper with their gradient, which keeps the branches alone."""
import functools
from typing import Any

import jax
from jaxtyping import Array

from pallas_kernels.gated_activation import mosaic_gpu
from pallas_kernels.gated_activation.specs import Gate


def gated_activation(gate: Gate, branches: tuple[Array, ...], interpret: Any = None) -> Array:
    """interpret: `plgpu.InterpretGPUParams`, for tests."""
    return _gated_activation(gate, interpret, branches)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated_activation(gate: Gate, interpret: Any, branches: tuple[Array, ...]) -> Array:
    return mosaic_gpu.forward(gate, branches, interpret)


_gated_activation.defvjp(lambda gate, interpret, branches: (_gated_activation(gate, interpret, branches), branches),
                         lambda gate, interpret, branches, gradient: (mosaic_gpu.backward(gate, branches, gradient, interpret),))
