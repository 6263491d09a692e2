"""How many layers have to be full attention? From none to all of eight: loss on text, recall, cache, and time of a token at long contexts.

    python experiments/hybrid_ratio.py --corpus runs/demo/corpus [--run-dir runs/hybrid_ratio] [--out results.json] [--size cpu|h200] [--seeds 3]
                                       [--parts text recall decode] [--jobs N] [--smoke]

Every 8th, 4th, 2nd or each of 8 layers is MLA, the others KDA; "7:1" is seven KDA layers to one of MLA. Each part is done by itself with --parts; the file
written last holds what was asked for, and a call with all parts reads the others back.

text and recall: every ratio is trained on packed text and on associative recall of 16 pairs, from weights that are all drawn alike (the mimetic start would
give KDA its memory and MLA none). Layers of the two kinds differ in parameters: the results have the counts.

decode: milliseconds of one more token of one sequence behind a context. The cache is made at that position outright, with random numbers of the size that
latents and states have: attention reads every slot whatever it holds, so that the time is that of a context that was read, without the minutes of reading
it. Contexts are 256 to 4,096 tokens (h200: 8,192 to 1,048,576). Bytes are those of the arrays, beside what `longmoe.inference.serving_costs` says on paper.

Time: H200, 5 to 8 runs at a time, 6.6 minutes for text and 2 for recall; decode 1 with its programs compiled ahead. Expected (Kimi Linear paper, perplexity
5.66 at 1:1, 5.65 at 3:1, 5.70 at 7:1, 5.77 all MLA): loss within a percent or two from 1:1 to 7:1 (so it was) and all MLA (it learns text far slower here,
without positions); recall complete with a single MLA layer or none (so it was); bytes and, where a GPU's memory is the limit, time a token in proportion to
the MLA layers (bytes were; at a million tokens 2, 4 and 8 MLA layers added 2.6, 11.5 and 32.6 ms to the 2.3 of none).

Writes results.json and hybrid_ratio.png: means with 95 % intervals, over seeds or (decode) over repeats.
"""
import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import arms
import demo
from decode_time import array_bytes, decode_milliseconds

from longmoe import plotting
from longmoe.configs import ModelConfig, TrainConfig, to_json
from longmoe.data.loader import make_loader
from longmoe.data.tasks import recall_vocab_size
from longmoe.evaluation.recall import recall_score
from longmoe.inference.serving_costs import ServingConfig, serving_costs

PARTS = ("text", "recall", "decode")
RATIOS = {"all KDA": 0, "7:1": 8, "3:1": 4, "1:1": 2, "all MLA": 1}
"""Arm -> mla_every."""
LAYERS, BASE, NUM_PAIRS = 8, "3:1", 16
CONTEXTS = {"smoke": (64,), "cpu": (256, 1024, 4096), "h200": (8192, 65536, 262144, 1048576)}


def text_arms(size: str, corpus: Path) -> dict[str, TrainConfig]:
    cfg = arms.text_config(size, corpus)
    # One layer is of one kind.
    layers, ratios = (1, {arm: RATIOS[arm] for arm in ("all KDA", "all MLA")}) if size == "smoke" else (LAYERS, RATIOS)
    return {arm: arms.with_model(cfg, num_layers=layers, mla_every=every, use_final_mla=False, init="normal") for arm, every in ratios.items()}


def recall_arms(size: str, corpus: Path) -> dict[str, TrainConfig]:
    task = demo.recall_config(demo.SMOKE if size == "smoke" else demo.Budget(), NUM_PAIRS)
    return {arm: arms.with_model(dataclasses.replace(cfg, data=task.data, steps=task.steps), vocab_size=recall_vocab_size(NUM_PAIRS))
            for arm, cfg in text_arms(size, corpus).items()}


def measure_recall(run: arms.Run, size: str) -> arms.Figures:
    batches = [batch for batch, _ in make_loader(run.config.data, seed=run.config.seed, split="heldout")][:1 if size == "smoke" else 8]
    return dict(recall=recall_score(run.config.model, run.variables, batches, NUM_PAIRS).accuracy)


def measure_decoding(model: ModelConfig, size: str) -> arms.Figures:
    """Context -> milliseconds a token (one a repeat), bytes of the cache's arrays, and bytes on paper."""
    contexts, (tokens, repeats) = CONTEXTS[size], (4, 2) if size == "smoke" else (32, 5)
    paper = serving_costs(model, ServingConfig(devices=1, weights="float32", cache=model.dtype), contexts)
    milliseconds = decode_milliseconds(model, contexts, tokens=tokens, repeats=repeats)
    return {str(row.length): dict(milliseconds=milliseconds[row.length], bytes=array_bytes(model, row.length), bytes_on_paper=row.sequence_bytes)
            for row in paper.rows}


def decode_part(args: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Arm -> context -> figures with the interval over repeats, and the seconds it took."""
    found, seconds = {}, 0.0
    for arm, cfg in text_arms(args.size, args.corpus).items():
        folder = args.run_dir / "decode" / arms.folder_name(arm)
        with arms.clocked(folder / "seconds.json") as clock:
            figures = arms.once(folder / "figures.json", to_json(cfg), lambda: measure_decoding(cfg.model, args.size))  # noqa: B023
        found[arm] = {context: figure | {"milliseconds": arms.summary(figure["milliseconds"])} for context, figure in figures.items()}
        seconds += clock[0]
    return found, seconds


def figure(results: dict[str, Any], mla_layers: dict[str, int]) -> bytes:
    panels = []
    for part, name, label in (("text", "heldout_loss", "held-out loss\n(nats per token)"), ("recall", "recall", f"recall of\n{NUM_PAIRS} pairs")):
        if part in results:
            rows = [(mla_layers[arm], *map(float, arms.bounds(found[name]))) for arm, found in results[part]["arms"].items()]
            panels.append(plotting.Panel("MLA layers", label, {"mean over seeds": plotting.Band(*zip(*sorted(rows)))}))
    if "decode" in results:
        milliseconds = {arm: plotting.Band([int(context) for context in found], *zip(*(arms.bounds(f["milliseconds"]) for f in found.values())))
                        for arm, found in results["decode"].items()}
        sizes = {arm: plotting.Band([int(context) for context in found], *[[f["bytes"] / 1e6 for f in found.values()]] * 3)
                 for arm, found in results["decode"].items()}
        panels += [plotting.Panel("tokens of context", label, bands, "log", "log")
                   for label, bands in (("milliseconds\na token", milliseconds), ("cache of a\nsequence (MB)", sizes))]
    return plotting.png(plotting.band_panels(panels))


def main(argv: Sequence[str] | None = None) -> None:
    args = arms.parse(argv, __doc__, "hybrid_ratio", add=lambda parser: parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS))
    arms.share_programs(args.run_dir)
    texts, results, seconds = text_arms(args.size, args.corpus), {}, 0.0
    for part, configs, measure, bounds in (
            ("text", texts, partial(arms.heldout_loss, batches=2 if args.smoke else None), {}),
            ("recall", recall_arms(args.size, args.corpus), partial(measure_recall, size=args.size), dict(least=0, most=1))):
        if part in args.parts:
            trained = arms.train(configs, args.seeds, args.run_dir / part, measure, args.jobs)
            seconds += trained.seconds
            results[part] = dict(arms=arms.summaries(trained.figures, **bounds))
            if BASE in trained.figures:
                names = [name for name in trained.figures[BASE][0] if name != "parameters"]
                results[part] |= dict(base=BASE, differences=arms.differences(trained.figures, BASE, names))
    if "decode" in args.parts:
        results["decode"], more = decode_part(args)
        seconds += more
    arms.write_results(args, seconds, results, figure(results, {arm: cfg.model.mixers.count("mla") for arm, cfg in texts.items()}))


if __name__ == "__main__":
    main()
