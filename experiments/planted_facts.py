"""Does a model find what it has read? Ten minutes of training on text and on documents with planted facts, then a needle at every depth.

    python experiments/planted_facts.py [--size cpu|h200] [--run-dir runs/planted_facts] [--out results.json] [--steps N] [--samples 8] [--smoke]

The training tokens are the standard library's source and pieces of it with facts between them and questions about them behind: a number, a number that a
later one replaces, a number that is nowhere. The needle grid words its question as they do, over other draws of the same words, and hides it in prose. h200:
the small preset with the mimetic start, slow first decays and no rematerialisation, 2,000 steps of four rows of 8,192 tokens. cpu: nano, rows of 512 tokens.
Scored are lengths inside the trained rows and up to eight times beyond.

Only an answer's few tokens teach to look, so 0.3 of the tokens are documents with little between the facts, a question in seventy tokens; half are documents
that nearly fill a row, their facts anywhere, and 0.2 are text. Dense documents have from one question to many, so that there is something to learn before the
model tells keys apart, and no document is cut by a row's end: the questions would stand in another row than their facts. Each is met once. The tokenizer has
VOCAB_SIZE tokens, the model no more, and is trained on such documents too: words of keys are then one token or two, within reach of a short convolution, and
numbers are spelled with some hundred tokens that are met often.

Time: 10 minutes of training on an H200. Expected: at least 95% of needles inside the trained length. How far beyond it holds is what the plot says: nothing in
the recipe knows a position, but no training row is longer. What it took, needles of 44 found at 1,024, 2,048, 4,096 and 8,192 tokens after 2,000 steps on the
H200: none with 32 questions in every document, documents cut by rows, a tokenizer of the text alone and first decays of 200 tokens at most; 44, 44, 33, 25 with
documents of up to 6,400 tokens, most of them short, and decays of up to 20,000 tokens; 44, 43, 44, 30 with long documents, facts anywhere in them and decays of
up to 200,000. All tokens were targets there. Now answers alone are: on a CPU (nano, heads of 64, 800 steps of 4,096 tokens) 94% of the numbers are then right
in long documents with one fact, and 28% where all tokens are targets: keys and numbers that nobody can foresee are most of the loss. This recipe was not run on
a GPU yet.

Writes results.json, and planted_facts.png beside it: the share of needles found (official score, Wilson's 95 % interval) over the length, with the controls.
The page with heat maps over depth is in RUN_DIR/run/evaluations. results.json also has the share of right answers on further documents of the trained form, by
the number of facts in them. The same command resumes.
"""
import argparse
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from record import run_record

import longmoe
from longmoe import plotting
from longmoe.configs import DataConfig, SourceConfig, TrainConfig
from longmoe.data.corpus import build_stdlib_corpus, stdlib_contents
from longmoe.data.long_documents import Filling, LongDocument, log_uniform
from longmoe.data.planted import ABSENT, planted_documents
from longmoe.data.token_folder import EncodedDocument, read_token_folder, write_token_folder
from longmoe.data.tokenizer import Tokenizer
from longmoe.eval_commands import SuiteRun, run_suites
from longmoe.evaluation.models import ScoreTokens, make_score
from longmoe.evaluation.statistics import wilson
from longmoe.train.checkpoints import load_checkpoint
from longmoe.train.metrics import read_lines

FACTS = ("single", "single", "last_counts", "absent")
"""Drawn from evenly: half of the questions ask for a number that stands in the text once."""
FACT = re.compile(r"numbers for \S+ is: ")
"""What a planted fact about a number has."""
WEIGHTS = {"text": 0.2, "dense": 0.3, "long": 0.5}
"""Shares of the training tokens."""
REST = 0.0
"""Weight, as targets, of planted documents' tokens that are no answer: the text is there to be learned."""
HELDOUT = 8
"""Documents of each source that are held out; a token folder has some."""
VOCAB_SIZE = 4096
TOKENIZER_DOCUMENTS = 3000
"""Documents without filling that the tokenizer is trained on beside the text."""
STEPS = dict(dt_min=1e-6, dt_max=1e-2)
"""First steps of decays (KDAConfig): times of 20 to 200,000 tokens. With the usual ones, 2 to 200, a fact is forgotten before it is asked for, and what is not
there has no gradient: on a CPU nano with heads of 64 and times up to 20,000 has 27% of the numbers right where there is one fact after 900 steps of 1,024
tokens (up to 8 questions); with the usual steps, and heads of 32, it had none after 1,000."""
PLOTTED = {"needle_grid": "needle", "needle_duplicate": "control: a later number counts", "needle_absent": "control: no number"}


@dataclasses.dataclass(frozen=True)
class Documents:
    """A source of documents with planted facts."""
    count: int
    filling: tuple[int, int]
    """Least and most tokens of a document's filling, log-uniform between."""
    questions: tuple[int, int]
    """Fewest and most, log-uniform between."""
    near: bool = True
    """Half of the facts at log-uniform distances from the end; False: all at uniform ones."""

    @property
    def name(self) -> str:
        return "_".join(map(str, (self.count, *self.filling, *self.questions, "near" if self.near else "uniform")))


@dataclasses.dataclass(frozen=True)
class Budget:
    """Sizes of model, data and training."""
    preset: str
    row: int
    """Tokens of a training row."""
    batch: int
    steps: int
    dense: Documents
    """Facts with little between them."""
    long: Documents
    """As long as a row allows."""
    lengths: tuple[int, ...]
    """At which needles are hidden."""
    learning_rate: float
    batch_tokens: int = 65_536
    """Of a batch of needles."""
    scored: int = 128
    """Further documents of each source whose answers are scored."""

    @property
    def sources(self) -> dict[str, Documents]:
        return dict(dense=self.dense, long=self.long)


BUDGETS = {
    "h200": Budget("small", row=8192, batch=4, steps=2000, dense=Documents(29_000, (16, 512), (1, 32)),
                   long=Documents(5_600, (4096, 7200), (4, 14), near=False),
                   lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536), learning_rate=2e-3, batch_tokens=360_448),
    "cpu": Budget("nano", row=512, batch=8, steps=1500, dense=Documents(11_000, (1, 32), (1, 4)), long=Documents(7_600, (192, 320), (1, 2), near=False),
                  lengths=(320, 512, 1024, 2048, 4096), learning_rate=3e-3),
    "smoke": Budget("nano", row=256, batch=2, steps=2, dense=Documents(8, (1, 16), (1, 2)), long=Documents(8, (16, 64), (1, 2)), lengths=(320,),
                    learning_rate=3e-3, scored=4),
}


@functools.cache
def texts() -> tuple[str, ...]:
    """Of the standard library's files."""
    contents = stdlib_contents()
    return tuple(map(contents.content, range(len(contents))))


def documents(source: Documents, filling: Filling, seed: int) -> Iterator[LongDocument]:
    return planted_documents(filling, seed=seed, questions=log_uniform(*source.questions), length=log_uniform(*source.filling), kinds=FACTS, near=source.near)


def prepare(folder: Path, budget: Budget) -> dict[str, Path]:
    """Source -> token folder: the standard library, and pieces of its files with facts and questions, worded as the needle grid's."""
    text = folder / f"text_{VOCAB_SIZE}_{budget.dense.questions[1]}"
    if not text.exists():
        sample = itertools.islice(documents(dataclasses.replace(budget.dense, filling=(1, 1)), Filling(texts(), Tokenizer.of_bytes()), 1), TOKENIZER_DOCUMENTS)
        build_stdlib_corpus(text, tokenizer=Tokenizer.train(itertools.chain(texts(), (document.text for document in sample)), VOCAB_SIZE))
    made, tokenizer = {"text": text}, read_token_folder(text).tokenizer
    filling = functools.cache(lambda: Filling(texts(), tokenizer))                 # tokenises all texts: once, and only where something is made
    for seed, (name, source) in enumerate(budget.sources.items(), 3):
        made[name] = folder / f"{name}_{VOCAB_SIZE}_{source.name}"
        if not made[name].exists():
            splits = {"train": (seed, source.count), "heldout": (seed + len(budget.sources), HELDOUT)}
            write_token_folder(made[name], tokenizer, {split: encoded(itertools.islice(documents(source, filling(), seed), count), tokenizer)
                                                       for split, (seed, count) in splits.items()},
                               name=name, source="planted facts in the standard library", licences=["PSF-2.0"])
    return made


def encoded(made: Iterable[LongDocument], tokenizer: Tokenizer) -> Iterator[EncodedDocument]:
    """Documents as tokens, of which answers with their full stops are targets of weight 1, all others of weight REST."""
    token_bytes = tokenizer.bytes_per_token()
    for document in made:
        ids = tokenizer.encode(document.text)
        weights = np.full(len(ids) + 1, REST, np.float32)
        for places in answer_tokens(document, ids, token_bytes):
            weights[places[0]:places[-1] + 2] = 1
        yield EncodedDocument(document.name, [*ids, tokenizer.eos_id], weights, len(document.text.encode()))


def config(data: dict[str, Path], budget: Budget) -> TrainConfig:
    cfg = longmoe.presets.PRESETS[budget.preset]()
    sources = tuple(SourceConfig(path=str(path), name=name, weight=WEIGHTS[name], whole=name != "text")
                    for name, path in data.items())
    model = dataclasses.replace(cfg.model, init="mimetic", vocab_size=VOCAB_SIZE, remat="none", kda=dataclasses.replace(cfg.model.kda, **STEPS))
    if budget.steps <= 2:
        model = dataclasses.replace(model, num_layers=1, mla_every=1, dense_layers=0)
    return dataclasses.replace(
        cfg, model=model, steps=budget.steps, data=DataConfig(sources=sources, sequence_length=budget.row, batch_size=budget.batch, workers=2),
        optim=dataclasses.replace(cfg.optim, learning_rate=budget.learning_rate, warmup_steps=max(1, budget.steps // 12)),
        checkpoint=dataclasses.replace(cfg.checkpoint, every=max(1, budget.steps // 3), keep=1))


def answer_tokens(document: LongDocument, ids: Sequence[int], token_bytes: np.ndarray) -> list[np.ndarray]:
    """Places in ids, the tokens of its text, of each answer without the stop behind it: every token that holds some of it."""
    turns = np.cumsum([0, *(len(turn.content.encode()) for turn in document.turns)])
    ends = np.cumsum(token_bytes[np.asarray(ids)])
    return [np.arange(np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop - len(".\n"), side="left") + 1)
            for start, stop in zip(turns[1::2], turns[2::2])]


def share_right(score: ScoreTokens, tokenizer: Tokenizer, made: Iterable[LongDocument], budget: Budget) -> dict[str, dict[str, Any]]:
    """Of the answers in the documents that a row can hold, by the facts that the document has ("1", "2-3", "4-7", ...; "absent": no fact answers it): the
    share whose every token is the most likely one behind the right ones before it, with Wilson's interval."""
    found: dict[str, list[bool]] = {}
    token_bytes = tokenizer.bytes_per_token()
    encoded = ((document, tokenizer.encode(document.text)) for document in made)
    for batch in itertools.batched(((document, ids) for document, ids in encoded if len(ids) < budget.row), budget.batch):
        rows = np.full((budget.batch, budget.row + 1), tokenizer.eos_id, np.int32)
        for row, (_, ids) in zip(rows, batch):
            row[1:1 + len(ids)] = ids                                     # behind the end-of-document token
        best = score(rows[:, :-1], rows[:, 1:]).best
        for row, right, (document, ids) in zip(rows, best, batch):
            facts = len(FACT.findall(document.turns[0].content))
            low = 1 << (max(facts, 1).bit_length() - 1)
            for turn, places in zip(document.turns[1::2], answer_tokens(document, ids, token_bytes)):
                name = "absent" if turn.content.startswith(ABSENT) else "1" if low == 1 else f"{low}-{2 * low - 1}"
                found.setdefault(name, []).append(bool((right[places] == row[1:][places]).all()))
    order = lambda name: (name == "absent", int(name.split("-")[0]) if name != "absent" else 0)
    return {name: dataclasses.asdict(wilson(float(np.mean(found[name])), len(found[name]))) for name in sorted(found, key=order)}


def scores(evaluation: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Task -> length -> official score with its interval, and the strict one."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in evaluation["tasks"]:
        official, strict = row["scores"]["official"], row["scores"]["strict"]
        found.setdefault(row["task"], {})[str(row["length"])] = {name: official[name] for name in ("mean", "low", "high", "n")} | {"strict": strict["mean"]}
    return found


def figure(found: dict[str, dict[str, dict[str, float]]], row: int) -> bytes:
    bands = {label: plotting.Band([int(length) for length in found[task]], *np.asarray([[cell[bound] for bound in ("mean", "low", "high")]
                                                                                        for cell in found[task].values()]).T)
             for task, label in PLOTTED.items() if task in found}
    return plotting.png(plotting.band_panels([plotting.Panel("tokens of prompt and answer", "share right", bands, "log2",
                                                             title=f"trained on rows of {row:,} tokens")]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("cpu", "h200"), default="cpu")
    parser.add_argument("--run-dir", type=Path, help="where the run goes (default: runs/planted_facts, with _smoke behind it under --smoke)")
    parser.add_argument("--out", type=Path, help="where the results go, with planted_facts.png beside them (default: RUN_DIR/results.json)")
    parser.add_argument("--steps", type=int, help="in place of the size's own")
    parser.add_argument("--samples", type=int, default=8, help="needles at each depth and length")
    parser.add_argument("--smoke", action="store_true", help="two steps of a layer, for tests")
    args = parser.parse_args(argv)
    budget = BUDGETS["smoke" if args.smoke else args.size]
    if args.steps is not None:
        budget = dataclasses.replace(budget, steps=args.steps)
    run_dir = args.run_dir or Path("runs") / ("planted_facts_smoke" if args.smoke else "planted_facts")
    run, out, samples = run_dir / "run", args.out or run_dir / "results.json", 1 if args.smoke else args.samples
    out.parent.mkdir(parents=True, exist_ok=True)
    data = prepare(run_dir / "data", budget)
    cfg = config(data, budget)
    lines = read_lines(Path(longmoe.fit(cfg, str(run)).paths.metrics))
    page = run_suites(SuiteRun(run=str(run), suites=("needle",), lengths=budget.lengths, samples=samples, batch_tokens=budget.batch_tokens))
    loaded, variables = load_checkpoint(str(run))
    tokenizer = read_token_folder(data["text"]).tokenizer
    score, filling = make_score(loaded.model, variables), Filling(texts(), tokenizer)
    trained_form = {name: share_right(score, tokenizer, itertools.islice(documents(source, filling, 2), budget.scored), budget)
                    for name, source in budget.sources.items()}
    found, seconds = scores(json.loads(page.with_suffix(".json").read_text())), lines[-1]["elapsed_seconds"]
    results = dict(budget=dataclasses.asdict(budget), samples=samples, scores=found, trained_form=trained_form, tokens=budget.steps * budget.batch * budget.row,
                   loss=float(np.mean([line["loss"] for line in lines[-max(1, len(lines) // 20):]])), training_seconds=round(seconds, 1),
                   run=run_record("planted_facts.py", argv, seconds))
    out.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    out.with_name("planted_facts.png").write_bytes(figure(found, budget.row))
    print(json.dumps({name: {facts: cell["mean"] for facts, cell in found.items()} for name, found in trained_form.items()}))
    print(json.dumps({task: {length: cell["mean"] for length, cell in cells.items()} for task, cells in found.items()}, indent=1))


if __name__ == "__main__":
    main()
