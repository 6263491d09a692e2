"""The page and the JSON of a run of all suites, without a model: half of the answers are the oracle's and half are guesses."""
import json
import re

import pytest
from long_tasks import ESSAY, count

from longmoe.eval_report import COLUMNS, Positions, plain, score_rows, sections, summary
from longmoe.evaluation.positions import ContextGain
from longmoe.evaluation.report import write_report
from longmoe.evaluation.ruler import TASKS
from longmoe.evaluation.suites import SUITES, Results, make_guesses, make_tasks, oracle_answers, run_tasks

POSITIONS = Positions(2048, 1, (0, 1024, 2048), (3.0, float("nan")), (ContextGain(512, 3.0, 0.0, float("nan"), 1), ContextGain(1536, 2.5, 0.5, 0.1, 1)))


@pytest.fixture(scope="module")
def results() -> Results:
    """Right at 1,024 and 2,048 tokens, guessed at 4,096; and a length at which nothing on text fits."""
    guess = make_guesses()
    answers = lambda task, examples: (oracle_answers if examples[0].length < 4096 else guess)(task, examples)
    return run_tasks(make_tasks(list(SUITES), essay=ESSAY), answers, lengths=[32, 1024, 2048, 4096], samples=4, count=count)


def test_summary(results):
    found = json.loads(json.dumps(plain(summary(results, [POSITIONS])), allow_nan=False))
    assert {name: context["length"] for name, context in found["effective_context"].items()} == {
        "retrieval": 2048, "multi-hop": 2048, "aggregation": 2048, "consistency": 2048, "recall": 2048, "state tracking": 2048}
    ruler = found["ruler"]
    assert ruler["effective_context"]["length"] == 2048 and set(ruler["averages"]) == {"1024", "2048", "4096"}
    assert ruler["weighted_rising"] < 0.7 < ruler["weighted_falling"]
    assert found["consistency"]["1024"] == {"by_ask": [1.0] * 8, "always_right": 1.0, "unchanged": 1.0} and found["consistency"]["4096"]["always_right"] == 0
    assert found["positions"][0]["nats_per_token"] == [3.0, None] and found["positions"][0]["gains"][0]["half_width"] is None
    assert {row["length"] for row in found["unfit"]} == {32}
    assert {(row["depth"], row["scores"]["official"]["n"]) for row in found["needles"]} == {(float(depth), 4) for depth in range(0, 101, 10)}


def test_ruler_needs_all_of_its_tasks(results):
    some = Results(tuple(record for record in results.records if record.task != "vt"), ())
    assert summary(some)["ruler"] is None and {record.task for record in results.records} > set(TASKS)


def test_page(results, tmp_path):
    page = write_report(tmp_path / "suites.html", "all", sections(results, [POSITIONS])).read_text()
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == ["Effective context", "Scores", "Needles", "Consistency", "Loss by position", "Left out", "Outputs that missed"]
    assert page.count("<img") == 2 + 3 + 2 and "RULER&#x27;s average" in page
    assert sections(Results((), ())) == []


def test_rows_of_the_table(results):
    rows = score_rows(results)
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert rows[0][:2] in {("mqar", "32"), ("palindrome", "32")} and ("vt", "1,024", "1.000 (0.510 to 1.000)", "1.000 (0.510 to 1.000)", "4", "0.000") in rows
