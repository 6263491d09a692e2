"""Times KDA's portable implementation on this CPU, forward and forward + backward, and measures its accuracy. Writes JSON.

    python benchmarks/kda_cpu.py [--out benchmarks/results/kda_cpu.json] [--repeats 9]
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import kda
from pallas_kernels.kda import specs
from pallas_kernels.testing import outputs_and_gradients, rms_ratio

SHAPES = {**{name: specs.SHAPES[name] for name in ("train_cpu", "long_cpu")}, "long_cpu_16384": specs.SHAPES["long_cpu"]._replace(tokens=16384)}


def time_one(function, x, repeats):
    compiled = jax.jit(function).lower(x).compile()
    jax.block_until_ready(compiled(x))
    wall, start = [], os.times()
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(x))
        wall.append(1e3 * (time.perf_counter() - begin))
    end = os.times()
    # Processor time is what the call costs when other work on the machine makes the wall time a lottery.
    busy = 1e3 * (end.user + end.system - start.user - start.system) / repeats
    return dict(median_ms=round(statistics.median(wall), 2), min_ms=round(min(wall), 2), cpu_ms=round(busy, 2),
                temp_mb=round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1))


def speed(repeats):
    rows = []
    for name, shape in SHAPES.items():
        x = {n: jnp.asarray(a) for n, a in specs.inputs(shape).items()}
        for promise in (-5.0, None):
            for residuals in specs.RESIDUALS:
                run = partial(kda, lower_bound=promise, residuals=residuals, implementation="xla")
                loss = lambda x, run=run: jnp.sum(run(**x)[0] * x["v"])
                rows.append(dict(shape=name, **shape._asdict(), lower_bound=promise, residuals=residuals,
                                 forward=time_one(lambda x, run=run: run(**x), x, repeats),
                                 forward_backward=time_one(jax.grad(loss), x, repeats)))
                print(json.dumps(rows[-1]), flush=True)
        # The token recurrence, for scale. Its backward pass keeps a state a token, so only where that fits.
        if shape.tokens <= 2048:
            run = partial(kda, implementation="reference")
            loss = lambda x, run=run: jnp.sum(run(**x)[0] * x["v"])
            rows.append(dict(shape=name, **shape._asdict(), implementation="reference", forward=time_one(lambda x, run=run: run(**x), x, repeats),
                             forward_backward=time_one(jax.grad(loss), x, repeats)))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def accuracy(tokens=257):
    """Worst RMS ratio over the gate cases against the float64 recurrence; the pinned case's gate gradients are zero by nature and left out."""
    worst = {}
    for promise, gates in ((-5.0, specs.BOUNDED_GATES), (None, specs.BOUNDED_GATES + specs.UNBOUNDED_GATES)):
        x = specs.inputs(specs.Shape(len(gates), tokens, 2, 24, 16), gates)
        draw = np.random.default_rng(1)
        cotangents = tuple(draw.normal(size=x[n].shape).astype(np.float32) for n in ("v", "initial_state"))
        runs = [outputs_and_gradients(partial(kda, lower_bound=promise, implementation=name), x, cotangents, dtype)
                for name, dtype in (("xla", jnp.float32), ("reference", jnp.float64))]
        got, want = (dict(o=outputs[0], final_state=outputs[1], **{f"d {n}": g for n, g in gradients.items()}) for outputs, gradients in runs)
        worst["tiles" if promise else "exact"] = {
            name: max(rms_ratio(got[name][i], want[name][i]) for i, gate in enumerate(gates) if (gate, name) != ("pinned", "d g")) for name in got}
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kda_cpu.json"))
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine = dict(processor=platform.processor() or platform.machine(), cores=os.cpu_count(), load=os.getloadavg()[0])
    result = dict(operator="kda", implementation="xla", dtype="float32", jax=jax.__version__, commit=commit, machine=machine,
                  command="python benchmarks/kda_cpu.py", accuracy=accuracy(), speed=speed(options.repeats))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
