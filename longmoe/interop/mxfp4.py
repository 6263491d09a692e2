"""MXFP4: 4-bit floats (E2M1) in groups of 32 with one shared power of two (E8M0), as the released experts are stored (OCP Microscaling 1.0).

A weight [out, in] becomes packed uint8 [out, in / 2] (low nibble: even column; bit 3 of a nibble: sign) and scale uint8 [out, in / 32].
A value is E2M1 * 2^(scale - 127). Numpy only: packing happens while files are read and written.
"""
from typing import Literal

import numpy as np

GROUP = 32
"""Columns that share a scale."""
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Value of the low three bits of a nibble."""
NAN_SCALE = 255

ScaleRule = Literal["floor", "round"]

_VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])
_MIDPOINTS = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2


def unpack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """packed uint8 [out, in / 2], scale uint8 [out, in / 32] -> float32 [out, in]. Scale 255 is NaN. Every finite value is exact in bfloat16 too.

    Raises ValueError where the two shapes do not belong together.
    """
    if packed.ndim != 2 or scale.shape != (packed.shape[0], 2 * packed.shape[1] / GROUP):
        raise ValueError(f"scale: got shape {list(scale.shape)} beside packed {list(packed.shape)}, wanted [out, in / {GROUP}] beside [out, in / 2]")
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*scale.shape, GROUP)
    with np.errstate(over="ignore"):                                    # the largest scales lie beyond float32: infinity, as the format says
        values = np.ldexp(_VALUES[codes], scale.astype(np.int32)[..., None] - 127)
    return np.where(scale[..., None] == NAN_SCALE, np.float32(np.nan), values).reshape(packed.shape[0], -1)


def pack(weight: np.ndarray, rule: ScaleRule = "floor") -> tuple[np.ndarray, np.ndarray]:
    """Finite weight [out, in], in a multiple of 32 -> packed uint8 [out, in / 2], scale uint8 [out, in / 32].

    rule: a group's exponent is floor(log2(largest)) - 2 ("floor", OCP), or that of the largest value rounded up from mantissa 1.75 on, so that it does not
    saturate at 6 ("round", compressed-tensors). Values go to the nearest code, ties to the even one, beyond 6 to 6.
    Packing what `unpack` made of either rule's bytes gives those bytes again.
    """
    if weight.ndim != 2 or weight.shape[1] % GROUP:
        raise ValueError(f"weight: got shape {list(weight.shape)}, wanted [out, in] with in a multiple of {GROUP}; leave this weight unpacked")
    groups = weight.astype(np.float32).reshape(weight.shape[0], -1, GROUP)
    if not np.all(np.isfinite(groups)):
        raise ValueError("weight: got values that are not finite, wanted finite ones; MXFP4 has no code for them")
    scale = _scales(np.max(np.abs(groups), axis=-1), rule)
    # In float64: the quotient by the smallest scales leaves float32.
    ratio = np.ldexp(np.abs(groups).astype(np.float64), 127 - scale.astype(np.int32)[..., None])
    below, above = np.searchsorted(_MIDPOINTS, ratio, side="left"), np.searchsorted(_MIDPOINTS, ratio, side="right")
    codes = np.where(below % 2 == 0, below, above)                      # they differ on a midpoint alone: of neighbours one is even
    codes = (codes | np.signbit(groups) << 3).astype(np.uint8).reshape(weight.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale


def _scales(largest: np.ndarray, rule: ScaleRule) -> np.ndarray:
    mantissa, exponent = np.frexp(largest)                              # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = exponent - 1 + (2 * mantissa >= 1.75 if rule == "round" else 0)
    return np.where(largest > 0, np.clip(exponent - 2 + 127, 0, NAN_SCALE - 1), 0).astype(np.uint8)
