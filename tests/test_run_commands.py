"""Commands on a trained run: figures, text as it comes, a comparison, and what is refused."""
import dataclasses
import json
import shutil

import pytest

from longmoe import presets
from longmoe.cli import main
from longmoe.commands import print_stream
from longmoe.data.corpus import build_corpus
from longmoe.eval_files import write_evaluation

TINY = ["--model.num-layers", "2", "--model.mla-every", "2", "--model.no-use-final-mla", "--model.vocab-size", "300", "--model.width", "32",
        "--model.dense-dim", "32", "--data.batch-size", "8", "--data.sequence-length", "40", "--optim.warmup-steps", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps through the command line."""
    folder = tmp_path_factory.mktemp("run")
    documents = [(f"file_{i}.py", f"def function_{i}(a, b):\n    return a * {i} + b\n" * 8) for i in range(60)]
    build_corpus(folder / "corpus", documents, vocab_size=300, name="tiny", source="the test", licences=["none"])
    assert main(["train", "nano", "--run-dir", str(folder / "first"), "--data.path", str(folder / "corpus"), "--steps", "3", *TINY]) == 0
    return folder / "first"


def test_eval_prints_and_writes_figures(run, capsys):
    assert main(["eval", str(run), "--batches", "2"]) == 0
    found = json.loads((run / "evaluations" / "step3-heldout-40-2batches.json").read_text())
    figures = found["figures"]
    assert (found["step"], found["batches"], found["sequence_length"]) == (3, 2, 40)
    assert figures["bits_per_byte"] > 0 and figures["unigram bits per byte"] > 0 and figures["tokens"] <= 2 * 8 * 40
    assert "bits per byte" in capsys.readouterr().out


def test_eval_runs_suites(run, capsys):
    """At 64 tokens no prompt fits and a held-out document does; at 1,024 two prompts do and no document."""
    assert main(["eval", str(run), "--suite", "code_hops,positions", "--lengths", "1024", "64", "--samples", "1"]) == 0
    written, printed = run / "evaluations" / "step3-code_hops+positions-64+1024-n1-seed0.json", capsys.readouterr()
    found, page = json.loads(written.read_text()), written.with_suffix(".html").read_text()
    tasks, longer = ("code_hops_1", "code_hops_2"), "code_hops_4"
    assert [(row["task"], row["length"]) for row in found["tasks"]] == [(task, 1024) for task in tasks]
    assert {(row["task"], row["length"]) for row in found["unfit"]} == {*((task, 64) for task in (*tasks, longer)), (longer, 1024), ("positions", 1024)}
    assert [(record["task"], record["tokens"] <= 992) for record in found["records"]] == [(task, True) for task in tasks]
    assert [part["length"] for part in found["positions"]] == [64] and found["positions"][0]["gains"][0]["nll"] > 0
    assert "Left out" in page and page.count("<img") == 2 + 2 and "left out" in printed.out and "eval: step" in printed.err


@pytest.mark.parametrize("flags,message", [
    (["--suite", "needle,rular"], "suite: got 'rular', wanted names among needle, ruler, graph_walks"), (["--suite", "rular"], "did you mean ruler?"),
    (["--suite", "needle", "--batches", "2"], "wanted samples and lengths"), (["--suite", "stack", "--samples", "0"], "samples: got 0"),
    (["--suite", "needle", "--essay", "nowhere.txt"], "nowhere.txt")])
def test_eval_refuses_what_it_cannot_do(run, capsys, flags, message):
    assert main(["eval", str(run), *flags]) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("suite,vocab_size,message", [
    ("stack,vt", 4096, "suite: got 'vt', wanted names among"),
    ("stack,ruler,positions", 4096, "suite: got ruler, positions for a_run, which was trained on associative_recall and has no tokenizer"),
    ("palindrome,stack", 100, "suite: got stack, whose tokens need a vocabulary of 130, wanted tasks for the model's 100")])
def test_suites_that_a_run_cannot_have(monkeypatch, capsys, suite, vocab_size, message):
    cfg = presets.nano()
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=vocab_size), data=dataclasses.replace(cfg.data, task="associative_recall"))
    monkeypatch.setattr("longmoe.eval_commands.kept_step", lambda run, step: 1)
    monkeypatch.setattr("longmoe.eval_commands.load_checkpoint", lambda run, step: (cfg, {}))
    assert main(["eval", "a_run", "--suite", suite]) == 2
    assert message in capsys.readouterr().err


def test_generate_repeats_itself_with_its_seed(run, capsys):
    """Of the corpus it takes the tokenizer alone: the documents need not be there."""
    texts, corpus = [], run.parent / "corpus"
    (corpus / "train").rename(corpus / "aside")
    try:
        for seed in ("1", "1", "2"):
            assert main(["generate", str(run), "--prompt", "def f", "--max-new-tokens", "12", "--seed", seed]) == 0
            texts.append(capsys.readouterr().out)
    finally:
        (corpus / "aside").rename(corpus / "train")
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("def f")


def test_report_of_one_run_and_of_two(run, tmp_path, capsys):
    write_evaluation(run, 2, ["heldout", "7"], {"figures": {"nats_per_token": 1.5, "task": "text"}})
    cell = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 8}
    write_evaluation(run, 3, ["stack"], {"tasks": [{"task": "stack", "length": 2048, "scores": {"official": cell, "strict": cell, "chance": 0.125}}]})
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "model.kda.head_dim" in page and "<th>step2-heldout-7</th>" in page and "<td>1.5000</td>" in page
    assert "<td>step3-stack</td><td>stack</td><td>2,048</td><td>0.500 (0.250 to 0.750)</td>" in page
    other = tmp_path / "other"
    other.mkdir()
    record = json.loads((run / "run.json").read_text())
    record["config"]["optim"]["learning_rate"] = 0.125
    (other / "run.json").write_text(json.dumps(record))
    (other / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").read_text().splitlines(keepends=True)[1:]))    # as with log_every above 1
    assert main(["report", str(run), str(other), "--out", str(tmp_path / "both.html")]) == 0
    page = (tmp_path / "both.html").read_text()
    assert f"<th>{run} step2-heldout-7</th>" in page and "<td>about 960</td>" in page and "<td>960</td>" in page
    assert "optim.learning_rate" in page and "0.125" in page and "model.kda.head_dim" not in page


@pytest.mark.parametrize("command", ["eval", "generate", "report"])
def test_a_missing_run_is_said(command, tmp_path, capsys):
    assert main([command, str(tmp_path / "nothing")]) == 2
    assert "wanted a folder that `longmoe train --run-dir` wrote" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_said(run, tmp_path, capsys):
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    largest = max((path for path in (damaged / "checkpoints").rglob("*") if path.is_file() and "model" in path.parts), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert main(["generate", str(damaged)]) == 2
    assert "this checkpoint is damaged" in capsys.readouterr().err


def test_a_damaged_evaluation_is_said(run, tmp_path, capsys):
    for name in ("run.json", "metrics.jsonl"):
        shutil.copy(run / name, tmp_path / name)
    write_evaluation(tmp_path, 3, ["stack"], {}).write_text("{")
    assert main(["report", str(tmp_path)]) == 2 and "step3-stack.json is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("text,message", [("{", "is not JSON"), ("{}", "lacks config, versions, device, commit")])
def test_a_damaged_record_is_said(run, tmp_path, capsys, text, message):
    (tmp_path / "run.json").write_text(text)
    (tmp_path / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and "writes it anew" in error


def test_characters_wait_for_their_bytes(capsys):
    """Tokens of single bytes: nothing of a character is printed before all of it, and a broken end is shown at the end."""
    data = "aé€b".encode() + b"\xe2\x82"
    print_stream(lambda ids: bytes(ids).decode("utf-8", errors="replace"), iter([*data, 0]), eos_id=0)
    assert capsys.readouterr().out == "aé€b\ufffd\n"
