"""Do Attention Residuals keep a deep model's hidden states and gradients even over depth, and do they lower its loss?

    python experiments/attn_residuals.py --corpus runs/demo/corpus [--run-dir runs/attn_residuals] [--out results.json] [--size cpu|h200] [--seeds 3] [--smoke]

Thin models (cpu: 12 layers of width 64; h200: 24 of width 256) with dense feed-forwards, so that routing plays no part, on packed text: the plain residual,
Block Attention Residuals with blocks of 2 and 4 layers (h200: also 8), and the full form, in which every sublayer's output is a source of its own. Time:
H200, 4 runs at a time beside other work, 12 minutes without the last two arms. Expected (Attention Residuals paper): with the plain residual what a sublayer
reads grows with depth, as a sum of ever more terms (so it was), and gradients are largest in the first layers; with blocks both are bounded inside a block and
start over in the next (what is read was; gradients fell alike); the loss is lower by 0.01 to 0.02 nats for blocks (by 0.24), a bit more for the full form.

Writes results.json and attn_residuals.png: loss over the training, and over the sublayers the size of input, output and gradient at its end, each with
its 95 % interval over seeds; held-out loss with differences from the plain residual paired by seed.
"""
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import arms
from depth_probe import depth_norms, make_probe

from longmoe import plotting
from longmoe.configs import KDAConfig, MLAConfig, ResidualConfig, TrainConfig
from longmoe.data.loader import make_loader

BLOCKS = {"smoke": (1,), "cpu": (2, 4), "h200": (2, 4, 8)}
"""Layers a block."""
BASE = "plain"


def variants(size: str, corpus: Path) -> dict[str, TrainConfig]:
    cfg = arms.text_config(size, corpus)
    layers, width = {"smoke": (2, 32), "cpu": (12, 64), "h200": (24, 256)}[size]
    # The mimetic start gives KDA's output projection a shape of its own: here all sublayers begin alike.
    thin = dict(num_layers=layers, dense_layers=layers, width=width, dense_dim=2 * width, init="normal", use_final_mla=False,
                mla_every=1 if size == "smoke" else cfg.model.mla_every)
    if size != "h200":
        thin |= dict(kda=KDAConfig(num_heads=2, head_dim=16), mla=MLAConfig(num_heads=2, q_lora_rank=24, kv_lora_rank=16, nope_dim=16, rope_dim=8, v_dim=16))
    residuals = {BASE: ResidualConfig("plain"), **{f"blocks of {n}": ResidualConfig("block", n) for n in BLOCKS[size]}, "full": ResidualConfig("full")}
    return {arm: arms.with_model(cfg, residual=residual, **thin) for arm, residual in residuals.items()}


def measure(run: arms.Run, heldout_batches: int | None) -> arms.Figures:
    """Held-out loss, and the depth profile on the first held-out batch."""
    batch, _ = next(make_loader(run.config.data, seed=0, split="heldout"))
    return arms.heldout_loss(run, heldout_batches) | depth_norms(make_probe(run.config.model)(run.variables, batch), batch["segment_ids"])


def figure(trained: arms.Trained, summaries: dict[str, dict[str, arms.Figures]]) -> bytes:
    panels = [plotting.Panel("step", "training loss\n(nats per token)", {arm: arms.curve(lines) for arm, lines in trained.lines.items()})]
    for name, label in (("input_rms", "input\n(root mean square)"), ("output_rms", "output\n(root mean square)"), ("gradient_norm", "gradient norm")):
        bands = {arm: plotting.Band(range(1, 1 + len(found[name]["mean"])), *arms.bounds(found[name])) for arm, found in summaries.items()}
        panels.append(plotting.Panel("sublayer (mixers are odd, feed-forwards even)", label, bands, yscale="log"))
    return plotting.png(plotting.band_panels(panels))


def main(argv: Sequence[str] | None = None) -> None:
    args = arms.parse(argv, __doc__, "attn_residuals")
    heldout_batches = 2 if args.smoke else None
    trained = arms.train(variants(args.size, args.corpus), args.seeds, args.run_dir, partial(measure, heldout_batches=heldout_batches), args.jobs)
    summaries = arms.summaries(trained.figures)
    results = dict(arms=summaries, base=BASE, differences=arms.differences(trained.figures, BASE, ("heldout_loss", "bits_per_byte")))
    arms.write_results(args, trained.seconds, results, figure(trained, summaries))


if __name__ == "__main__":
    main()
