"""Whole models, from their checkpoints, against vectors made by transformers 5.24.0 (kimi_linear) and nemo_automodel 0.7.0 (k3)."""
import pytest
from oracle_models import MODELS, measure_forced, measure_model
from oracle_vectors import assert_passes, cases, checkpoint, committed, load

from longmoe import load_hf
from longmoe.interop.hf import published

# Cases that are not committed are there on some machines only: by hand.
MARKS = {case: () if case in committed(kind) else (pytest.mark.slow, pytest.mark.exhaustive) for kind in MODELS for case in cases(kind)}
ALL = [pytest.param(case, marks=marks) for case, marks in MARKS.items()]


def test_every_kind_has_a_committed_case():
    assert {"kimi_linear_s1", "k3_s1", "k3_s1_mxfp4"} <= {case for kind in MODELS for case in committed(kind)}


@pytest.mark.parametrize("case", [pytest.param(case, marks=(*marks, *[pytest.mark.slow] * (case == "kimi_linear_s1"))) for case, marks in MARKS.items()])
def test_float32(case, tmp_path):
    agreement = measure_model(case, "float32", tmp_path)
    assert agreement.routes == 1 and agreement.same_tokens in (True, None)      # before the logits: another expert is no rounding error
    assert_passes(agreement.figures)
    assert agreement.top1 == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [pytest.param(case, marks=marks) for case, marks in MARKS.items() if "logits_f64" in load(case).outputs])
def test_float64(case, tmp_path):
    assert_passes(measure_model(case, "float64", tmp_path).figures)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ALL)
def test_bfloat16(case, tmp_path):
    # The weights are large and near ties many: rounding sends some tokens to other experts, in the producers too (docs/numerics.md).
    agreement = measure_model(case, "bfloat16", tmp_path)
    logits = next(figure for figure in agreement.figures if figure.quantity == "logits")
    assert logits.rms < 0.5 and agreement.top1 > 0.6


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ALL)
def test_bfloat16_with_the_experts_of_float32(case, tmp_path):
    narrow, _ = measure_forced(case, tmp_path)
    assert narrow.rms < 0.25 and narrow.top1 > 0.75


@pytest.mark.parametrize("case", [case for case in cases("k3") if case.endswith("mxfp4")])
def test_unpacked_experts(case, tmp_path):
    """The experts that the case holds dequantised, to the bit."""
    wanted = {name.removeprefix("dequantised."): x for name, x in load(case).outputs.items() if name.startswith("dequantised.")}
    got = {tensor.name: tensor.kind.save(array) for tensor, array in published(*load_hf(checkpoint(case, tmp_path))) if tensor.name in wanted}
    assert set(got) == set(wanted) and all((got[name] == x).all() for name, x in wanted.items())
