"""Times KDA's portable implementation on this CPU, forward and forward + backward, with its accuracy beside each time. Writes JSON.

    longmoe bench kda [--out kda_cpu.json] [--repeats 9] [--shapes train_cpu long_cpu long_cpu_16384] [--no-accuracy]

rms: RMS(difference) / RMS(reference) of the output and the final state, and the worst of the gradients, against the token recurrence in float64 on the
same inputs; gradients where the recurrence's backward pass, which keeps a state a token, fits (2,048 tokens).
"""
import argparse
import json
import os
import platform
import statistics
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import command, commit
from pallas_kernels.kda import specs
from pallas_kernels.kda.api import kda
from pallas_kernels.testing import outputs_and_gradients, rms_ratio

RECURRENCE_TOKENS = 2048
SHAPES = {**specs.SHAPES, "long_cpu_16384": specs.Shape(1, 16384, 4, 64, 64)}
TIMED = ("train_cpu", "long_cpu", "long_cpu_16384")


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


def reference(x):
    """(outputs, gradients or None) of the float64 recurrence, for cotangents that are v and the initial state."""
    run = partial(kda, implementation="reference")
    if x["v"].shape[1] <= RECURRENCE_TOKENS:
        return outputs_and_gradients(run, x, (x["v"], x["initial_state"]), jnp.float64)
    with jax.enable_x64():
        return jax.tree.map(np.asarray, jax.jit(run)(**{name: jnp.asarray(a, jnp.float64) for name, a in x.items()})), None


def errors(run, x, want):
    """RMS ratios of `run` against `want`."""
    outputs, gradients = outputs_and_gradients(run, x, (x["v"], x["initial_state"]))
    ratios = {name: rms_ratio(outputs[i], want[0][i]) for i, name in enumerate(("o", "final_state"))}
    if want[1] is not None:
        ratios["worst_gradient"] = max(rms_ratio(gradients[name], want[1][name]) for name in want[1])
    return {name: float(f"{ratio:.3g}") for name, ratio in ratios.items()}


def speed(names, repeats):
    rows = []

    def row(run, x, **facts):
        loss = lambda x: jnp.sum(run(**x)[0] * x["v"])
        rows.append(facts | dict(forward=time_one(lambda x: run(**x), x, repeats), forward_backward=time_one(jax.grad(loss), x, repeats)))
        print(json.dumps(rows[-1]), flush=True)

    for name in names:
        shape, inputs = SHAPES[name], specs.inputs(SHAPES[name])
        x, want = {n: jnp.asarray(a) for n, a in inputs.items()}, reference(inputs)
        for promise in (-5.0, None):
            for residuals in specs.RESIDUALS:
                run = partial(kda, lower_bound=promise, residuals=residuals, implementation="xla")
                row(run, x, shape=name, **shape._asdict(), implementation="xla", lower_bound=promise, residuals=residuals, rms=errors(run, inputs, want))
        # The token recurrence, for scale. Its backward pass keeps a state a token, so only where that fits.
        if shape.tokens <= RECURRENCE_TOKENS:
            row(partial(kda, implementation="reference"), x, shape=name, **shape._asdict(), implementation="reference")
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


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="longmoe bench kda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("kda_cpu.json"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(TIMED),
                        help="named workloads (the layers of released models need tens of gigabytes)")
    parser.add_argument("--accuracy", action=argparse.BooleanOptionalAction, default=True, help="also every kind of gate, at odd sizes")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats: got {options.repeats}, wanted at least 1")
    machine = dict(processor=platform.processor() or platform.machine(), cores=os.cpu_count(), load=os.getloadavg()[0])
    result = dict(operator="kda", implementation="xla", dtype="float32", jax=jax.__version__, commit=commit(), machine=machine,
                  command=command("kda", arguments), accuracy=accuracy() if options.accuracy else None, speed=speed(options.shapes, options.repeats))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
