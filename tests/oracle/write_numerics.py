"""Runs every golden vector in float32, float64 and bfloat16 and writes the tables of docs/numerics.md, and all figures as JSON.

    python tests/oracle/write_numerics.py [--models]         # about 20 minutes on 2 cores; --models keeps the components' figures and rows as they are

Cases that are not committed are read from ../shared/oracle and must be there. Exits with 1 where a figure is over its bound.
"""
import argparse
import dataclasses
import json
import platform
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from oracle_layers import LAYERS
from oracle_models import MODELS, Agreement, Nearness, measure_conditioning, measure_forced, measure_model
from oracle_operators import measure_gate, measure_operator
from oracle_vectors import SHARED, Figure, cases, folder_of, load

from longmoe.interop.mxfp4 import pack, unpack

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "numerics.md"
RECORD = ROOT / "benchmarks" / "results" / "oracle_agreement.json"
TRANSFORMERS = ROOT / "benchmarks" / "results" / "transformers_agreement.json"
BEGIN, END = "<!-- written by tests/oracle/write_numerics.py -->", "<!-- end -->"
PACK_RULES = {"mxfp4_s2": "floor", "mxfp4_s3_compressed_tensors": "round"}


def producer(case: str) -> str:
    return json.loads((folder_of(case) / f"{case}.json").read_text())["produced_by"][0]["package"]


def worst(figures: Iterable[Figure], gradient: bool) -> str:
    """Largest error and its bound; the quantity that comes nearest to its bound."""
    chosen = [figure for figure in figures if figure.quantity.startswith("grad.") == gradient]
    if not chosen:
        return "-"
    top = max(chosen, key=lambda figure: figure.worst / (figure.bound or 1))
    return f"{top.worst:.1e} of {top.bound:.0e}" if top.bound else f"{top.worst:.1e}"


def component_rows(record: list[Figure]) -> list[str]:
    rows = ["| case | made by | outputs, float32 | gradients, float32 | float64 (of 1e-10) | RMS, bfloat16 |", "|---|---|---|---|---|---|"]
    runs = {"kda_op": measure_operator, "kda_gate": measure_gate, **LAYERS}
    for kind, run in runs.items():
        for case in cases(kind):
            in_32, in_64 = run(case, "float32"), run(case, "float64")
            in_16 = [] if kind == "kda_gate" else run(case, "bfloat16")
            record += [*in_32, *in_64, *in_16]
            rms = next((f"{figure.rms:.1e}" for figure in in_16 if figure.quantity in ("out", "o")), "-")
            rows.append(f"| {case} | {producer(case)} | {worst(in_32, False)} | {worst(in_32, True)} | {max(f.worst for f in in_64):.1e} | {rms} |")
            print(rows[-1], flush=True)
    for case in cases("mxfp4"):
        held = load(case).inputs | load(case).outputs
        same = np.array_equal(unpack(held["packed"], held["scale"]), held["dequantised_f32"])
        if case in PACK_RULES:
            packed, scale = pack(held["weight_f32"], PACK_RULES[case])
            same = same and np.array_equal(packed, held["packed"]) and np.array_equal(scale, held["scale"])
        record.append(Figure(case, "unpacked and packed" if case in PACK_RULES else "unpacked", "uint8", float(not same), float(not same), 0.0))
        rows.append(f"| {case} | {producer(case)} | {'equal to the bit' if same else 'DIFFERENT'} | - | - | - |")
    return rows


def model_rows(record: list[Figure]) -> list[str]:
    rows = ["| case | made by | logits, float32 | worst inside, float32 | gradients, float32 | float64, weights an ulp away: logits, gradients | "
            "routes | greedy tokens | logits, float64 | "
            "bfloat16, free routing: RMS, top-1, routes | bfloat16, float32's routing: RMS, top-1 | only weights bfloat16, float32's routing: RMS, top-1 | "
            "made-by's own bfloat16: RMS, top-1 |", f"|{'---|' * 13}"]
    theirs = json.loads(TRANSFORMERS.read_text()).get("bfloat16_of_transformers", {}) if TRANSFORMERS.is_file() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for case in (case for kind in MODELS for case in cases(kind)):
            in_32, in_64, in_16 = (measure_model(case, dtype, Path(scratch)) for dtype in ("float32", "float64", "bfloat16"))
            forced = measure_forced(case, Path(scratch))
            moved = measure_conditioning(case, Path(scratch)) if load(case).gradients else None
            record += [*in_32.figures, *in_64.figures, *in_16.figures, *forced_figures(case, *forced), *(moved or [])]
            record.append(Figure(case, "routes and greedy tokens", "float32", *2 * (float(in_32.routes < 1 or in_32.same_tokens is False),), 0.0))
            rows.append(model_row(case, in_32, in_64, in_16, forced, moved, theirs.get(case)))
            print(rows[-1], flush=True)
    return rows


def forced_figures(case: str, narrow: Nearness, narrow_weights: Nearness) -> list[Figure]:
    named = {"bfloat16": narrow, "float32, weights bfloat16": narrow_weights}
    return [Figure(case, "logits, float32's routes", dtype, near.worst, near.rms, None) for dtype, near in named.items()]


def model_row(case: str, in_32: Agreement, in_64: Agreement, in_16: Agreement, forced: tuple[Nearness, Nearness], moved: list[Figure] | None,
              theirs: dict | None) -> str:
    is_logits = lambda figure: figure.quantity.endswith("logits")
    inside = [figure for figure in in_32.figures if not is_logits(figure)]
    rms = next(figure.rms for figure in in_16.figures if figure.quantity == "logits")
    routes = f"{in_16.routes:.3f}" if "router_ids_sorted" in load(case).outputs else "-"
    cells = [case, producer(case), worst(filter(is_logits, in_32.figures), False), worst(inside, False), worst(in_32.figures, True),
             ", ".join(worst(moved, gradient) for gradient in (False, True)) if moved else "-",
             "equal" if in_32.routes == 1 else "DIFFERENT", {True: "equal", None: "-", False: "DIFFERENT"}[in_32.same_tokens],
             worst(in_64.figures, False), f"{rms:.2f}, {in_16.top1:.3f}, {routes}", *(f"{near.rms:.2f}, {near.top1:.3f}" for near in forced),
             f"{theirs['logits_rms']:.2f}, {theirs['top1']:.3f}" if theirs else "-"]
    return f"| {' | '.join(cells)} |"


def kept_components(text: str) -> tuple[list[str], list[Figure], str]:
    """(rows, figures, commit) of the components as the page and the record hold them."""
    record = json.loads(RECORD.read_text())
    model_cases = {case for kind in MODELS for case in cases(kind)}
    rows = text[text.index("### Components"):text.index("### Models")].splitlines()
    return ([row for row in rows if row.startswith("|")], [Figure(**figure) for figure in record["figures"] if figure["case"] not in model_cases],
            record["commits"]["components"] if "commits" in record else record["commit"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--models", action="store_true")
    arguments = parser.parse_args()
    page = arguments.page
    if not SHARED.is_dir():
        raise SystemExit(f"{SHARED}: no such folder; the tables are of all cases, the committed ones alone are what the suite runs")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    commits = dict(components=commit, models=commit)
    figures: list[Figure] = []
    if arguments.models:
        components, figures, commits["components"] = kept_components(page.read_text())
    else:
        components = component_rows(figures)
    models = model_rows(figures)
    RECORD.write_text(json.dumps(dict(command="python tests/oracle/write_numerics.py", commits=commits, jax=jax.__version__, machine=platform.machine(),
                                      figures=[dataclasses.asdict(figure) for figure in figures]), indent=None).replace("}, {", "},\n {") + "\n")
    text = page.read_text()
    head, tail = text[:text.index(BEGIN) + len(BEGIN)], text[text.index(END):]
    tables = "\n".join(["### Components", "", *components, "", "### Models", "", *models])
    page.write_text(f"{head}\n\n{tables}\n\n{len(figures)} figures (`benchmarks/results/{RECORD.name}`), jax {jax.__version__}, CPU.\n\n{tail}")
    over = [figure for figure in figures if not figure.passes]
    print(f"{len(figures)} figures, {len(over)} over their bound", *over, sep="\n")
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
