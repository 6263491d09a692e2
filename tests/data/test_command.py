import dataclasses
import json

import pytest

from longmoe.cli import main
from longmoe.configs import DataConfig, SourceConfig, TrainConfig, from_json, to_json
from longmoe.data.chat import CHAT_TOKENS
from longmoe.data.command import masked_text
from longmoe.data.token_folder import read_token_folder
from longmoe.data.tokenizer import Tokenizer


@pytest.fixture
def files(documents, tmp_path):
    (tmp_path / "text").mkdir()
    for name, text in documents:
        (tmp_path / "text" / name.replace("/", "_")).write_text(text)
    (tmp_path / "text" / "latin.txt").write_bytes(b"\xe9")
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"yes {n}"}]} for n in range(50)]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mix.json").write_text(json.dumps([
        {"kind": "text", "path": "text", "licence": "MIT"}, {"kind": "jsonl", "path": "talk.jsonl", "name": "talk", "content": "messages", "weight": 3}]))
    return tmp_path


def test_build_then_inspect(files, capsys):
    out, licences = str(files / "out"), ("--licence", "MIT", "--licence", "ISC")
    assert main(["data", "build", out, "--text", str(files / "text"), "--vocab-size", "280", *licences]) == 0
    said = capsys.readouterr().out
    assert "text (text; licence MIT, ISC): 60 documents; left out: 1 not UTF-8" in said and "heldout:" in said and "vocabulary 280" in said
    folder = read_token_folder(out)
    assert folder.meta["licences"] == ["MIT, ISC"] and folder.meta["name"] == "text"
    assert main(["data", "build", out, "--text", str(files / "text")]) == 2 and "is there already" in capsys.readouterr().err
    assert main(["data", "build", out, "--text", str(files / "text"), "--vocab-size", "290", "--replace", *licences]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", "--path", out, "--sequence-length", "20", "--batch-size", "3", "--batches", "2", "--rows", "4"]) == 0
    said = capsys.readouterr().out
    assert f"corpus (token_folder; licence MIT, ISC): {len(folder.train):,} documents" in said and "drawn 120 tokens (100.0%), epoch 0" in said
    assert said.count("20 tokens, 20 of them targets") == 4 and "package_module_" in said


def test_inspect_shows_masks_shares_and_what_was_left_out(files, capsys):
    assert main(["data", "inspect", "--sources", str(files / "mix.json"), "--tokenizer", "bytes", "--batch-size", "64", "--rows", "8"]) == 0
    said = capsys.readouterr().out
    assert "text (text; licence MIT)" in said and "left out: 1 not UTF-8" in said and "talk (jsonl; licence not stated)" in said and "weight 3" in said
    assert "⟦<|user|>" in said and "<|end|><|assistant|>⟧yes" in said and "<|end|>⟦<|endoftext|>⟧" in said
    assert main(["data", "inspect", "--sources", str(files / "mix.json"), "--sources.1.weight", "0", "--tokenizer", "bytes", "--rows", "0"]) == 0
    assert "weight 0; drawn 0 tokens (0.0%), epoch 0, 0 documents into it" in capsys.readouterr().out


def test_a_built_mixture_holds_the_masks(files, capsys):
    assert main(["data", "build", str(files / "out"), "--sources", str(files / "mix.json"), "--tokenizer", "bytes"]) == 0
    assert main(["data", "inspect", "--path", str(files / "out"), "--batch-size", "64", "--rows", "64"]) == 0
    assert "corpus, talk/talk.jsonl:" in (said := capsys.readouterr().out) and "<|end|><|assistant|>⟧yes" in said


@pytest.mark.parametrize("arguments, says", [
    (["data", "bild"], "command: got 'bild', wanted one of build, long, inspect"), (["data", "inspect", "--path", "/nowhere"], "no folder"),
    (["data", "inspect", "--sources"], "sources: got nothing"), (["data", "inspect", "--task", "associative_recall"], "wanted 'text'"),
    (["data", "build", "x", "--text", "/nowhere"], "does not exist"),
    (["train", "nano", "--run-dir", "x", "--data.sources", "/nowhere"], "cannot be read as JSON")])
def test_mistakes_are_said(arguments, says, capsys):
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("listed, says", [
    ({}, "holds dict"), ([], "at least one source"), (["a"], "sources[0]: got 'a', wanted an object"), ([{"path": "a", "wait": 1}], "unknown fields ['wait']"),
    ([{"path": "a", "kind": "josnl"}], "SourceConfig.kind: got 'josnl'"), ([{"path": "a", "weight": "2"}], "SourceConfig.weight: got '2'"),
    ([{"path": "a/x"}, {"path": "b/x"}], "got ['x'] more than once"), ([{"path": "a", "weight": 0}], "no weight above 0"),
    ([{"kind": "jsonl"}], "SourceConfig.path: got nothing"), ([{"kind": "text", "path": "a", "content": "messages"}], "conversations come from records"),
    ([{"kind": "text", "path": "a", "field": "b"}], "SourceConfig.field: got 'b' with kind 'text'"),
    ([{"path": "a", "suffixes": [".x"]}], "SourceConfig.suffixes: got ('.x',)")])
def test_bad_lists_of_sources(listed, says, tmp_path, capsys):
    (tmp_path / "mix.json").write_text(json.dumps(listed))
    assert main(["data", "inspect", "--sources", str(tmp_path / "mix.json")]) == 2
    assert says in capsys.readouterr().err


def test_help_lists_the_flags_of_data(capsys, files):
    for arguments, flags in ((["train", "nano", "--help"], ("--data.path", "--data.tokenizer", "--data.prefetch", "--data.workers")),
                             (["train", "nano", "--data.sources", str(files / "mix.json"), "--help"], ("--data.sources.1.weight",)),
                             (["data", "build", "--help"], ("--text", "--array-record", "--vocab-size")), (["data", "inspect", "--help"], ("--rows",))):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        said = capsys.readouterr().out
        assert stop.value.code == 0 and all(flag in said for flag in flags)
    assert main(["data", "--help"]) == 0 and "longmoe data build" in capsys.readouterr().out


def test_sources_go_through_json():
    sources = (SourceConfig(path="a", weight=0.25), SourceConfig(kind="jsonl", path="b.jsonl", content="messages", suffixes=(".x", ".y")))
    cfg = TrainConfig(data=DataConfig(sources=sources, tokenizer="bytes", workers=2))
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, mla_layers=(1, 4)))
    assert from_json(TrainConfig, to_json(cfg)) == cfg
    with pytest.raises(ValueError, match=r"DataConfig.sources\[1\]: got unknown fields \['colour'\]"):
        from_json(DataConfig, json.dumps({"sources": [{"path": "a"}, {"path": "b", "colour": "red"}]}))
    for changes in ({"sequence_length": 0}, {"batch_size": -1}, {"workers": -1}, {"prefetch": -1}):
        with pytest.raises(ValueError, match=f"DataConfig.{next(iter(changes))}: got {next(iter(changes.values()))}, wanted"):
            DataConfig(**changes)
    with pytest.raises(ValueError, match="DataConfig.path: got 'x' beside sources"):
        DataConfig(path="x", sources=sources)


def test_masked_text():
    tokenizer = Tokenizer.of_bytes(CHAT_TOKENS)
    assert masked_text(tokenizer, tokenizer.encode("abcd"), [0, 1, 1, 0]) == "⟦a⟧bc⟦d⟧" and masked_text(tokenizer, tokenizer.encode("ab"), [1, 1]) == "ab"
