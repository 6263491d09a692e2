"""A run that has everything its data and state can have at once, small: three sources mixed by weight, packed, read ahead, in micro-batches."""
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from tiny_config import tiny_train

from longmoe.configs import DataConfig, MeshConfig, SourceConfig, TrainConfig
from longmoe.data.corpus import build_corpus

STEPS = 20
VOCAB = 300
WORDS = "def return if else for in while import class self None True lambda yield print range len sum value index".split()


def make_sources(folder: Path, seed: int = 0) -> Path:
    """A token folder `code`, and two files that are tokenised while training: `notes.jsonl` of texts, `chats.jsonl` of conversations."""
    rng = np.random.default_rng(seed)
    text = lambda longest: " ".join(rng.choice(WORDS, int(rng.integers(1, longest))))
    folder.mkdir(parents=True, exist_ok=True)
    build_corpus(folder / "code", [(f"{i}.py", text(60)) for i in range(40)], vocab_size=VOCAB, name="words", source="generated", licences=["none"])
    chat = lambda: [{"role": "user", "content": text(5)}, {"role": "assistant", "content": text(20)}]
    (folder / "notes.jsonl").write_text("".join(json.dumps({"text": text(40)}) + "\n" for _ in range(30)))
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat()}) + "\n" for _ in range(30)))
    return folder


def mixed_config(folder: Path, optimizer: str = "muon") -> TrainConfig:
    """Rows of 24 tokens hold pieces of several documents; 8 rows in 4 micro-batches."""
    sources = (SourceConfig(path=str(folder / "code"), weight=3.0),
               SourceConfig(kind="jsonl", path=str(folder / "notes.jsonl"), name="notes", weight=2.0),
               SourceConfig(kind="jsonl", path=str(folder / "chats.jsonl"), name="chats", content="messages", weight=1.0))
    cfg = tiny_train(vocab_size=VOCAB, num_layers=2, accumulation_steps=4, optimizer=optimizer)
    return dataclasses.replace(cfg, steps=STEPS, data=DataConfig(sources=sources, sequence_length=24, batch_size=8, prefetch=4),
                               mesh=MeshConfig(data=1, fsdp=1))


def data_state(run: Path, step: int) -> dict[str, Any]:
    """The data's position in a run's checkpoint."""
    return json.loads((run / "checkpoints" / str(step) / "record" / "metadata").read_text())["data"]
