"""Checks causal attention's Mosaic GPU kernels on this Hopper GPU, then times them beside cuDNN's. Prints each result and rewrites the JSON after it.

    longmoe bench attention [--out attention_gpu.json] [--shapes 2,8192,8,96,64 ...]

B,T,H,key width,value width; bfloat16; one document a row, and documents of about 3,000 tokens. TFLOP/s count the products of pairs that causality leaves, two
forward and five with the backward pass besides. cuDNN (through jax.nn.dot_product_attention, which wants values as wide as keys: padded with zeros) runs
without documents.
"""
import argparse
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.api import attention
from pallas_kernels.attention.visible import first_visible
from pallas_kernels.bench import command, commit
from pallas_kernels.bench.compiling import Programs, add_processes, pool_of
from pallas_kernels.kda.documents import document_runs
from pallas_kernels.testing import median_ms, rms_ratio

SHAPES = ((2, 8192, 8, 96, 64), (1, 65536, 8, 96, 64), (1, 8192, 16, 128, 128), (1, 8192, 16, 192, 128))
CHECKED = ((2, 1000, 2, 96, 64), (1, 700, 2, 128, 128), (1, 700, 2, 192, 128))
DOCUMENT = 3000


def inputs(batch, tokens, heads, key, value, seed=0):
    """(q, k, v, a gradient of o), drawn on the device."""
    keys = jax.random.split(jax.random.key(seed), 4)
    return tuple(jax.random.normal(keys[i], (batch, tokens, heads, width), jnp.bfloat16) for i, width in enumerate((key, key, value, value)))


def documents(batch, tokens, length=DOCUMENT):
    draw = np.random.default_rng(0)
    return first_visible(document_runs(jnp.asarray(np.cumsum(draw.random((batch, tokens)) < 1 / length, axis=1) + 1, jnp.int32)))


def call(implementation, q, k, v, first):
    if implementation == "cudnn":
        width = q.shape[-1] - v.shape[-1]
        padded = jnp.pad(v, ((0, 0),) * 3 + ((0, width),))
        return jax.nn.dot_product_attention(q, k, padded, is_causal=True, implementation="cudnn")[..., :v.shape[-1]]
    return attention(q, k, v, first=first, implementation=implementation, precision=jax.lax.Precision.HIGHEST)[0]


def program(what, implementation, shape):
    """(function, shapes of its arguments)."""
    *arrays, do = jax.eval_shape(partial(inputs, *shape))
    first = jax.ShapeDtypeStruct(shape[:2], jnp.int32)
    if what == "forward":
        return partial(call, implementation), (*arrays, first)
    train = lambda q, k, v, first, do: jax.vjp(lambda q, k, v: call(implementation, q, k, v, first), q, k, v)[1](do)
    return train, (*arrays, first, do)


def check(shape):
    """RMS ratio of o and the gradients to float32 at the same inputs, and whether two runs agree to the bit."""
    *arrays, do = inputs(*shape)
    first = documents(*shape[:2], length=shape[1] / 5)

    def run(implementation, arrays, do):
        o, pull = jax.vjp(lambda q, k, v: call(implementation, q, k, v, first), *arrays)
        return o, *pull(do.astype(o.dtype))
    got, again = (jax.jit(partial(run, "mosaic_gpu"))(arrays, do) for _ in range(2))
    want = jax.jit(partial(run, "reference"))([x.astype(jnp.float32) for x in arrays], do)
    ratios = {name: float(f"{rms_ratio(a, b):.3g}") for name, a, b in zip(("o", "dq", "dk", "dv"), got, want)}
    return ratios | dict(two_runs_equal=all(np.array_equal(a, b) for a, b in zip(got, again)))


def measure(programs, what, implementation, shape):
    *arrays, do = inputs(*shape)
    batch, tokens, heads, key, value = shape
    function, found = programs[what, implementation, shape], {}
    for name, first in (("one document", jnp.zeros((batch, tokens), jnp.int32)), ("documents", documents(batch, tokens))):
        if implementation == "cudnn" and name == "documents":
            continue
        found[name] = round(median_ms(function, *arrays, first, *(() if what == "forward" else (do,)), inner=5, outer=7)[0], 4)
    widths = key + value if what == "forward" else key + value + 3 * key + 2 * value
    return dict(ms=found, tflops=round(batch * heads * tokens ** 2 * widths / found["one document"] / 1e9, 1))


def run(options, arguments, pool):
    device, rows = jax.devices()[0], []
    head = dict(commit=commit(), jax=jax.__version__, device=device.device_kind, command=command("attention", arguments),
                platform_version=getattr(device.client, "platform_version", ""))

    def add(name, work):
        try:
            rows.append(dict(part=name, result=work()))
        except Exception as error:
            rows.append(dict(part=name, error=f"{type(error).__name__}: {error}"[:1500]))
        print(json.dumps(rows[-1]), flush=True)
        options.out.write_text(json.dumps(head | dict(rows=rows), indent=1) + "\n")

    checks = {shape: pool.submit(check, shape) for shape in CHECKED}
    jobs = [(what, implementation, shape) for shape in options.shapes for implementation in ("mosaic_gpu", "cudnn") for what in ("forward", "train")]
    programs = Programs(pool, program, jobs)
    for shape, future in checks.items():
        add(f"accuracy {shape}", future.result)
    programs.wait()
    for job in jobs:
        add(" ".join(map(str, job)), partial(measure, programs, *job))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="longmoe bench attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("attention_gpu.json"))
    parser.add_argument("--shapes", nargs="*", type=lambda text: tuple(map(int, text.split(","))), default=SHAPES)
    add_processes(parser)
    options = parser.parse_args(arguments)
    with pool_of(options.processes) as pool:
        run(options, arguments, pool)


if __name__ == "__main__":
    main()
