"""KDA against vectors made by fla-core 0.6.0 (its naive torch recurrence and gates, float64). Tolerances relative to the largest |reference|."""
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pallas_kernels import kda
from pallas_kernels.kda.gates import log_decay
from pallas_kernels.testing import outputs_and_gradients

DATA = Path(__file__).parent / "data"
OPERATOR_CASES = sorted(path.stem for path in DATA.glob("kda_op_*.safetensors"))
GATE_CASES = sorted(path.stem for path in DATA.glob("kda_gate_*.safetensors"))


def load(case):
    arrays = load_file(DATA / f"{case}.safetensors")
    part = lambda prefix: {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}
    return json.loads((DATA / f"{case}.json").read_text())["config"], part("in."), part("cot."), part("out."), part("grad.")


def assert_close(got, want, tolerance):
    far = {name: error for name in want if not (error := float(np.max(np.abs(got[name] - want[name])) / np.max(np.abs(want[name])))) <= tolerance}
    assert not far


RUNS = [("reference", jnp.float64, 1e-10), ("reference", jnp.float32, 2e-6), ("xla", jnp.float64, 1e-10), ("xla", jnp.float32, 2e-5)]
SLOW = {("xla", jnp.float64), ("reference", jnp.float32)}


@pytest.mark.parametrize("case", OPERATOR_CASES)
@pytest.mark.parametrize("implementation, dtype, tolerance", [
    pytest.param(*run, marks=pytest.mark.slow if run[:2] in SLOW else ()) for run in RUNS])
def test_operator(case, implementation, dtype, tolerance):
    _, inputs, cotangents, outputs, gradients = load(case)
    scale = inputs.pop("scale").item()
    promise = -5.0 if inputs["g"].min() >= -5.0 and implementation == "xla" else None

    def run(**x):
        return kda(**x, scale=scale, lower_bound=promise, implementation=implementation)

    (o, state), got = outputs_and_gradients(run, inputs, (cotangents["o"], cotangents["final_state"]), dtype)
    assert_close({"o": o, "final_state": state, **got}, {"o": outputs["o"], "final_state": outputs["final_state"], **gradients}, tolerance)


@pytest.mark.parametrize("case", GATE_CASES)
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float64, 1e-10), (jnp.float32, 2e-6)])
def test_gate(case, dtype, tolerance):
    config, inputs, cotangents, outputs, gradients = load(case)
    heads, width = inputs["x"].shape[2:]

    def run(x, A_log, dt_bias):
        return log_decay(x, config["form"], A_log, dt_bias.reshape(heads, width), config.get("lower_bound"))

    g, got = outputs_and_gradients(run, inputs, cotangents["g"], dtype)
    assert_close({"g": g, **got}, {"g": outputs["g"], **gradients}, tolerance)
