"""What evaluations leave in a run: RUN/evaluations/, a JSON file for each thing that was asked, and a page beside those of suites."""
import json
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from longmoe.train.run_files import RunPaths, replace_text

HELDOUT = "heldout"
"""First part of the name of a held-out pass; others begin with their suites."""


def write_evaluation(run: epath.PathLike, step: int, asked: Sequence[str], record: Mapping[str, Any]) -> epath.Path:
    """Writes RUN/evaluations/step<step>-<asked joined by dashes>.json whole, and returns its path. The same question again replaces its file."""
    folder = RunPaths(epath.Path(run)).evaluations
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step{step}-{'-'.join(asked)}.json"
    replace_text(path, json.dumps({"step": step, **record}, indent=1) + "\n")
    return path


def read_evaluations(run: epath.PathLike) -> dict[str, dict[str, Any]]:
    """File name without its suffix -> what it holds, by step and then by name. ValueError names a file that is not whole."""
    found = {}
    for path in RunPaths(epath.Path(run)).evaluations.glob("step*.json"):
        try:
            found[path.stem] = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"runs: {path} is not JSON ({error}); the same `longmoe eval` command writes it anew") from error
    return dict(sorted(found.items(), key=lambda item: (item[1]["step"], item[0])))
