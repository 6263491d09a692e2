"""Shared bones of the experiments that compare arms: configs that differ in one thing, each trained under several seeds.

`train` runs `longmoe.fit` for every arm and seed in a folder of its own, RUN_DIR/<arm>/seed_<n>, and keeps what `measure` finds there beside it, so that the
same command goes on where it was stopped and does nothing twice; `--jobs` runs train side by side. A seed draws the initial weights and the order of the
documents and is the same for all arms: differences between arms are paired by it. `summaries` and `differences` give means over seeds with Student's 95 %
interval.
"""
import argparse
import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import demo
import jax
import numpy as np
from record import run_record

import longmoe
from longmoe import plotting
from longmoe.configs import DataConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig, TrainConfig, to_json
from longmoe.data.loader import make_loader
from longmoe.data.token_folder import read_token_folder
from longmoe.evaluation.statistics import student
from longmoe.evaluation.text import evaluate_batches, make_loss_function
from longmoe.train.metrics import read_lines
from longmoe.train.run_files import RunPaths

Figures = dict[str, Any]
"""Name -> a number, or a list of numbers that is as long in every run of an arm."""
SIZES = ("cpu", "h200")


@dataclasses.dataclass(frozen=True)
class Run:
    """One arm under one seed, trained."""
    arm: str
    seed: int
    config: TrainConfig
    variables: Mapping[str, Any]


@dataclasses.dataclass
class Trained:
    """All arms under all seeds."""
    figures: dict[str, list[Figures]]
    """Arm -> what `measure` found, in the order of the seeds."""
    lines: dict[str, list[list[dict[str, Any]]]]
    """Arm -> the lines of metrics.jsonl, in the order of the seeds."""
    seconds: float
    """That the device was held: training with compilation, and measuring, over every call that worked on these runs and was not killed."""


def text_config(size: str, corpus: Path) -> TrainConfig:
    """The text run that arms are made from: cpu is the demo's, h200 a wider one whose shapes the Hopper kernels take, smoke one layer for tests."""
    if size == "h200":
        model = ModelConfig(
            width=384, num_layers=8, use_final_mla=False, dense_dim=1536, dtype="bfloat16", init_std=0.02,
            kda=KDAConfig(num_heads=6, head_dim=64), mla=MLAConfig(num_heads=6, q_lora_rank=192, kv_lora_rank=512, nope_dim=64, rope_dim=64, v_dim=64),
            moe=MoEConfig(num_experts=32, latent_dim=192, expert_dim=256, shared_expert_dim=256, bias_ema=0.9))
        cfg = longmoe.presets.nano()
        return dataclasses.replace(
            cfg, model=model, steps=300, data=DataConfig(path=str(corpus), sequence_length=1024, batch_size=16),
            optim=dataclasses.replace(cfg.optim, learning_rate=3e-3, muon_rms=0.2, warmup_steps=30, loss_chunk=8192),
            checkpoint=dataclasses.replace(cfg.checkpoint, every=300, keep=1))
    cfg = demo.text_config(corpus, demo.SMOKE if size == "smoke" else demo.Budget())
    if size == "smoke":
        model = dataclasses.replace(cfg.model, num_layers=1, mla_every=1, dense_layers=0)
        cfg = dataclasses.replace(cfg, model=model, steps=4, data=dataclasses.replace(cfg.data, sequence_length=128),
                                  optim=dataclasses.replace(cfg.optim, optimizer="adamw"))
    return cfg


def with_model(cfg: TrainConfig, **changes: Any) -> TrainConfig:
    """The config with fields of its model replaced."""
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **changes))


Measure = Callable[[Run], Figures]


def train(configs: Mapping[str, TrainConfig], seeds: Sequence[int], run_dir: Path, measure: Measure, jobs: int = 1) -> Trained:
    """Trains and measures every arm under every seed. What was trained and measured before, under the same config, is read back.

    jobs: so many runs at a time, `side_by_side`.
    """
    calls = [(arm, dataclasses.replace(cfg, seed=seed), run_dir, measure) for seed in seeds for arm, cfg in configs.items()]
    with clocked(run_dir / "seconds.json") as clock:
        found = side_by_side(train_and_measure, calls, jobs)
    by_arm = lambda part: {arm: [one[part] for one in found[i::len(configs)]] for i, arm in enumerate(configs)}
    return Trained(by_arm(0), by_arm(1), clock[0])


def side_by_side[T](function: Callable[..., T], calls: Sequence[tuple[Any, ...]], jobs: int) -> list[T]:
    """What `function` gives for each of `calls`. jobs: above 1, so many at a time, each in a process of its own with an equal share of the device's memory;
    all that goes in and out is then pickled.

    Where models are small, one call compiles, loads or dispatches while another one computes; and only a process that is new finds the programs of the seed
    before it, since jax 0.11 numbers the kernels that a process lowers and takes the number for a part of the program.
    """
    if jobs == 1:
        return [function(*call) for call in calls]
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / jobs:.3f}")
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        return list(pool.map(function, *zip(*calls)))


def train_and_measure(arm: str, cfg: TrainConfig, run_dir: Path, measure: Measure) -> tuple[Figures, list[dict[str, Any]]]:
    """One run -> its figures and the lines of metrics.jsonl."""
    share_programs(run_dir)
    folder = run_dir / folder_name(arm) / f"seed_{cfg.seed}"

    def figures() -> Figures:
        return measure(Run(arm, cfg.seed, cfg, demo.variables_of(longmoe.fit(cfg, str(folder)).state)))

    return once(folder / "figures.json", to_json(cfg), figures), read_lines(RunPaths(folder).metrics)


def folder_name(arm: str) -> str:
    """The arm's name without what file systems and shells take amiss: 7:1 becomes 7_1."""
    return re.sub(r"[^A-Za-z0-9_]+", "_", arm)


def share_programs(run_dir: Path) -> None:
    """Seeds of an arm run the same programs: what one compiles, the next ones read. JAX_COMPILATION_CACHE_DIR names another place."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(run_dir / "programs"))


loss_function = cache(make_loss_function)
"""Compiled once for all seeds of a model."""


def heldout_loss(run: Run, batches: int | None = None) -> Figures:
    """Loss of a trained text run on the first `batches` held-out batches (None: all), in both units, and the size of its model."""
    data = run.config.data
    heldout = [batch for batch, _ in make_loader(data, seed=0, split="heldout")][:batches]
    losses = evaluate_batches(loss_function(run.config.model), run.variables, heldout)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.variables["params"]))
    return dict(heldout_loss=losses.nats_per_token(), parameters=parameters,
                bits_per_byte=losses.bits_per_byte(read_token_folder(data.path).tokenizer.bytes_per_token()))


def summary(values: Sequence[Any], **bounds: float) -> Figures:
    """Mean over seeds with its interval, and the values themselves; element by element for lists. Bounds are None (JSON has no NaN) for one seed.

    bounds: least and most of `student`.
    """
    if not isinstance(values[0], Sequence):
        return _plain(student(values, **bounds)) | {"values": list(values)}
    parts = [_plain(student(column, **bounds)) for column in zip(*values, strict=True)]
    return {name: [part[name] for part in parts] for name in ("mean", "low", "high")} | {"n": len(values), "values": [list(value) for value in values]}


def _plain(interval: Any) -> Figures:
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in dataclasses.asdict(interval).items()}


def summaries(figures: Mapping[str, Sequence[Figures]], **bounds: float) -> dict[str, dict[str, Figures]]:
    """Arm -> figure -> its `summary` over seeds."""
    return {arm: {name: summary([run[name] for run in runs], **bounds) for name in runs[0]} for arm, runs in figures.items()}


def differences(figures: Mapping[str, Sequence[Figures]], base: str, names: Sequence[str]) -> dict[str, dict[str, Figures]]:
    """Arm -> figure -> `summary` of the arm minus `base` under the same seed: what seeds share, such as the order of the documents, cancels."""
    minus = lambda value, other: (np.asarray(value, float) - np.asarray(other, float)).tolist()
    return {arm: {name: summary([minus(run[name], other[name]) for run, other in zip(runs, figures[base], strict=True)]) for name in names}
            for arm, runs in figures.items() if arm != base}


def bounds(found: Figures) -> tuple[Any, Any, Any]:
    """(mean, low, high) of a `summary`, NaN where there is no interval, for the functions of `longmoe.plotting`."""
    return tuple(np.asarray(found[name], float) for name in ("mean", "low", "high"))


def curve(runs: Sequence[Sequence[Mapping[str, Any]]], name: str = "loss", window: int = 20) -> plotting.Band:
    """A figure of metrics.jsonl over steps: means of `window` lines, and their interval over seeds."""
    steps = [line["step"] for line in runs[0]]
    window = min(window, len(steps))
    ends = range(window, len(steps) + 1, max(1, window // 2))
    found = summary([[float(np.mean([line[name] for line in lines[end - window:end]])) for end in ends] for lines in runs])
    return plotting.Band([steps[end - 1] for end in ends], *bounds(found))


def parse(argv: Sequence[str] | None, doc: str, name: str, *, seeds: int = 3,
          add: Callable[[argparse.ArgumentParser], Any] = lambda parser: None) -> argparse.Namespace:
    """The options of every experiment on arms, and those that `add` adds; builds the corpus where it is missing. `size` is smoke under --smoke, `seeds` a
    range."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=Path("runs/demo/corpus"))
    parser.add_argument("--run-dir", type=Path, help=f"where the runs go (default: runs/{name}, with _smoke behind it under --smoke)")
    parser.add_argument("--out", type=Path, help=f"where the results go, with {name}.png beside them (default: RUN_DIR/results.json)")
    parser.add_argument("--size", choices=SIZES, default="cpu", help="cpu: the demo's model; h200: a wider one for one GPU")
    parser.add_argument("--seeds", type=int, default=seeds, help="how many seeds, from 0")
    parser.add_argument("--jobs", type=int, default=1, help="runs that are trained at a time, each in a process of its own (1: all in this one)")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a layer or two, one seed, for tests")
    add(parser)
    args = parser.parse_args(argv)
    for option in ("seeds", "jobs"):
        if getattr(args, option) < 1:
            parser.error(f"--{option}: got {getattr(args, option)}, wanted at least 1")
    args.name, args.argv = name, argv
    args.run_dir = args.run_dir or Path("runs") / (f"{name}_smoke" if args.smoke else name)
    args.out = args.out or args.run_dir / "results.json"
    args.size, args.seeds = ("smoke", range(1)) if args.smoke else (args.size, range(args.seeds))
    if args.smoke:
        jax.config.update("jax_disable_most_optimizations", True)      # compilation is nearly all of its time
    demo.prepare_corpus(args.corpus)
    return args


def write_results(args: argparse.Namespace, seconds: float, results: Mapping[str, Any], figure: bytes | None) -> None:
    """Writes `results`, with what they were made by and on, to --out and the figure, if any, beside it. seconds: on the device."""
    record = dict(size=args.size, seeds=list(args.seeds), run=run_record(f"{args.name}.py", args.argv, seconds))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**results, **record}, indent=1, allow_nan=False) + "\n")
    if figure is not None:
        args.out.with_name(f"{args.name}.png").write_bytes(figure)
    print(f"{args.out}, {record['run']['device_minutes']} device minutes")


@contextmanager
def clocked(path: Path) -> Iterator[list[float]]:
    """Adds the seconds inside to those that `path` holds; the list gets the sum as its first element at the end."""
    total, began = [json.loads(path.read_text()) if path.exists() else 0.0], time.monotonic()
    try:
        yield total
    finally:
        total[0] += time.monotonic() - began
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(round(total[0], 3)))


def once(path: Path, depends_on: str, measure: Callable[[], Figures]) -> Figures:
    """What `measure` gives, kept in `path` for the next call with the same `depends_on`."""
    digest = hashlib.sha256(depends_on.encode()).hexdigest()
    kept = json.loads(path.read_text()) if path.exists() else {}
    if kept.get("depends_on") != digest:
        kept = {"depends_on": digest, "figures": measure()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept, indent=1))
    return kept["figures"]
