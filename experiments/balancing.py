"""Which way of balancing experts keeps them even on real text, and at what price? The demo's text run under each balancer, same seed and data.

    python experiments/balancing.py --corpus runs/demo/corpus [--run-dir runs/balancing] [--out results.json] [--smoke]

About 20 minutes on 2 CPU cores. Expected: MaxVio under Quantile Balancing, mean over the last fifth of the steps, below a third of the run without
balancing, at the same loss. Writes results.json, and balancing.png (loss, MaxVio and dead experts of every arm) beside it.
"""
import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from demo import SMOKE, Budget, prepare_corpus, text_config

import longmoe
from longmoe import plotting
from longmoe.configs import MoEConfig, TrainConfig
from longmoe.train.metrics import read_lines

ARMS: dict[str, dict[str, Any]] = {
    "quantile": dict(balancer="quantile"),
    "none": dict(balancer="none"),
    # A run of 400 steps is short for the rate of 0.001 that suits long ones: it would move a bias by 0.4 at most.
    "sign": dict(balancer="sign", bias_rate=0.01),
    "auxiliary_loss": dict(balancer="auxiliary_loss", balance_loss=0.01),
    "load_ema": dict(balancer="load_ema"),
}
"""Arm -> what it changes in MoEConfig."""


def arm_config(corpus: Path, arm: str, smoke: bool) -> TrainConfig:
    cfg = text_config(corpus, SMOKE if smoke else Budget())
    moe: MoEConfig = dataclasses.replace(cfg.model.moe, **ARMS[arm])
    # Five programs are compiled: two layers, one of them with experts, are enough to try every arm.
    depth = dict(num_layers=2, mla_every=2) if smoke else {}
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, moe=moe, **depth))


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the last fifth of the steps; one number a MoE layer where there are layers."""
    tail = lines[-max(1, len(lines) // 5):]
    mean = lambda name: np.mean([line[name] for line in tail], axis=0).round(4).tolist()
    return dict(steps=lines[-1]["step"], **{name: mean(name) for name in ("loss", "max_violation", "dead_experts", "load_entropy")})


def figure(lines: dict[str, Sequence[dict[str, Any]]]) -> bytes:
    """Loss, and the means over layers of MaxVio and of dead experts, over steps."""
    series = lambda name: {arm: [np.mean(line[name]) for line in found] for arm, found in lines.items()}
    panels = {"loss (nats per token)": series("loss"), "MaxVio, mean of layers": series("max_violation"),
              "dead experts, mean of layers": series("dead_experts")}
    return plotting.png(plotting.compare_runs({arm: [line["step"] for line in found] for arm, found in lines.items()}, panels))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=Path("runs/demo/corpus"))
    parser.add_argument("--run-dir", type=Path, default=Path("runs/balancing"))
    parser.add_argument("--out", type=Path, help="where the results go (default: RUN_DIR/results.json)")
    parser.add_argument("--smoke", action="store_true", help="a few steps of two layers, for tests")
    args = parser.parse_args(argv)
    prepare_corpus(args.corpus)
    lines = {}
    for arm in ARMS:
        run = longmoe.fit(arm_config(args.corpus, arm, args.smoke), str(args.run_dir / arm))
        lines[arm] = read_lines(run.paths.metrics)
    results: dict[str, Any] = {arm: summary(found) for arm, found in lines.items()}
    level = {arm: float(np.mean(results[arm]["max_violation"])) for arm in ARMS}
    results["ratio_to_none"] = {arm: round(value / level["none"], 4) for arm, value in level.items() if level["none"]}
    results["command"] = " ".join(["python", "experiments/balancing.py", *(sys.argv[1:] if argv is None else argv)])
    results["run"] = {name: json.loads(run.paths.run_json.read_text())[name] for name in ("versions", "commit", "device")}
    out = args.out or args.run_dir / "results.json"
    out.write_text(json.dumps(results, indent=1) + "\n")
    out.with_name("balancing.png").write_bytes(figure(lines))
    print(json.dumps({name: results[name] for name in (*ARMS, "ratio_to_none")}, indent=1))


if __name__ == "__main__":
    main()
