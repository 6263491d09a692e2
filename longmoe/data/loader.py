"""`make_loader`: batches with the state after each, so that a checkpoint holds the state of the last batch that was applied."""

import dataclasses
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from longmoe.data.corpus import default_corpus
from longmoe.data.mixture import Mixture
from longmoe.data.packing import Packer
from longmoe.data.sources import Source, open_sources
from longmoe.data.tasks import associative_recall, recall_vocab_size
from longmoe.data.token_folder import SPLITS

if TYPE_CHECKING:
    from longmoe.configs import DataConfig

Batch = dict[str, np.ndarray]
State = dict[str, Any]

_log = logging.getLogger(__name__)
HELDOUT_TASK_BATCHES = 16
_TRAINING_LANES = 64


def make_loader(data_config: "DataConfig", *, seed: int, split: str = "train", state: Mapping[str, Any] | None = None,
                vocab_size: int | None = None) -> Iterator[tuple[Batch, State]]:
    """-> iterator of (batch, state after that batch).

    A batch holds tokens, targets, segment_ids, source_ids int32 and loss_weights float32, all [batch_size, sequence_length]
    (`longmoe.data.packing` and `longmoe.data.tasks` say what they mean). The state is JSON-plain; given back as `state` to a new loader of
    the same sources, seed and split it continues with the very next batch. It may also be given to a loader with other weights, further sources,
    another row length or batch size: no document is then lost or repeated. prefetch and workers change no batch and no state.

    split "train" never ends: text is mixed by weight and shuffled anew each epoch of each source (`longmoe.data.mixture`). "heldout" is one pass in
    order, source after source (a task: 16 batches). A config with neither path nor sources means the standard-library corpus in the user's
    cache folder. `vocab_size`, the model's, is checked when given.

    ValueError: a source that is missing or damaged, tokens that do not fit `vocab_size`, a state of other data, another seed or another split.
    """
    loader: Iterator[tuple[Batch, State]]
    if split not in SPLITS:
        raise ValueError(f"split: got {split!r}, wanted one of {', '.join(SPLITS)}")
    if data_config.task == "text":
        sources = open_sources(with_default_corpus(data_config), split)
        _check_vocab(vocab_size, sources[0].tokenizer.vocab_size, f"the tokenizer of {', '.join(source.name for source in sources)}")
        loader = TextLoader(data_config, sources, seed, split, state)
    elif data_config.task == "associative_recall":
        _check_vocab(vocab_size, recall_vocab_size(data_config.num_pairs), f"associative recall of {data_config.num_pairs} pairs")
        loader = _RecallLoader(data_config, seed, split, state)
    else:
        raise ValueError(f"task: got {data_config.task!r}, wanted 'text' or 'associative_recall'")
    return _Prefetched(loader, data_config.prefetch) if data_config.prefetch else loader


def with_default_corpus(data_config: "DataConfig") -> "DataConfig":
    """The config itself, or with the standard-library corpus as its path where it names no text."""
    if data_config.path or data_config.sources:
        return data_config
    return dataclasses.replace(data_config, path=str(default_corpus().path))


class _Prefetched:
    """Makes up to `depth` items of an iterator ahead, in one thread and so in order. The thread goes with the object."""

    def __init__(self, iterator: Iterator[Any], depth: int):
        self._iterator, self._depth = iterator, depth
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="longmoe-data")
        self._made: deque[Future[Any]] = deque()
        self._over = False

    def __iter__(self) -> "_Prefetched":
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        while len(self._made) <= self._depth:
            self._made.append(self._executor.submit(next, self._iterator, None))
        try:
            item = self._made.popleft().result()
        except BaseException:
            self._close()
            raise
        if item is None:
            self._close()
            raise StopIteration
        return item

    def _close(self) -> None:
        self._over = True
        self._executor.shutdown(wait=False, cancel_futures=True)


class TextLoader:
    """Packed documents of opened sources; what `make_loader` returns for task text, before prefetching."""

    def __init__(self, config: "DataConfig", sources: tuple[Source, ...], seed: int, split: str, state: Mapping[str, Any] | None = None):
        training = split == "train"
        self._identity = {"task": "text", "split": split, "seed": seed}
        mixture = Mixture(sources, seed=seed, repeat=training, workers=config.workers)
        self.packer = Packer(mixture, sequence_length=config.sequence_length, batch_size=config.batch_size,
                             num_lanes=max(_TRAINING_LANES, config.batch_size) if training else 1)
        if state is not None:
            _check_identity(self._identity, state)
            self.packer.restore(state["packer"])

    def __iter__(self) -> "TextLoader":
        return self

    def __next__(self) -> tuple[Batch, State]:
        batch = self.packer.next_batch()
        if batch is None:
            raise StopIteration
        return batch, {**self._identity, "packer": self.packer.state()}


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
    if model is not None and model > needed:
        _log.info("%s uses %d of the model's %d tokens", what, needed, model)
