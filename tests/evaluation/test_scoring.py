"""Scores of outputs that mean to deceive: for each the official score, which a published table would give, and the strict one."""
import pytest
from long_tasks import TEXT_TASKS, TOKEN_TASKS, count

from longmoe.evaluation.examples import TextExample, make_examples
from longmoe.evaluation.scoring import contained, names_exactly

OFFICIAL, STRICT = 0, 1


def example(answers: tuple[str, ...], candidates: tuple[str, ...] = (), **metadata) -> TextExample:
    return TextExample("", answers, candidates, 0.0, 0, 100, 10, 20, metadata)


def score(task: str, answers, output: str, candidates=(), **metadata) -> tuple[float, float]:
    return tuple(TEXT_TASKS[task].score(example(answers, candidates, **metadata), output))


NUMBERS = [
    (" 2345678.", 1, 1),
    ("2345678", 1, 1),
    ("12345678", 1, 0),                                            # a longer number that contains the answer
    ("23456789", 1, 0),
    ("x2345678", 1, 0),
    ("-2345678", 1, 0),                                            # part of a hyphenated word or a negative number
    ("1111111, 2345678, 3333333", 1, 0),                           # every candidate listed
    ("I cannot say.", 0, 0),
    ("I was told that it is 2345678, but I cannot say.", 1, 1),
    ("", 0, 0),
    (" \n", 0, 0),
    ("Let me see.\n\nThe text says it clearly: 2345678", 1, 1),     # answer after other text
    ("234567", 0, 0),
    ("2,345,678", 0, 0),
    ("2345678 2345678", 1, 1),
]


@pytest.mark.parametrize("output,official,strict", NUMBERS)
@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "needle_grid", "needle_duplicate", "code_hops_2", "consistency"])
def test_one_number(task, output, official, strict):
    assert score(task, ("2345678",), output) == (official, strict)


@pytest.mark.parametrize("output,official,strict", [
    ("1111111, 2222222, 3333333 and 4444444", 1, 1),
    ("4444444 3333333 2222222 1111111", 1, 1),
    ("1111111, 2222222", 0.5, 0),
    ("1111111, 2222222, 3333333, 4444444, 5555555", 1, 0),
    ("11111111, 2222222, 3333333, 4444444", 1, 0),
    ("No such numbers were given.", 0, 0),
    ("", 0, 0),
])
@pytest.mark.parametrize("task", ["niah_multivalue", "niah_multiquery"])
def test_several_numbers(task, output, official, strict):
    assert score(task, ("1111111", "2222222", "3333333", "4444444"), output) == (official, strict)


@pytest.mark.parametrize("output,official,strict", [
    (" 1861eb42-1a02-4772-bff5-8f564d9bfacb.", 1, 1),
    ("1861EB42-1A02-4772-BFF5-8F564D9BFACB", 1, 1),
    ("1861eb42-1a02-4772-bff5-8f564d9bfacb0", 1, 0),
    ("a-1861eb42-1a02-4772-bff5-8f564d9bfacb", 1, 0),
    ("1861eb42-1a02-4772-bff5-8f564d9bfacb 2861eb42-1a02-4772-bff5-8f564d9bfacb", 1, 0),
    ("1861eb42", 0, 0),
    ("", 0, 0),
])
@pytest.mark.parametrize("task", ["niah_single_3", "niah_multikey_3"])
def test_uuids(task, output, official, strict):
    assert score(task, ("1861eb42-1a02-4772-bff5-8f564d9bfacb",), output) == (official, strict)


@pytest.mark.parametrize("output,official,strict", [
    ("not stated", 1, 1), (" Not stated.", 1, 1), ("The answer is: not stated.", 1, 0),
    ("not stated, perhaps 1234567", 0, 0), ("1234567", 0, 0), ("", 0, 0), ("none", 0, 0), ("not", 0, 0), ("I cannot say", 0, 0), ("understated", 0, 0),
])
def test_absent_needle(output, official, strict):
    assert score("needle_absent", ("not stated",), output) == (official, strict)


@pytest.mark.parametrize("output,official,strict", [
    ("ABCDE, FGHIJ", 1, 1), ("abcde fghij", 1, 0), ("XABCDE FGHIJ", 1, 0), ("ABCDE", 0.5, 0), ("ABCDE FGHIJ KLMNO", 1, 0), ("No variable", 0, 0), ("", 0, 0),
    ("Following the chain, the variables are ABCDE and FGHIJ.", 1, 1),
])
def test_variables(output, official, strict):
    assert score("vt", ("ABCDE", "FGHIJ"), output) == (official, strict)


@pytest.mark.parametrize("output,official,strict", [
    ("oak, well-worn", 1, 1), ("1. oak 2. well-worn", 1, 1), ("OAK and Well-Worn, I think", 1, 1), ("oaken, well-worn", 1, 0), ("soak well-worn", 1, 0),
    ("oak", 0.5, 0), ("oak well-worn elm", 1, 0), ("oak well-worn and also sand", 1, 1), ("oak well worn", 0.5, 0), ("I cannot count.", 0, 0), ("", 0, 0),
])
@pytest.mark.parametrize("task", ["cwe", "fwe"])
def test_words(task, output, official, strict):
    """A word that the prompt's list lacks ("sand") is text, not a guess."""
    assert score(task, ("oak", "well-worn"), output, ("oak", "well-worn", "elm", "worn")) == (official, strict)


@pytest.mark.parametrize("output,official,strict", [
    ("Final Answer: [aa, bb]", 1, 1), (" [aa, bb]", 1, 1), ("[bb, aa, aa].", 1, 1), ("['aa', \"BB\"]", 1, 1),
    ("The nodes are easy to see.\nFinal Answer: [aa, bb]\n", 1, 1),
    ("Final Answer: [aa, bb]\nI hope this helps!", 0, 0),                # not the last line
    ("Final Answer: [aa]", 2 / 3, 0), ("Final Answer: [aa, bb, cc, dd]", 2 / 3, 0), ("Final Answer: [aab, bb]", 0.5, 0),
    ("Final Answer: aa, bb", 0, 0), ("aa bb", 0, 0), ("Final Answer: []", 0, 0), ("I cannot say.", 0, 0), ("", 0, 0),
])
@pytest.mark.parametrize("task", ["graph_bfs", "graph_parents"])
def test_sets_of_nodes(task, output, official, strict):
    assert score(task, ("aa", "bb"), output) == pytest.approx((official, strict))


def test_empty_sets_agree():
    assert score("graph_bfs", (), "Final Answer: []") == (1, 1)
    assert score("graph_bfs", (), "Final Answer: [aa]") == score("graph_bfs", (), "none") == (0, 0)


def test_repetition():
    gold = "abcDEF0123The cat finds the hat."
    asked = lambda output: score("mrcr_2", (gold,), output, prefix="abcDEF0123")
    assert asked(gold) == asked(f"  {gold}\n") == (1, 1)
    assert asked("The cat finds the hat.") == asked("") == asked("I cannot repeat it.") == asked(f"Sure: {gold}") == (0, 0)
    assert asked("abcDEF0123") == (0, 0)
    near = asked("abcDEF0123The cat finds the mat.")
    assert 0.9 < near[OFFICIAL] < 1 and near[STRICT] == 0
    both = asked(f"{gold} The dog hides the bone.")
    assert 0.5 < both[OFFICIAL] < 1 and both[STRICT] == 0


def test_rows():
    row = make_examples(TOKEN_TASKS["palindrome"], length=16)(0)
    wrong = row.answers.copy()
    wrong[:2] = (wrong[:2] + 1) % 64
    assert TOKEN_TASKS["palindrome"].score(row, row.answers) == (1, 1)
    assert TOKEN_TASKS["palindrome"].score(row, wrong) == (0.75, 0)


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_listing_everything_and_saying_nothing(name):
    """Whatever the task: all candidates at once never pass the strict rule, nothing and refusals pass no rule."""
    task = TEXT_TASKS[name]
    made = make_examples(task, length=2048, count=count)(5)
    everything = task.render([*made.candidates, *made.answers])
    assert task.score(made, everything).strict == 0
    for refusal in ("", "\n\n", "I'm sorry, but I can't help with that.", "no"):
        assert task.score(made, refusal) == (0, 0)


def test_rules():
    assert contained(("Ab", "cd"), "xaBx") == 0.5
    assert names_exactly({"A", "b"}, ["a", "B", "b"]) == 1 and names_exactly({"a"}, []) == 0
