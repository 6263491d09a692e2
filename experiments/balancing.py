"""Which way of balancing experts keeps them even on real text, and at what price? The demo's text run under each balancer, same seed and data.

    python experiments/balancing.py --corpus runs/demo/corpus [--run-dir runs/balancing] [--out results.json] [--size cpu|h200] [--seeds 1] [--smoke]

About 20 minutes on 2 CPU cores for one seed. Expected: MaxVio under Quantile Balancing, mean over the last fifth of the steps, below a third of the run
without balancing, at the same loss. Writes results.json, and balancing.png (loss, MaxVio and dead experts of every arm over the steps) beside it.
"""
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import arms
import numpy as np

from longmoe import plotting
from longmoe.configs import TrainConfig

ARMS: dict[str, dict[str, Any]] = {
    "quantile": dict(balancer="quantile"),
    "none": dict(balancer="none"),
    # A run of 400 steps is short for the rate of 0.001 that suits long ones: it would move a bias by 0.4 at most.
    "sign": dict(balancer="sign", bias_rate=0.01),
    "auxiliary_loss": dict(balancer="auxiliary_loss", balance_loss=0.01),
    "load_ema": dict(balancer="load_ema"),
}
"""Arm -> what it changes in MoEConfig."""
FIGURES = ("loss", "max_violation", "dead_experts", "load_entropy")


def variants(size: str, corpus: Path) -> dict[str, TrainConfig]:
    cfg = arms.text_config(size, corpus)
    return {arm: arms.with_model(cfg, moe=dataclasses.replace(cfg.model.moe, **change)) for arm, change in ARMS.items()}


def last_fifth(lines: Sequence[dict[str, Any]]) -> arms.Figures:
    """Means over the last fifth of the steps; one number a MoE layer where there are layers."""
    tail = lines[-max(1, len(lines) // 5):]
    return {name: np.mean([line[name] for line in tail], axis=0).tolist() for name in FIGURES}


def measure_nothing(run: arms.Run) -> arms.Figures:
    """All figures are of the training itself."""
    return {}


def figure(trained: arms.Trained) -> bytes:
    """Loss, and the means over layers of MaxVio and of dead experts, over steps."""
    labels = {"loss": "loss (nats per token)", "max_violation": "MaxVio, mean of layers", "dead_experts": "dead experts, mean of layers"}
    return plotting.png(plotting.band_panels([
        plotting.Panel("step", label, {arm: arms.curve(lines, name) for arm, lines in trained.lines.items()}) for name, label in labels.items()]))


def main(argv: Sequence[str] | None = None) -> None:
    args = arms.parse(argv, __doc__, "balancing", seeds=1)
    trained = arms.train(variants(args.size, args.corpus), args.seeds, args.run_dir, measure_nothing, args.jobs)
    figures = {arm: [last_fifth(lines) for lines in runs] for arm, runs in trained.lines.items()}
    summaries = arms.summaries(figures)
    level = {arm: float(np.mean(found["max_violation"]["mean"])) for arm, found in summaries.items()}
    ratios = {arm: round(value / level["none"], 4) for arm, value in level.items() if level["none"]}
    differences = arms.differences(figures, "none", ("loss",))
    arms.write_results(args, trained.seconds, dict(arms=summaries, ratio_to_none=ratios, base="none", differences=differences), figure(trained))


if __name__ == "__main__":
    main()
