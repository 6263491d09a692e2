"""Does every part of the recipe learn? Trains the nano preset on real text and on associative recall, and writes a report.

    make demo                                    # or: python experiments/demo.py [--run-dir runs/demo] [--steps N] [--smoke]

About 6 minutes on 2 CPU cores; no download: the text is the standard library of the running Python. Expected: held-out bits per byte
under 2.2 where a unigram has about 2.9 and a bigram about 1.9, and over 90% recall of 16 pairs where chance is 6.25%.
The same command again resumes, and skips what is finished; --fresh starts over.
"""

import argparse
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from demo_report import write_demo_report
from rich.console import Console
from rich.table import Table

import longmoe
from longmoe.configs import DataConfig, TrainConfig, to_json
from longmoe.data.corpus import build_stdlib_corpus
from longmoe.data.loader import make_loader
from longmoe.data.tasks import recall_length, recall_vocab_size
from longmoe.data.token_folder import TokenFolder, read_token_folder
from longmoe.evaluation.ngrams import ngram_baselines
from longmoe.evaluation.recall import recall_score
from longmoe.evaluation.text import (
    document_starts,
    evaluate_batches,
    loss_by_position,
    make_loss_function,
    mean_depth_weights,
    silence,
)

POSITION_EDGES = (0, 8, 32, 128, 512)
PROMPT = "def read_lines(path):\n"
console = Console(stderr=True, highlight=False)


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much the demo does."""

    steps: int = 400
    recall_steps: int = 200
    heldout_batches: int | None = None
    """Batches of the held-out pass; None is all of it."""
    ablation_batches: int = 8
    recall_batches: int = 8
    new_tokens: int = 160


SMOKE = Budget(steps=6, recall_steps=6, heldout_batches=2, ablation_batches=2, recall_batches=1, new_tokens=8)


def text_config(corpus: Path, budget: Budget) -> TrainConfig:
    """The nano preset on packed text."""
    cfg = longmoe.presets.nano()
    return dataclasses.replace(
        cfg, steps=budget.steps, data=DataConfig(path=str(corpus), sequence_length=512, batch_size=4),
        optim=dataclasses.replace(cfg.optim, warmup_steps=min(40, budget.steps // 4)),
        checkpoint=dataclasses.replace(cfg.checkpoint, every=200, keep=1))


def recall_config(budget: Budget, num_pairs: int = 16) -> TrainConfig:
    """Two layers of the nano preset, KDA and then MLA with experts, with a vocabulary of the task's own size."""
    cfg = longmoe.presets.nano()
    model = dataclasses.replace(cfg.model, vocab_size=recall_vocab_size(num_pairs), num_layers=2, mla_every=2, use_final_mla=False)
    return dataclasses.replace(
        cfg, steps=budget.recall_steps, model=model,
        data=DataConfig(task="associative_recall", num_pairs=num_pairs, sequence_length=recall_length(num_pairs), batch_size=64),
        optim=dataclasses.replace(cfg.optim, warmup_steps=min(20, budget.recall_steps // 4)),
        checkpoint=dataclasses.replace(cfg.checkpoint, every=200, keep=1))


def prepare_corpus(path: Path) -> TokenFolder:
    return read_token_folder(path) if path.exists() else build_stdlib_corpus(path)


def variables_of(state: Any) -> dict[str, Any]:
    return {"params": state.params, "router_state": state.router_state}


def evaluate_text(cfg: TrainConfig, folder: TokenFolder, variables: dict[str, Any], budget: Budget) -> dict[str, Any]:
    """All figures about held-out text, JSON-plain."""
    data = dataclasses.replace(cfg.data, batch_size=16)
    batches = [batch for batch, _ in make_loader(data, seed=0, split="heldout")][:budget.heldout_batches]
    few = batches[:budget.ablation_batches]
    loss_function = make_loss_function(cfg.model)
    losses = evaluate_batches(loss_function, variables, batches)
    starts = evaluate_batches(loss_function, variables, document_starts(folder.heldout, sequence_length=data.sequence_length, batch_size=16))
    whole = evaluate_batches(loss_function, variables, few).nats_per_token()
    silenced = {mixer: evaluate_batches(loss_function, silence(variables, mixer), few).nats_per_token() for mixer in ("kda", "mla")}
    weights = mean_depth_weights(cfg.model, variables, batches[0])
    return {
        "nats_per_token": losses.nats_per_token(), "bits_per_byte": losses.bits_per_byte(folder.tokenizer.bytes_per_token()),
        "tokens": losses.num_tokens, "ngrams": [dataclasses.asdict(b) for b in ngram_baselines(folder, losses.num_tokens)],
        "position_edges": POSITION_EDGES, "by_context": loss_by_position(losses, POSITION_EDGES),
        "by_document_position": loss_by_position(starts, POSITION_EDGES), "ablation_base": whole, "silenced": silenced,
        "depth_weights": {site: np.round(w, 5).tolist() for site, w in weights.items()},
    }


def evaluate_recall(cfg: TrainConfig, variables: dict[str, Any], budget: Budget) -> dict[str, Any]:
    batches = [batch for batch, _ in make_loader(cfg.data, seed=cfg.seed, split="heldout")][:budget.recall_batches]
    return dataclasses.asdict(recall_score(cfg.model, variables, batches, cfg.data.num_pairs))


def sample_text(cfg: TrainConfig, folder: TokenFolder, variables: dict[str, Any], budget: Budget) -> dict[str, str]:
    prompt = [folder.tokenizer.eos_id, *folder.tokenizer.encode(PROMPT)]
    new = longmoe.generate(longmoe.LongMoE(cfg.model), variables, jnp.asarray([prompt], jnp.int32), max_new_tokens=budget.new_tokens,
                           temperature=0.8, top_k=50, key=jax.random.key(0))
    return {"prompt": PROMPT, "continuation": folder.tokenizer.decode(np.asarray(new)[0])}


class Parts:
    """Runs the demo's parts, says what each does and how long it took, and keeps the results of finished ones."""

    def __init__(self, path: Path):
        self._path = path
        self.seconds: dict[str, float] = {}

    def run(self, name: str, text: str, part: Callable[[], Any]) -> Any:
        console.print(f"[bold]{name}[/bold]: {text}")
        began = time.monotonic()
        result = part()
        self.seconds[name] = time.monotonic() - began
        console.print(f"  {self.seconds[name]:.0f} s", style="dim")
        return result

    def once(self, name: str, text: str, depends_on: str, part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """As `run`, but a result of the same `depends_on` is read back instead. Results are JSON-plain."""
        digest = hashlib.sha256(depends_on.encode()).hexdigest()
        kept = json.loads(self._path.read_text()) if self._path.exists() else {}
        if kept.get(name, {}).get("depends_on") == digest:
            console.print(f"[bold]{name}[/bold]: done before")
            self.seconds[name] = kept[name]["seconds"]
            return kept[name]["result"]
        result = self.run(name, text, part)
        kept[name] = {"depends_on": digest, "seconds": self.seconds[name], "result": result}
        self._path.write_text(json.dumps(kept, indent=1))
        return result


def acceptance(results: dict[str, Any], max_violation: Sequence[float]) -> list[tuple[str, str, str]]:
    """(figure, measured, wanted), as shown at the end and in the report."""
    text, recall = results["text"], results["recall"]
    unigram, bigram = (b["bits_per_byte"] for b in text["ngrams"])
    gain = lambda bins: 1 - bins[-1] / bins[1]
    rise = {mixer: nats / text["ablation_base"] - 1 for mixer, nats in text["silenced"].items()}
    return [
        ("held-out bits per byte", f"{text['bits_per_byte']:.3f}", f"under 2.2 (unigram {unigram:.3f}, bigram {bigram:.3f})"),
        ("loss at positions 128+ of a row against 8-32", f"{gain(text['by_context']):.1%} lower", "at least 5% lower"),
        ("the same for rows that start with a file's first token", f"{gain(text['by_document_position']):.1%} lower", "reported"),
        ("loss with all KDA layers silenced", f"+{rise['kda']:.1%}", "over +10%"),
        ("loss with all MLA layers silenced", f"+{rise['mla']:.1%}", "reported"),
        ("recall of 16 pairs", f"{recall['accuracy']:.1%}", f"at least 90% (chance {recall['chance']:.2%})"),
        ("MaxVio, mean of the last fifth of the steps", ", ".join(f"{v:.3f}" for v in max_violation), "reported, one a MoE layer"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, help=f"steps on text (default {Budget().steps})")
    parser.add_argument("--recall-steps", type=int, help=f"steps on associative recall (default {Budget().recall_steps})")
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything, for tests")
    parser.add_argument("--fresh", action="store_true", help="delete earlier results in the run directory")
    args = parser.parse_args(argv)
    budget = SMOKE if args.smoke else Budget()
    given = {"steps": args.steps, "recall_steps": args.recall_steps}
    budget = dataclasses.replace(budget, **{name: value for name, value in given.items() if value is not None})

    root = args.run_dir
    root.mkdir(parents=True, exist_ok=True)
    if args.fresh:
        (root / "results.json").unlink(missing_ok=True)
    parts = Parts(root / "results.json")
    folder = parts.run("corpus", "the standard library's source, held out by file; byte-level BPE of 4,096", lambda: prepare_corpus(root / "corpus"))
    text_cfg, recall_cfg = text_config(root / "corpus", budget), recall_config(budget)
    text = parts.run("train text", f"nano preset, {text_cfg.steps} steps", lambda: longmoe.fit(text_cfg, str(root / "text"), fresh=args.fresh))
    recall = parts.run("train recall", f"16 pairs, {recall_cfg.steps} steps", lambda: longmoe.fit(recall_cfg, str(root / "recall"), fresh=args.fresh))
    text_key, recall_key = (to_json(c) + folder.fingerprint + repr(budget) for c in (text_cfg, recall_cfg))
    results = {
        "text": parts.once("evaluate text", "held-out loss, n-grams, positions, silenced layers", text_key,
                           lambda: evaluate_text(text_cfg, folder, variables_of(text.state), budget)),
        "recall": parts.once("evaluate recall", "accuracy on new rows", recall_key,
                             lambda: evaluate_recall(recall_cfg, variables_of(recall.state), budget)),
        "sample": parts.once("generate", "a sample", text_key, lambda: sample_text(text_cfg, folder, variables_of(text.state), budget)),
    }
    lines = {name: [json.loads(line) for line in fitted.paths.metrics.read_text().splitlines()] for name, fitted in
             (("text", text), ("recall", recall))}
    tail = lines["text"][-max(1, len(lines["text"]) // 5):]
    figures = acceptance(results, np.mean([line["max_violation"] for line in tail], axis=0))
    report = write_demo_report(root / "report.html", folder, results, lines, figures, parts.seconds)

    table = Table("figure", "measured", "wanted", title="demo")
    for row in figures:
        table.add_row(*row)
    Console(highlight=False).print(table)
    console.print(f"report: {report}")


if __name__ == "__main__":
    main()
