"""Models as pairs of functions: batched generation, and any pair through the suites. Our `score` is tested beside the plain loss, in test_text."""
import re

import numpy as np
import pytest
from long_tasks import ESSAY, TEXT_TASKS, TOKEN_TASKS, count, solve

from longmoe.data.tokenizer import Tokenizer
from longmoe.evaluation.examples import make_examples
from longmoe.evaluation.models import Model, TokenScores, make_count, make_generate
from longmoe.evaluation.statistics import Interval
from longmoe.evaluation.suites import (
    Record,
    cells,
    effective_contexts,
    family_score,
    make_guesses,
    make_tasks,
    model_answers,
    oracle_answers,
    run_tasks,
    samples_of,
)

BYTES = Tokenizer.of_bytes()


def test_generation_is_batched_and_ends():
    asked = []

    def generate_tokens(tokens, *, max_new_tokens, prompt_lengths, eos_id):
        """Says the last two bytes of each prompt again and ends; a prompt that ends in "!" goes on for ever."""
        asked.append((tokens.shape, max_new_tokens))
        rows = []
        for row, length in zip(tokens, prompt_lengths):
            assert row[0] == eos_id and np.all(row[length:] == eos_id)
            said = row[length - 2:length].tolist()
            rows.append((said * max_new_tokens)[:max_new_tokens] if said[-1] == ord("!") else said + [eos_id] * (max_new_tokens - 2))
        return np.array(rows)

    generate = make_generate(generate_tokens, BYTES)
    assert generate(["a longer prompt: ab", "cd", "x" * 17 + "e!"], 3) == ["ab", "cd", "e!e"]
    assert asked == [((3, 20), 64)] and make_count(BYTES)("abcd") == 5
    assert generate(["x" * 700], 65) == ["xx"] and asked[1] == ((1, 768), 128)


def reader(prompts, max_new_tokens):
    """A model that reads well: it knows the templates."""
    kinds = {"special magic": "needle_grid", "access number": "consistency", "secret language": "fwe"}
    return [" " + ", ".join(solve(next(task for words, task in kinds.items() if words in prompt), prompt)) for prompt in prompts]


def test_any_pair_of_functions_is_a_model():
    """The reader on text; on tokens one that repeats the value which followed a token before."""
    def score(tokens, targets):
        best = np.zeros_like(tokens)
        for row, answers in zip(tokens.tolist(), best):
            followed: dict[int, int] = {}
            for at, token in enumerate(row):
                answers[at] = followed.get(token, 0)
                if at:
                    followed.setdefault(row[at - 1], token)
        return TokenScores(np.zeros(tokens.shape, np.float32), best)

    tasks = [*make_tasks(["needle"], essay=ESSAY), TEXT_TASKS["consistency"], TEXT_TASKS["fwe"], TOKEN_TASKS["mqar"]]
    done = []
    answers = model_answers(Model(reader, score, count))
    results = run_tasks(tasks, answers, lengths=[64, 1024], samples=2, count=count, progress=lambda *step: done.append(step))
    assert {record.task for record in results.records} == {task.name for task in tasks}
    assert all(record.official == record.strict == 1 for record in results.records)
    assert {(unfit.task, unfit.length) for unfit in results.unfit} == {("consistency", 64), ("fwe", 64), *((task.name, 64) for task in tasks[:3])}
    assert sum(examples for _, examples in done) == 2 * sum(samples_of(task, 2) for task in tasks)
    assert all(record.output and record.tokens < record.length for record in results.records if record.task != "mqar")


def test_a_missing_function_is_said():
    for model, task in ((Model(score=lambda *_: None), TEXT_TASKS["vt"]), (Model(generate=reader, count=count), TOKEN_TASKS["mqar"])):
        name = "generate" if task is TEXT_TASKS["vt"] else "score"
        with pytest.raises(ValueError, match=rf"model\.{name}: got None, wanted a function, because {task.name}"):
            run_tasks([task], model_answers(model), lengths=[1024], samples=1, count=count)
    with pytest.raises(ValueError, match="suites: got rular, wanted names among needle, ruler"):
        make_tasks(["rular"])
    with pytest.raises(ValueError, match="essay: got None, wanted an Essay for ruler"):
        make_tasks(["ruler"])
    for asked in (dict(samples=0), dict(samples=1, batch_size=0), dict(samples=1, batch_tokens=0)):
        with pytest.raises(ValueError, match="samples: got"):
            run_tasks([TEXT_TASKS["vt"]], oracle_answers, lengths=[1024], count=count, **asked)


def test_batches_of_a_length_have_one_shape():
    sizes = []

    def answers(task, examples):
        sizes.append(len(examples))
        return oracle_answers(task, examples)

    asked = dict(lengths=[8192], samples=12, count=count)
    run_tasks([TEXT_TASKS["vt"], TEXT_TASKS["needle_grid"]], answers, **asked)
    assert set(sizes) == {6} and sum(sizes) == 12 + 12 * 11
    sizes.clear()
    run_tasks([TEXT_TASKS["needle_grid"]], answers, **asked, batch_tokens=100_000)
    assert sizes == [12] * 11 and max(sizes) * 8192 <= 100_000
    sizes.clear()
    run_tasks([TEXT_TASKS["needle_grid"]], answers, **asked, batch_tokens=8191)
    assert sizes == [1] * 132
    sizes.clear()
    run_tasks([TEXT_TASKS["vt"]], answers, batch_size=5, **asked)
    assert sizes == [5, 5, 2]


def test_a_task_that_fits_only_sometimes_is_left_out():
    """Its mean would be over the short examples alone."""
    uneven = lambda text: count(text) + (600 if re.search(r"[13579] are$|[13579]\.\n", text) else 0)
    found = [run_tasks([TEXT_TASKS["vt"]], oracle_answers, lengths=[700], samples=8, seed=seed, count=uneven, batch_size=1) for seed in range(8)]
    assert all(len(results.records) == 8 or len(results.unfit) == 1 and not results.records for results in found)


def record(task: str, length: int, official: float, family: str = "retrieval") -> Record:
    return Record(task, family, length, 0, length, official, official, 0.1, {})


def test_families_weigh_tasks_alike():
    records = [*[record("a", 1024, 1.0)] * 30, *[record("b", 1024, 0.0)] * 10, *[record("a", 2048, 0.9)] * 30, record("absent", 1024, 1.0, "control")]
    score, chance = family_score([r for r in records if r.length == 1024 and r.family == "retrieval"])
    assert isinstance(score, Interval) and score.mean == 0.5 and score.n == int(4 / (1 / 30 + 1 / 10)) and chance == pytest.approx(0.1)
    assert cells(records, lambda r: r.length)[2048].official.n == 30
    found = effective_contexts(records)
    assert set(found) == {"retrieval"} and found["retrieval"].length == 1024, "b did not run at 2048"


def test_guesses_differ_by_seed_and_example():
    task = TEXT_TASKS["code_hops_1"]
    examples = [make_examples(task, length=2048, count=count)(i) for i in range(20)]
    first, again, other = (make_guesses(seed)(task, examples) for seed in (1, 1, 2))
    assert first == again != other and all(guess in example.candidates for guess, example in zip(first, examples))
