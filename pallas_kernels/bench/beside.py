"""Times the small operators beside the large ones in every implementation that runs on this machine. Writes JSON.

    longmoe bench short-conv [--out short_conv.json] [--shapes 4,8192,1024,4 ...]
    longmoe bench gated-activation [--out gated_activation.json] [--shapes 262144,320 ...]
    longmoe bench top-k [--out top_k.json] [--shapes 32768,896,17 ...]

short-conv: B,T,C,taps, bfloat16 on a GPU (float32 on a CPU), documents of about 300 tokens, forward and with both gradients; `rms` against float64 at the same
inputs (o, dx, dtaps). gated-activation: rows,features of SiTU-GLU on the halves of one array, likewise; `rms` against float32. top-k: rows,columns,k of scores
with ties; `equal` to `xla`. `gigabytes_per_second` counts each operand and result once.
"""
import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import command, commit
from pallas_kernels.dispatch import NAMES
from pallas_kernels.gated_activation import api as gated
from pallas_kernels.short_conv import api as short_conv
from pallas_kernels.testing import median_ms, rms_ratio
from pallas_kernels.top_k import api as top_k

DOCUMENT = 300


def implementations(operator: Any, **facts: Any) -> list[str]:
    """All that can take the call but the reference."""
    return [name for name in NAMES if name != "reference" and not operator.unmet[name](**facts)]


def convolutions(batch: int, tokens: int, channels: int, width: int, repeats: int) -> Iterator[dict[str, Any]]:
    draw, dtype = np.random.default_rng(0), jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    x, g = (jax.random.normal(jax.random.key(i), (batch, tokens, channels), dtype) for i in range(2))
    taps = jax.random.normal(jax.random.key(2), (width, channels)) / 2
    runs = jnp.asarray(np.cumsum(draw.random((batch, tokens)) < 1 / DOCUMENT, axis=1) + 1, jnp.int32)

    def train(implementation, x, taps, g):
        out, pull = jax.vjp(partial(short_conv.short_conv, runs=runs, implementation=implementation), x, taps)
        return out, *pull(g)

    few = min(channels, 128)                                # channels are alike: float64 is slow on a GPU
    with jax.enable_x64():
        exact = [np.asarray(y) for y in jax.jit(partial(train, "xla"))(*(y[..., :few].astype(jnp.float64) for y in (x, taps, g)))]
    for name in implementations(short_conv.OPERATOR, tokens=tokens, channels=channels, width=width, dtype=dtype):
        time = lambda function, *arguments: round(median_ms(function, *arguments, inner=10, outer=repeats)[0], 4)
        forward = time(jax.jit(partial(short_conv.short_conv, runs=runs, implementation=name)), x, taps)
        step = jax.jit(partial(train, name))
        both, got = time(step, x, taps, g), step(x, taps, g)
        rms = [float(f"{rms_ratio(a[..., :few], b):.3g}") for a, b in zip(got, exact)]
        yield dict(shape=[batch, tokens, channels, width], implementation=name, forward_ms=forward, train_ms=both, rms=rms,
                   gigabytes_per_second=dict(forward=round(2 * x.nbytes / forward / 1e6), train=round(5 * x.nbytes / both / 1e6)))


def activations(rows: int, features: int, repeats: int) -> Iterator[dict[str, Any]]:
    dtype, gate = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32, gated.specs.Gate("situ")
    both, g = (2 * jax.random.normal(jax.random.key(i), (rows, width), dtype) for i, width in enumerate((2 * features, features)))

    def train(implementation, both, g):
        y, pull = jax.vjp(partial(gated.gated_activation, gate=gate, implementation=implementation), both)
        return y, *pull(g)

    exact = jax.jit(partial(train, "xla"))(both.astype(jnp.float32), g.astype(jnp.float32))
    for name in implementations(gated.OPERATOR, shape=g.shape, dtype=dtype):
        time = lambda function, *arguments: round(median_ms(function, *arguments, inner=10, outer=repeats)[0], 4)
        forward = time(jax.jit(partial(gated.gated_activation, gate=gate, implementation=name)), both)
        step = jax.jit(partial(train, name))
        train_ms, got = time(step, both, g), step(both, g)
        yield dict(shape=[rows, features], implementation=name, forward_ms=forward, train_ms=train_ms,
                   rms=[float(f"{rms_ratio(a, b):.3g}") for a, b in zip(got, exact)],
                   gigabytes_per_second=dict(forward=round(3 * g.nbytes / forward / 1e6), train=round(8 * g.nbytes / train_ms / 1e6)))


def selections(rows: int, columns: int, k: int, repeats: int) -> Iterator[dict[str, Any]]:
    x = jax.nn.sigmoid(jax.random.normal(jax.random.key(0), (rows, columns)))
    x = x.at[:rows // 100].set(jnp.round(8 * x[:rows // 100]) / 8)
    want = top_k.top_k(x, k, implementation="xla")
    for name in implementations(top_k.OPERATOR, rows=rows, columns=columns, k=k, dtype=x.dtype):
        function = jax.jit(partial(top_k.top_k, k=k, implementation=name))
        ms = round(median_ms(function, x, inner=10, outer=repeats)[0], 4)
        yield dict(shape=[rows, columns, k], implementation=name, ms=ms, equal=all(bool((a == b).all()) for a, b in zip(function(x), want)),
                   gigabytes_per_second=round((x.nbytes + rows * k * 8) / ms / 1e6))


def _run(operator: str, measure: Callable[..., Iterator[dict[str, Any]]], shapes: Sequence[tuple[int, ...]], arguments: list[str] | None) -> None:
    name = operator.replace("-", "_")
    parser = argparse.ArgumentParser(prog=f"longmoe bench {operator}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(f"{name}.json"))
    parser.add_argument("--shapes", nargs="*", type=lambda text: tuple(map(int, text.split(","))), default=shapes)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(arguments)
    report = dict(commit=commit(), jax=jax.__version__, device=jax.devices()[0].device_kind, command=command(operator, arguments), rows=[])
    for shape in options.shapes:
        for row in measure(*shape, options.repeats):
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")


def short_conv_main(arguments: list[str] | None = None) -> None:
    on_gpu = jax.default_backend() == "gpu"
    _run("short-conv", convolutions, [(4, 8192, 1024, 4), (1, 65536, 2048, 4)] if on_gpu else [(1, 512, 128, 4)], arguments)


def gated_activation_main(arguments: list[str] | None = None) -> None:
    on_gpu = jax.default_backend() == "gpu"
    _run("gated-activation", activations, [(262144, 320), (262144, 512), (131072, 896)] if on_gpu else [(1024, 64)], arguments)


def top_k_main(arguments: list[str] | None = None) -> None:
    on_gpu = jax.default_backend() == "gpu"
    _run("top-k", selections, [(32768, 896, 17), (65536, 112, 9), (32768, 64, 9)] if on_gpu else [(512, 64, 9)], arguments)
