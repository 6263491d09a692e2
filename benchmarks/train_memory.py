"""Memory of a compiled training step as XLA assigns it, beside the estimate: a preset on this CPU, or compiled for an H200 without one. Writes JSON.

    python benchmarks/train_memory.py nano 16,256 4,1024 [--remat full] [--accumulation-steps 4]
    PYTHONPATH=.h200 python benchmarks/train_memory.py small 2,8192 --platform h200      (CUDA plugin wheels: `make h200` fetches them)

A measurement of the same preset, shape, policy and platform in OUT is replaced, others stay. measured_bytes: arguments (train state and batch),
temporaries, and results that do not take an argument's place.
"""
import argparse
import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "h200"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from compile_for_h200 import h200_devices  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402

import longmoe  # noqa: E402
from longmoe.model.lm import RUN_ONCE  # noqa: E402
from longmoe.presets import PRESETS  # noqa: E402
from longmoe.train.memory import compiled_bytes  # noqa: E402
from longmoe.train.state import abstract_train_state  # noqa: E402
from longmoe.train.step import KEYS, ROWS, make_train_step  # noqa: E402
from pallas_kernels.bench import commit  # noqa: E402
from pallas_kernels.grouped_matmul import specs, xla  # noqa: E402


def config(preset, rows, tokens, remat, accumulation_steps):
    cfg = PRESETS[preset]()
    return dataclasses.replace(cfg, accumulation_steps=accumulation_steps or cfg.accumulation_steps,
                               model=dataclasses.replace(cfg.model, remat=remat or cfg.model.remat),
                               data=dataclasses.replace(cfg.data, batch_size=rows, sequence_length=tokens))


def measure(cfg, platform):
    """(compiled memory analysis, seconds)."""
    mesh = longmoe.make_mesh(cfg.mesh, h200_devices(1) if platform == "h200" else jax.devices()[:1])
    shape = (cfg.data.batch_size, cfg.data.sequence_length)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.float32 if name == "loss_weights" else jnp.int32, sharding=NamedSharding(mesh, ROWS)) for name in KEYS}
    # The tile follows the default backend, which here is the CPU that compiles.
    tiles = mock.patch.object(xla, "tile_rows", functools.partial(specs.tile_rows, backend="gpu")) if platform == "h200" else contextlib.nullcontext()
    began = time.monotonic()
    with tiles:
        lowered = make_train_step(cfg, mesh).lower(abstract_train_state(cfg, mesh), batch)
    # On the CPU the buffers are the same without fast code, which takes long to make.
    return lowered.compile(RUN_ONCE if platform == "cpu" else None).memory_analysis(), time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("shapes", nargs="+", help="ROWS,TOKENS of a whole step")
    parser.add_argument("--remat", choices=("none", "full", "save_matmuls"))
    parser.add_argument("--accumulation-steps", type=int)
    parser.add_argument("--platform", choices=("cpu", "h200"), default="cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "train_memory.json")
    options = parser.parse_args()
    for shape in options.shapes:
        rows, tokens = map(int, shape.split(","))
        cfg = config(options.preset, rows, tokens, options.remat, options.accumulation_steps)
        found, seconds = measure(cfg, options.platform)
        what = dict(preset=options.preset, rows=rows, tokens=tokens, remat=cfg.model.remat, accumulation_steps=cfg.accumulation_steps,
                    platform=options.platform)
        row = what | dict(
            arguments=found.argument_size_in_bytes, temporary=found.temp_size_in_bytes,
            measured_bytes=compiled_bytes(found),
            estimated_bytes=longmoe.estimate(cfg, platform="gpu" if options.platform == "h200" else "cpu").bytes_per_device,
            seconds=round(seconds, 1), jax=jax.__version__, commit=commit(),
            command=" ".join(["python", *sys.argv]))
        print(json.dumps(row), flush=True)
        kept = json.loads(options.out.read_text()) if options.out.exists() else []
        kept = [other for other in kept if any(other[name] != value for name, value in what.items())]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(sorted([*kept, row], key=lambda r: (r["preset"], r["platform"], r["rows"], r["tokens"])), indent=1) + "\n")


if __name__ == "__main__":
    main()
