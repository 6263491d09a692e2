"""Layers against vectors made by transformers 5.24.0 (glm5_kda), nemo_automodel 0.7.0 and fla-core 0.6.0: outputs, caches, decoding, routes, gradients."""
import pytest
from oracle_layers import LAYERS
from oracle_vectors import assert_passes, cases, committed

ALL = [pytest.param(kind, case, marks=() if case in committed(kind) else pytest.mark.exhaustive) for kind in LAYERS for case in cases(kind)]


@pytest.mark.parametrize("kind", LAYERS)
def test_every_kind_has_a_committed_case(kind):
    assert committed(kind)


@pytest.mark.parametrize("kind, case", ALL)
def test_float32(kind, case):
    assert_passes(LAYERS[kind](case, "float32"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind, case", ALL)
def test_float64(kind, case):
    assert_passes(LAYERS[kind](case, "float64"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind, case", ALL)
def test_bfloat16(kind, case):
    # Near the rounding of its inputs: half a unit in the last place is 2e-3.
    assert all(figure.rms < 2e-2 for figure in LAYERS[kind](case, "bfloat16"))
