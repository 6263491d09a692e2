"""Trains the `small` preset at 8,192 tokens on this GPU through `longmoe.fit`, and writes down how fast it went. JSON and a picture of the loss.

    python benchmarks/train_small.py --data TOKEN_FOLDER [--steps 200] [--batch-size 2] [--implementation xla] [--resume]
        [--out benchmarks/results/small_8k_xla]

TOKEN_FOLDER comes from `longmoe data build TOKEN_FOLDER --text FOLDER --vocab-size 32768`. OUT.json holds tokens/s and MFU (medians over the second half of
the steps), the seconds from the call of `fit` to the end of the first step, compilation included, peak memory and the loss of every step; OUT.png the curve.
"""
import argparse
import dataclasses
import json
import shutil
import statistics
import threading
import time
from pathlib import Path

import longmoe
from longmoe import plotting
from longmoe.data.token_folder import read_token_folder
from longmoe.train.metrics import read_lines
from longmoe.train.run_files import versions


def config(options):
    cfg = longmoe.presets.small()
    return dataclasses.replace(
        cfg, steps=options.steps, log_every=1, model=dataclasses.replace(cfg.model, implementation=options.implementation),
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
    meta = read_token_folder(options.data).meta
    return dict(
        preset="small", sequence_length=cfg.data.sequence_length, batch_size=cfg.data.batch_size, steps=len(lines), implementation=options.implementation,
        training_tokens_in_folder=meta["splits"]["train"]["tokens"], corpus=meta["name"],
        tokens_per_second=round(median("tokens_per_second")), mfu=round(median("mfu"), 4) if "mfu" in settled[0] else None,
        step_ms=round(1e3 * median("step_seconds"), 1), first_step_seconds=round(first_step_seconds, 1), total_seconds=round(total_seconds, 1),
        peak_bytes=max((line.get("device_peak_bytes", 0) for line in lines), default=0), loss=[round(line["loss"], 4) for line in lines],
        max_violation=[round(statistics.fmean(line["max_violation"]), 4) for line in lines], skipped=sum(line["skipped"] for line in lines),
        device=run["device"], commit=run["commit"], versions=versions())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/small_8k"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--implementation", default="xla")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was stopped; the seconds of its first start are kept")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/small_8k_xla"))
    options = parser.parse_args()
    cfg = config(options)
    if not options.resume:
        shutil.rmtree(options.run_dir, ignore_errors=True)
    began, first_seconds = time.monotonic(), options.run_dir / "first_step_seconds"
    if not first_seconds.exists():
        threading.Thread(target=watch, args=(options.run_dir / "metrics.jsonl", first_seconds, began), daemon=True).start()
    run = longmoe.fit(cfg, options.run_dir)
    total = time.monotonic() - began
    lines = read_lines(run.paths.metrics)
    first = float(first_seconds.read_text())
    result = summary(options, cfg, lines, first, total, json.loads(run.paths.run_json.read_text()))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    figure = plotting.loss_curve([line["step"] for line in lines], result["loss"])
    options.out.with_suffix(".png").write_bytes(plotting.png(figure))
    print(json.dumps({name: value for name, value in result.items() if name not in ("loss", "max_violation")}, indent=1))


if __name__ == "__main__":
    main()
