"""`make_loader`: batches with the state after each, so that a checkpoint holds the state of the last batch that was applied."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from longmoe.data.corpus import default_corpus
from longmoe.data.hashing import permutation
from longmoe.data.packing import Packer
from longmoe.data.tasks import associative_recall, recall_vocab_size
from longmoe.data.token_folder import SPLITS, TokenFolder, read_token_folder

if TYPE_CHECKING:
    from longmoe.configs import DataConfig

Batch = dict[str, np.ndarray]
State = dict[str, Any]

HELDOUT_TASK_BATCHES = 16
_TRAINING_LANES = 64


def make_loader(data_config: "DataConfig", *, seed: int, split: str = "train", state: Mapping[str, Any] | None = None,
                vocab_size: int | None = None) -> Iterator[tuple[Batch, State]]:
    """-> iterator of (batch, state after that batch).

    A batch holds tokens, targets, segment_ids, source_ids int32 and loss_weights float32, all [batch_size, sequence_length]
    (`longmoe.data.packing` and `longmoe.data.tasks` say what they mean). The state is JSON-plain; given back as `state` to a new loader of
    the same config, seed and split it continues with the very next batch.

    split "train" never ends: text is shuffled anew each epoch by a permutation of (seed, epoch). "heldout" is one pass in
    order (a task: 16 batches). data_config.path "" means the standard-library corpus in the user's cache folder.
    `vocab_size`, the model's, is checked when given.

    ValueError: a folder that is damaged, tokens that do not fit `vocab_size`, a state of other data, another seed or another split.
    """
    if split not in SPLITS:
        raise ValueError(f"split: got {split!r}, wanted one of {', '.join(SPLITS)}")
    if data_config.task == "text":
        folder = open_corpus(data_config)
        _check_vocab(vocab_size, folder.vocab_size, f"the tokenizer of {folder.path}")
        return _TextLoader(data_config, folder, seed, split, state)
    if data_config.task == "associative_recall":
        _check_vocab(vocab_size, recall_vocab_size(data_config.num_pairs), f"associative recall of {data_config.num_pairs} pairs")
        return _RecallLoader(data_config, seed, split, state)
    raise ValueError(f"task: got {data_config.task!r}, wanted 'text' or 'associative_recall'")


def open_corpus(data_config: "DataConfig") -> TokenFolder:
    """The token folder that the config names."""
    return read_token_folder(data_config.path) if data_config.path else default_corpus()


class _TextLoader:
    def __init__(self, config: "DataConfig", folder: TokenFolder, seed: int, split: str, state: Mapping[str, Any] | None):
        documents = folder.split(split)
        training = split == "train"
        lanes = max(_TRAINING_LANES, config.batch_size) if training else 1
        self._identity = {"task": "text", "split": split, "seed": seed, "fingerprint": folder.fingerprint}
        self._packer = Packer(
            documents, sequence_length=config.sequence_length, batch_size=config.batch_size, num_lanes=lanes,
            order=(lambda epoch: permutation(len(documents), seed, epoch)) if training else (lambda epoch: np.arange(len(documents))),
            repeat=training)
        if state is not None:
            _check_identity(self._identity, state)
            self._packer.restore(state["packer"])

    def __iter__(self) -> "_TextLoader":
        return self

    def __next__(self) -> tuple[Batch, State]:
        batch = self._packer.next_batch()
        if batch is None:
            raise StopIteration
        return batch, {**self._identity, "packer": self._packer.state()}


class _RecallLoader:
    def __init__(self, config: "DataConfig", seed: int, split: str, state: Mapping[str, Any] | None):
        drawn_from = {"split": split, "seed": seed, "num_pairs": config.num_pairs, "batch_size": config.batch_size}
        self._identity = {"task": "associative_recall", **drawn_from}
        self._arguments = {**drawn_from, "sequence_length": config.sequence_length}
        self._step = 0
        if state is not None:
            _check_identity(self._identity, state)
            self._step = int(state["step"])

    def __iter__(self) -> "_RecallLoader":
        return self

    def __next__(self) -> tuple[Batch, State]:
        if self._arguments["split"] == "heldout" and self._step == HELDOUT_TASK_BATCHES:
            raise StopIteration
        batch = associative_recall(**self._arguments, step=self._step)
        self._step += 1
        return batch, {**self._identity, "step": self._step}


def _check_identity(wanted: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if state.get(name) != value:
            raise ValueError(f"state: it was saved with {name}={state.get(name)!r}, this loader has {name}={value!r}; "
                             "resume with the data and seed that the run began with, or start a fresh run")


def _check_vocab(model: int | None, needed: int, what: str) -> None:
    if model is not None and model < needed:
        raise ValueError(f"vocab_size: the model has {model} tokens, {what} needs {needed}; set model.vocab_size to at least {needed}")
