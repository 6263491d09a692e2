"""Runs the KDA operator's and gates' cases, and measures them."""
from typing import Any

import jax.numpy as jnp
from oracle_vectors import FLOAT64_BOUND, Figure, compare, load

from pallas_kernels import kda
from pallas_kernels.kda.gates import log_decay
from pallas_kernels.testing import outputs_and_gradients

BOUNDS = {("reference", "float32"): 2e-6, ("xla", "float32"): 2e-5, ("reference", "float64"): FLOAT64_BOUND, ("xla", "float64"): FLOAT64_BOUND}
"""By implementation and dtype: the chunked form sums in another order. bfloat16 is only reported."""


def measure_operator(name: str, dtype: str, implementation: str = "xla") -> list[Figure]:
    """Outputs and gradients. bfloat16: q, k, v are rounded; the decay, beta and the state stay float32, as in the model."""
    case = load(name)
    inputs = dict(case.inputs)
    scale = inputs.pop("scale").item()
    promise = -5.0 if inputs["g"].min() >= -5.0 and implementation == "xla" else None
    narrow = "qkv" if dtype == "bfloat16" else ""

    def run(**x: Any) -> Any:
        x = {n: a.astype(jnp.bfloat16) if n in narrow else a for n, a in x.items()}
        return kda(**x, scale=scale, lower_bound=promise, implementation=implementation)

    cotangents = (case.cotangents["o"], case.cotangents["final_state"])
    (o, state), gradients = outputs_and_gradients(run, inputs, cotangents, jnp.dtype("float32" if narrow else dtype))
    got = {"o": o, "final_state": state, **{f"grad.{n}": g for n, g in gradients.items()}}
    want = {n: case.outputs[n] for n in ("o", "final_state")} | {f"grad.{n}": g for n, g in case.gradients.items()}
    return compare(name, dtype, got, want, BOUNDS.get((implementation, dtype)))


def measure_gate(name: str, dtype: str) -> list[Figure]:
    """The log decay and its gradients; the model never runs it in bfloat16."""
    case = load(name)
    heads, width = case.inputs["x"].shape[2:]

    def run(x: Any, A_log: Any, dt_bias: Any) -> Any:
        return log_decay(x, case.config["form"], A_log, dt_bias.reshape(heads, width), case.config.get("lower_bound"))

    g, gradients = outputs_and_gradients(run, case.inputs, case.cotangents["g"], jnp.dtype(dtype))
    return compare(name, dtype, {"g": g, **{f"grad.{n}": v for n, v in gradients.items()}},
                   {"g": case.outputs["g"], **{f"grad.{n}": v for n, v in case.gradients.items()}}, BOUNDS["reference", dtype])
