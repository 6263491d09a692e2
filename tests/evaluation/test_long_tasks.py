"""Generators: what they say is right can be found in the prompt, once, and the prompt fits; oracle and guesses score as they must."""
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tasks import ESSAY, NEEDLE, TEXT_TASKS, TOKEN_TASKS, count, samples, solve

from longmoe.data.draws import Draws
from longmoe.data.planted import draw_numbers
from longmoe.data.tokenizer import Tokenizer
from longmoe.data.words import ADJECTIVES, NOUNS, NUM_PAIRS, draw_pairs, draw_words
from longmoe.evaluation.consistency import consistency, consistency_task
from longmoe.evaluation.examples import MAX_SEARCH_STEPS, SizeError, make_examples
from longmoe.evaluation.haystack import Essay, default_essay, insert
from longmoe.evaluation.niah import draw_uuids, needle_tasks
from longmoe.evaluation.statistics import wilson
from longmoe.evaluation.suites import cells, make_guesses, oracle_answers, run_tasks
from longmoe.evaluation.synthetic import make_batches, mqar_task

TASKS = {**TEXT_TASKS, **TOKEN_TASKS}
LENGTHS = [1024, 8192, 65536]
GUESSES = 40
SURE = 4.5
"""z of the interval that a share of guesses must be chance within: one in 150,000 falls outside."""


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", TEXT_TASKS)
def test_the_answers_follow_from_the_prompt_and_it_fits(name, length):
    task = TEXT_TASKS[name]
    make = make_examples(task, length=length, count=count, seed=3)
    examples = [make(i) for i in range(samples(task))]
    for example in examples:
        assert solve(name, example.prompt) == set(example.answers)
        assert example.prompt_tokens == count(example.prompt) and example.prompt_tokens + example.answer_tokens <= length
        assert example.answer_tokens >= task.answer_tokens and example.answer_tokens > count(task.render(example.answers))
        assert example.prompt == example.prompt.rstrip(), "the answer's first token begins with the space"
        assert len(set(example.answers)) == len(example.answers) and len(set(example.candidates)) == len(example.candidates) >= 2
    full = [example.prompt_tokens + example.answer_tokens for example in examples if example.metadata.get("ask", 7) == 7]
    assert max(full) > length - 300, "a unit is never as large as that"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", TASKS)
def test_oracle_is_right_and_guesses_are_at_chance(name, length):
    tasks = [TASKS[name]]
    asked = dict(lengths=[length], count=count, samples=max(1, GUESSES // samples(tasks[0])) if name in TEXT_TASKS else 2, seed=5)
    oracle = run_tasks(tasks, oracle_answers, **asked).records
    assert all(record.official == record.strict == 1.0 for record in oracle)
    guesses = run_tasks(tasks, make_guesses(), **asked).records
    answers = GUESSES if name in TEXT_TASKS else sum(record.metadata["asked"] for record in guesses)
    cell = cells(guesses, lambda record: record.task)[name]
    if name.startswith("mrcr"):      # not a share: only the mean's spread is known
        assert abs(cell.official.mean - cell.chance) < 0.25
    else:
        bounds = wilson(cell.official.mean, answers, SURE)
        assert bounds.low <= cell.chance <= bounds.high
    assert cell.strict.mean <= cell.official.mean + 1e-9 and (cell.official.mean < 1 or cell.chance > 0.4)


@pytest.mark.parametrize("name", TASKS)
def test_examples_depend_on_seed_and_index_alone(name):
    make = lambda seed: make_examples(TASKS[name], length=1024, count=count, seed=seed)
    facts = lambda example: example.prompt if name in TEXT_TASKS else example.tokens.tolist()
    first, other = make(1), make(2)
    last_to_first = [facts(first(index)) for index in (9, 1, 0)]
    again = make(1)
    assert [facts(again(index)) for index in (0, 1, 9)] == last_to_first[::-1]
    assert facts(first(0)) != facts(first(11)) and facts(first(0)) != facts(other(0))


@pytest.mark.parametrize("name", [name for name in TEXT_TASKS if name.startswith(("niah", "needle"))])
def test_needles_are_there_once(name):
    task = TEXT_TASKS[name]
    make = make_examples(task, length=2048, count=count, seed=7)
    for example in map(make, range(samples(task))):
        found = NEEDLE.findall(example.prompt)
        values = [value for _, value in found]
        assert len(set(values)) == len(values)
        assert all(example.prompt.count(value) == 1 for value in values), "a value stands in its needle alone"
        per_key = 4 if name == "niah_multivalue" else 2 if name == "needle_duplicate" else 1
        keys = [key for key, _ in found]
        assert all(keys.count(key) == per_key for key in keys)
        assert all((example.prompt.count(value) == 1) == (value in values) for value in example.candidates)
        assert bool(found) == (name != "needle_absent")


@pytest.mark.parametrize("depth", [0, 30, 100])
def test_depth_is_where_the_needle_is(depth):
    task = needle_tasks(ESSAY, [depth])[0]
    example = make_examples(task, length=4096, count=count, seed=1)(0)
    _, haystack, _ = example.prompt.split("\n")
    before, needle, after = re.split(r"(One of the special magic .*?\.)", haystack)
    assert example.metadata["depth"] == depth and abs(100 * len(before) / (len(before) + len(after)) - depth) < 2
    assert (not before) == (depth == 0) and (not after) == (depth == 100)


def test_a_code_answer_is_found_only_by_following_calls():
    """Chains are of one shape, and neither the order of files nor of constants tells which one is asked."""
    make = make_examples(TEXT_TASKS["code_hops_2"], length=2048, count=count)
    places = [example.candidates.index(example.answers[0]) / len(example.candidates) for example in map(make, range(40))]
    in_text = [re.findall(r"return (\d+)", e.prompt).index(e.answers[0]) / len(e.candidates) for e in map(make, range(40))]
    for shares in (places, in_text):
        assert 0.3 < np.mean(shares) < 0.65 and len(set(shares)) > 10


def test_a_trace_grows_and_its_fact_stays():
    task = TEXT_TASKS["consistency"]
    make = make_examples(task, length=4096, count=count, seed=2)
    trace = [make(i) for i in range(8, 16)]
    steps = [example.prompt.rsplit("\n", 1)[0] for example in trace]
    assert all(longer.startswith(shorter + "\n") for shorter, longer in zip(steps[:-2], steps[1:-1]))
    assert len({example.answers for example in trace}) == 1 != len({example.answers for example in (make(0), make(8))})
    assert [example.metadata["ask"] for example in trace] == list(range(8)) and {example.metadata["trace"] for example in trace} == {1}


def test_consistency_counts_traces():
    asked = lambda trace, ask, output: ({"trace": trace, "ask": ask, "asks": 2}, "1000000", output)
    found = consistency([asked(0, 0, "1000000"), asked(0, 1, " it is 1000000."), asked(1, 0, "2000000"), asked(1, 1, "2000000"),
                         asked(2, 0, "1000000"), asked(2, 1, "I do not know"), asked(3, 0, ""), asked(3, 1, "")])
    assert found.by_ask == (0.5, 0.25) and found.always_right == 0.25 and found.unchanged == 0.5
    for incomplete in ([], [asked(0, 0, "1")]):
        with pytest.raises(ValueError, match="wanted all asks of every trace"):
            consistency(incomplete)
    with pytest.raises(ValueError, match="asks: got 0, wanted at least 1"):
        consistency_task(0)


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_impossible_lengths_are_refused(name):
    with pytest.raises(SizeError, match=rf"length: got 60, .*{name}"):
        make_examples(TEXT_TASKS[name], length=60, count=count)
    with pytest.raises(ValueError, match="count: got None, wanted a function"):
        make_examples(TEXT_TASKS[name], length=1024)
    with pytest.raises(ValueError, match="length: got 0, wanted at least 1"):
        make_examples(TEXT_TASKS[name], length=0, count=count)


@pytest.mark.parametrize("task,length", [(mqar_task(num_pairs=8), 31), (TOKEN_TASKS["mqar"], 3), (TOKEN_TASKS["palindrome"], 1), (TOKEN_TASKS["stack"], 5)])
def test_impossible_lengths_of_rows_are_refused(task, length):
    with pytest.raises(SizeError, match=f"length: got {length}, wanted at least .* for {task.name}"):
        make_examples(task, length=length)(0)


@settings(max_examples=15, deadline=None)
@given(st.integers(300, 3000), st.integers(0, 2**31), st.sampled_from(["niah_multikey_2", "niah_single_2", "vt", "cwe", "mrcr_2", "graph_bfs", "consistency"]),
       st.integers(0, 7))
def test_no_prompt_is_over_its_budget(length, seed, name, index):
    """Under a tokenizer that splits on letters' case and digits, so that names and numbers differ in size."""
    uneven = lambda text: len(re.findall(r"[a-z]{1,5}|[A-Z]|\d\d?|[^\w\s]", text))
    try:
        example = make_examples(TEXT_TASKS[name], length=length, count=uneven, seed=seed)(index)
    except SizeError:
        assert length < 1024
        return
    assert uneven(example.prompt) + example.answer_tokens <= length
    assert solve(name, example.prompt) == set(example.answers)


def test_a_real_tokenizer_sizes_prompts():
    tokenizer = Tokenizer.train([" ".join(ESSAY.sentences(100))], 300)
    calls = 0

    def measured(text: str) -> int:
        nonlocal calls
        calls += 1
        return len(tokenizer.encode(text))

    for name in ("niah_single_2", "vt", "cwe"):
        example = make_examples(TEXT_TASKS[name], length=6000, count=measured)(0)
        assert len(tokenizer.encode(example.prompt)) == example.prompt_tokens <= 6000 - example.answer_tokens
        assert example.prompt_tokens > 5500


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_million_tokens(name):
    """Eight times the length takes nowhere near 64 times as long, and few whole prompts are counted."""
    def build(length: int) -> tuple[float, int]:
        calls = 0

        def counted(text: str) -> int:
            nonlocal calls
            calls += len(text) > length       # a quarter of a full prompt
            return count(text)

        start = time.process_time()
        example = make_examples(TASKS[name], length=length, count=counted)(10)
        if name in TEXT_TASKS:
            assert example.prompt_tokens + example.answer_tokens <= length
        return time.process_time() - start, calls

    (short, _), (long, calls) = build(2**17), build(2**20)
    assert long < 30 * max(short, 0.05) and calls <= MAX_SEARCH_STEPS


def test_mqar_rows():
    example = make_examples(TOKEN_TASKS["mqar"], length=1024, seed=4)(0)
    keys, values = example.tokens[0:256:2], example.tokens[1:256:2]
    table = dict(zip(keys.tolist(), values.tolist()))
    assert len(table) == 128 and len(set(values)) == 128 and keys.max() < 4096 <= values.min() and example.tokens.max() < 8192
    assert sorted(example.tokens[example.asked]) == sorted(keys) and example.answers.tolist() == [table[k] for k in example.tokens[example.asked].tolist()]
    rest = np.delete(example.tokens[256:], np.flatnonzero(example.asked) - 256)
    assert not set(rest) & (set(keys) | set(values)), "filling holds no key and no value"
    assert np.all(np.flatnonzero(example.asked) % 2 == 0)
    for vocab_size, num_pairs in ((8, None), (8192, 4096), (8192, 0)):
        with pytest.raises(ValueError, match=f"vocab_size: got {vocab_size} with num_pairs={num_pairs}"):
            mqar_task(vocab_size, num_pairs)


@settings(max_examples=20, deadline=None)
@given(st.integers(6, 400), st.integers(0, 2**31))
def test_rows_are_what_they_say(length, seed):
    rows = {name: make_examples(task, length=length, seed=seed)(0) for name, task in TOKEN_TASKS.items()}
    for name, row in rows.items():
        assert len(row.tokens) <= length and row.tokens.max() < TOKEN_TASKS[name].vocab_size and row.asked.any()
        assert set(row.answers.tolist()) <= set(row.candidates.tolist())
    palindrome = rows["palindrome"]
    n = length // 2
    assert palindrome.answers.tolist() == palindrome.tokens[:n][::-1].tolist() and palindrome.tokens[n] == 64
    assert palindrome.tokens[n + 1:].tolist() == palindrome.answers[:-1].tolist()
    held: dict[int, list[int]] = {}
    stack = rows["stack"]
    for at, (operation, place, element) in zip(range(1, length, 3), stack.tokens.reshape(-1, 3).tolist()):
        assert operation in (128, 129) and 64 <= place < 128 and element < 64 and stack.asked[at] == (operation == 129)
        if operation == 128:
            held.setdefault(place, []).append(element)
        else:
            assert held[place].pop() == element == stack.targets[at]
    assert rows["state_parity"].targets.tolist() == (np.cumsum(rows["state_parity"].tokens) % 2).tolist()
    assert rows["state_modular"].targets.tolist() == (np.cumsum(rows["state_modular"].tokens) % 5).tolist()


@pytest.mark.parametrize("name,size", [("state_s3", 6), ("state_s5", 120)])
def test_permutations_form_a_group(name, size):
    """Read off rows alone: the product of two elements is one function of them, with a unit, inverses, and an order that matters."""
    row = make_examples(TOKEN_TASKS[name], length=60 * size * size, seed=1)(0)
    table = {}
    for state, element, after in zip(row.targets[:-1].tolist(), row.tokens[1:].tolist(), row.targets[1:].tolist()):
        assert table.setdefault((state, element), after) == after
    assert len(table) == size**2 and row.targets[0] == row.tokens[0]
    assert all(table[0, a] == table[a, 0] == a for a in range(size))
    assert all({table[a, b] for b in range(size)} == set(range(size)) for a in range(size))
    assert any(table[a, b] != table[b, a] for a in range(size) for b in range(a))


def test_batches_are_laid_out_as_training_rows():
    batch = make_batches(TOKEN_TASKS["stack"], length=20, batch_size=3, seed=0)(2)
    row = make_examples(TOKEN_TASKS["stack"], length=20, seed=0)(7)
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        "tokens": ((3, 20), np.int32), "targets": ((3, 20), np.int32), "segment_ids": ((3, 20), np.int32), "loss_weights": ((3, 20), np.float32)}
    assert batch["tokens"][1, :18].tolist() == row.tokens.tolist() and batch["segment_ids"][1].tolist() == [1] * 18 + [0] * 2
    assert np.array_equal(batch["loss_weights"][1, :18] > 0, row.asked) and not batch["loss_weights"][:, 18:].any()


def test_no_word_is_part_of_another():
    words = ADJECTIVES + NOUNS
    assert len(set(words)) == len(words) and not [(a, b) for a in words for b in words if a != b and a in b]
    for size in (len(words), 5000):
        drawn = draw_words(Draws(1), size)
        assert len(set(drawn)) == size
    assert len(set(draw_pairs(Draws(1), 90_000, frozenset({"amber-hill"})))) == 90_000
    assert "amber-hill" not in draw_pairs(Draws(1), NUM_PAIRS - 1, frozenset({"amber-hill"}))
    with pytest.raises(ValueError, match=f"count: got {NUM_PAIRS + 1}, wanted at most {NUM_PAIRS}"):
        draw_pairs(Draws(1), NUM_PAIRS + 1)
    with pytest.raises(ValueError, match="wanted at most"):
        draw_words(Draws(1), len(words)**2 + 1)


@settings(deadline=None)
@given(st.integers(1, 500), st.data())
def test_draws(bound, data):
    size = data.draw(st.integers(0, bound))
    distinct, integers, uniform = Draws(bound).distinct(bound, size), Draws(bound).integers(bound, 50), Draws(bound).uniform(50)
    assert len(set(distinct.tolist())) == size and set(distinct.tolist()) <= set(range(bound)) and set(integers.tolist()) <= set(range(bound))
    if 2 * size <= bound:
        assert Draws(bound).distinct(bound, size // 3).tolist() == distinct[:size // 3].tolist()
    assert 0 < uniform.min() and uniform.max() < 1
    assert sorted(Draws(bound).shuffled(range(bound))) == list(range(bound))
    with pytest.raises(ValueError, match="count: got"):
        Draws(bound).distinct(bound, bound + 1)


def test_values_have_their_form():
    assert all(re.fullmatch(r"\d{7}", number) for number in draw_numbers(Draws(3), 1000))
    assert all(re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", each) for each in draw_uuids(Draws(3), 1000))


@settings(deadline=None)
@given(st.integers(0, 400))
def test_an_essay_repeats_and_gives_as_many_words_as_asked(words):
    text = " ".join(ESSAY.sentences(words)).split()
    assert len(text) == words and text[:5] == "The mill stood at the".split()[:words]


def test_an_essay_leaves_out_what_looks_like_a_value():
    essay = Essay("It was in 1912 or 12345 or x1234567y, near a well-worn road. It rained!")
    assert essay.sentences(essay.num_words) == ["It was in 1912 or or near a well-worn road.", "It rained!"] and essay.pairs == {"well-worn"}
    with pytest.raises(ValueError, match="text: got 6 characters without a word"):
        Essay(" 12345")


def test_the_default_essay_is_prose():
    essay = default_essay()
    assert essay.num_words > 20_000 and default_essay() is essay
    assert not re.search(r"\d{5}|>>>|__", " ".join(essay.sentences(essay.num_words)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=5))
def test_insert_keeps_the_order_of_units_and_needles(places):
    units, needles = [f"u{i}" for i in range(6)], [f"n{i}" for i in range(len(places))]
    result = insert(units, places, needles)
    assert [x for x in result if x[0] == "u"] == units and sorted(x for x in result if x[0] == "n") == needles
    for place, needle in zip(places, needles):
        assert [x for x in result[:result.index(needle)] if x[0] == "u"] == units[:place]
