"""Measures for checking an operator against a reference: used by the tests and the benchmarks of every operator."""
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def rms_ratio(got, want) -> float:
    """RMS(got - want) / RMS(want) in float64, over any array-likes of one shape. 0 for empty arrays; the plain RMS(got) where want is all zero.

    NaN or infinity anywhere gives nan or inf, so that `rms_ratio(...) < bound` fails.
    """
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    if got.shape != want.shape:
        raise ValueError(f"got has shape {got.shape}, want has shape {want.shape}")
    if not want.size:
        return 0.0
    error, size = (float(np.sqrt(np.mean(np.square(x)))) for x in (got - want, want))
    return error / size if size else error


def outputs_and_gradients(function: Callable, arguments: Mapping[str, Any], cotangents: Any, dtype: Any = jnp.float32) -> tuple[Any, dict[str, Any]]:
    """function(**arguments) and the gradient of sum(outputs * cotangents) for every floating argument, jitted, floats cast to `dtype`.

    float64 runs in its own x64 context, so that the process stays in float32. Returns numpy arrays.
    """
    with jax.enable_x64(dtype == jnp.float64):
        cast = lambda x: jnp.asarray(x, dtype) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating) else jnp.asarray(x)
        arguments = {name: cast(x) for name, x in arguments.items()}
        fixed = {name: x for name, x in arguments.items() if not jnp.issubdtype(x.dtype, jnp.floating)}

        @jax.jit
        def run(floats, fixed, cotangents):
            outputs, pull = jax.vjp(lambda floats: function(**floats, **fixed), floats)
            return outputs, pull(jax.tree.map(lambda c, o: jnp.asarray(c, o.dtype), cotangents, outputs))[0]

        return jax.tree.map(np.asarray, run({n: x for n, x in arguments.items() if n not in fixed}, fixed, cotangents))


def median_ms(function: Callable, *arguments: Any, inner: int, outer: int, warmups: int = 2) -> tuple[float, float]:
    """(median, least) milliseconds of a call, over `outer` runs of `inner` calls each, after some calls to warm up."""
    for _ in range(warmups):
        jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(outer):
        began = time.perf_counter()
        for _ in range(inner):
            out = function(*arguments)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / inner * 1e3)
    return statistics.median(times), min(times)
