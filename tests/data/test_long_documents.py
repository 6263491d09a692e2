"""Long documents: what they are made of, that answers follow from their evidence, and that they cover their window."""
import itertools
import json
import re

import numpy as np
import pytest

from longmoe.cli import main
from longmoe.data.draws import Draws
from longmoe.data.long_documents import CHUNK, Filling, LongDocument, Turn, folder_documents, log_uniform, write_long_documents
from longmoe.data.planted import ABSENT, KINDS, MOST_PLACES, planted_documents
from longmoe.data.tokenizer import Tokenizer
from longmoe.data.traces import trace_documents

TEXTS = [f"text {i}\n" + "".join(f"line {j} of text {i} says nothing of note\n" for j in range(40)) for i in range(9)]
BYTES = Tokenizer.of_bytes()
fixed = lambda tokens: lambda draws: tokens


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "root"
    index = "A\n=\n\n.. toctree::\n   :maxdepth: 2\n\n   guide\n   Deep <deep/y>\n"
    for name, text in {"b/z.py": "z = 1", "b/a.py": "a = 1\n\n", "a/deep/x.py": "x = 1\n", "a/index.rst": index, "a/deep/y.rst": "Y\n",
                       "a/guide.rst": "G\n", "a/zebra.rst": "left behind\n", "top.txt": "top\n", "a/picture.png": "no"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "b" / "bad.py").write_bytes(b"\xff\xfe")
    return root


def test_folders_are_read_in_order_of_the_path(folder):
    found = {document.name: document.text for document in folder_documents(folder)}
    assert list(found) == ["a", "b", "root"]
    assert found["b"] == "# b/a.py\na = 1\n# b/z.py\nz = 1\n" and found["root"] == "# top.txt\ntop\n"
    assert re.findall("# (.*)", found["a"]) == ["a/deep/x.py", "a/deep/y.rst", "a/guide.rst", "a/index.rst", "a/zebra.rst"]
    whole, = folder_documents(folder, depth=0, suffixes=(".py",))
    assert re.findall("# (.*)", whole.text) == ["a/deep/x.py", "b/a.py", "b/z.py"]


def test_manuals_are_read_in_order_of_their_toctrees(folder):
    manual, = folder_documents(folder / "a", depth=0, order="toctree", suffixes=(".rst",))
    assert re.findall("# (.*)", manual.text) == ["index.rst", "guide.rst", "deep/y.rst", "zebra.rst"]
    inside = {document.name: document.text for document in folder_documents(folder, order="toctree", suffixes=(".rst",))}
    assert re.findall("# (.*)", inside["a"]) == ["a/index.rst", "a/guide.rst", "a/deep/y.rst", "a/zebra.rst"]
    (folder / "a" / "guide.rst").write_text(".. toctree::\n\n   /a/index\n   guide\n")           # a circle ends
    assert len(list(folder_documents(folder, order="toctree", suffixes=(".rst",)))) == 1


def test_filling_weaves_texts_in_their_own_order():
    chunks = Filling(TEXTS, BYTES).take(Draws(1), 3 * sum(map(len, TEXTS)))
    assert sum(map(len, chunks)) >= 3 * sum(map(len, TEXTS)) and all(len(chunk) < CHUNK + 100 and chunk.endswith("\n") for chunk in chunks)
    assert [re.search(r"text (\d)", chunk)[1] for chunk in chunks[:8]][:4] == [re.search(r"text (\d)", chunk)[1] for chunk in chunks[:8]][4:]
    once = chunks[:sum(-(-len(text) // CHUNK) for text in TEXTS)]
    lines = [line for chunk in once for line in chunk.splitlines() if line.endswith("text 3 says nothing of note")]
    assert lines == TEXTS[3].splitlines()[1:][:len(lines)]
    with pytest.raises(ValueError, match="texts: got 1 without a character"):
        Filling([""], BYTES)


def planted(kind, count=12, questions=2, seed=0):
    return list(itertools.islice(planted_documents(Filling(TEXTS, BYTES), seed=seed, questions=questions, length=fixed(9000), kinds=(kind,)), count))


def solve(kind, text, question):
    """The answer by reading, not by how the document was made."""
    key = re.search(r"(?:for|of) ([a-z]+-[a-z]+(?:-\d)?)", question)[1]
    if kind == "total":
        return str(sum(map(int, re.findall(rf"The depot of {key} received (\d+) crates", text))))
    if kind == "chain":
        while not (found := re.search(rf"The access code of {key} is (\d+)\.", text)):
            key = re.search(rf"The access code of {key} is the one of ([\w-]+)\.", text)[1]
        return found[1]
    return (re.findall(rf"special magic numbers for {key} is: (\d+)\.", text) or [ABSENT])[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_follow_from_the_text(kind):
    for document in planted(kind):
        body = document.turns[0].content
        for asked, answer in itertools.batched(range(len(document.turns)), 2):
            question = document.turns[asked].content.splitlines()[-1]
            assert document.turns[answer].role == "assistant" and document.turns[answer].content == solve(kind, body, question) + ".\n"
        for evidence in document.evidence:
            fact = body[evidence.character:].splitlines()[0]
            assert re.match("One of the special|The access code|The depot", fact)
        places = len(document.evidence) / 2
        assert {"single": places == 1, "last_counts": places == 1, "absent": places == 0}.get(kind, 2 <= places <= MOST_PLACES)


def test_a_document_depends_on_seed_and_number_alone():
    assert planted("chain", 3) == planted("chain", 3) and planted("chain", 3, seed=1) != planted("chain", 3)
    assert planted("chain", 3)[2] == planted("chain", 5)[2]
    with pytest.raises(ValueError, match="kinds: got chains"):
        planted("chains")


def test_the_number_of_questions_is_drawn_where_it_is_asked_for():
    counts = [len(document.turns) // 2 for document in planted("single", 60, questions=log_uniform(1, 6))]
    assert {len(document.turns) for document in planted("single", 5, questions=log_uniform(5, 5))} == {10}
    assert set(counts) >= {1, 2, 3, 4} and max(counts) <= 6 and counts.count(1) > counts.count(4)


def test_evidence_covers_the_window():
    """Distances reach from next to the questions to the beginning; half of them are log-uniform."""
    distances = np.concatenate([document.distances(BYTES)[1] for document in planted("single", 150)])
    reached, _ = np.histogram(distances, bins=[0, 600, 2500, 5000, 7500, 11000])
    assert (reached > 20).all() and reached.sum() == 300
    first, second = distances[::2], distances[1::2]
    assert np.median(second) < 0.6 * np.median(first)


def test_distances_are_in_tokens():
    document, = planted("single", 1, questions=1)
    tokens, (distance,) = document.distances(BYTES)
    answer = document.text.index(document.turns[1].content, len(document.turns[0].content))
    assert tokens == len(document.text) and distance == answer - document.evidence[0].character


def test_traces_answer_from_what_was_done():
    answers, distances = 0, []
    for document in itertools.islice(trace_documents(Filling(TEXTS, BYTES), seed=0, length=fixed(20_000)), 4):
        counts = {}
        for turn, reply in itertools.pairwise(document.turns):
            if call := re.fullmatch(r"(set|add)\(([\w-]+), (\d+)\)", reply.content):
                counts[call[2]] = int(call[3]) + (counts[call[2]] if call[1] == "add" else 0)
            elif turn.content.startswith("How many"):
                answers += 1
                assert reply.role == "assistant" and int(reply.content) == counts[re.search(r"of ([\w-]+) are", turn.content)[1]]
        assert {turn.role for turn in document.turns} == {"system", "user", "assistant", "tool"} and len(document.text) > 20_000
        asked = {evidence.answer for evidence in document.evidence}
        assert all(document.turns[evidence.turn].content.startswith(("Put", "Add")) for evidence in document.evidence)
        assert asked == {i for i, turn in enumerate(document.turns) if document.turns[i - 1].content.startswith("How many")}
        distances += document.distances(BYTES)[1]
    assert answers > 20 and max(distances) > 5000


def test_written_lines_and_their_summary(tmp_path):
    documents = [LongDocument("short", (Turn("user", "hi"),)), *planted("total", 2)]
    found = write_long_documents(tmp_path / "long.jsonl", documents, BYTES, least_tokens=100)
    lines = [json.loads(line) for line in (tmp_path / "long.jsonl").read_text().splitlines()]
    assert (found.documents, found.left_out) == (2, 1) and found.tokens == sum(line["tokens"] for line in lines) and found.longest == max(
        line["tokens"] for line in lines)
    assert [line["text"] for line in lines] == [document.text for document in documents[1:]]
    assert sum(found.distances.values()) == sum(len(line["evidence_distances"]) for line in lines)
    write_long_documents(tmp_path / "chat.jsonl", documents[1:], BYTES, form="messages")
    first = json.loads((tmp_path / "chat.jsonl").read_text().splitlines()[0])["messages"]
    assert [turn["role"] for turn in first] == ["user", "assistant"] * 2


def test_the_command_writes_what_a_run_can_read(folder, tmp_path, capsys):
    out = str(tmp_path / "planted.jsonl")
    flags = ["--text", str(folder), "--tokenizer", "bytes", "--documents", "6", "--least-tokens", "1024", "--most-tokens", "4096"]
    assert main(["data", "long", out, "--kind", "planted", "--form", "messages", *flags]) == 0
    said = capsys.readouterr().out
    assert "6 documents" in said and "so that texts come again" in said and "evidence" in said and "512 to 1,023" in said
    tokens = [json.loads(line)["tokens"] for line in open(out)]
    assert all(900 < n < 6000 for n in tokens) and len(set(tokens)) == 6
    (tmp_path / "mix.json").write_text(json.dumps([{"kind": "jsonl", "path": "planted.jsonl", "content": "messages"}]))
    assert main(["data", "inspect", "--sources", str(tmp_path / "mix.json"), "--tokenizer", "bytes", "--rows", "0", "--sequence-length", "8192",
                 "--batch-size", "1"]) == 0
    few = ["--questions", "4", "--least-questions"]
    assert main(["data", "long", str(tmp_path / "few.jsonl"), *flags, *few, "1"]) == 0 and "6 documents" in capsys.readouterr().out
    assert main(["data", "long", str(tmp_path / "none.jsonl"), *flags, *few, "5"]) == 2 and "questions: got 4 with least_q" in capsys.readouterr().err
    assert main(["data", "long", out, "--kind", "traces", *flags]) == 2 and "is there already" in capsys.readouterr().err
    assert main(["data", "long", str(tmp_path / "r.jsonl"), "--kind", "folders", "--text", str(folder), "--tokenizer", "bytes"]) == 0
    assert "3 documents" in capsys.readouterr().out
