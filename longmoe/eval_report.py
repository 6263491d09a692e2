"""What the results of long-context suites add up to, as JSON and as a page with heat maps."""
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from longmoe import plotting
from longmoe.evaluation import report as html
from longmoe.evaluation.consistency import Consistency, consistency
from longmoe.evaluation.positions import ContextGain
from longmoe.evaluation.ruler import TASKS
from longmoe.evaluation.statistics import RULER_THRESHOLD, EffectiveContext, effective_context, weighted_averages
from longmoe.evaluation.suites import Cell, Record, Results, cells, effective_contexts, family_score

COLUMNS = ("task", "length", "official", "strict", "examples", "chance")
NEEDLE = "needle_"
"""What the names of the needle grid and its controls begin with; their records have a depth."""
_SHOWN_OUTPUTS = 8
_SHOWN_CHARACTERS = 160


@dataclasses.dataclass(frozen=True)
class Positions:
    """Losses over held-out documents of at least `length` tokens: nats a token in the bins between `edges`, and the gain of context."""
    length: int
    documents: int
    edges: tuple[int, ...]
    nats_per_token: tuple[float, ...]
    gains: tuple[ContextGain, ...]


def summary(results: Results, positions: Sequence[Positions] = ()) -> dict[str, Any]:
    """Everything that the examples add up to, each figure with its interval."""
    records = results.records
    by_task = cells(records, lambda r: (r.task, r.length)).items()
    by_depth = cells([r for r in records if r.task.startswith(NEEDLE)], lambda r: (r.task, r.length, r.metadata["depth"])).items()
    return {"tasks": [{"task": task, "length": length, "scores": cell} for (task, length), cell in by_task],
            "needles": [{"task": task, "length": length, "depth": depth, "scores": cell} for (task, length, depth), cell in by_depth],
            "effective_context": effective_contexts(records), "ruler": _ruler(records), "consistency": _consistency(records),
            "positions": positions, "unfit": results.unfit}


def plain(value: Any) -> Any:
    """As JSON has it: dataclasses as objects, numbers that are not finite as null."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown_score(mean: float, low: float, high: float) -> str:
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def score_rows(results: Results) -> list[tuple[str, ...]]:
    """A row of text under COLUMNS for each task and length."""
    score = lambda s: shown_score(s.mean, s.low, s.high)
    return [(task, f"{length:,}", score(cell.official), score(cell.strict), str(cell.official.n), f"{cell.chance:.3f}")
            for (task, length), cell in cells(results.records, lambda r: (r.task, r.length)).items()]


def _ruler(records: Sequence[Record]) -> dict[str, Any] | None:
    """RULER's averages over the lengths at which all eleven tasks ran, None where there is no such length."""
    by_length = {length: [r for r in records if r.length == length and r.task in TASKS] for length in dict.fromkeys(r.length for r in records)}
    scores = {length: family_score(part) for length, part in by_length.items() if {r.task for r in part} == set(TASKS)}
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


def sections(results: Results, positions: Sequence[Positions] = ()) -> list[html.Section]:
    """The page: effective context, scores, needles, consistency, losses by position, what was left out, and outputs that missed."""
    figures, records = summary(results, positions), results.records
    lengths = sorted({record.length for record in records})
    found = [_effective_section(figures["effective_context"], figures["ruler"])] if figures["effective_context"] else []
    if records:
        found.append(_scores_section(results, lengths))
    if any(record.task.startswith(NEEDLE) for record in records):
        found.append(_needle_section(records, lengths))
    if figures["consistency"]:
        rows = [("length", "right by ask", "right at every ask", "same answer at every ask"),
                *((f"{length:,}", " ".join(f"{share:.2f}" for share in c.by_ask), f"{c.always_right:.2f}", f"{c.unchanged:.2f}")
                  for length, c in figures["consistency"].items())]
        found.append(html.Section("Consistency", [html.Table(rows)]))
    if positions:
        found.append(_positions_section(positions))
    if results.unfit:
        rows = [("task", "length", "reason"), *((unfit.task, f"{unfit.length:,}", unfit.reason) for unfit in results.unfit)]
        found.append(html.Section("Left out", [html.Table(rows)]))
    wrong = [record for record in records if record.output is not None and record.official < 1][:_SHOWN_OUTPUTS]
    if wrong:
        cut = lambda text: repr(text[:_SHOWN_CHARACTERS])
        lines = [f"{r.task} at {r.length:,}: wanted {cut(', '.join(r.answers))}, got {cut(r.output or '')}" for r in wrong]
        found.append(html.Section("Outputs that missed", [html.Verbatim("\n".join(lines))]))
    return found


def _effective_section(contexts: Mapping[str, EffectiveContext], ruler: Mapping[str, Any] | None) -> html.Section:
    row = lambda name, c: (name, f"{c.length:,}", f"{c.low:,} to {c.high:,}", f"{c.threshold:.3f}")
    rows = [("family", "effective context", "95 % interval", "least score"), *(row(name, c) for name, c in contexts.items())]
    if ruler:
        rows.append(row("RULER's average", ruler["effective_context"]))
    rule = ("The longest tested length whose official score is above chance and at least 0.85 of the score at the shortest length "
            f"(of RULER's average, at least {RULER_THRESHOLD}). 0: no tested length.")
    return html.Section("Effective context", [html.Table(rows), rule])


def _scores_section(results: Results, lengths: Sequence[int]) -> html.Section:
    found = cells(results.records, lambda r: (r.task, r.length))
    tasks = list(dict.fromkeys(task for task, _ in found))
    pictures = [_map(found, tasks, [(task,) for task in tasks], lengths, kind, f"{kind} score of each task") for kind in ("official", "strict")]
    return html.Section("Scores", [*pictures, html.Table([COLUMNS, *score_rows(results)])])


def _needle_section(records: Sequence[Record], lengths: Sequence[int]) -> html.Section:
    found = cells([r for r in records if r.task.startswith(NEEDLE)], lambda r: (r.task, r.metadata["depth"], r.length))
    depths = sorted({depth for _, depth, _ in found})
    shown = {"needle_grid": ("official", "The needle found"), "needle_absent": ("official", "No needle, and none claimed"),
             "needle_duplicate": ("strict", "Two needles of one key: the last one found, and it alone named")}
    return html.Section("Needles", [_map(found, [f"{depth:.0f}" for depth in depths], [(task, depth) for depth in depths], lengths, *shown[task],
                                         ylabel="depth (%)") for task in dict.fromkeys(task for task, _, _ in found)])


def _map(found: Mapping[Any, Cell], names: Sequence[str], keys: Sequence[tuple[Any, ...]], lengths: Sequence[int], kind: str, caption: str, *,
         ylabel: str = "") -> html.Picture:
    """A heat map of one score: a row for each of `keys`, a column for each length."""
    mean = lambda cell: math.nan if cell is None else getattr(cell, kind).mean
    values = np.array([[mean(found.get((*key, length))) for length in lengths] for key in keys])
    figure = plotting.heat_map(values, names, [f"{length:,}" for length in lengths], xlabel="length (tokens)", ylabel=ylabel, label=f"{kind} score")
    return html.Picture(plotting.png(figure), caption)


def _positions_section(positions: Sequence[Positions]) -> html.Section:
    gains = {f"{p.length:,} tokens": ([g.context for g in p.gains], [g.gain for g in p.gains], [g.half_width for g in p.gains]) for p in positions}
    longest = max(positions, key=lambda p: p.length)
    return html.Section("Loss by position", [
        html.Picture(plotting.png(plotting.loss_by_position(longest.edges, {f"{longest.documents} documents": longest.nats_per_token})),
                     f"Held-out documents of at least {longest.length:,} tokens, the same in every bin"),
        html.Picture(plotting.png(plotting.context_gain(gains)), "What more context takes off the loss of the same last tokens")])
