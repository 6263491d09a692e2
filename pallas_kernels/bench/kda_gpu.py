"""Checks KDA's Mosaic GPU kernels on this Hopper GPU, then times them. Prints every result as it comes and rewrites the JSON after each.

    longmoe bench kda [--out kda_gpu.json] [--shapes 1,8192,96 8,2048,32] [--no-train] [--no-xla] [--no-parts] [--no-long] [--anchor SCRIPT ...]

K = V = 128, bfloat16, raw bounded gates, logits of beta and unnormalised q, k: the whole operator. Checks and compilation run side by side in processes of
their own, and nothing runs beside a timing. --long: 2^20 tokens in one call, its time a token beside that of 2^16. A part that fails is
recorded with its error and the rest goes on. --anchor: scripts that print one JSON line for each `B,T,H` argument, run in the same command after our own.
"""
import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bench import command, commit
from pallas_kernels.bench import kda_gpu_checks as checks
from pallas_kernels.bench.compiling import Programs, add_processes, pool_of
from pallas_kernels.kda import gates, mosaic_gpu_backward, mosaic_gpu_forward, mosaic_gpu_prepare, mosaic_gpu_tiles, specs
from pallas_kernels.kda.api import kda_step
from pallas_kernels.kda.chunk import CHUNK
from pallas_kernels.testing import median_ms

SHAPES = ((1, 8192, 96), (8, 2048, 32), (1, 65536, 16), (4, 4096, 16))
LONG = {"forward": ((1, 1 << 16, 8), (1, 1 << 20, 8)), "train": ((1, 1 << 16, 4), (1, 1 << 20, 4))}
DECODE = specs.Shape(64, 1, 16, 128, 128)
DECODE_STEPS, DECODE_UNROLL = 200, 10


# ---------------------------------------------------------------- programs, each (what, implementation, shape)


def program(what, implementation, shape):
    """(function, shapes of its arguments)."""
    if what in ("step", "copy"):
        return decode_program(what, implementation)
    if what in PARTS:
        return partial(PARTS[what], statics(shape)[1]), part_shapes(what, shape)
    x, do = jax.eval_shape(partial(checks.device_inputs, *shape))
    run = lambda residuals: lambda x: checks.call(implementation, residuals=residuals, **checks.WHOLE)(**x)[0]
    if what == "forward":
        return run("recompute"), (x,)
    residuals = "save" if what == "train saving" else "recompute"
    return lambda x, do: jax.vjp(run(residuals), x)[1](do), (x, do)


def decode_program(what, implementation):
    """One step among many in one program, the state carried in place; or a copy of the state's bytes in such a loop."""
    x, _ = jax.eval_shape(partial(checks.device_inputs, DECODE.batch, 1, DECODE.heads))
    x = {n: jax.ShapeDtypeStruct((a.shape[0], *a.shape[2:]), a.dtype) if n in (*checks.WIDE, "beta") else a for n, a in x.items()}
    state = jax.ShapeDtypeStruct((DECODE.batch, DECODE.heads, DECODE.key, DECODE.value), jnp.float32)

    def turn(x, state):
        # A turn of the loop has two kernels of its own, which count: a turn is several steps, and the barrier keeps copies from becoming one.
        for _ in range(DECODE_UNROLL):
            new = kda_step(**x, state=state, implementation=implementation, **checks.WHOLE)[1] if what == "step" else state * 0.999
            state = lax.optimization_barrier(new)
        return state

    return lambda x, state: lax.fori_loop(0, DECODE_STEPS // DECODE_UNROLL, lambda _, state: turn(x, state), state), (x, state)


def kernel_inputs(x):
    """(arguments of the kernels, the states that they start from), sequences cut as the whole operator cuts them."""
    batch, tokens, heads, width = x["q"].shape
    rate = jnp.exp(x["a_log"])
    beta = jnp.swapaxes(jax.nn.sigmoid(x["beta"].astype(jnp.float32)), 1, 2)
    parts = mosaic_gpu_forward.parts_of(batch * heads, tokens // CHUNK)
    inputs = mosaic_gpu_tiles.Inputs(x["q"], x["k"], x["v"], x["g"], beta, rate, rate[:, None] * x["dt_bias"], None, None)
    return mosaic_gpu_forward.cut(inputs, parts), jnp.zeros((batch * parts, heads, width, width))


def statics(shape):
    """How many parts a sequence of this shape is cut into, and the kernels' static facts."""
    batch, tokens, heads = shape
    return mosaic_gpu_forward.parts_of(batch * heads, tokens // CHUNK), mosaic_gpu_tiles.Config(128 ** -0.5, gates.DEFAULT_LOWER_BOUND, True)


PARTS = {
    "prepare": mosaic_gpu_prepare.prepare,
    "transitions": mosaic_gpu_forward.transitions,
    "recur": lambda config, *arguments: mosaic_gpu_forward.recur(config, *arguments, False),
    "recur saving": lambda config, *arguments: mosaic_gpu_forward.recur(config, *arguments, True),
    "reverse transitions": lambda config, *arguments: mosaic_gpu_backward.reverse(config, *arguments, False),
    "reverse": lambda config, *arguments: mosaic_gpu_backward.reverse(config, *arguments, True),
    "gradients": mosaic_gpu_backward.gradients,
}
"""The kernels one by one."""


def part_arguments(what, inputs, do, initial, run):
    """Arguments of one kernel from those of the first, run(what, *arguments) being how others make them."""
    if what == "prepare":
        return (inputs,)
    prepared = run("prepare", inputs)
    if what == "transitions":
        return prepared, inputs.v, inputs.beta
    if what.startswith("recur"):
        return prepared, inputs.v, inputs.beta, initial
    if what.startswith("reverse"):
        return prepared, do, initial
    _, _, states, d = run("recur saving", prepared, inputs.v, inputs.beta, initial)
    _, dstates, w = run("reverse", prepared, do, initial)
    return inputs, do, w, d, states, dstates


def part_shapes(what, shape):
    x, do = jax.eval_shape(partial(checks.device_inputs, *shape))
    inputs, initial = jax.eval_shape(kernel_inputs, x)
    run = lambda part, *arguments: jax.eval_shape(partial(PARTS[part], statics(shape)[1]), *arguments)
    return part_arguments(what, inputs, jax.ShapeDtypeStruct(inputs.v.shape, do.dtype), initial, run)


def part_names(shape, train):
    parts, _ = statics(shape)
    names = [name for name in PARTS if parts > 1 or "transitions" not in name]
    return names if train else names[:names.index("recur") + 1]


# ---------------------------------------------------------------- timings


def time_program(programs, what, implementation, shape):
    """Milliseconds, median."""
    inner, outer = (5, 7) if shape[1] < 1 << 20 else (1, 5)
    function, (x, do) = programs[what, implementation, shape], checks.device_inputs(*shape)
    if what not in PARTS:
        return round(median_ms(function, *((x,) if what == "forward" else (x, do)), inner=inner, outer=outer)[0], 4)
    inputs, initial = kernel_inputs(x)
    del x
    run = lambda part, *arguments: programs[part, implementation, shape](*arguments)
    return round(median_ms(function, *part_arguments(what, inputs, do.reshape(inputs.v.shape), initial, run), inner=inner, outer=outer)[0], 4)


def decode_times(programs, implementation):
    """A step's time and rate, beside a copy of the state's bytes in the same loop."""
    shapes = decode_program("step", implementation)[1]
    arguments = jax.tree.map(lambda s: jax.random.normal(jax.random.key(0), s.shape, s.dtype), shapes)
    traffic = 2 * arguments[1].nbytes
    rate = lambda what: DECODE_STEPS * traffic / median_ms(programs[what, implementation, None], *arguments, inner=2, outer=7)[0] / 1e9
    copies, found = rate("copy"), rate("step")
    return dict(step_us=traffic / found / 1e6, tb_per_s=found, copy_tb_per_s=copies, share=found / copies, state_bytes=arguments[1].nbytes)


def time_long(programs, what):
    """Milliseconds of both lengths, and how many times the short one's time a token the long one takes."""
    short, long = LONG[what]
    times = [time_program(programs, what, "mosaic_gpu", shape) for shape in (short, long)]
    return dict(ms=dict(zip(map(str, (short, long)), times)), a_token=round(times[1] / times[0] * short[1] / long[1], 3),
                peak_bytes=jax.devices()[0].memory_stats()["peak_bytes_in_use"])


class Report:
    def __init__(self, path, arguments):
        self.path, self.rows = path, []
        device = jax.devices()[0]
        self.head = dict(commit=commit(), jax=jax.__version__, python=platform.python_version(), device=device.device_kind, command=command("kda", arguments),
                         platform_version=getattr(device.client, "platform_version", ""))

    def add(self, name, work):
        """Runs `work`, records its result or its error, and how long it took."""
        start = time.perf_counter()
        try:
            row = dict(part=name, result=work())
        except Exception as error:
            row = dict(part=name, error=f"{type(error).__name__}: {error}"[:1500], where=traceback.format_exc()[-1500:])
        row["seconds"] = round(time.perf_counter() - start, 1)
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self.path.write_text(json.dumps(dict(self.head, rows=self.rows), indent=1) + "\n")


def submit_checks(pool, implementations, long):
    """Name -> a check that runs in the pool. Those with most work on a CPU first; the long ones apart, since each fills the device."""
    found = {f"accuracy: {case}": pool.submit(checks.accuracy, case, implementations) for case in reversed(checks.ACCURACY)}
    found |= {"prefixes keep every bit": pool.submit(checks.prefixes), "accuracy: decoding": pool.submit(checks.decode_accuracy),
              "packed documents against each apart": pool.submit(checks.packed_apart),
              "one call against 4 in a row": pool.submit(checks.in_a_row, 1024, 3, 4, True)}
    if long:
        found |= {f"one call of 2^20 tokens against 2 in a row, {'train' if train else 'forward'}": pool.submit(checks.in_a_row, 1 << 20, heads, 2, train)
                  for heads, train in ((8, False), (4, True))}
    return found


def jobs_of(shapes, implementations, options):
    """Timed programs in the order of their rows: (what, implementation, shape)."""
    whole = ("forward", *(("train", "train saving") if options.train else ()))
    jobs = []
    for shape in shapes:
        for implementation in implementations:
            jobs += [(what, implementation, shape) for what in whole]
            if implementation == "mosaic_gpu" and options.parts:
                jobs += [(what, implementation, shape) for what in part_names(shape, options.train)]
    return jobs


def run(options, arguments, pool):
    report = Report(options.out, arguments)
    print(json.dumps(report.head), flush=True)
    implementations = ("mosaic_gpu", *(("xla",) if options.xla else ()))
    timed = jobs_of([tuple(map(int, text.split(","))) for text in options.shapes], implementations, options)
    decode = [(what, implementation, None) for implementation in implementations for what in ("step", "copy")]
    long = [(what, "mosaic_gpu", shape) for what, both in LONG.items() for shape in both] if options.long else []
    checked = submit_checks(pool, implementations, options.long) if options.accuracy else {}
    programs = Programs(pool, program, [*timed, *decode, *long])
    for name, future in checked.items():
        report.add(name, future.result)
    programs.wait()
    for implementation in implementations:
        report.add(f"{implementation} decoding {DECODE.batch} x {DECODE.heads}", partial(decode_times, programs, implementation))
    for what, implementation, shape in timed:
        report.add(f"{implementation} {','.join(map(str, shape))} {what} ms", partial(time_program, programs, what, implementation, shape))
    if options.long:
        for what in LONG:
            report.add(f"2^16 and 2^20 tokens, {what}", partial(time_long, programs, what))
    for script in options.anchor:
        lines = lambda script=script: subprocess.run([sys.executable, script, *options.shapes], capture_output=True, text=True).stdout.splitlines()
        report.add(f"anchor {script}", lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="longmoe bench kda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("kda_gpu.json"))
    parser.add_argument("--shapes", nargs="*", default=[",".join(map(str, s)) for s in SHAPES])
    add_processes(parser)
    switch = lambda name, help: parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=True, help=help)
    switch("train", "forward and backward too")
    switch("accuracy", "the checks first")
    switch("xla", "check and time the portable path too")
    switch("parts", "time every kernel by itself too")
    switch("long", "2^20 tokens")
    parser.add_argument("--anchor", nargs="*", default=[])
    options = parser.parse_args(arguments)
    with pool_of(options.processes) as pool:
        run(options, arguments, pool)


if __name__ == "__main__":
    main()
