"""MXFP4 against vectors made by nemo_automodel 0.7.0 and compressed-tensors 0.20.1, to the bit."""
import ml_dtypes
import numpy as np
import pytest
from oracle_vectors import cases, load

from longmoe.interop.mxfp4 import GROUP, MAGNITUDES, pack, unpack

CASES = cases("mxfp4")


def bits(x):
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")


def held(case):
    loaded = load(case)
    arrays = loaded.outputs | loaded.inputs
    return arrays["packed"], arrays["scale"], arrays


@pytest.mark.parametrize("case", CASES)
def test_unpack(case):
    packed, scale, arrays = held(case)
    got = unpack(packed, scale)
    np.testing.assert_array_equal(bits(got), bits(arrays["dequantised_f32"]))
    if "dequantised_bf16" in arrays:
        np.testing.assert_array_equal(bits(got.astype(ml_dtypes.bfloat16)), bits(arrays["dequantised_bf16"]))
    if "fp4_values" in arrays:
        np.testing.assert_array_equal(got, arrays["fp4_values"] * np.repeat(np.exp2(scale.astype(np.float32) - 127), GROUP, axis=1))


@pytest.mark.parametrize("case, rule", [("mxfp4_s2", "floor"), ("mxfp4_s3_compressed_tensors", "round")])
def test_pack(case, rule):
    packed, scale, arrays = held(case)
    for got, want in zip(pack(arrays["weight_f32"], rule), (packed, scale)):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rule", ["floor", "round"])
def test_packing_what_was_unpacked_changes_nothing(rule):
    """Over all scales, signed zeros, ties and groups of zeros."""
    draw = np.random.default_rng(0)
    weight = draw.normal(size=(64, 3 * GROUP)) * np.exp2(draw.integers(-120, 120, (64, 1)))
    weight[0], weight[1, :GROUP] = -0.0, 0
    weight[2, :16] = np.concatenate([MAGNITUDES, -MAGNITUDES]) + 0.25
    first = pack(weight.astype(np.float32), rule)
    for got, want in zip(pack(unpack(*first), rule), first):
        np.testing.assert_array_equal(got, want)


def test_refuses():
    with pytest.raises(ValueError, match="multiple of 32"):
        pack(np.zeros((2, 40), np.float32))
    with pytest.raises(ValueError, match="not finite"):
        pack(np.full((1, 32), np.inf, np.float32))
    with pytest.raises(ValueError, match="scale: got shape"):
        unpack(np.zeros((2, 16), np.uint8), np.zeros((2, 2), np.uint8))
    assert np.all(np.isnan(unpack(np.zeros((1, 16), np.uint8), np.full((1, 1), 255, np.uint8))))
