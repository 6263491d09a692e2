"""runs/index.html: one line a run, made anew from what the runs' own folders hold."""
import datetime
import html
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARK = "<!-- longmoe: index of runs -->"
"""First line of the page. An index.html without it is somebody else's and is left alone."""
TAIL_BYTES = 1 << 16
"""How much of the end of a metrics.jsonl is read: a few lines even of a model with many layers."""
COLUMNS = ("run", "model", "step", "loss", "tokens/s", "MaxVio", "skipped now", "device", "commit", "last step at")
_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2rem; } table { border-collapse: collapse; }
th, td { padding: .3rem 1rem .3rem 0; text-align: left; border-bottom: 1px solid #e4e4e4; font-variant-numeric: tabular-nums; }"""


def write_run_index(folder: Path) -> Path | None:
    """Writes folder/index.html from the run.json and metrics.jsonl of each run in `folder`, newest first; a reader sees the old page or the new one.

    Returns its path; None where an index.html is there that this function has not written, which stays as it is.
    """
    page = folder / "index.html"
    if page.exists() and not page.read_text(errors="replace").startswith(MARK):
        return None
    runs = sorted((run for run in map(_describe, folder.glob("*/run.json")) if run is not None), key=lambda run: run[0], reverse=True)
    rows = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" for _, cells in runs)
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    text = (f"{MARK}\n<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>runs</title><style>{_STYLE}</style>\n<h1>Runs</h1>\n"
            f"<table>\n<tr>{head}</tr>\n{rows}\n</table>\n</html>\n")
    # A name of its own: several runs may write at once, and the last one wins whole.
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".index-", suffix=".html", delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, page)
    return page


def last_line(path: Path) -> dict[str, Any]:
    """The last whole object of a metrics.jsonl, from its end; empty where there is none."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:                                              # cut off at the start of the tail, or while it was written
            continue
        if isinstance(found, dict):
            return found
    return {}


def _describe(run_json: Path) -> tuple[float, tuple[str, ...]] | None:
    """(time of the last change, cells) of a run; None while its run.json is not whole."""
    try:
        record = json.loads(run_json.read_text())
    except (OSError, ValueError):                                       # being written, or deleted, by its run
        return None
    metrics = run_json.parent / "metrics.jsonl"
    line = last_line(metrics)
    changed = max(path.stat().st_mtime for path in (run_json, metrics) if path.exists())
    return changed, _cells(run_json.parent.name, record, line, metrics.stat().st_mtime if line else None,
                           (run_json.parent / "report.html").exists())


def _cells(name: str, record: Mapping[str, Any], line: Mapping[str, Any], stepped: float | None, has_report: bool) -> tuple[str, ...]:
    config, escape = record.get("config", {}), lambda value: html.escape(str(value))
    model = config.get("model", {})
    number = lambda key, form: format(line[key], form) if isinstance(line.get(key), int | float) else escape(line.get(key, ""))
    violation = [value for value in line.get("max_violation", []) if isinstance(value, int | float)]
    when = "" if stepped is None else datetime.datetime.fromtimestamp(stepped, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (f"<a href=\"{escape(name)}/{'report.html' if has_report else ''}\">{escape(name)}</a>",
            escape(f"{model.get('num_layers', '?')} x {model.get('width', '?')}, {model.get('moe', {}).get('num_experts', '?')} experts"),
            escape(f"{line.get('step', 0)} / {config.get('steps', '?')}"), number("loss", ".4f"), number("tokens_per_second", ",.0f"),
            f"{max(violation):.2f}" if violation else "", number("skipped", "d"), escape(record.get("device", "")),
            escape((record.get("commit") or "")[:7]), when)
