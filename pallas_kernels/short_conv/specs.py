"""Static facts of a short_conv call: argument checks, and what each implementation cannot do."""
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.dispatch import unmet_nothing, unmet_on_hopper

TILE = 64
"""Tokens of a block of the Hopper kernels."""
EDGE = 8
"""Tokens that they bring in before and after them; a convolution reaches back one token less at most."""
LANES, NARROW_LANES = 256, 128
"""Channels that the copy engine takes along one axis; the channels of a call are a multiple of the narrow ones."""


def check_arguments(x: Array, taps: Array, runs: Array | None, history: Array | None, history_runs: Array | None) -> None:
    """Raises ValueError naming the argument that does not fit."""
    if x.ndim != 3 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x: got {x.dtype} {x.shape}, wanted numbers [batch, tokens, channels]")
    batch, tokens, channels = x.shape
    if taps.ndim != 2 or taps.shape[1] != channels or not taps.shape[0]:
        raise ValueError(f"taps: got shape {taps.shape}, wanted [width, {channels}], a tap or more for each channel of x {x.shape}")
    before = taps.shape[0] - 1
    for name, value, shape in (("runs", runs, (batch, tokens)), ("history", history, (batch, before, channels)),
                               ("history_runs", history_runs, (batch, before))):
        if value is not None and value.shape != shape:
            raise ValueError(f"{name}: got shape {value.shape}, wanted {list(shape)}, for x {x.shape} and taps {taps.shape}")


def block_shape(channels: int) -> tuple[int, int]:
    """Channels of a block of the Hopper kernels, as two axes."""
    lanes = LANES if channels % LANES == 0 else NARROW_LANES
    return (2 if channels % (2 * lanes) == 0 else 1), lanes


def unmet_mosaic_gpu(**facts: Any) -> list[str]:
    """Every reason why the Hopper kernels cannot take the call."""
    return unmet_on_hopper() + unmet_by_shape(**facts)


def unmet_by_shape(*, tokens: int, channels: int, width: int, dtype: Any) -> list[str]:
    """What the Hopper kernels want of the arguments, whatever the device."""
    unmet = []
    if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
        unmet.append(f"dtype of x: got {dtype}, wanted bfloat16 or float16")
    for name, size, step in (("tokens", tokens, TILE), ("channels", channels, NARROW_LANES)):
        if size % step or not size:
            unmet.append(f"{name}: got {size}, wanted a multiple of {step}")
    if not 2 <= width <= EDGE + 1:
        unmet.append(f"taps: got {width} a channel, wanted 2 to {EDGE + 1}")
    return unmet


EXAMPLE = dict(tokens=8192, channels=1024, width=4, dtype=jnp.dtype("bfloat16"))
UNMET = dict(mosaic_gpu=unmet_mosaic_gpu, xla=unmet_nothing, reference=unmet_nothing)
