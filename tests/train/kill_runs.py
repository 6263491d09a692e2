"""Kills runs with SIGKILL at random moments, starts the same call again each time, and compares where they end with a run that was left alone.

    python tests/train/kill_runs.py FOLDER --kills 20 --seed 0 [--optimizer adamw] [--saves-alone]

The runs mix three sources, pack them, read four batches ahead and cut each step into four micro-batches. Every second kill waits for a save to be under
way. A run that has ended is compared (state, data's position, metrics) and the next one begins, until the kills are used up and the last run has ended.
Prints figures as JSON; status 1 when a run did not end as the undisturbed one. Processes are forked from this one, which has imported JAX and uses nothing
that starts a thread.
"""
import argparse
import dataclasses
import hashlib
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from etils import epath

# The packages before the tests: tests/pallas_kernels would pass for the package of that name.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from mixed_run import STEPS, data_state, make_sources, mixed_config

import longmoe
import longmoe.train.loop
from longmoe.configs import CheckpointConfig, TrainConfig
from longmoe.train import manifest
from longmoe.train.checkpoints import Checkpoints, complete_steps
from longmoe.train.metrics import CLOCK, MetricsFile, read_lines
from longmoe.train.state import TrainState


def config(folder: Path, optimizer: str) -> TrainConfig:
    """One checkpoint kept beside every sixth step, so that most saves also delete."""
    return dataclasses.replace(mixed_config(folder / "sources", optimizer), checkpoint=CheckpointConfig(every=2, keep=1, keep_every=6))


def start(work: Callable[[], None], log: Path) -> int:
    """Forks a process that does `work`, its messages going to `log`; returns its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def train(cfg: TrainConfig, run: Path, programs: Path) -> None:
    """Trains in `run` to the end and writes a digest of the state."""
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    write_digest(longmoe.fit(cfg, run).state, run)


def save_alone(cfg: TrainConfig, run: Path) -> None:
    """In place of training: small sums that need no compilation, saved and written down as a run does."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = TrainState(step=np.int32(0), params={"w": np.arange(3000, dtype=np.float32)}, router_state={"b": np.zeros(8, np.float32)}, opt_state=(),
                       rng=jax.random.key(0))
    state = state.replace(**jax.device_put(dict(step=state.step, params=state.params, router_state=state.router_state)))
    with Checkpoints(epath.Path(run / "checkpoints"), cfg.checkpoint) as checkpoints:
        if steps := checkpoints.steps():
            state, _ = checkpoints.restore(steps[-1], jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), state), cfg)
        file = MetricsFile(run / "metrics.jsonl", int(state.step))
        for step in range(int(state.step) + 1, STEPS + 1):
            move = lambda tree, step=step: jax.tree.map(lambda x: jax.device_put(np.asarray(x) * np.float32(0.9) + np.float32(step)), tree)
            state = state.replace(step=jax.device_put(np.int32(step)), params=move(state.params), router_state=move(state.router_state))
            file.write(step, {"loss": step})
            if step % cfg.checkpoint.every == 0:
                checkpoints.save(step, state, {"next": step}, cfg)
    write_digest(state, run)


def write_digest(state: TrainState, run: Path) -> None:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state.replace(rng=jax.random.key_data(state.rng))):
        digest.update(np.asarray(leaf).tobytes())
    (run / "digest.txt").write_text(digest.hexdigest())


def ended(child: int, options: int = os.WNOHANG) -> bool:
    """Whether the process has ended by itself."""
    found, status = os.waitpid(child, options)
    if found and status:
        raise SystemExit(f"a run failed by itself (status {status}); its messages are beside its folder")
    return bool(found)


def unfinished(run: Path) -> set[str]:
    """What is half done in the checkpoints' folder: a save by its stage, or a deletion."""
    folder = run / "checkpoints"
    names = os.listdir(folder) if folder.exists() else []
    steps = [int(name) for name in names if name.isdecimal()]
    bare = [step for step in steps if not (folder / str(step) / manifest.NAME).exists()]
    writing = {"Orbax is writing"} if any(re.search("orbax-checkpoint-tmp", name) for name in names) else set()
    return writing | {"before the manifest" if step == max(steps) else "deleting" for step in bare}


def lines(run: Path) -> int:
    return (run / "metrics.jsonl").read_text().count("\n") if (run / "metrics.jsonl").exists() else 0


def kill_somewhere(child: int, run: Path, in_save: bool, rng: random.Random) -> bool:
    """Kills inside a save, or some lines of metrics later, or while the process starts. False when it has ended by itself before."""
    count, delay = rng.randrange(0, 6), rng.uniform(0, 0.2)
    at_start = None if in_save or count else time.monotonic() + rng.uniform(0, 3)
    seen, was, written = -1 if in_save else 0, True, lines(run)         # what an earlier kill left behind is no save of this process
    while not ended(child):
        is_now = bool(unfinished(run)) if in_save else lines(run) != written
        seen, was, written = seen + (is_now and not was if in_save else is_now), is_now, lines(run)
        if time.monotonic() > at_start if at_start else seen >= count:
            time.sleep(delay)
            if ended(child):
                return False
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return True
        time.sleep(0.001)
    return False


def outcome(run: Path) -> tuple[str, dict, list[dict]]:
    """Where a run ended: digest of its state, the data's position, every step's metrics."""
    metrics = [{name: value for name, value in line.items() if name not in CLOCK} for line in read_lines(run / "metrics.jsonl")]
    return (run / "digest.txt").read_text(), data_state(run, STEPS), metrics


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--saves-alone", action="store_true", help="save made-up states, without a model")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    devices = lambda mesh_config: longmoe.make_mesh(mesh_config, jax.devices()[:1])
    longmoe.train.loop.make_mesh = devices
    rng, cfg = random.Random(args.seed), config(args.folder, args.optimizer)
    work = lambda run: save_alone(cfg, run) if args.saves_alone else train(cfg, run, args.folder / "programs")
    begin = lambda run: start(lambda: work(run), run.with_suffix(".log"))
    began = time.monotonic()
    if not args.saves_alone:
        ended(start(lambda: make_sources(args.folder / "sources"), args.folder / "sources.log"), 0)
    ended(begin(args.folder / "whole"), 0)
    whole = outcome(args.folder / "whole")
    kills, lost, runs, wrong, newest = 0, 0, 0, 0, 0
    struck: dict[str, int] = {}
    while runs == 0 or kills < args.kills:
        run = args.folder / f"run_{runs}"
        while kills < args.kills and kill_somewhere(begin(run), run, kills % 2 == 1, rng):
            kills += 1
            for what in unfinished(run) or {"between saves"}:
                struck[what] = struck.get(what, 0) + 1
            steps = complete_steps(run / "checkpoints")
            lost += bool(newest) and (not steps or steps[-1] < newest)
            newest = steps[-1] if steps else newest
        if not (run / "digest.txt").exists():
            ended(begin(run), 0)
        wrong += outcome(run) != whole
        runs, newest = runs + 1, 0
    print(json.dumps(dict(kills=kills, struck=struck, checkpoints_lost=lost, runs=runs, runs_that_differ=wrong, seconds=round(time.monotonic() - began, 1))))
    return int(bool(wrong or lost))


if __name__ == "__main__":
    sys.exit(main())
