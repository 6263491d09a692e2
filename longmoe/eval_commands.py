"""longmoe eval RUN --suite ...: long-context suites on a trained run; figures in the terminal, as JSON, and as a page with heat maps."""
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath
from rich.console import Console
from rich.table import Table

from longmoe.configs import TrainConfig
from longmoe.data.loader import with_default_corpus
from longmoe.data.sources import Documents, open_sources, open_tokenizer
from longmoe.data.tokenizer import Tokenizer
from longmoe.eval_files import write_evaluation
from longmoe.eval_report import COLUMNS, Positions, plain, score_rows, sections, summary
from longmoe.evaluation.examples import Task, TokenTask
from longmoe.evaluation.haystack import Essay, default_essay
from longmoe.evaluation.models import Model, ScoreTokens, make_count, make_generate, make_score
from longmoe.evaluation.positions import TAIL, context_gain, long_documents, position_edges, score_documents
from longmoe.evaluation.report import write_report
from longmoe.evaluation.suites import BATCH_TOKENS, SUITES, TOKEN_SUITES, Results, Unfit, make_tasks, model_answers, run_tasks, samples_of
from longmoe.evaluation.text import loss_by_position
from longmoe.inference.engine import generate
from longmoe.model.lm import LongMoE
from longmoe.plan_commands import nearest
from longmoe.train.checkpoints import kept_step, load_checkpoint
from longmoe.train.metrics import ProgressDisplay

POSITIONS = "positions"
"""The suite of losses by position, which scores held-out documents instead of generated examples."""
SHORTEST = 1024


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
    batch_tokens: int = BATCH_TOKENS


def run_suites(asked: SuiteRun) -> epath.Path:
    """Runs the suites, prints a table, and writes RUN/evaluations/step<step>-<what was asked>.json and .html.

    Both also after each length, shortest first. Returns the page's path.

    ValueError for a name that is no suite, a suite on text for a run without a tokenizer, and a suite whose ids the model does not have.
    """
    for name in asked.suites:
        if name not in (*SUITES, POSITIONS):
            raise ValueError(f"suite: got {name!r}, wanted names among {', '.join((*SUITES, POSITIONS))}{nearest(name, (*SUITES, POSITIONS))}")
    asked = dataclasses.replace(asked, step=kept_step(asked.run, asked.step))
    config, variables = load_checkpoint(asked.run, asked.step)
    tasks = _tasks(asked, config)
    lengths = sorted(set(asked.lengths)) or _default_lengths(config.data.sequence_length)
    data = with_default_corpus(config.data) if config.data.task == "text" else config.data
    tokenizer = open_tokenizer(data) if data.task == "text" else None
    model = _model(config, variables, tokenizer)
    documents = [source.documents for source in open_sources(data, "heldout")] if POSITIONS in asked.suites else []
    results, positions = Results((), ()), []
    total = len(lengths) * (sum(samples_of(task, asked.samples) for task in tasks) + asked.samples * (POSITIONS in asked.suites))
    with ProgressDisplay("eval", total) as display:
        done = 0

        def progress(name: str, examples: int) -> None:
            nonlocal done
            done += examples
            display.advance(done, name)

        display.say(f"{len(tasks)} tasks at {', '.join(f'{length:,}' for length in lengths)} tokens")
        for length in lengths:
            results += run_tasks(tasks, model_answers(model), lengths=[length], samples=asked.samples, count=model.count, seed=asked.seed,
                                 batch_size=asked.batch_size, batch_tokens=asked.batch_tokens, progress=progress)
            if tokenizer is not None and POSITIONS in asked.suites:
                found = _positions(documents, model.score, tokenizer.eos_id, length, asked.samples)
                positions += [found] if isinstance(found, Positions) else []
                results += Results((), () if isinstance(found, Positions) else (found,))
                progress(POSITIONS, asked.samples)
            page = _write(asked, lengths, results, positions)
    _print(asked.run, results, positions)
    print(f"{page.with_suffix('.json')}\n{page}")
    return page


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


def _default_lengths(sequence_length: int) -> list[int]:
    return [2**i for i in range(SHORTEST.bit_length() - 1, max(SHORTEST, 2 * sequence_length).bit_length())]


def _model(config: TrainConfig, variables: Mapping[str, Any], tokenizer: Tokenizer | None) -> Model:
    score = make_score(config.model, variables)
    if tokenizer is None:
        return Model(score=score)
    return Model(generate=make_generate(functools.partial(generate, LongMoE(config.model), variables), tokenizer), score=score, count=make_count(tokenizer))


def _positions(documents: Sequence[Documents], score: ScoreTokens, eos_id: int, length: int, most: int) -> Positions | Unfit:
    """Of the first `most` held-out documents that are long enough."""
    chosen = long_documents(_tokens(documents), length, most)
    if not len(chosen):
        return Unfit(POSITIONS, length, f"length: got {length}, but no held-out document has as many tokens")
    edges = position_edges(length)
    losses = score_documents(score, chosen, first=eos_id)
    gains = context_gain(score, chosen, first=eos_id, tail=min(TAIL, length // 2))
    return Positions(length, len(chosen), edges, tuple(loss_by_position(losses, edges)), tuple(gains))


def _tokens(documents: Sequence[Documents]) -> Iterator[np.ndarray]:
    for source in documents:
        for index in range(len(source)):
            yield source.document(index).tokens


def _write(asked: SuiteRun, lengths: Sequence[int], results: Results, positions: Sequence[Positions]) -> epath.Path:
    record = {"asked": plain(asked)} | plain(summary(results, positions)) | {"records": plain(results.records)}
    name = ("+".join(asked.suites), "+".join(map(str, lengths)), f"n{asked.samples}", f"seed{asked.seed}")
    path = write_evaluation(asked.run, asked.step, name, record)
    return write_report(path.with_suffix(".html"), f"{asked.run}, step {asked.step:,}: {', '.join(asked.suites)}", sections(results, positions))


def _print(run: str, results: Results, positions: Sequence[Positions]) -> None:
    table = Table(*COLUMNS, title=run)
    for row in score_rows(results):
        table.add_row(*row)
    console = Console(highlight=False)
    if table.row_count:
        console.print(table)
    for found in positions:
        last = found.gains[-1]
        console.print(f"positions, {found.documents} documents of {found.length:,} tokens: {found.nats_per_token[-1]:.4f} nats a token in the last bin; the "
                      f"last tokens lose {last.gain:.4f} nats from {found.gains[0].context:,} to {last.context:,} tokens of context")
    for unfit in results.unfit:
        console.print(f"{unfit.task} left out at {unfit.length:,}: {unfit.reason}")
