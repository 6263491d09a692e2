"""KDA against vectors made by fla-core 0.6.0 (its naive torch recurrence and gates, float64). Tolerances relative to the largest |reference|."""
import pytest
from oracle_operators import measure_gate, measure_operator
from oracle_vectors import assert_passes, committed

RUNS = [("reference", "float64"), ("reference", "float32"), ("xla", "float64"), ("xla", "float32")]
SLOW = {("xla", "float64"), ("reference", "float32")}


@pytest.mark.parametrize("case", committed("kda_op"))
@pytest.mark.parametrize("implementation, dtype", [pytest.param(*run, marks=pytest.mark.exhaustive if run in SLOW else ()) for run in RUNS])
def test_operator(case, implementation, dtype):
    assert_passes(measure_operator(case, dtype, implementation))


@pytest.mark.parametrize("case", committed("kda_gate"))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gate(case, dtype):
    assert_passes(measure_gate(case, dtype))


def test_all_committed():
    assert len(committed("kda_op")) == 6 and len(committed("kda_gate")) == 2
