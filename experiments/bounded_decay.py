"""What does a bound on the decay buy, and does it cost loss? The bounded gate (log decay in (-5, 0)) beside the softplus gate (no bound), in four parts.

    python experiments/bounded_decay.py --corpus runs/demo/corpus [--run-dir runs/bounded_decay] [--out results.json] [--size cpu|h200] [--seeds 3]
                                        [--parts tile range speed loss] [--jobs N] [--smoke]

tile: error of a 16-token tile's decays as products of two factors, and of the whole operator with factored and with exact tiles, against float64, for gate
pre-activations of growing size. range: the share of those factors that float16, bfloat16 and float32 cannot hold. speed: factored against exact tiles on this
machine, each with its error; on a Hopper GPU the kernels too, which want a bound. loss: the text run with either gate, three seeds.
Expected: under the bound every factor fits bfloat16 and errors stay those of rounding at any size; without it factors overflow and the factored operator
fails, so that it needs exact tiles, which take longer; the loss is the same within its interval. The same command again skips finished parts.
The first three parts take some 2 minutes of one CPU core (H200: 6 beside other work, most of them compilation and references in float64), the loss six times
the demo's training (H200, 2 runs at a time: 6 minutes).

Writes results.json and bounded_decay.png: errors over the gate's spread, times over tokens, training loss with its 95 % interval over seeds.
"""
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import arms
import jax
import jax.numpy as jnp
import numpy as np
from demo import Parts

from longmoe import plotting
from longmoe.configs import TrainConfig
from longmoe.model.kda import init_a_log_softplus, init_dt_bias
from pallas_kernels import kda
from pallas_kernels.dispatch import unmet_on_hopper
from pallas_kernels.kda import specs
from pallas_kernels.kda.chunk import BALANCE, TILE, decays
from pallas_kernels.kda.gates import DEFAULT_LOWER_BOUND, log_decay
from pallas_kernels.testing import median_ms, rms_ratio

PARTS = ("tile", "range", "speed", "loss")
GATES = ("bounded", "softplus")
DTYPES = ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of each part is done."""

    spreads: tuple[float, ...] = (0.5, 1, 2, 4, 8, 16)
    """Standard deviations of the gate's pre-activation."""
    tiles: int = 256
    operator: specs.Shape = specs.Shape(1, 512, 4, 64, 64)
    timed: tuple[specs.Shape, ...] = (specs.Shape(1, 1024, 4, 64, 64), specs.Shape(1, 2048, 4, 64, 64), specs.Shape(1, 4096, 4, 64, 64))
    timed_dtype: str = "float32"
    inner: int = 1
    outer: int = 9


SCALES = {
    "h200": Scale(timed=tuple(specs.Shape(1, tokens, 32, 128, 128) for tokens in (2048, 4096, 8192)), timed_dtype="bfloat16", inner=10),
    "cpu": Scale(),
    "smoke": Scale(spreads=(1, 16), tiles=4, operator=specs.Shape(1, 64, 1, 16, 16), timed=(specs.Shape(1, 64, 1, 16, 16),), outer=2),
}


def draw_log_decays(gate: str, shape: tuple[int, ...], spread: float, seed: int = 0) -> np.ndarray:
    """Float32 log decays [..., H, Dk] of a layer's first step: its parameters as they start, pre-activations normal with `spread` about their start."""
    *_, heads, width = shape
    decay, bias, draws = jax.random.split(jax.random.key(seed), 3)
    a_log = jnp.zeros(heads) if gate == "bounded" else init_a_log_softplus(decay, (heads,))
    raw = spread * jax.random.normal(draws, shape)
    return np.asarray(log_decay(raw, gate, a_log, init_dt_bias(bias, (heads, width)), None))


def tile_factors(g: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Float32 log decays [N, 16, K] of tiles, N a multiple of 4 -> the operator's own factors exp(G_i - anchor) and exp(anchor - G_j), the anchor before the
    tile and a constant between them, made in float32 and rounded to `dtype`, as the operands of a product are. Both [N, 16, K] float64, infinite or 0 where
    `dtype` cannot hold them.
    """
    tiles = decays(jnp.asarray(g).reshape(-1, 2, 2 * TILE, g.shape[-1]), factored=True).terms[0]
    left, right = (x.astype(dtype).astype(jnp.float32).reshape(g.shape) for x in (tiles.rho, tiles.kappa))
    return np.asarray(left, np.float64), np.asarray(right, np.float64)


def tile_error(g: np.ndarray, dtype: Any) -> dict[str, float | None]:
    """Of the decays between the tokens i >= j of tiles [N, 16, K]: root mean square of the relative error over those that lie above 1e-6 (None if no pair
    does), and the share of all that come out infinite or undefined."""
    sums = np.cumsum(g.astype(np.float64), axis=-2)
    want = np.exp(np.minimum(sums[..., :, None, :] - sums[..., None, :, :], 0))
    left, right = tile_factors(g, dtype)
    with np.errstate(invalid="ignore"):
        got = left[..., :, None, :] * right[..., None, :, :]
    pairs = np.broadcast_to(np.tril(np.ones((TILE, TILE), bool))[..., None], want.shape)
    got, want = got[pairs], want[pairs]
    shown, finite = want > 1e-6, np.isfinite(got)
    errors = got[shown & finite] / want[shown & finite] - 1
    return dict(rms_relative=float(np.sqrt(np.mean(errors**2))) if len(errors) else None, not_finite=float(1 - finite.mean()))


def operator_errors(shape: specs.Shape, gate: str, spread: float, dtype: str) -> dict[str, float | None]:
    """RMS ratio to the float64 recurrence of the operator's output: tiles exact, and factored after a promise of -5 that the softplus gate does not keep.

    None: not finite.
    """
    x = specs.inputs(shape)
    x["g"] = draw_log_decays(gate, x["g"].shape, spread)
    x |= {name: np.asarray(jnp.asarray(x[name], dtype).astype(jnp.float32)) for name in "qkv"}
    want = reference(x)
    arguments = {name: jnp.asarray(array, dtype if name in "qkv" else jnp.float32) for name, array in x.items()}
    out = {}
    for name, promise in (("exact", None), ("factored", DEFAULT_LOWER_BOUND)):
        ratio = rms_ratio(OPERATORS[promise](arguments)[0].astype(jnp.float32), want)
        out[name] = float(f"{ratio:.3g}") if math.isfinite(ratio) else None
    return out


OPERATORS = {promise: jax.jit(lambda x, promise=promise: kda(**x, lower_bound=promise, implementation="xla")) for promise in (None, DEFAULT_LOWER_BOUND)}
"""Promised bound (None: exact tiles) -> the operator on a dict of its arguments."""


def reference(x: dict[str, np.ndarray]) -> np.ndarray:
    """The recurrence's output in float64."""
    with jax.enable_x64():
        arguments = {name: jnp.asarray(array, jnp.float64) for name, array in x.items()}
        return np.asarray(jax.jit(lambda x: kda(**x, implementation="reference"))(arguments)[0])


def tile_part(scale: Scale) -> dict[str, Any]:
    """gate -> spread -> errors of factored tiles in float32 and with operands in bfloat16, of the operator in both, and the mean log decay."""
    def one(gate: str, spread: float) -> dict[str, Any]:
        g = tiles(draw_log_decays(gate, (scale.tiles, TILE, 4, 64), spread))
        return dict(mean_log_decay=float(g.mean()), least=float(g.min()), tile={d: tile_error(g, jnp.dtype(d)) for d in ("float32", "bfloat16")},
                    operator={d: operator_errors(scale.operator, gate, spread, d) for d in ("float32", "bfloat16")})

    return {gate: {str(spread): one(gate, spread) for spread in scale.spreads} for gate in GATES}


def tiles(g: np.ndarray) -> np.ndarray:
    """[N, 16, H, K] -> [N * H, 16, K]."""
    return np.moveaxis(g, 2, 1).reshape(-1, TILE, g.shape[-1])


def range_shares(g: np.ndarray, dtype: Any, constant: float) -> dict[str, float]:
    """Log decays [N, 16, K] of tiles -> shares of the factors constant * exp(G_i) ("left") and exp(-G_j) / constant ("right") that are too large for dtype
    ("overflow") and too small to be one of its normal numbers ("underflow")."""
    # Of logarithms, since float64 has no room either: 16 tokens of a strong softplus gate come to exp(2000).
    left = np.cumsum(g.astype(np.float64), axis=-2) + math.log(constant)
    most, least = math.log(float(jnp.finfo(dtype).max)), math.log(float(jnp.finfo(dtype).smallest_normal))
    return {f"{side} {name}": round(float(np.mean(found)), 5) for side, logs in (("left", left), ("right", -left))
            for name, found in (("overflow", logs > most), ("underflow", logs < least))}


def range_part(scale: Scale) -> dict[str, Any]:
    """gate -> decays -> dtype -> shares of left and right factors that are too large for it and too small to be normal."""
    def drawn(gate: str) -> dict[str, np.ndarray]:
        shape = (scale.tiles, TILE, 4, 64)
        spread = {f"pre-activations of spread {s}": draw_log_decays(gate, shape, s) for s in (1.0, 4.0)}
        # Every channel forgets about as fast as its gate lets it: log decays of -4.998 a token under the bound, of -8 to -128 without.
        raw, a_log = jnp.full(shape, 8.0), jnp.zeros(4) if gate == "bounded" else init_a_log_softplus(jax.random.key(0), (4,))
        return spread | {"saturated (pre-activation 8)": np.asarray(log_decay(raw, gate, a_log, None, None))}

    constants = {"balanced": BALANCE, "plain": 1.0}
    return {gate: {name: {dtype: {kind: range_shares(tiles(g), jnp.dtype(dtype), constant) for kind, constant in constants.items()} for dtype in DTYPES}
                   for name, g in drawn(gate).items()} for gate in GATES}


def timed_calls(dtype: str) -> dict[str, Callable[..., Any]]:
    """Name -> the operator on (q, k, v, raw g, beta, a_log, dt_bias). The exact tiles have the same decays, and are not told that there is a bound."""
    def bounded(implementation: str, q, k, v, g, beta, a_log, dt_bias):
        return kda(q, k, v, g, beta, gate="bounded", a_log=a_log, dt_bias=dt_bias, implementation=implementation)[0]

    def exact(q, k, v, g, beta, a_log, dt_bias):
        return kda(q, k, v, log_decay(g.astype(jnp.float32), "bounded", a_log, dt_bias, None), beta, implementation="xla")[0]

    calls = {"factored tiles": partial(bounded, "xla"), "exact tiles": exact}
    return calls | ({} if unmet_on_hopper() or dtype != "bfloat16" else {"kernels (factored)": partial(bounded, "mosaic_gpu")})


def speed_part(scale: Scale) -> dict[str, Any]:
    """Milliseconds [median, least] of the forward pass and of forward and backward, and the RMS ratio of that output to the float64 recurrence."""
    inputs = {shape: speed_inputs(shape, scale.timed_dtype) for shape in scale.timed}
    lowered = {(shape, name, what): jax.jit(f).lower(*inputs[shape][0]) for shape in scale.timed for name, call in timed_calls(scale.timed_dtype).items()
               for what, f in (("forward", call), ("forward_backward", with_gradients(call)))}
    # Compiled side by side, before anything is timed.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = dict(zip(lowered, pool.map(lambda one: one.compile(), lowered.values())))
    rows = []
    for shape, name in dict.fromkeys(key[:2] for key in programs):
        arguments, want = inputs[shape]
        run = lambda what: programs[shape, name, what]  # noqa: B023
        times = {what: [round(ms, 3) for ms in median_ms(run(what), *arguments, inner=scale.inner, outer=scale.outer)]
                 for what in ("forward", "forward_backward")}
        rows.append(dict(call=name, **shape._asdict(), **times, rms=float(f"{rms_ratio(run('forward')(*arguments).astype(jnp.float32), want):.3g}")))
    return dict(dtype=scale.timed_dtype, load=round(os.getloadavg()[0], 2), rows=rows)


def speed_inputs(shape: specs.Shape, dtype: str) -> tuple[tuple[jax.Array, ...], np.ndarray]:
    """(q, k, v, raw g, beta, a_log, dt_bias) and the float64 recurrence's output on them."""
    x = specs.inputs(shape)
    heads, width = x["g"].shape[2:]
    cast = lambda array: jnp.asarray(array, dtype)
    g = cast(np.random.default_rng(1).normal(size=x["g"].shape))
    bias = init_dt_bias(jax.random.key(0), (heads, width))
    arguments = (*(cast(x[name]) for name in "qkv"), g, jnp.asarray(x["beta"]), jnp.zeros(heads), bias)
    plain = {name: np.asarray(array.astype(jnp.float32)) for name, array in zip("qkv", arguments)}
    decay = np.asarray(log_decay(g.astype(jnp.float32), "bounded", jnp.zeros(heads), bias, None))
    return arguments, reference(dict(plain, g=decay, beta=x["beta"]))


def with_gradients(call: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *a: jnp.sum(call(*a).astype(jnp.float32) * a[2].astype(jnp.float32)), argnums=tuple(range(7)))


def loss_arms(size: str, corpus: Path) -> dict[str, TrainConfig]:
    """The text run with either gate."""
    cfg = arms.text_config(size, corpus)
    if size == "smoke":
        cfg = arms.with_model(cfg, mla_every=0, use_final_mla=False)    # its one layer is the one that has the gate
    return {gate: arms.with_model(cfg, kda=dataclasses.replace(cfg.model.kda, gate=gate)) for gate in GATES}


def figure(results: dict[str, Any], losses: dict[str, plotting.Band]) -> bytes:
    """A panel for each of tile, operator and speed that there are results of, and for `losses` by gate; what is not finite is left out of its line."""
    panels = []
    number = lambda x: math.nan if x is None else x
    line = lambda x, y: plotting.Band([float(p) for p in x], *([number(v) for v in y],) * 3)
    if "tile" in results:
        found = results["tile"]
        spread = "spread of the gate's pre-activation"
        share = {gate: line(rows, [row["tile"]["float32"]["not_finite"] for row in rows.values()]) for gate, rows in found.items()}
        panels.append(plotting.Panel(spread, "share of decays that are not finite", share, xscale="log2", title="16-token tile as two factors, float32"))
        errors = {f"{gate}, {tiles}": line(rows, [row["operator"]["float32"][tiles] for row in rows.values()])
                  for gate, rows in found.items() for tiles in ("factored", "exact")}
        panels.append(plotting.Panel(spread, "RMS error / RMS output", errors, xscale="log2", yscale="log", title="operator, float32 (gaps: not finite)"))
    if "speed" in results:
        rows = results["speed"]["rows"]
        chosen = lambda call: [row for row in rows if row["call"] == call]
        column = lambda call, name, *place: [row[name][place[0]] if place else row[name] for row in chosen(call)]
        times = {call: plotting.Band(column(call, "tokens"), *(column(call, "forward_backward", place) for place in (0, 1, 0)))
                 for call in dict.fromkeys(row["call"] for row in rows)}
        panels.append(plotting.Panel("tokens", "ms, median (band: to the least)", times, xscale="log2", title="forward + backward"))
    if losses:
        panels.append(plotting.Panel("step", "training loss (nats per token)", losses, title="text"))
    return plotting.png(plotting.band_panels(panels, columns=2))


def main(argv: Sequence[str] | None = None) -> None:
    args = arms.parse(argv, __doc__, "bounded_decay", add=lambda parser: parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS))
    results: dict[str, Any] = {}
    seconds, losses = 0.0, {}
    if "loss" in args.parts:                                             # first: the other parts take the device's memory into this process
        trained = arms.train(loss_arms(args.size, args.corpus), args.seeds, args.run_dir / "loss",
                             partial(arms.heldout_loss, batches=2 if args.smoke else None), args.jobs)
        seconds, losses = trained.seconds, {gate: arms.curve(lines) for gate, lines in trained.lines.items()}
        results["loss"] = dict(arms=arms.summaries(trained.figures), base=GATES[0],
                               differences=arms.differences(trained.figures, GATES[0], ("heldout_loss", "bits_per_byte")))
    args.run_dir.mkdir(parents=True, exist_ok=True)
    scale, kept = SCALES[args.size], Parts(args.run_dir / "parts.json")
    for name, text, part in (("tile", "errors over sizes of the gate", tile_part), ("range", "factors outside each dtype", range_part),
                             ("speed", "factored and exact tiles", speed_part)):
        if name in args.parts:
            results[name] = kept.once(name, text, f"{scale} {jax.devices()[0].device_kind}", partial(part, scale))
    seconds += sum(kept.seconds.values())
    arms.write_results(args, seconds, results, figure(results, losses) if set(args.parts) - {"range"} else None)


if __name__ == "__main__":
    main()
