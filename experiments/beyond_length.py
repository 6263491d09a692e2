"""What happens past the length that a model was trained on: staged extension against short rows alone, and NoPE against RoPE.

    python experiments/beyond_length.py --corpus runs/demo/corpus [--run-dir runs/beyond_length] [--out results.json] [--size cpu|h200] [--seeds 3] [--smoke]

Six arms on the same tokens, of which each step trains on as many: KDA and MLA 3 to 1, without positional encoding (NoPE, the recipe) or with rotary position
embedding in the MLA layers (RoPE), either on short rows to the end or in stages of longer rows; and all layers MLA, NoPE and RoPE, on short rows. Short rows
are 256 tokens and stages 256, 1,024 and 4,096 (h200: 512; 512, 2,048, 8,192), for half, a quarter and a quarter of the steps. Held-out documents of the last
length are scored by position: 18 of the standard library (h200: 7), the same for all arms. Weights are all drawn alike, without the mimetic start.

Time: H200, 4 runs at a time beside other work, 12 minutes. Expected (Kimi Linear paper, RULER at 128K: hybrid NoPE 84.3, hybrid RoPE 78.8, all MLA 81.3;
direction only): after short rows RoPE loses more than NoPE past their length, most where all layers are MLA (all MLA: so it was, yet RoPE stays ahead; hybrid:
no difference); stages lower the loss there and cost little before it (they neither lower it nor cost, where the hybrids lose nothing past their rows).

Writes results.json and beyond_length.png: loss by position and its differences, paired by seed, with 95 % intervals over seeds.
"""
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import arms

from longmoe import plotting
from longmoe.configs import StageConfig, TrainConfig
from longmoe.data.token_folder import read_token_folder
from longmoe.evaluation.models import make_score
from longmoe.evaluation.positions import long_documents, position_edges, score_documents
from longmoe.evaluation.text import loss_by_position

LENGTHS = {"smoke": (16, 32), "cpu": (256, 1024, 4096), "h200": (512, 2048, 8192)}
TOKENS_PER_STEP = {"smoke": 64, "cpu": 4096, "h200": 16384}
SHARES = (2, 1, 1)
"""Of the steps, by stage."""
DOCUMENTS = {"smoke": 2, "cpu": 18, "h200": 7}
FIRST_EDGE = 32
"""Positions below it are one bin: their loss is that of a document's beginning."""
THETA = 10000.0
COMPARED = {
    "stages minus short, NoPE": ("hybrid NoPE, staged", "hybrid NoPE, short"), "stages minus short, RoPE": ("hybrid RoPE, staged", "hybrid RoPE, short"),
    "RoPE minus NoPE, hybrid": ("hybrid RoPE, short", "hybrid NoPE, short"), "RoPE minus NoPE, all MLA": ("all MLA RoPE, short", "all MLA NoPE, short")}
"""Difference -> (arm, the arm that is taken from it)."""


def variants(size: str, corpus: Path) -> dict[str, TrainConfig]:
    cfg, lengths, tokens = arms.text_config(size, corpus), LENGTHS[size], TOKENS_PER_STEP[size]
    unit = cfg.steps // sum(SHARES[:len(lengths)])
    cfg = arms.with_model(dataclasses.replace(
        cfg, steps=unit * sum(SHARES[:len(lengths)]), data=dataclasses.replace(cfg.data, sequence_length=lengths[0], batch_size=tokens // lengths[0])),
        init="normal")
    staged = cfg.with_stages(tuple(StageConfig(length, share * unit * tokens) for length, share in zip(lengths, SHARES)))
    rope = dataclasses.replace(cfg.model.mla, rope_theta=THETA)
    return {"hybrid NoPE, short": cfg, "hybrid NoPE, staged": staged,
            "hybrid RoPE, short": arms.with_model(cfg, mla=rope), "hybrid RoPE, staged": arms.with_model(staged, mla=rope),
            "all MLA NoPE, short": arms.with_model(cfg, mla_every=1), "all MLA RoPE, short": arms.with_model(cfg, mla_every=1, mla=rope)}


def edges(size: str) -> tuple[int, ...]:
    return tuple(edge for edge in position_edges(LENGTHS[size][-1]) if edge == 0 or edge >= min(FIRST_EDGE, LENGTHS[size][0]))


def measure(run: arms.Run, size: str) -> arms.Figures:
    """Mean loss by position of held-out documents, nats a token; the last bins lie past the short rows."""
    folder = read_token_folder(run.config.data.path)
    documents = long_documents(map(folder.heldout.document, range(len(folder.heldout.lengths()))), LENGTHS[size][-1], DOCUMENTS[size])
    losses = score_documents(make_score(run.config.model, run.variables), documents, first=folder.tokenizer.eos_id)
    return dict(by_position=loss_by_position(losses, edges(size)), documents=len(documents))


def figure(size: str, summaries: dict[str, dict[str, arms.Figures]], differences: dict[str, arms.Figures]) -> bytes:
    middles = [max(1.0, (low * high) ** 0.5) for low, high in zip(edges(size)[:-1], edges(size)[1:])]
    band = lambda found: plotting.Band(middles, *arms.bounds(found))
    position = "position in the document"
    return plotting.png(plotting.band_panels([
        plotting.Panel(position, "loss\n(nats per token)", {arm: band(found["by_position"]) for arm, found in summaries.items()}, "log"),
        plotting.Panel(position, "difference\n(nats per token)", {name: band(found) for name, found in differences.items()}, "log")]))


def main(argv: Sequence[str] | None = None) -> None:
    args = arms.parse(argv, __doc__, "beyond_length")
    trained = arms.train(variants(args.size, args.corpus), args.seeds, args.run_dir, partial(measure, size=args.size), args.jobs)
    summaries = arms.summaries(trained.figures)
    differences = {name: arms.differences({of: trained.figures[of] for of in (arm, base)}, base, ("by_position",))[arm]["by_position"]
                   for name, (arm, base) in COMPARED.items()}
    results = dict(edges=edges(args.size), trained_on=LENGTHS[args.size], arms=summaries, differences=differences)
    arms.write_results(args, trained.seconds, results, figure(args.size, summaries, differences))


if __name__ == "__main__":
    main()
