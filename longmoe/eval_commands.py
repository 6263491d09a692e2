"""longmoe eval RUN --suite ...: long-context suites on a trained run; figures in the terminal, as JSON, and as a page with heat maps."""
import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from longmoe import plotting
from longmoe.configs import DataConfig, TrainConfig
from longmoe.data.loader import with_default_corpus
from longmoe.data.sources import open_sources, open_tokenizer
from longmoe.data.tokenizer import Tokenizer
from longmoe.evaluation import report as html
from longmoe.evaluation.consistency import Consistency, consistency
from longmoe.evaluation.examples import Task, TokenTask
from longmoe.evaluation.haystack import Essay, default_essay
from longmoe.evaluation.models import Model, ScoreTokens, make_count, make_generate, make_score
from longmoe.evaluation.positions import TAIL, ContextGain, context_gain, long_documents, position_edges, score_documents
from longmoe.evaluation.statistics import RULER_THRESHOLD, EffectiveContext, effective_context, weighted_averages
from longmoe.evaluation.suites import (
    SUITES,
    TOKEN_SUITES,
    Cell,
    Record,
    Results,
    Unfit,
    cells,
    effective_contexts,
    family_score,
    make_tasks,
    model_answers,
    run_tasks,
    samples_of,
)
from longmoe.evaluation.text import loss_by_position
from longmoe.inference.engine import generate
from longmoe.model.lm import LongMoE
from longmoe.plan_commands import nearest
from longmoe.train.checkpoints import load_checkpoint
from longmoe.train.metrics import ProgressDisplay
from longmoe.train.run_files import RunPaths, replace_text

POSITIONS = "positions"
"""The suite of losses by position, which scores held-out documents instead of generated examples."""
SHORTEST = 1024
_COLUMNS = ("task", "length", "official", "strict", "examples", "chance")
_SHOWN_OUTPUTS = 8
_SHOWN_CHARACTERS = 160


@dataclasses.dataclass(frozen=True)
class SuiteRun:
    """What is asked for; the fields are the flags of `longmoe eval`."""
    run: str
    suites: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    samples: int = 16
    seed: int = 0
    essay: str = ""
    step: int | None = None
    batch_size: int | None = None


@dataclasses.dataclass(frozen=True)
class Positions:
    """Losses over held-out documents of at least `length` tokens: nats a token in the bins between `edges`, and the gain of context."""
    length: int
    documents: int
    edges: tuple[int, ...]
    nats_per_token: tuple[float, ...]
    gains: tuple[ContextGain, ...]


def run_suites(asked: SuiteRun) -> None:
    """Runs the suites, prints a table, and writes RUN/suites.json and RUN/suites.html.

    ValueError for a name that is no suite, a suite on text for a run without a tokenizer, and a suite whose ids the model does not have.
    """
    for name in asked.suites:
        if name not in (*SUITES, POSITIONS):
            raise ValueError(f"suite: got {name!r}, wanted names among {', '.join((*SUITES, POSITIONS))}{nearest(name, (*SUITES, POSITIONS))}")
    config, variables = load_checkpoint(asked.run, asked.step)
    tasks = _tasks(asked, config)
    lengths = asked.lengths or _default_lengths(config.data.sequence_length)
    on_text = config.data.task == "text"
    data = with_default_corpus(config.data) if on_text else config.data
    tokenizer = open_tokenizer(data) if on_text else None
    model = _model(config, variables, tokenizer)
    total = len(lengths) * (sum(samples_of(task, asked.samples) for task in tasks) + asked.samples * (POSITIONS in asked.suites))
    with ProgressDisplay("eval", total) as display:
        done = 0

        def progress(name: str, examples: int) -> None:
            nonlocal done
            done += examples
            display.advance(done, name)

        results = run_tasks(tasks, model_answers(model), lengths=lengths, samples=asked.samples, count=model.count, seed=asked.seed,
                            batch_size=asked.batch_size, progress=progress)
        positions: list[Positions] = []
        if tokenizer is not None and POSITIONS in asked.suites:
            positions, results = _positions(asked, data, model.score, tokenizer.eos_id, lengths, results, progress)
    record = _summary(asked, lengths, results, positions)
    root = RunPaths(Path(asked.run)).root
    replace_text(root / "suites.json", json.dumps(_plain(record | {"records": results.records}), indent=1) + "\n")
    page = html.write_report(root / "suites.html", f"{asked.run}: {', '.join(asked.suites)}", _sections(lengths, results, positions, record))
    _print(asked.run, results)
    print(page)


def _tasks(asked: SuiteRun, config: TrainConfig) -> list[Task]:
    on_text = [name for name in asked.suites if name not in TOKEN_SUITES]
    if on_text and config.data.task != "text":
        raise ValueError(f"suite: got {', '.join(on_text)} for {asked.run}, which was trained on {config.data.task} and has no tokenizer, "
                         f"wanted names among {', '.join(TOKEN_SUITES)}, or a run on text")
    needs_essay = bool({"needle", "ruler"} & set(asked.suites))
    essay = None if not needs_essay else Essay(Path(asked.essay).read_text("utf-8")) if asked.essay else default_essay()
    tasks = make_tasks([name for name in asked.suites if name != POSITIONS], essay=essay, vocab_size=config.model.vocab_size)
    for task in tasks:
        if isinstance(task, TokenTask) and task.vocab_size > config.model.vocab_size:
            raise ValueError(f"suite: got {task.name}, whose tokens need a vocabulary of {task.vocab_size}, wanted tasks for the model's "
                             f"{config.model.vocab_size}")
    return tasks


def _default_lengths(sequence_length: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(SHORTEST.bit_length() - 1, max(SHORTEST, 2 * sequence_length).bit_length()))


def _model(config: TrainConfig, variables: Mapping[str, Any], tokenizer: Tokenizer | None) -> Model:
    score = make_score(config.model, variables)
    if tokenizer is None:
        return Model(score=score)
    return Model(generate=make_generate(functools.partial(generate, LongMoE(config.model), variables), tokenizer), score=score, count=make_count(tokenizer))


def _positions(asked: SuiteRun, data: DataConfig, score: ScoreTokens, eos_id: int, lengths: Sequence[int], results: Results,
               progress: Any) -> tuple[list[Positions], Results]:
    """Of each length for which the held-out split has documents; the others are added to what did not fit."""
    sources = [source.documents for source in open_sources(data, "heldout")]
    found, unfit = [], list(results.unfit)
    for length in lengths:
        documents = long_documents(_tokens(sources), length, asked.samples)
        if len(documents):
            edges = position_edges(length)
            losses = score_documents(score, documents, first=eos_id)
            gains = context_gain(score, documents, tail=min(TAIL, length // 2))
            found.append(Positions(length, len(documents), edges, tuple(loss_by_position(losses, edges)), tuple(gains)))
        else:
            unfit.append(Unfit(POSITIONS, length, f"length: got {length}, but no held-out document has as many tokens"))
        progress(POSITIONS, asked.samples)
    return found, dataclasses.replace(results, unfit=tuple(unfit))


def _tokens(sources: Sequence[Any]) -> Iterator[np.ndarray]:
    for documents in sources:
        for index in range(len(documents)):
            yield documents.document(index).tokens


def _summary(asked: SuiteRun, lengths: Sequence[int], results: Results, positions: Sequence[Positions]) -> dict[str, Any]:
    """Everything but the single examples."""
    records = results.records
    by_task = [{"task": task, "length": length} | dataclasses.asdict(cell) for (task, length), cell in cells(records, lambda r: (r.task, r.length)).items()]
    grid = [{"task": task, "length": length, "depth": depth} | dataclasses.asdict(cell) for (task, length, depth), cell in
            cells([r for r in records if r.task.startswith("needle_")], lambda r: (r.task, r.length, r.metadata["depth"])).items()]
    return {"asked": asked, "lengths": lengths, "tasks": by_task, "needles": grid, "effective_context": effective_contexts(records),
            "ruler": _ruler(records) if "ruler" in asked.suites else None, "consistency": _consistency(records), "positions": positions,
            "unfit": results.unfit}


def _ruler(records: Sequence[Record]) -> dict[str, Any] | None:
    """RULER's averages over the lengths at which all eleven tasks ran, None where there is no such length."""
    names = {task.name for task in SUITES["ruler"](Essay("none"), 0)}
    by_length = {length: [r for r in records if r.length == length and r.task in names] for length in dict.fromkeys(r.length for r in records)}
    scores = {length: family_score(part) for length, part in by_length.items() if {r.task for r in part} == names}
    if not scores:
        return None
    averages = {length: score for length, (score, _) in scores.items()}
    rising, falling = weighted_averages({length: score.mean for length, score in averages.items()})
    return {"averages": averages, "weighted_rising": rising, "weighted_falling": falling,
            "effective_context": effective_context(averages, {length: chance for length, (_, chance) in scores.items()}, threshold=RULER_THRESHOLD)}


def _consistency(records: Sequence[Record]) -> dict[int, Consistency]:
    own = [record for record in records if record.task == "consistency"]
    of_length = lambda length: [(r.metadata, r.answers[0], r.output or "") for r in own if r.length == length]
    return {length: consistency(of_length(length)) for length in dict.fromkeys(record.length for record in own)}


def _plain(value: Any) -> Any:
    """As JSON has it: dataclasses as objects, numbers that are not finite as null."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sections(lengths: Sequence[int], results: Results, positions: Sequence[Positions], record: Mapping[str, Any]) -> list[html.Section]:
    sections = []
    if record["effective_context"]:
        sections.append(_effective_section(record["effective_context"], record["ruler"]))
    if results.records:
        sections.append(_scores_section(lengths, results.records))
    sections += _needle_sections(lengths, results.records)
    if record["consistency"]:
        rows = [("length", "right by ask", "right at every ask", "same answer at every ask"),
                *((f"{length:,}", " ".join(f"{share:.2f}" for share in c.by_ask), f"{c.always_right:.2f}", f"{c.unchanged:.2f}")
                  for length, c in record["consistency"].items())]
        sections.append(html.Section("Consistency", [html.Table(rows)]))
    if positions:
        sections.append(_positions_section(positions))
    if results.unfit:
        sections.append(html.Section("Left out", [html.Table([("task", "length", "reason"), *((u.task, f"{u.length:,}", u.reason) for u in results.unfit)])]))
    wrong = [r for r in results.records if r.output is not None and r.official < 1][:_SHOWN_OUTPUTS]
    if wrong:
        cut = lambda text: repr(text[:_SHOWN_CHARACTERS])
        line = lambda r: f"{r.task} at {r.length:,}: wanted {cut(', '.join(r.answers))}, got {cut(r.output or '')}"
        sections.append(html.Section("Outputs that missed", [html.Verbatim("\n".join(map(line, wrong)))]))
    return sections


def _effective_section(contexts: Mapping[str, EffectiveContext], ruler: Mapping[str, Any] | None) -> html.Section:
    row = lambda name, c: (name, f"{c.length:,}", f"{c.low:,} to {c.high:,}", f"{c.threshold:.3f}")
    rows = [("family", "effective context", "95 % interval", "least score"), *(row(name, c) for name, c in contexts.items())]
    if ruler:
        rows.append(row("RULER's average", ruler["effective_context"]))
    rule = ("The longest tested length whose official score is above chance and at least 0.85 of the score at the shortest length "
            f"(of RULER's average, at least {RULER_THRESHOLD}). 0: no tested length.")
    return html.Section("Effective context", [html.Table(rows), rule])


def _scores_section(lengths: Sequence[int], records: Sequence[Record]) -> html.Section:
    found = cells(records, lambda r: (r.task, r.length))
    tasks = list(dict.fromkeys(r.task for r in records))
    pictures = [_map(found, tasks, [(task,) for task in tasks], lengths, kind, f"{kind} score of each task") for kind in ("official", "strict")]
    return html.Section("Scores", [*pictures, html.Table([_COLUMNS, *(_row(*item) for item in found.items())])])


def _needle_sections(lengths: Sequence[int], records: Sequence[Record]) -> list[html.Section]:
    own = [record for record in records if record.task.startswith("needle_")]
    if not own:
        return []
    found = cells(own, lambda r: (r.task, r.metadata["depth"], r.length))
    depths = sorted({depth for _, depth, _ in found})
    shown = {"needle_grid": ("official", "The needle found"), "needle_absent": ("official", "No needle, and none claimed"),
             "needle_duplicate": ("strict", "Two needles of one key: the last one found, and it alone named")}
    tasks = dict.fromkeys(record.task for record in own)
    return [html.Section("Needles", [_map(found, [f"{depth:.0f}" for depth in depths], [(task, depth) for depth in depths], lengths, *shown[task],
                                          ylabel="depth (%)") for task in tasks])]


def _map(found: Mapping[Any, Cell], names: Sequence[str], keys: Sequence[tuple[Any, ...]], lengths: Sequence[int], kind: str, caption: str, *,
         ylabel: str = "") -> html.Picture:
    """A heat map of one score: a row for each of `keys`, a column for each length."""
    mean = lambda cell: math.nan if cell is None else getattr(cell, kind).mean
    values = np.array([[mean(found.get((*key, length))) for length in lengths] for key in keys])
    figure = plotting.heat_map(values, names, [f"{length:,}" for length in lengths], xlabel="length (tokens)", ylabel=ylabel, label=f"{kind} score")
    return html.Picture(plotting.png(figure), caption)


def _row(key: tuple[str, int], cell: Cell) -> tuple[str, ...]:
    score = lambda s: f"{s.mean:.3f} ({s.low:.3f} to {s.high:.3f})"
    return key[0], f"{key[1]:,}", score(cell.official), score(cell.strict), str(cell.official.n), f"{cell.chance:.3f}"


def _positions_section(positions: Sequence[Positions]) -> html.Section:
    gains = {f"{p.length:,} tokens": ([g.context for g in p.gains], [g.gain for g in p.gains], [g.half_width for g in p.gains]) for p in positions}
    longest = positions[-1]
    return html.Section("Loss by position", [
        html.Picture(plotting.png(plotting.loss_by_position(longest.edges, {f"{longest.documents} documents": longest.nats_per_token})),
                     f"Held-out documents of at least {longest.length:,} tokens, the same in every bin"),
        html.Picture(plotting.png(plotting.context_gain(gains)), "What more context takes off the loss of the same last tokens")])


def _print(run: str, results: Results) -> None:
    table = Table(*_COLUMNS, title=run)
    for item in cells(results.records, lambda r: (r.task, r.length)).items():
        table.add_row(*_row(*item))
    for unfit in results.unfit:
        table.add_row(unfit.task, f"{unfit.length:,}", "left out", "", "", "")
    Console().print(table)
