"""Prompts are byte for byte those in tests/golden/evaluation/, which were read by hand: figures of two versions compare only if their prompts do.

    PYTHONPATH=. python tests/evaluation/test_golden_prompts.py     writes the files anew, after a change that is meant
"""
import json
from pathlib import Path

import pytest
from long_tasks import TEXT_TASKS, TOKEN_TASKS, count

from longmoe.evaluation.examples import SizeError, make_examples

GOLDEN = Path(__file__).parent.parent / "golden" / "evaluation"
TOKEN_LENGTH = 24


def written(name: str) -> str:
    """Example 4 of seed 1 at the shortest of these lengths that the task can have (4 is neither the first of a grid's depths nor a trace's last ask)."""
    for length in (256, 384, 512, 768, 1024):
        try:
            example = make_examples(TEXT_TASKS[name], length=length, count=count, seed=1)(4)
        except SizeError:
            continue
        facts = {"length": length, "prompt_tokens": example.prompt_tokens, "answer_tokens": example.answer_tokens, "chance": round(example.chance, 6),
                 "candidates": len(example.candidates), "metadata": example.metadata, "answers": example.answers}
        return f"{json.dumps(facts)}\n----\n{example.prompt}"
    raise AssertionError(f"{name} fits no length")


def written_rows() -> str:
    rows = {}
    for name, task in TOKEN_TASKS.items():
        example = make_examples(task, length=TOKEN_LENGTH, seed=1)(0)
        rows[name] = {"tokens": example.tokens.tolist(), "targets": example.targets.tolist(), "asked": [int(a) for a in example.asked]}
    return "{\n" + ",\n".join(f'"{name}": {json.dumps(row)}' for name, row in rows.items()) + "\n}\n"


def test_every_task_has_a_golden_file():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(TEXT_TASKS)


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_prompt_is_the_golden_one(name):
    assert written(name).encode() == (GOLDEN / f"{name}.txt").read_bytes(), "renew the files (see above) if the change is meant"


def test_rows_are_the_golden_ones():
    assert written_rows() == (GOLDEN / "token_rows.json").read_text(), "renew the files (see above) if the change is meant"


if __name__ == "__main__":
    for name in TEXT_TASKS:
        (GOLDEN / f"{name}.txt").write_bytes(written(name).encode())
    (GOLDEN / "token_rows.json").write_text(written_rows())
