"""Checks and times the Mosaic GPU grouped matmul on a Hopper GPU: every candidate tile, forward and both gradients. Writes JSON after each shape.

    longmoe bench grouped-matmul [--seconds 220] [--shapes 0 65536,2048,1024,256] [--operations drhs] [--anchors a.py b.py] [--out grouped_matmul_gpu.json]

anchors: scripts run first, each in a process of its own (they may use another framework); JSON lines that they print are kept.
Groups are uneven: Dirichlet(8), seed 0. TFLOP/s count useful arithmetic, 2 M K N, and the time includes building the schedule.
Under lasting load the power limit lowers the clock, so candidates are timed in bursts after a rest and 25 ms of calls: median of 5 samples of 5.
`sustained_tflops`, of the best of each operation only, is the rate of half a second of calls back to back. Both ways a dense product, 8192 cubed, is
the ceiling (`dense_tflops`).
"""
import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

from pallas_kernels.bench import command, commit
from pallas_kernels.bench.compiling import add_processes, pool_of
from pallas_kernels.grouped_matmul import cases, mosaic_gpu, tiles
from pallas_kernels.grouped_matmul.mosaic_gpu_rows import rows_matmul
from pallas_kernels.grouped_matmul.mosaic_gpu_weights import weights_matmul
from pallas_kernels.testing import median_ms, rms_ratio

SHAPES = [(262144, 1024, 1024, 64), (131072, 3584, 6144, 112), (65536, 2048, 1024, 256)]
OPERATIONS = ("forward", "dlhs", "drhs")
BOUND = 3e-3
DENSE = 8192
REST, WARM, LOAD = 0.3, 0.025, 0.5
"""Seconds without work before a timing; of calls that bring the clock up again; of work in a sustained timing."""
PLANS = {
    "default": {},
    "clusters": dict(forward=tiles.RowTiles(cluster_along="rows"), dlhs=tiles.RowTiles(cols=64, cluster_along="cols"),
                     drhs=tiles.WeightTiles(cluster_along="rows")),
    "columns past the end": dict(forward=tiles.RowTiles(), dlhs=tiles.RowTiles(cols=256), drhs=tiles.WeightTiles()),
    "short steps": dict(drhs=tiles.WeightTiles(depth=32, stages=8, lag=3)),
}
START = time.monotonic()


def say(**record):
    print(json.dumps(dict(at=round(time.monotonic() - START, 1), **record)), flush=True)
    return record


def draw_sizes(rows, groups):
    sizes = (np.random.default_rng(0).dirichlet(np.ones(groups) * 8) * rows).astype(np.int32)
    sizes[-1] += rows - sizes.sum()
    return sizes


def operation(name, choice, sms):
    """(function of (lhs, rhs, sizes, dout)) for one of OPERATIONS."""
    if name == "forward":
        return lambda lhs, rhs, sizes, dout: rows_matmul(lhs, rhs, sizes, lhs.dtype, choice, transpose_rhs=False, sms=sms)
    if name == "dlhs":
        return lambda lhs, rhs, sizes, dout: rows_matmul(dout, rhs, sizes, lhs.dtype, choice, transpose_rhs=True, sms=sms)
    return lambda lhs, rhs, sizes, dout: weights_matmul(lhs, dout, sizes, rhs.dtype, choice, sms=sms)


@functools.partial(jax.jit, static_argnames=("name", "window"))
def error_ratio(name, got, lhs, rhs, sizes, dout, window):
    """Relative Frobenius error against float32 products, group by group in windows of `window` rows."""
    dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    wide = lambda x: x.astype(jnp.float32)

    def one_group(sums, group):
        weight, size, end, index = group
        at = jnp.clip(end - size, 0, lhs.shape[0] - window)
        row = at + jnp.arange(window)
        mine = ((row >= end - size) & (row < end))[:, None]
        cut = lambda x: jnp.where(mine, wide(jax.lax.dynamic_slice_in_dim(x, at, window)), 0)
        if name == "drhs":
            want, have = dot(cut(lhs).T, cut(dout)), wide(got[index])
        else:
            want, have = dot(cut(lhs), wide(weight)) if name == "forward" else dot(cut(dout), wide(weight).T), cut(got)
        return (sums[0] + jnp.sum((have - want) ** 2), sums[1] + jnp.sum(want ** 2)), None

    (error, size), _ = jax.lax.scan(one_group, (0.0, 0.0), (rhs, sizes, jnp.cumsum(sizes), jnp.arange(sizes.shape[0])))
    return jnp.sqrt(error / size)


def check_case(label, kind, out_dtype):
    """Failures of one adverse case, the whole gradient rule twice, against float64; clean, and with the largest group's rows NaN."""
    case, failures = (cases.CASES | cases.ON_HARDWARE)[label], []
    plan = dataclasses.replace(mosaic_gpu.make_plan(*case[:3], len(case[3])), **PLANS[kind])

    @jax.jit
    def run(lhs, rhs, sizes, dout):
        out, vjp = jax.vjp(lambda lhs, rhs: mosaic_gpu.grouped_matmul(lhs, rhs, sizes, out_dtype, plan), lhs, rhs)
        return out, *vjp(dout.astype(out.dtype))

    for poisoned in (None, int(np.argmax(case[3]))):
        arguments, want = cases.inputs(*case, poisoned=poisoned)
        got, again = (jax.tree.map(np.asarray, run(*arguments)) for _ in range(2))
        for name, a, b, w in zip(OPERATIONS, got, again, want):
            a, b = a.astype(np.float64), b.astype(np.float64)
            found = dict(error=rms_ratio(np.nan_to_num(a), np.nan_to_num(w)), same_nan=bool(np.array_equal(np.isnan(a), np.isnan(w))),
                         repeats=bool(np.array_equal(a, b, equal_nan=True)))
            if not (found["error"] < BOUND and found["same_nan"] and found["repeats"]):
                failures.append(dict(case=label, plan=kind, out=out_dtype, poisoned=poisoned, operation=name, **found))
    return failures


def small_cases(pool):
    """The adverse cases of the CPU tests on real hardware, which the interpreter cannot vouch for."""
    jobs = [(label, "default", "bfloat16") for label in cases.CASES | cases.ON_HARDWARE]
    jobs += [("columns past the end", kind, "bfloat16") for kind in ("clusters", "columns past the end", "short steps")]
    jobs += [(label, *how) for label in list(cases.CASES)[:4] for how in (("default", "float32"), ("clusters", "bfloat16"), ("short steps", "bfloat16"))]
    failures = []
    for job, future in [(job, pool.submit(check_case, *job)) for job in jobs]:
        try:
            failures += future.result()
        except Exception as error:
            failures.append(dict(case=job, exception=repr(error)[:400]))
    return say(check="small cases", jobs=len(jobs), failures=failures)


def argument_shapes(shape):
    rows, k, n, groups = shape
    new = jax.ShapeDtypeStruct
    return new((rows, k), jnp.bfloat16), new((groups, k, n), jnp.bfloat16), new((groups,), jnp.int32), new((rows, n), jnp.bfloat16)


def compile_one(name, choice, shape):
    """(serialized program, seconds); runs in a process of its own, since lowering holds Python's lock."""
    begin, sms = time.monotonic(), jax.devices()[0].core_count
    compiled = jax.jit(operation(name, choice, sms)).lower(*argument_shapes(shape)).compile()
    return serialize_executable.serialize(compiled), time.monotonic() - begin


def compile_all(work, shape, pool, deadline):
    """{(operation, tiles): (program, seconds) or the error}, none of them compiling any more: a compilation beside a timing would spoil it."""
    found, pending = {}, [(job, pool.submit(compile_one, *job, shape)) for job in work]
    for job, future in pending:
        try:
            serialized, took = future.result(max(deadline - time.monotonic(), 0))
            found[job] = serialize_executable.deserialize_and_load(*serialized), took
        except Exception as error:
            future.cancel()
            found[job] = error
    return found


def burst_ms(function, *arguments):
    """(median, least) milliseconds of a call, as other libraries time theirs."""
    time.sleep(REST)
    began = time.perf_counter()
    while time.perf_counter() - began < WARM:
        jax.block_until_ready(function(*arguments))
    return median_ms(function, *arguments, inner=5, outer=5)


def sustained_ms(function, *arguments, expected):
    """Milliseconds of a call in a row of them that takes about LOAD seconds. expected: of one call."""
    time.sleep(REST)
    return median_ms(function, *arguments, inner=max(5, round(1e3 * LOAD / expected)), outer=1)[0]


def tflops(shape, ms):
    rows, k, n, *_ = shape
    return round(2 * rows * k * n / ms / 1e9, 1)


def time_dense():
    """The ceiling: a dense product of XLA's choice, in bursts and sustained."""
    shape = (DENSE,) * 3
    square = jax.random.normal(jax.random.key(0), (DENSE, DENSE), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    median, _ = burst_ms(product, square, square)
    lasting = sustained_ms(product, square, square, expected=median)
    found = dict(dense_tflops=tflops(shape, median), dense_sustained_tflops=tflops(shape, lasting))
    say(**found)
    return found


def make_arguments(shape, sizes):
    rows, k, n, groups = shape
    keys = jax.random.split(jax.random.key(0), 3)
    draw = jax.jit(lambda key, shape, scale: scale * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    return draw(keys[0], (rows, k), 1.0), draw(keys[1], (groups, k, n), 0.02), jnp.asarray(sizes), draw(keys[2], (rows, n), 1.0)


def time_shape(shape, operations, seconds, pool):
    rows, k, n, groups = shape
    begin = time.monotonic()
    sizes = draw_sizes(rows, groups)
    arguments, window = make_arguments(shape, sizes), int(-(-sizes.max() // 128) * 128)
    lists = {name: tiles.candidates(name, rows=rows, k=k, n=n, groups=groups) for name in operations}
    # Best guesses of all operations first, so that a short budget still covers each.
    work = [(name, lists[name][i]) for i in range(max(map(len, lists.values()))) for name in operations if i < len(lists[name])]
    compiled = compile_all(work, shape, pool, begin + 0.75 * seconds)
    records, best = [], {}
    for name, choice in work:
        record = dict(shape=shape, operation=name, tiles=dataclasses.asdict(choice))
        try:
            if isinstance(compiled[name, choice], Exception):
                raise compiled[name, choice]
            program, took = compiled.pop((name, choice))
            if time.monotonic() > begin + seconds:
                records.append(record | dict(skipped="out of time"))
                continue
            error = float(error_ratio(name, program(*arguments), *arguments, window))
            record |= dict(compile_s=round(took, 2), error=error, correct=error < BOUND)
            median, least = burst_ms(program, *arguments)
            record |= dict(ms=round(median, 4), min_ms=round(least, 4), tflops=tflops(shape, median))
        except Exception as error:
            record |= dict(exception=repr(error)[:600], trace=traceback.format_exc()[-600:])
        records.append(say(**record))
        if record.get("correct") and "ms" in record and (name not in best or record["ms"] < best[name][0]["ms"]):
            best[name] = records[-1], program
    for record, program in best.values():
        record["sustained_tflops"] = tflops(shape, sustained_ms(program, *arguments, expected=record["ms"]))
    return records


def best_of(records, dense):
    """The fastest correct candidate of each shape and operation, with its shares of the dense product's rates."""
    best = {}
    for record in sorted((r for r in records if "sustained_tflops" in r), key=lambda r: (r["shape"], r["operation"])):
        rates = {name: record[name] for name in ("tflops", "sustained_tflops")}
        shares = {name.replace("tflops", "share"): round(rate / dense[f"dense_{name}"], 3) for name, rate in rates.items()}
        best[f"{record['shape']} {record['operation']}"] = rates | shares | dict(tiles=record["tiles"])
    return best


def run_anchors(scripts):
    found = []
    for script in scripts:
        try:
            done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=150)
            found += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            if done.returncode:
                found.append(dict(anchor=script, exception=done.stderr[-600:]))
        except Exception as error:
            found.append(dict(anchor=script, exception=repr(error)[:600]))
    for record in found:
        say(**record)
    return found


def measure(options, arguments, anchors, pool):
    """Checks, then times every shape; rewrites options.out after each."""
    begin, device = time.monotonic(), jax.devices()[0]
    result = dict(operator="grouped_matmul", implementation="mosaic_gpu", dtype="bfloat16", device=device.device_kind, commit=commit(),
                  versions=dict(jax=jax.__version__, jaxlib=jax.lib.__version__, python=sys.version.split()[0], platform=device.client.platform_version),
                  command=command("grouped-matmul", arguments), anchors=anchors, checks=options.checks and small_cases(pool))
    dense = time_dense()
    result |= dense | dict(records=[], best={})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for done, shape in enumerate(options.shapes):
        left = options.seconds - (time.monotonic() - begin)
        result["records"] += time_shape(shape, options.operations, left / (len(options.shapes) - done), pool)
        result["best"] = best_of(result["records"], dense)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def one_shape(text):
    """A shape by its index in SHAPES or as M,K,N,G."""
    match [int(x) for x in text.split(",") if x.isdigit()]:
        case [rows, k, n, groups]:
            return rows, k, n, groups
        case [index] if index < len(SHAPES):
            return SHAPES[index]
    raise argparse.ArgumentTypeError(f"got {text!r}, wanted M,K,N,G or an index from 0 to {len(SHAPES) - 1}")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="longmoe bench grouped-matmul", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("grouped_matmul_gpu.json"))
    parser.add_argument("--seconds", type=float, default=220, help="stop timing new candidates then; anchors are extra")
    add_processes(parser)
    parser.add_argument("--shapes", type=one_shape, nargs="+", default=SHAPES, help=f"shapes to time: M,K,N,G or an index, 0 to {len(SHAPES) - 1}")
    parser.add_argument("--operations", choices=OPERATIONS, nargs="+", default=OPERATIONS)
    parser.add_argument("--anchors", nargs="*", default=[])
    parser.add_argument("--checks", action=argparse.BooleanOptionalAction, default=True, help="the small adverse cases first")
    options = parser.parse_args(arguments)
    with pool_of(options.processes) as pool:
        # Processes start with their first work: the anchors have the device to themselves.
        result = measure(options, arguments, run_anchors(options.anchors), pool)
    for name, best in result["best"].items():
        say(best=name, **best)


if __name__ == "__main__":
    main()
