"""Does training in stages of longer rows lower the loss far into a document, and is nothing lost where a stage begins?

    python experiments/staged_context.py [--run-dir runs/staged] [--out results.json] [--scale 1] [--smoke]

The nano preset on the standard library's source: rows of 128, 1,024, 4,096 and 16,384 tokens for 64K, 64K, 128K and 128K tokens (times --scale), 16,384
tokens a step throughout, the share of whole packages (files of a package one after another) growing from stage to stage. Held out are eight packages.
Expected: after each stage the loss is lower at positions that the rows have come to reach, and not higher at the short ones; every step's tokens are
counted by source. The same command resumes in whichever stage it was stopped.
"""
import argparse
import dataclasses
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from demo import variables_of

import longmoe
from longmoe.configs import DataConfig, GateConfig, SourceConfig, StageConfig, TrainConfig
from longmoe.data.corpus import build_corpus
from longmoe.data.long_documents import folder_documents
from longmoe.data.records import TextFiles
from longmoe.data.sources import Contents
from longmoe.data.token_folder import read_token_folder
from longmoe.evaluation.models import make_score
from longmoe.evaluation.positions import long_documents, score_documents
from longmoe.evaluation.text import loss_by_position
from longmoe.plotting import loss_by_position as loss_by_position_plot
from longmoe.plotting import png

LENGTHS, TOKENS, WHOLE_PACKAGES = (128, 1024, 4096, 16384), (1, 1, 2, 2), (0.0, 0.2, 0.5, 0.8)
TOKENS_PER_STEP, UNIT = 16384, 65536
HELD_OUT = ("email", "http", "json", "logging", "sqlite3", "unittest", "wsgiref", "xml")
LEFT_OUT = ("test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "pydoc_data", "__pycache__", "encodings",
            "lib-dynload", "config-*", "dist-packages")
EDGES = (0, 128, 1024, 4096, 16384)


def prepare(folder: Path) -> Path:
    """folder/files: a token folder of single files; folder/packages: texts of whole packages; folder/heldout: those that are in neither."""
    if (folder / "files").exists():
        return folder
    root = Path(sysconfig.get_path("stdlib"))
    contents = Contents(SourceConfig(kind="text", path=str(root)), TextFiles(root, (".py",), LEFT_OUT))
    modules = [(name, contents.content(i)) for i in range(len(contents)) if (name := contents.name(i)).partition("/")[0] not in HELD_OUT]
    for part in ("packages", "heldout"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for package in folder_documents(root, suffixes=(".py",), skipped_folders=LEFT_OUT):
        if package.name != root.name:                                   # modules that are in no package
            (folder / ("heldout" if package.name in HELD_OUT else "packages") / f"{package.name}.py").write_text(package.text)
    build_corpus(folder / "files", modules, vocab_size=4096, name="files of the standard library", source="the running Python's", licences=["PSF-2.0"])
    return folder


def config(folder: Path, scale: int) -> TrainConfig:
    sources = (SourceConfig(path=str(folder / "files"), name="files"), SourceConfig(kind="text", path=str(folder / "packages"), name="packages", weight=0.0))
    stages = tuple(StageConfig(length, scale * units * UNIT, weights={"files": 1 - share, "packages": share}, gate=GateConfig(max_short_loss_rise=0.05))
                   for length, units, share in zip(LENGTHS, TOKENS, WHOLE_PACKAGES))
    cfg = longmoe.presets.nano()
    data = DataConfig(sources=sources, sequence_length=LENGTHS[0], batch_size=TOKENS_PER_STEP // LENGTHS[0])
    cfg = dataclasses.replace(cfg, data=data).with_stages(stages)
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, warmup_steps=max(2, cfg.steps // 20)))


class Positions:
    """Loss by position on the held-out packages, beside what a gate asks for, kept by step."""

    def __init__(self, folder: Path, cfg: TrainConfig, kept: Path):
        self._tokenizer, self._kept = read_token_folder(folder / "files").tokenizer, kept
        texts = [(folder / "heldout" / f"{name}.py").read_text() for name in HELD_OUT]
        self.documents = long_documents((np.asarray(self._tokenizer.encode(text), np.int32) for text in texts), cfg.stages[-1].sequence_length, len(texts))
        self.found: dict[str, list[float]] = json.loads(kept.read_text()) if kept.exists() else {}

    def measure(self, cfg: TrainConfig, variables: Any, step: int) -> None:
        if str(step) not in self.found:
            losses = score_documents(make_score(cfg.model, variables), self.documents, first=self._tokenizer.eos_id)
            self.found[str(step)] = [float(x) for x in loss_by_position(losses, self.edges)]
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            self._kept.write_text(json.dumps(self.found))

    @property
    def edges(self) -> tuple[int, ...]:
        return tuple(edge for edge in EDGES if edge <= self.documents.shape[1])

    def gate(self, cfg: TrainConfig, state: longmoe.TrainState, asked: tuple[str, ...]) -> dict[str, float]:
        self.measure(cfg, variables_of(state), int(state.step))
        return longmoe.measure_gate(cfg, state, asked)


def smaller(cfg: TrainConfig) -> TrainConfig:
    """Two layers, rows of 128 and 256 tokens, two steps each."""
    model = dataclasses.replace(cfg.model, num_layers=2, mla_every=2, use_final_mla=False)
    stages = tuple(dataclasses.replace(stage, sequence_length=length, tokens=2 * 512) for stage, length in zip(cfg.stages, (128, 256)))
    return dataclasses.replace(cfg, model=model, stages=stages, steps=4, data=dataclasses.replace(cfg.data, batch_size=4))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/staged"))
    parser.add_argument("--out", type=Path, help="where the results and the plot beside them go (default: RUN_DIR/results.json)")
    parser.add_argument("--scale", type=int, default=1, help="multiplies every stage's tokens")
    parser.add_argument("--smoke", action="store_true", help="two short stages, for tests")
    args = parser.parse_args(argv)
    folder = prepare(args.run_dir / "corpus")
    cfg = smaller(config(folder, 1)) if args.smoke else config(folder, args.scale)
    positions = Positions(folder, cfg, args.run_dir / "positions.json")
    positions.measure(cfg, longmoe.init_variables(cfg.model, jax.random.key(cfg.seed)), 0)
    run = longmoe.fit(cfg, str(args.run_dir / "run"), measure=positions.gate)
    steps = [json.loads(line) for line in run.paths.metrics.read_text().splitlines()]
    stages = json.loads(run.paths.stages.read_text())
    results = dict(edges=positions.edges, documents=len(positions.documents), loss_by_position=positions.found, stages=stages,
                   tokens=sum(step["tokens"] for step in steps), elapsed_seconds=round(steps[-1]["elapsed_seconds"], 1),
                   run={name: json.loads(run.paths.run_json.read_text())[name] for name in ("versions", "commit", "device")})
    out = args.out or args.run_dir / "results.json"
    out.write_text(json.dumps(results, indent=1))
    names = {"0": "before", **{str(stage["end"]): f"after rows of {stage['sequence_length']:,}" for stage in stages}}
    out.with_suffix(".png").write_bytes(png(loss_by_position_plot(positions.edges, {names[step]: losses for step, losses in positions.found.items()})))
    print(json.dumps(results["loss_by_position"], indent=1))


if __name__ == "__main__":
    main()
