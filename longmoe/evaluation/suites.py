"""Suites of tasks, run on a model: examples, answers, scores, and what they add up to.

    model = Model(generate=..., score=..., count=...)
    results = run_tasks(make_tasks(["needle", "ruler"], essay=default_essay()), model_answers(model), count=model.count, lengths=[1024, 8192], samples=20)
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longmoe.data.draws import Draws
from longmoe.data.hashing import text_key
from longmoe.evaluation.code_hops import code_hop_tasks
from longmoe.evaluation.consistency import consistency_task
from longmoe.evaluation.examples import Count, Example, Score, SizeError, Task, TextTask, make_examples
from longmoe.evaluation.graph_walks import graph_walk_tasks
from longmoe.evaluation.haystack import Essay
from longmoe.evaluation.models import Model
from longmoe.evaluation.mrcr import mrcr_tasks
from longmoe.evaluation.niah import needle_tasks
from longmoe.evaluation.ruler import ruler_tasks
from longmoe.evaluation.statistics import EffectiveContext, Interval, effective_context, wilson
from longmoe.evaluation.synthetic import MQAR_VOCAB, mqar_task, palindrome_task, stack_task, state_tasks

Answers = Callable[[Task, Sequence[Example]], Sequence[Any]]
"""(task, examples) -> an output for each: text, or int [asked] for a task on tokens."""

SUITES: Mapping[str, Callable[[Essay | None, int], Sequence[Task]]] = {
    "needle": lambda essay, vocab_size: needle_tasks(essay),
    "ruler": lambda essay, vocab_size: ruler_tasks(essay),
    "graph_walks": lambda essay, vocab_size: graph_walk_tasks(),
    "code_hops": lambda essay, vocab_size: code_hop_tasks(),
    "mrcr": lambda essay, vocab_size: mrcr_tasks(),
    "consistency": lambda essay, vocab_size: [consistency_task()],
    "mqar": lambda essay, vocab_size: [mqar_task(vocab_size)],
    "palindrome": lambda essay, vocab_size: [palindrome_task()],
    "stack": lambda essay, vocab_size: [stack_task()],
    "state_tracking": lambda essay, vocab_size: state_tasks(),
}
"""Suite -> (essay, vocab_size) -> its tasks."""
BATCH_TOKENS, LARGEST_BATCH = 65_536, 64
"""Batches that are not given a size hold at most so many tokens, unless one example is longer, and at most so many examples."""
CONTROL = "control"
"""Family of tasks that say how far to trust another one: it has no effective context."""
TOKEN_SUITES = ("mqar", "palindrome", "stack", "state_tracking")
"""Those on token ids, which need no tokenizer. The others are on text."""


@dataclass(frozen=True)
class Record:
    """One example's outcome. `output` and `answers` are text, or None and () for tasks on tokens."""

    task: str
    family: str
    length: int
    index: int
    tokens: int
    official: float
    strict: float
    chance: float
    metadata: Mapping[str, Any]
    answers: tuple[str, ...] = ()
    output: str | None = None


@dataclass(frozen=True)
class Unfit:
    """A length that a task cannot have, and why."""

    task: str
    length: int
    reason: str


@dataclass(frozen=True)
class Results:
    """What `run_tasks` found; results add up."""

    records: tuple[Record, ...]
    unfit: tuple[Unfit, ...]

    def __add__(self, other: "Results") -> "Results":
        return Results(self.records + other.records, self.unfit + other.unfit)


@dataclass(frozen=True)
class Cell:
    """Scores of all records that share a key, with 95 % intervals; chance is the expected official score of guesses."""

    official: Interval
    strict: Interval
    chance: float


def make_tasks(suites: Sequence[str], *, essay: Essay | None = None, vocab_size: int = MQAR_VOCAB) -> list[Task]:
    """The tasks of `suites` (names of SUITES) in order. essay: haystack of needle and ruler; vocab_size: of the model, for mqar (MQAR_VOCAB at most)."""
    unknown = [name for name in suites if name not in SUITES]
    if unknown:
        raise ValueError(f"suites: got {', '.join(unknown)}, wanted names among {', '.join(SUITES)}")
    if essay is None and {"needle", "ruler"} & set(suites):
        raise ValueError(f"essay: got None, wanted an Essay for {', '.join(suites)}, such as default_essay()")
    return [task for name in suites for task in SUITES[name](essay, min(vocab_size, MQAR_VOCAB))]


def samples_of(task: Task, samples: int) -> int:
    """Examples a length: `samples` of each depth for the needle grid and its controls, whole traces for consistency, else `samples`."""
    return samples * (task.draws_shared_by if isinstance(task, TextTask) else 1)


def run_tasks(tasks: Sequence[Task], answers: Answers, *, lengths: Sequence[int], samples: int, count: Count | None = None, seed: int = 0,
              batch_size: int | None = None, batch_tokens: int = BATCH_TOKENS,
              progress: Callable[[str, int], None] = lambda task, done: None) -> Results:
    """Every task at every length, `samples_of` examples each, asked for in batches.

    count: the model's, for tasks on text. batch_size None takes a divisor of the examples of every task, as many as batch_tokens hold and at most
    LARGEST_BATCH, so that all batches of a length have one shape. progress(task, examples) is called after each batch, and with a whole task's examples
    where it does not fit.
    A length that a task cannot have is listed in `unfit`, never cut.
    """
    if samples < 1 or batch_tokens < 1 or batch_size is not None and batch_size < 1:
        raise ValueError(f"samples: got {samples} with batch_size={batch_size} and batch_tokens={batch_tokens}, wanted all at least 1")
    shared = math.gcd(*(samples_of(task, samples) for task in tasks))
    records: list[Record] = []
    unfit: list[Unfit] = []
    for length in lengths:
        for task in tasks:
            wanted, rows = samples_of(task, samples), batch_size or _batch_size(shared, batch_tokens // length)
            own: list[Record] = []
            try:
                make = make_examples(task, length=length, count=count, seed=seed)
                for start in range(0, wanted, rows):
                    examples = [make(i) for i in range(start, min(start + rows, wanted))]
                    own += [_record(task, *pair) for pair in zip(examples, answers(task, examples), strict=True)]
                    progress(task.name, len(examples))
            except SizeError as error:                           # a task that fits only sometimes would give no fair mean
                unfit.append(Unfit(task.name, length, str(error)))
                progress(task.name, wanted - len(own))
            else:
                records += own
    return Results(tuple(records), tuple(unfit))


def model_answers(model: Model) -> Answers:
    """Asks a model. ValueError where it lacks the function that a task needs."""
    def answers(task: Task, examples: Sequence[Example]) -> Sequence[Any]:
        if isinstance(task, TextTask):
            if model.generate is None:
                raise ValueError(f"model.generate: got None, wanted a function, because {task.name} is a task on text")
            return model.generate([example.prompt for example in examples], max(example.answer_tokens for example in examples))
        if model.score is None:
            raise ValueError(f"model.score: got None, wanted a function, because {task.name} is a task on tokens")
        best = model.score(np.stack([e.tokens for e in examples]), np.stack([e.targets for e in examples])).best
        return [row[example.asked] for row, example in zip(best, examples)]

    return answers


def oracle_answers(task: Task, examples: Sequence[Example]) -> Sequence[Any]:
    """The gold answers, written out as the task wants them."""
    return [task.render(e.answers) if isinstance(task, TextTask) else e.answers for e in examples]


def make_guesses(seed: int = 0) -> Answers:
    """As many of an example's candidates as it has answers, without looking at the prompt."""
    def answers(task: Task, examples: Sequence[Example]) -> Sequence[Any]:
        outputs = []
        for example in examples:
            draws = Draws(seed, text_key(f"guess {task.name}"), example.length, example.index)
            if isinstance(task, TextTask):
                outputs.append(task.render(draws.choose(example.candidates, min(len(example.answers), len(example.candidates)))))
            else:
                outputs.append(example.candidates[draws.integers(len(example.candidates), len(example.answers))])
        return outputs

    return answers


def cells(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, Cell]:
    """Records by `key`, in order of the first: cells(records, lambda r: (r.task, r.length))."""
    groups: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    mean = lambda group, figure: sum(getattr(r, figure) for r in group) / len(group)
    return {name: Cell(wilson(mean(group, "official"), len(group)), wilson(mean(group, "strict"), len(group)), mean(group, "chance"))
            for name, group in groups.items()}


def family_score(records: Sequence[Record]) -> tuple[Interval, float]:
    """(official score with its interval, chance): means over the tasks of `records`, each task counting the same."""
    tasks = cells(records, lambda record: record.task).values()
    # The variance of a mean over K tasks is that of one sample of K^2 / sum(1 / n), where the tasks are alike, and less where they differ.
    n = int(len(tasks)**2 / sum(1 / cell.official.n for cell in tasks))
    mean = lambda figures: sum(figures) / len(tasks)
    return wilson(min(1.0, mean(cell.official.mean for cell in tasks)), n), mean(cell.chance for cell in tasks)


def effective_contexts(records: Sequence[Record], *, threshold: float | None = None) -> dict[str, EffectiveContext]:
    """Family -> its effective context by `family_score`, over the lengths at which all of the family's tasks ran; families without one are left out.

    threshold as for `effective_context`.
    """
    result = {}
    for family in dict.fromkeys(record.family for record in records if record.family != CONTROL):
        by_length: dict[int, list[Record]] = defaultdict(list)
        for record in records:
            if record.family == family:
                by_length[record.length].append(record)
        tasks = {record.task for part in by_length.values() for record in part}
        scores = {length: family_score(part) for length, part in by_length.items() if {record.task for record in part} == tasks}
        if scores:
            result[family] = effective_context({k: v[0] for k, v in scores.items()}, {k: v[1] for k, v in scores.items()}, threshold=threshold)
    return result


def _batch_size(examples: int, most: int) -> int:
    """The largest divisor of `examples` among 1 to `most` and LARGEST_BATCH."""
    return max(size for size in range(1, min(LARGEST_BATCH, max(1, most)) + 1) if examples % size == 0)


def _record(task: Task, example: Example, output: Any) -> Record:
    score: Score = task.score(example, output)
    text = isinstance(task, TextTask)
    return Record(task=task.name, family=task.family, length=example.length, index=example.index, official=score.official, strict=score.strict,
                  tokens=example.prompt_tokens if text else len(example.tokens), chance=example.chance, metadata=example.metadata,
                  answers=example.answers if text else (), output=output if text else None)
