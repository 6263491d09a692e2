"""Commands about runs that have been trained: longmoe eval | generate | report."""
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from longmoe import plotting
from longmoe.configs import DataConfig, TrainConfig
from longmoe.data.loader import make_loader, with_default_corpus
from longmoe.data.sources import open_tokenizer
from longmoe.data.token_folder import read_token_folder
from longmoe.eval_commands import SuiteRun, run_suites
from longmoe.eval_files import HELDOUT, read_evaluations, write_evaluation
from longmoe.eval_report import COLUMNS, shown_score
from longmoe.evaluation import report as html
from longmoe.evaluation.ngrams import ngram_baselines
from longmoe.evaluation.recall import recall_score
from longmoe.evaluation.suites import BATCH_TOKENS
from longmoe.evaluation.text import evaluate_batches, loss_by_position, make_loss_function
from longmoe.inference.engine import stream
from longmoe.model.lm import LongMoE
from longmoe.train.checkpoints import kept_step, load_checkpoint
from longmoe.train.metrics import read_lines
from longmoe.train.run_files import RunPaths

EDGES = (0, 8, 32, 128, 512, 2048, 8192, 32768, 131072, 524288)
"""Position bins of `longmoe eval`, as far as a row goes."""
WINDOW = 20
"""Logged steps that a report's curves are means of; a fifth of a short run's."""


@dataclasses.dataclass(frozen=True)
class Eval:
    """Scores a run's newest checkpoint on the held-out part of its data; prints the figures and writes them to RUN/evaluations/step<step>-heldout-*.json."""
    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    step: int | None = None
    """A step whose checkpoint was kept; None is the newest."""
    batches: int | None = None
    """Batches of the held-out pass; None is all of it."""
    batch_size: int | None = None
    """Rows a batch; None is the run's own."""
    sequence_length: int | None = None
    """Tokens a row; None is the run's own."""
    suite: str = ""
    """Runs long-context suites instead, and writes their figures and a page into RUN/evaluations/. Names with commas between, of: needle, ruler,
    graph_walks, code_hops, mrcr, consistency, mqar, palindrome, stack, state_tracking, positions. batch_size is then examples a batch (None: by
    batch_tokens)."""
    lengths: tuple[int, ...] = ()
    """With suite: tokens of an example, prompt and answer together. By default the powers of two from 1,024 to twice the run's rows, or 1,024."""
    samples: int = 16
    """With suite: examples of each task and length (of each depth, for needles; whole traces, for consistency)."""
    batch_tokens: int = BATCH_TOKENS
    """With suite: tokens that a batch holds at most, where batch_size is None."""
    seed: int = 0
    """With suite: of the examples; the same seed gives the same ones."""
    essay: str = ""
    """With suite: a text file that needles are hidden in, instead of prose from the standard library's docstrings."""


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continues a prompt with a run's newest checkpoint, and prints the text as it comes."""
    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    prompt: str = ""
    """Text to continue; the model reads it as the beginning of a document."""
    max_new_tokens: int = 200
    """Stops after so many tokens, or at the end of the document."""
    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int | None = 50
    """Draws from the k most likely tokens."""
    top_p: float | None = None
    """Draws from the fewest tokens that together are this likely."""
    seed: int = 0
    """Of the draws: the same seed gives the same text."""
    step: int | None = None
    """A step whose checkpoint was kept; None is the newest."""


@dataclasses.dataclass(frozen=True)
class Report:
    """One HTML page about one run, or one that compares several."""
    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run directories."""
    out: str = ""
    """The page; by default report.html in the run, or comparison.html here for several."""


def evaluate(arguments: list[str]) -> None:
    parsed = tyro.cli(Eval, args=arguments, prog="longmoe eval")
    if parsed.suite:
        if parsed.batches is not None or parsed.sequence_length is not None:
            raise ValueError("suite: got it beside batches or sequence_length, which are of the held-out pass; wanted samples and lengths")
        run_suites(SuiteRun(parsed.run, tuple(dict.fromkeys(parsed.suite.split(","))), parsed.lengths, parsed.samples, parsed.seed, parsed.essay,
                            parsed.step, parsed.batch_size, parsed.batch_tokens))
        return
    step = kept_step(parsed.run, parsed.step)
    config, variables = load_checkpoint(parsed.run, step)
    changes = {name: value for name in ("batch_size", "sequence_length") if (value := getattr(parsed, name)) is not None}
    data = dataclasses.replace(config.data, **changes)
    batches = [batch for batch, _ in make_loader(data, seed=config.seed, split="heldout", vocab_size=config.model.vocab_size)][:parsed.batches]
    score = _score_recall if data.task == "associative_recall" else _score_text
    figures = score(config, data, variables, batches)
    asked = [HELDOUT, f"{data.sequence_length}", *([] if parsed.batches is None else [f"{len(batches)}batches"])]
    path = write_evaluation(parsed.run, step, asked, {"batch_size": data.batch_size, "sequence_length": data.sequence_length, "batches": len(batches),
                                                      "figures": figures})
    table = Table("figure", "value", title=f"{parsed.run}, step {step:,}, held out")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), _shown(value))
    Console().print(table)
    print(path)


def _shown(value: Any) -> str:
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _score_text(config: TrainConfig, data: DataConfig, variables: Any, batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
    losses = evaluate_batches(make_loss_function(config.model), variables, batches)
    edges = [edge for edge in EDGES if edge < data.sequence_length] + [data.sequence_length]
    by_position = {f"nats per token at positions {a} to {b - 1}": value for a, b, value in zip(edges, edges[1:], loss_by_position(losses, edges))}
    data = with_default_corpus(data)
    bits_per_byte = losses.bits_per_byte(open_tokenizer(data).bytes_per_token())
    figures = dict(nats_per_token=losses.nats_per_token(), bits_per_byte=bits_per_byte, tokens=losses.num_tokens)
    if data.path:
        folder = read_token_folder(data.path)
        figures |= {f"{b.name} bits per byte": b.bits_per_byte for b in ngram_baselines(folder, losses.num_tokens)}
    return figures | by_position


def _score_recall(config: TrainConfig, data: DataConfig, variables: Any, batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
    return dataclasses.asdict(recall_score(config.model, variables, batches, data.num_pairs))


def generate(arguments: list[str]) -> None:
    parsed = tyro.cli(Generate, args=arguments, prog="longmoe generate")
    config, variables = load_checkpoint(parsed.run, parsed.step)
    if config.data.task != "text":
        raise ValueError(f"run: {parsed.run} was trained on {config.data.task}, wanted a run on text")
    tokenizer = open_tokenizer(with_default_corpus(config.data))
    prompt = np.array([[tokenizer.eos_id, *tokenizer.encode(parsed.prompt)]], np.int32)
    pieces = stream(LongMoE(config.model), variables, prompt, max_new_tokens=parsed.max_new_tokens, temperature=parsed.temperature,
                    top_k=parsed.top_k, top_p=parsed.top_p, key=jax.random.key(parsed.seed), eos_id=tokenizer.eos_id)
    print(parsed.prompt, end="", flush=True)
    print_stream(tokenizer.decode, (int(token) for piece in pieces for token in piece[0]), tokenizer.eos_id)


def print_stream(decode: Callable[[Sequence[int]], str], tokens: Any, eos_id: int) -> None:
    """Prints the text of `tokens` up to eos_id as it grows. A character whose bytes are not all there yet waits for the rest."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        if token == eos_id:
            break
        ids.append(token)
        text = decode(ids)
        whole = text.rstrip("\ufffd")
        if whole.startswith(shown):
            print(whole[len(shown):], end="", flush=True)
            shown = whole
    print(decode(ids)[len(shown):])


def report(arguments: list[str]) -> None:
    parsed = tyro.cli(Report, args=arguments, prog="longmoe report")
    if not parsed.runs:
        raise ValueError("runs: got none, wanted at least one run directory")
    runs = {path.rstrip("/"): _read_run(path) for path in parsed.runs}
    out = parsed.out or (f"{next(iter(runs))}/report.html" if len(runs) == 1 else "comparison.html")
    evaluations = {name: read_evaluations(name) for name in runs}
    print(html.write_report(out, " / ".join(runs), [*_figures(runs), *_evaluations(evaluations),
                                                    _differences({name: record for name, (record, _) in runs.items()})]))


def _read_run(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(run.json, lines of metrics.jsonl)."""
    paths = RunPaths(Path(path))
    if not paths.run_json.exists():
        raise ValueError(f"runs: {path} holds no run.json, wanted a folder that `longmoe train --run-dir` wrote")
    lines = read_lines(paths.metrics)
    if not lines:
        raise ValueError(f"runs: {path} has logged no step yet")
    try:
        record = json.loads(paths.run_json.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"runs: {paths.run_json} is not JSON ({error}); the same `longmoe train` command writes it anew") from error
    missing = [name for name in ("config", "versions", "device", "commit") if name not in record]
    if missing:
        raise ValueError(f"runs: {paths.run_json} lacks {', '.join(missing)}; the same `longmoe train` command writes it anew")
    return record, lines


def _figures(runs: Mapping[str, tuple[dict[str, Any], list[dict[str, Any]]]]) -> list[html.Section]:
    steps = {name: [line["step"] for line in lines] for name, (_, lines) in runs.items()}
    panel = lambda figure: {name: [float(np.mean(line[figure])) for line in lines] for name, (_, lines) in runs.items()}
    labels = {"loss (nats per token)": "loss", "MaxVio (mean of layers)": "max_violation", "tokens a second": "tokens_per_second"}
    panels = {label: panel(figure) for label, figure in labels.items() if all(lines[0].get(figure) not in (None, []) for _, lines in runs.values())}
    rows = [("run", "steps", "trained tokens", "loss, mean of the last fifth", "MaxVio, mean of the last fifth", "tokens a second, median", "device", "commit")]
    for name, (record, lines) in runs.items():
        tail = lines[-max(1, len(lines) // 5):]
        mean = lambda figure, tail=tail: float(np.mean([np.mean(line[figure]) for line in tail])) if tail[0].get(figure) else float("nan")
        rows.append((name, f"{lines[-1]['step']:,}", _trained_tokens(lines), f"{mean('loss'):.4f}", f"{mean('max_violation'):.3f}",
                     f"{np.median([line['tokens_per_second'] for line in lines]):,.0f}", str(record["device"]), str(record["commit"])[:10]))
    window = max(1, min(WINDOW, min(map(len, steps.values())) // 5))
    sections = [html.Section("Figures", [html.Table(rows)]),
                html.Section("Over steps", [html.Picture(plotting.png(plotting.compare_runs(steps, panels, window=window)),
                                                         f"Means over {window} logged steps" if window > 1 else "Each logged step")])]
    if len(runs) == 1 and any("expert_load" in line for line in lines):
        loaded = [line for line in lines if line.get("expert_load")]
        if loaded:
            figure = plotting.expert_load([line["step"] for line in loaded], np.array([line["expert_load"] for line in loaded]))
            sections.append(html.Section("Experts", [html.Picture(plotting.png(figure), "Load of each expert over steps")]))
    return sections


def _trained_tokens(lines: Sequence[Mapping[str, Any]]) -> str:
    """Of all steps. Where not every step was logged, those between are taken to be like them."""
    total = sum(line["tokens"] for line in lines)
    return f"{total:,}" if len(lines) == lines[-1]["step"] else f"about {round(total / len(lines) * lines[-1]['step']):,}"


def _evaluations(runs: Mapping[str, Mapping[str, dict[str, Any]]]) -> list[html.Section]:
    """What `longmoe eval` found on the runs: held-out figures side by side, and the scores of suites."""
    label = lambda run, name: name if len(runs) == 1 else f"{run} {name}"
    named = [(label(run, name), record) for run, found in runs.items() for name, record in found.items()]
    heldout = {name: record["figures"] for name, record in named if "figures" in record}
    sections = []
    if heldout:
        figures = list(dict.fromkeys(figure for found in heldout.values() for figure in found))
        rows = [(figure.replace("_", " "), *(_shown(found.get(figure, "")) for found in heldout.values())) for figure in figures]
        sections.append(html.Section("Held out", [html.Table([("figure", *heldout), *rows])]))
    score = lambda s: shown_score(s["mean"], s["low"], s["high"])
    rows = [(name, row["task"], f"{row['length']:,}", score(row["scores"]["official"]), score(row["scores"]["strict"]),
             str(row["scores"]["official"]["n"]), f"{row['scores']['chance']:.3f}") for name, record in named for row in record.get("tasks", [])]
    if rows:
        sections.append(html.Section("Long-context suites", [html.Table([("evaluation", *COLUMNS), *rows]),
                                                             "Each has a page in its run's folder evaluations, which says what was left out too."]))
    return sections


def _differences(records: Mapping[str, dict[str, Any]]) -> html.Section:
    """The settings and versions in which the runs differ; all settings of a single run."""
    flat = {name: dict(_leaves(record["config"])) | {f"version of {p}": v for p, v in record["versions"].items()} for name, record in records.items()}
    fields = sorted(set().union(*flat.values()))
    value = lambda name, field: json.dumps(flat[name].get(field))
    if len(records) == 1:
        return html.Section("Settings", [html.Table([("field", "value"), *((f, value(n, f)) for n in records for f in fields)])])
    differing = [field for field in fields if len({value(name, field) for name in flat}) > 1]
    if not differing:
        return html.Section("Settings", ["The runs have the same settings and versions."])
    return html.Section("Settings that differ", [html.Table([("field", *flat), *((field, *(value(name, field) for name in flat)) for field in differing)])])


def _leaves(config: Any, path: str = "") -> Any:
    if not isinstance(config, dict):
        yield path, config
        return
    for name, item in config.items():
        yield from _leaves(item, f"{path}.{name}" if path else name)
