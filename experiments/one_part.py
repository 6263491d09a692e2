"""What is each part worth? One part of the recipe changed at a time: the output gate of MLA, the experts' latent space, the activation.

    python experiments/one_part.py --corpus runs/demo/corpus [--run-dir runs/one_part] [--out results.json] [--size cpu|h200] [--seeds 3] [--smoke]

The text run with every part against: MLA without its output gate (its projection goes too: fewer parameters); experts at the model's width, as narrow as
makes up for the latent space's two projections, once with as many parameters as the MoE layer had and once with as many FLOPs a token (h200: rounded to
what the grouped-matmul kernels take; parameters are in the results); SwiGLU in place of SiTU-GLU. Differences from the whole recipe are paired by seed.
Time: 2 CPU cores not measured (15 runs of the demo's text part). Expected: differences of a percent of the loss or less, some within the interval of three
seeds (the Kimi Linear paper's own for KDA's output gate is 0.004 nats).

Writes results.json and one_part.png: held-out loss of each arm and the differences, with 95 % intervals over seeds.
"""
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import arms

from longmoe import plotting
from longmoe.configs import ModelConfig, MoEConfig, TrainConfig

BASE = "whole recipe"
KERNEL_MULTIPLE = 64
"""Widths that the grouped-matmul kernels take are multiples of it."""


def full_width(model: ModelConfig, meets: int, multiple: int) -> MoEConfig:
    """Experts at the model's width whose hidden width makes up for the latent space over `meets` experts a layer: all of them for as many parameters, those
    of a token for as many FLOPs. meets * 3 D F' = meets * 3 Z F + 2 D Z, rounded to a multiple."""
    moe, width = model.moe, model.width
    exact = moe.latent_dim * moe.expert_dim / width + 2 * moe.latent_dim / (3 * meets)
    return dataclasses.replace(moe, latent_dim=None, expert_dim=max(1, round(exact / multiple)) * multiple)


def variants(size: str, corpus: Path) -> dict[str, TrainConfig]:
    cfg = arms.text_config(size, corpus)
    model, multiple = cfg.model, KERNEL_MULTIPLE if size == "h200" else 1
    changes = {BASE: {},
               "ungated MLA": dict(mla=dataclasses.replace(model.mla, use_output_gate=False)),
               "full-width experts, same parameters": dict(moe=full_width(model, model.moe.num_experts, multiple)),
               "full-width experts, same FLOPs": dict(moe=full_width(model, model.moe.experts_per_token, multiple)),
               "SwiGLU": dict(activation="swiglu")}
    return {arm: arms.with_model(cfg, **change) for arm, change in changes.items()}


def figure(summaries: dict[str, dict[str, arms.Figures]], differences: dict[str, dict[str, arms.Figures]]) -> bytes:
    rows = lambda table: {arm: tuple(map(float, arms.bounds(found["heldout_loss"]))) for arm, found in table.items()}
    return plotting.png(plotting.interval_panels([
        plotting.Intervals("held-out loss (nats per token)", rows(summaries)),
        plotting.Intervals(f"minus the {BASE}, same seed (nats per token)", rows(differences), 0.0)]))


def main(argv: Sequence[str] | None = None) -> None:
    args = arms.parse(argv, __doc__, "one_part")
    measure = partial(arms.heldout_loss, batches=2 if args.smoke else None)
    trained = arms.train(variants(args.size, args.corpus), args.seeds, args.run_dir, measure, args.jobs)
    summaries = arms.summaries(trained.figures)
    differences = arms.differences(trained.figures, BASE, ("heldout_loss", "bits_per_byte"))
    results = dict(arms=summaries, base=BASE, differences=differences)
    arms.write_results(args, trained.seconds, results, figure(summaries, differences))


if __name__ == "__main__":
    main()
