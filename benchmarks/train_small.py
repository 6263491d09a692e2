"""Trains the `small` preset at 8,192 tokens on this GPU through `longmoe.fit`, and writes down how fast it went. JSON and a picture of the loss.

    python benchmarks/train_small.py --data TOKEN_FOLDER [--steps 200] [--batch-size 2] [--implementation auto xla] [--out benchmarks/results/small_8k]

TOKEN_FOLDER comes from `longmoe data build TOKEN_FOLDER --text FOLDER --vocab-size 32768`. OUT.json holds, for each implementation, tokens/s and MFU
(medians over the second half of the steps), the seconds from the call of `fit` to the end of the first step, compilation included, peak memory and the loss
of every step; OUT.png the curves. Of two implementations, which start from the same parameters and read the same batches, `largest_gap` is the largest
relative difference of their losses, each averaged over SMOOTH steps.
"""
import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np

import longmoe
from longmoe import plotting
from longmoe.data.token_folder import read_token_folder
from longmoe.train.metrics import read_lines
from longmoe.train.run_files import versions

SMOOTH = 20


def config(options, implementation):
    cfg = longmoe.presets.small()
    return dataclasses.replace(
        cfg, steps=options.steps, log_every=1, model=dataclasses.replace(cfg.model, implementation=implementation),
        data=dataclasses.replace(cfg.data, path=str(options.data), batch_size=options.batch_size),
        optim=dataclasses.replace(cfg.optim, warmup_steps=options.steps // 10),
        checkpoint=dataclasses.replace(cfg.checkpoint, every=options.steps))


def watch(metrics, target, began):
    """Writes to `target` how long the first step's line took to appear in a metrics.jsonl that earlier runs did not leave there."""
    while not (metrics.exists() and metrics.read_text()):
        time.sleep(0.05)
    target.write_text(str(time.monotonic() - began))


def summary(options, cfg, lines, first_step_seconds, total_seconds, run):
    settled = lines[len(lines) // 2:]
    median = lambda name: statistics.median(line[name] for line in settled)
    return dict(
        implementation=cfg.model.implementation, steps=len(lines), tokens_per_second=round(median("tokens_per_second")),
        mfu=round(median("mfu"), 4) if "mfu" in settled[0] else None, step_ms=round(1e3 * median("step_seconds"), 1),
        first_step_seconds=round(first_step_seconds, 1), compile_seconds=run.get("compile_seconds"), total_seconds=round(total_seconds, 1),
        peak_bytes=max((line.get("device_peak_bytes", 0) for line in lines), default=0), loss=[round(line["loss"], 4) for line in lines],
        max_violation=[round(statistics.fmean(line["max_violation"]), 4) for line in lines], skipped=sum(line["skipped"] for line in lines))


def train(options, implementation):
    """One run from its beginning -> its summary and what the run says of itself."""
    cfg, run_dir = config(options, implementation), options.run_dir / implementation
    shutil.rmtree(run_dir, ignore_errors=True)
    began, first_seconds = time.monotonic(), run_dir / "first_step_seconds"
    threading.Thread(target=watch, args=(run_dir / "metrics.jsonl", first_seconds, began), daemon=True).start()
    paths = longmoe.fit(cfg, run_dir).paths
    total, run = time.monotonic() - began, json.loads(paths.run_json.read_text())
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    return summary(options, cfg, read_lines(paths.metrics), float(first_seconds.read_text()), total, run), run


def largest_gap(runs):
    """Between two runs' smoothed losses, relative."""
    first, second = (np.convolve(run["loss"], np.ones(SMOOTH) / SMOOTH, "valid") for run in runs)
    return float(np.max(np.abs(first - second) / second))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/small_8k"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--implementation", nargs="+", default=["auto"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/small_8k"))
    options = parser.parse_args()
    meta = read_token_folder(options.data).meta
    result = dict(preset="small", sequence_length=config(options, "auto").data.sequence_length, batch_size=options.batch_size,
                  training_tokens_in_folder=meta["splits"]["train"]["tokens"], corpus=meta["name"], runs=[])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for implementation in options.implementation:
        found, run = train(options, implementation)
        result["runs"].append(found)
        result |= dict(device=run["device"], commit=run["commit"], versions=versions(), command=" ".join(["python", *sys.argv]))
        if len(result["runs"]) == 2:
            result |= dict(smoothed_over=SMOOTH, largest_gap=round(largest_gap(result["runs"]), 5))
        options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps({name: value for name, value in found.items() if name not in ("loss", "max_violation")}), flush=True)
    losses = {run["implementation"]: run["loss"] for run in result["runs"]}
    figure = plotting.compare_runs({name: range(1, 1 + len(loss)) for name, loss in losses.items()}, {"loss (nats a token)": losses}, window=SMOOTH)
    options.out.with_suffix(".png").write_bytes(plotting.png(figure))
    print(json.dumps({name: value for name, value in result.items() if name != "runs"}, indent=1))


if __name__ == "__main__":
    main()
