"""Training steps on rows of 8K to 1M tokens on this device: tokens a second, MFU, peak memory, and what KDA, MLA and the experts take of it. JSON, picture.

    python benchmarks/long_context.py [--preset small] [--tokens 8192 65536 262144 1048576] [--token-chunk 32768] [--steps 2] [--no-mla]
        [--out benchmarks/results/long_context]

One row a step, random tokens, one warm-up step and --steps timed ones for each length, shortest first; OUT.json is written after each, and lengths that it
has for the same settings are not run again. Parts: a KDA layer, an MLA layer and a mixture of experts by themselves, forward and backward, on a piece of a
row (MLA: a whole row), times the layers and pieces there are, without what rematerialisation does again. --no-mla leaves MLA out of the model: time a
token should then not depend on the length.
"""
import argparse
import dataclasses
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import longmoe  # noqa: E402
from longmoe import plotting  # noqa: E402
from longmoe.model.kda import KDA  # noqa: E402
from longmoe.model.mla import MLA  # noqa: E402
from longmoe.model.moe import MoE  # noqa: E402
from longmoe.presets import PRESETS  # noqa: E402
from longmoe.train.loop import state_and_step  # noqa: E402
from longmoe.train.memory import compiled_bytes  # noqa: E402
from longmoe.train.run_files import commit, versions  # noqa: E402
from longmoe.train.step import KEYS, compiler_options  # noqa: E402
from longmoe.train.throughput import Throughput, available_flops, training_flops  # noqa: E402
from pallas_kernels.testing import median_ms  # noqa: E402

ONCE_ABOVE = 65536
"""Tokens above which a part of the model is timed once: attention over a million tokens takes seconds."""


def config(options, tokens):
    cfg = PRESETS[options.preset]()
    model = dataclasses.replace(cfg.model, token_chunk=options.token_chunk, implementation=options.implementation)
    if options.no_mla:
        model = dataclasses.replace(model, mla_every=0)
    return dataclasses.replace(cfg, model=model, accumulation_steps=1, data=dataclasses.replace(cfg.data, batch_size=1, sequence_length=tokens))


def batch_of(cfg, seed):
    shape = (1, cfg.data.sequence_length)
    tokens = np.random.default_rng(seed).integers(0, cfg.model.vocab_size, (1, shape[1] + 1), dtype=np.int32)
    arrays = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], loss_weights=np.ones(shape, np.float32), segment_ids=np.ones(shape, np.int32))
    return {name: jnp.asarray(arrays[name]) for name in KEYS}


def lowered_part(cfg, module, tokens):
    """Forward and backward of one module on a row of so many tokens, lowered, and a function that makes its arguments."""
    def arguments():
        x = jax.random.normal(jax.random.key(0), (1, tokens, cfg.model.width), jnp.dtype(cfg.model.dtype))
        return module.init(jax.random.key(1), x[:, :64]), x

    def loss(params, rest, x):
        return jnp.sum(module.apply({**rest, "params": params}, x)[0].astype(jnp.float32))

    def step(variables, x):
        return jax.grad(loss, argnums=(0, 2))(variables["params"], {name: tree for name, tree in variables.items() if name != "params"}, x)

    return jax.jit(step).lower(*jax.eval_shape(arguments)), jax.jit(arguments)


def parts(cfg):
    """Part -> (module, tokens of the piece of a row it is timed on, how often a step has that, without what rematerialisation does again)."""
    model, tokens = cfg.model, cfg.data.sequence_length
    piece = min(tokens, model.token_chunk or tokens)
    found = {"KDA": (KDA(model), piece, model.mixers.count("kda")), "MLA": (MLA(model), tokens, model.mixers.count("mla")),
             "experts": (MoE(model), piece, model.num_moe_layers)}
    return {name: (module, length, layers * tokens // length) for name, (module, length, layers) in found.items() if layers}


def compiled_parts(cfg, mesh):
    """Compiled as the step is."""
    lowered = {name: lowered_part(cfg, module, length) for name, (module, length, _) in parts(cfg).items()}
    with ThreadPoolExecutor(len(lowered)) as pool:
        programs = pool.map(lambda one: one[0].compile(compiler_options(cfg, mesh)), lowered.values())
        return {name: (program, arguments) for (name, (_, arguments)), program in zip(lowered.items(), programs)}


def part_seconds(cfg, mesh):
    """Part -> estimated seconds a step, of all its layers and pieces."""
    programs, found = compiled_parts(cfg, mesh), {}
    for name, (_, length, count) in parts(cfg).items():
        program, arguments = programs[name]
        found[name] = round(count * median_ms(program, *arguments(), inner=1, outer=3 if length <= ONCE_ABOVE else 1, warmups=1)[0] / 1e3, 4)
    return found


def measure(cfg, steps):
    mesh = longmoe.make_mesh(cfg.mesh, jax.devices()[:1])
    began = time.monotonic()
    state, step = state_and_step(cfg, mesh, lambda: longmoe.init_train_state(cfg, mesh, jax.random.key(0)))
    compile_seconds, seconds, losses = time.monotonic() - began, [], []
    for batch in [batch_of(cfg, seed) for seed in range(steps + 1)]:
        began = time.monotonic()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.monotonic() - began)
    found, tokens, peak = Throughput(cfg, jax.devices()[:1]).memory(), cfg.data.sequence_length, available_flops(cfg, jax.devices()[:1])
    row = dict(tokens=tokens, compile_seconds=round(compile_seconds, 1), step_seconds=[round(s, 4) for s in seconds], loss=losses,
               tokens_per_second=round(tokens / float(np.median(seconds[1:]))), peak_bytes=found.get("device_peak_bytes"),
               compiled_bytes=compiled_bytes(step.memory_analysis()), estimated_bytes=longmoe.estimate(cfg, platform=platform()).bytes_per_device)
    row["mfu"] = None if peak is None else round(training_flops(cfg) * row["tokens_per_second"] / peak, 4)
    del state, batch
    return row | dict(part_seconds=part_seconds(cfg, mesh))


def platform():
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 65536, 262144, 1048576])
    parser.add_argument("--token-chunk", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--no-mla", action="store_true")
    parser.add_argument("--implementation", default="auto")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "long_context")
    options = parser.parse_args()
    path = options.out.with_suffix(".json")
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    what = dict(preset=options.preset, mla=not options.no_mla, token_chunk=options.token_chunk, implementation=options.implementation,
                device=jax.devices()[0].device_kind)
    for tokens in sorted(options.tokens):
        if any(row["tokens"] == tokens and all(row[name] == value for name, value in what.items()) for row in rows):
            continue
        rows.append(what | measure(config(options, tokens), options.steps) | dict(
            versions=versions(), commit=commit(), command=" ".join(["python", *sys.argv])))
        print(json.dumps({name: value for name, value in rows[-1].items() if name not in ("versions", "command")}), flush=True)
        path.write_text(json.dumps(dict(rows=rows), indent=1) + "\n")
    name = lambda row: f"{row['preset']}{'' if row['mla'] else ' without MLA'}"
    lines = {name(row): sorted((r["tokens"], 1e6 / r["tokens_per_second"]) for r in rows if name(r) == name(row)) for row in rows}
    bands = {of: plotting.Band(*zip(*points), *[[float("nan")] * len(points)] * 2) for of, points in lines.items()}
    options.out.with_suffix(".png").write_bytes(plotting.png(plotting.band_panels([plotting.Panel("tokens of a row", "us a token", bands, "log2")])))


if __name__ == "__main__":
    main()
