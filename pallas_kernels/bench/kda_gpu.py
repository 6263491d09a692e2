"""Checks KDA's Mosaic GPU kernels on this Hopper GPU, then times them. Prints every result as it comes and rewrites the JSON after each.

    longmoe bench kda [--out kda_gpu.json] [--shapes 1,8192,96 8,2048,32] [--no-train] [--no-xla] [--no-parts] [--anchor SCRIPT ...]

K = V = 128, bfloat16, raw bounded gates, logits of beta and unnormalised q, k: the whole operator. A part that fails is recorded with its error
and the rest goes on. --anchor: scripts that print one JSON line for each `B,T,H` argument, run in the same command after our own.
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
import numpy as np
from jax import lax

from pallas_kernels.bench import command, commit
from pallas_kernels.kda import gates, mosaic_gpu_backward, mosaic_gpu_forward, mosaic_gpu_prepare, mosaic_gpu_tiles, specs
from pallas_kernels.kda.api import kda, kda_step
from pallas_kernels.kda.chunk import CHUNK
from pallas_kernels.testing import median_ms, outputs_and_gradients, rms_ratio

SHAPES = ((1, 8192, 96), (8, 2048, 32), (1, 65536, 16), (4, 4096, 16))
WIDE = ("q", "k", "v", "g")
WHOLE = dict(gate="bounded", beta_logits=True, qk_l2norm=True)


def raw_inputs(shape, seed=0):
    """Float32 numpy arguments, q, k, v, g on bfloat16 values."""
    x = specs.inputs(shape, seed=seed)
    draw = np.random.default_rng(seed + 1)
    x["g"], x["beta"] = draw.normal(size=x["g"].shape), draw.normal(size=x["beta"].shape)
    x["a_log"], x["dt_bias"] = 0.3 * draw.normal(size=shape.heads), draw.normal(size=(shape.heads, shape.key))
    return {n: np.asarray(jnp.asarray(a, jnp.bfloat16 if n in WIDE else jnp.float32), np.float32) for n, a in x.items()}


def call(implementation, narrow=WIDE, **keywords):
    def run(**x):
        if implementation != "reference":
            x = {n: a.astype(jnp.bfloat16) if n in narrow else a for n, a in x.items()}
        return kda(**x, **keywords, implementation=implementation)
    return run


def accuracy(shape, keywords, change, narrow=WIDE, implementations=("mosaic_gpu", "xla")):
    """RMS ratio of every output and gradient against the float64 recurrence at the rounded inputs, which runs on the CPU."""
    x = change(raw_inputs(shape))
    draw = np.random.default_rng(9)
    cotangents = tuple(np.asarray(jnp.asarray(draw.normal(size=x[n].shape), d), np.float32) for n, d in (("v", jnp.bfloat16), ("initial_state", jnp.float32)))
    with jax.default_device(jax.devices("cpu")[0]):
        want = outputs_and_gradients(call("reference", **keywords), x, cotangents, jnp.float64)
    result = {}
    for name in implementations:
        got = outputs_and_gradients(call(name, narrow, **keywords), x, cotangents)
        again = outputs_and_gradients(call(name, narrow, **keywords), x, cotangents) if name == "mosaic_gpu" else got
        ratios = {n: rms_ratio(got[0][i], want[0][i]) for i, n in enumerate(("o", "state"))} | {f"d {n}": rms_ratio(got[1][n], want[1][n]) for n in want[1]}
        same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again)))
        result[name] = {n: float(f"{r:.3g}") for n, r in ratios.items()} | dict(two_runs_equal=same)
    return result


def packed(x):
    tokens = x["q"].shape[1]
    ids = np.searchsorted([0.13 * tokens, 0.37 * tokens, 0.38 * tokens, 0.72 * tokens], np.arange(tokens)) + 1
    ids[int(0.5 * tokens):int(0.5 * tokens) + 9] = 0
    return x | dict(segment_ids=np.broadcast_to(ids, x["q"].shape[:2]).astype(np.int32))


def log_decays(x):
    case = specs.inputs(specs.Shape(*x["q"].shape, x["v"].shape[-1]), "strong_then_weak")
    x = x | dict(g=case["g"], beta=case["beta"])
    return {n: a for n, a in x.items() if n not in ("a_log", "dt_bias")}


def slow_decay(x):
    """So slow that a state is still there after a thousand tokens."""
    return x | dict(g=x["g"] - 6)


def prefixes():
    """For each prefix length, whether outputs and prefix-loss gradients keep every bit when later inputs change."""
    shape = specs.Shape(1, 300, 2, 128, 128)
    x, other = raw_inputs(shape), raw_inputs(shape, seed=50)
    t = np.arange(shape.tokens)

    @jax.jit
    def run(x, cotangent):
        names = [*WIDE, "beta"]
        o, pull = jax.vjp(lambda part: call("mosaic_gpu", **WHOLE)(**{**x, **part})[0], {n: x[n] for n in names})
        return o, pull(cotangent)[0]

    result = {}
    for prefix in (1, 7, 15, 16, 17, 33, 63, 64, 65, 130, 257):
        keep = lambda a, prefix=prefix: (t < prefix).reshape(1, -1, *(1,) * (a.ndim - 2))
        cotangent = jnp.asarray(np.where(keep(x["v"]), x["v"], 0), jnp.bfloat16)
        mixed = x | {n: np.where(keep(x[n]), x[n], other[n]) for n in (*WIDE, "beta")}
        a, b = run(x, cotangent), run(mixed, cotangent)
        result[prefix] = all(np.array_equal(np.asarray(p)[:, :prefix], np.asarray(q)[:, :prefix]) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
    return result


def time_ms(function, *arguments):
    return round(median_ms(function, *arguments, inner=5, outer=7)[0], 4)


def device_inputs(batch, tokens, heads, width=128):
    keys = jax.random.split(jax.random.key(0), 8)
    new = lambda i, *s: jax.random.normal(keys[i], s, jnp.bfloat16)
    wide = (batch, tokens, heads, width)
    return dict(q=new(0, *wide), k=new(1, *wide), v=new(2, *wide), g=new(3, *wide), beta=new(4, batch, tokens, heads),
                a_log=0.1 * jax.random.normal(keys[6], (heads,)), dt_bias=0.1 * jax.random.normal(keys[7], (heads, width))), new(5, *wide)


def timed_parts(x, do, implementation, train, parts=True):
    """Name -> function to time, over jitted callables with their arguments bound."""
    forward = jax.jit(lambda x: call(implementation, **WHOLE)(**x))
    yield "forward_ms", forward, (x,)
    if train:
        both = lambda residuals: jax.jit(lambda x, do: jax.vjp(lambda x: call(implementation, residuals=residuals, **WHOLE)(**x)[0], x)[1](do))
        yield "train_ms", both("recompute"), (x, do)
        yield "train_saving_ms", both("save"), (x, do)
    if implementation == "mosaic_gpu" and parts:
        yield from kernel_parts(x, do, train)


def kernel_parts(x, do, train):
    """The kernels one by one, on sequences cut as the whole operator cuts them."""
    inputs, initial, config, parts = kernel_inputs(x)
    prepare = jax.jit(partial(mosaic_gpu_prepare.prepare, config))
    yield "prepare_ms", prepare, (inputs,)
    prepared = prepare(inputs)
    if parts > 1:
        yield "transitions_ms", jax.jit(partial(mosaic_gpu_forward.transitions, config)), (prepared, inputs.v, inputs.beta)
    recur = lambda save: jax.jit(lambda p, v, b, s: mosaic_gpu_forward.recur(config, p, v, b, s, save))
    yield "recur_ms", recur(False), (prepared, inputs.v, inputs.beta, initial)
    yield "recur_saving_ms", recur(True), (prepared, inputs.v, inputs.beta, initial)
    if train:
        _, _, states, d = recur(True)(prepared, inputs.v, inputs.beta, initial)
        do = do.reshape(inputs.v.shape)
        reverse = lambda save: jax.jit(lambda p, do, s: mosaic_gpu_backward.reverse(config, p, do, s, save))
        if parts > 1:
            yield "reverse_transitions_ms", reverse(False), (prepared, do, initial)
        yield "reverse_ms", reverse(True), (prepared, do, initial)
        _, dstates, w = reverse(True)(prepared, do, initial)
        del prepared
        yield "gradients_ms", jax.jit(partial(mosaic_gpu_backward.gradients, config)), (inputs, do, w, d, states, dstates)


def kernel_inputs(x):
    batch, tokens, heads, width = x["q"].shape
    rate = jnp.exp(x["a_log"])
    beta = jnp.swapaxes(jax.nn.sigmoid(x["beta"].astype(jnp.float32)), 1, 2)
    parts = mosaic_gpu_forward.parts_of(batch * heads, tokens // CHUNK)
    inputs = mosaic_gpu_tiles.Inputs(x["q"], x["k"], x["v"], x["g"], beta, rate, rate[:, None] * x["dt_bias"], None, None)
    config = mosaic_gpu_tiles.Config(width ** -0.5, gates.DEFAULT_LOWER_BOUND, True)
    return mosaic_gpu_forward.cut(inputs, parts), jnp.zeros((batch * parts, heads, width, width)), config, parts


DECODE = specs.Shape(64, 1, 16, 128, 128)
DECODE_STEPS = 200


def decode_accuracy():
    """RMS ratios of one step against the float64 recurrence, for every gate and width."""
    cases = (("bounded", 128, 128), ("softplus", 64, 64), ("log_decay", 128, 64), ("bounded", 64, 128))
    return {f"{gate} {key}x{value}": one_step_accuracy(gate, key, value) for gate, key, value in cases}


def one_step_accuracy(gate, key, value):
    x = raw_inputs(specs.Shape(5, 1, 3, key, value))
    x = {n: a[:, 0] if n in (*WIDE, "beta") else a for n, a in x.items()}
    if gate == "log_decay":
        x = {n: np.abs(a) * (-1 if n == "g" else 1) for n, a in x.items() if n not in ("a_log", "dt_bias")}
    state = x.pop("initial_state")

    def run(implementation, x, state):
        return kda_step(**x, state=state, gate=gate, beta_logits=gate != "log_decay", qk_l2norm=True, implementation=implementation)

    got = jax.jit(partial(run, "mosaic_gpu"))({n: jnp.asarray(a, jnp.bfloat16) if n in WIDE else a for n, a in x.items()}, state)
    with jax.enable_x64():
        want = run("reference", {n: jnp.asarray(a, jnp.float64) for n, a in x.items()}, jnp.asarray(state, jnp.float64))
    return dict(o=rms_ratio(got[0], want[0]), state=rms_ratio(got[1], want[1]))


def decode_times(implementation):
    """One step among many in one program, the state carried in place, beside a copy of the state's bytes in the same loop."""
    x, _ = device_inputs(DECODE.batch, 1, DECODE.heads)
    x = {n: a[:, 0] if n in (*WIDE, "beta") else a for n, a in x.items()}
    state = jnp.zeros((DECODE.batch, DECODE.heads, DECODE.key, DECODE.value))

    def steps(x, state):
        def step(_, carry):
            o, state = kda_step(**x | dict(v=carry[0]), state=carry[1], implementation=implementation, **WHOLE)
            return o, state
        return lax.fori_loop(0, DECODE_STEPS, step, (x["v"], state))

    traffic = 2 * state.nbytes
    rate = lambda f, *arguments: DECODE_STEPS * traffic / median_ms(jax.jit(f), *arguments, inner=2, outer=7)[0] / 1e9
    copies = rate(lambda state: lax.fori_loop(0, DECODE_STEPS, lambda _, s: s * 0.999, state), state)
    found = rate(steps, x, state)
    return dict(step_us=traffic / found / 1e6, tb_per_s=found, copy_tb_per_s=copies, share=found / copies, state_bytes=state.nbytes)


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


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="longmoe bench kda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("kda_gpu.json"))
    parser.add_argument("--shapes", nargs="*", default=[",".join(map(str, s)) for s in SHAPES])
    parser.add_argument("--no-train", action="store_true")
    parser.add_argument("--no-accuracy", action="store_true")
    parser.add_argument("--xla", action=argparse.BooleanOptionalAction, default=True, help="time the portable path too")
    parser.add_argument("--parts", action=argparse.BooleanOptionalAction, default=True, help="time every kernel by itself too")
    parser.add_argument("--anchor", nargs="*", default=[])
    options = parser.parse_args(arguments)
    report = Report(options.out, arguments)
    print(json.dumps(report.head), flush=True)
    implementations = ("mosaic_gpu", *(("xla",) if options.xla else ()))
    if not options.no_accuracy:
        shape, check = specs.Shape(2, 500, 2, 128, 128), partial(accuracy, implementations=implementations)
        report.add("accuracy: everything inside", lambda: check(shape, WHOLE, lambda x: x))
        report.add("accuracy: packed, Dv 64", lambda: check(shape._replace(value=64), WHOLE, packed))
        report.add("accuracy: log decays, Dk 64", lambda: check(shape._replace(key=64), dict(lower_bound=-5.0), log_decays, WIDE[:3]))
        long = specs.Shape(1, 64 * 64, 1, 128, 128)
        report.add("accuracy: one long head in parts", lambda: check(long, WHOLE, slow_decay))
        report.add("prefixes keep every bit", prefixes)
        report.add("accuracy: decoding", decode_accuracy)
    for implementation in implementations:
        report.add(f"{implementation} decoding {DECODE.batch} x {DECODE.heads}", partial(decode_times, implementation))
    for text in options.shapes:
        for implementation in implementations:
            try:
                parts = timed_parts(*device_inputs(*map(int, text.split(","))), implementation, not options.no_train, options.parts)
                for name, function, values in parts:
                    report.add(f"{implementation} {text} {name}", partial(time_ms, function, *values))
            except Exception as error:
                report.add(f"{implementation} {text}", partial(raise_again, error))
    for script in options.anchor:
        run = lambda script=script: subprocess.run([sys.executable, script, *options.shapes], capture_output=True, text=True).stdout.splitlines()
        report.add(f"anchor {script}", run)


def raise_again(error):
    raise error


if __name__ == "__main__":
    main()
