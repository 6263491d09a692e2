import hashlib
import json
import sysconfig
from pathlib import Path

import pytest

from longmoe.configs import SourceConfig
from longmoe.data.corpus import build_corpus, build_token_folder, stdlib_contents
from longmoe.data.hashing import is_held_out
from longmoe.data.token_folder import read_token_folder


def test_stdlib_has_no_tests_and_no_installed_packages():
    contents = stdlib_contents()
    names = [contents.name(i) for i in range(len(contents))]
    assert names == sorted(names) and len(names) > 300 and "argparse.py" in names
    unwanted = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert not [n for n in names if unwanted & set(n.split("/")[:-1])]
    assert (Path(sysconfig.get_paths()["stdlib"]) / names[0]).read_text() == contents.content(0)


def test_held_out_files_are_fixed_by_name_and_disjoint(folder, documents):
    held_out = set(folder.heldout.names)
    assert held_out == {name for name, _ in documents if is_held_out(name)}
    assert not held_out & set(folder.train.names)
    assert [is_held_out(n) for n in ("turtle.py", "argparse.py", "statistics.py")] == [True, False, True]


def test_the_same_text_gives_the_same_folder(folder, documents, tmp_path):
    again = build_corpus(tmp_path / "again", documents, vocab_size=300, name="small", source="generated", licences=["none"])
    assert again.fingerprint == folder.fingerprint


def test_documents_come_back_as_text(folder, documents):
    texts = dict(documents)
    for split in (folder.train, folder.heldout):
        for index, name in enumerate(split.names):
            ids = split.document(index)
            assert ids[-1] == folder.tokenizer.eos_id and folder.tokenizer.decode(ids) == texts[name]
        assert split.num_bytes == sum(len(texts[n].encode()) for n in split.names)
        assert folder.tokenizer.bytes_per_token()[split.tokens].sum() == split.num_bytes


def test_a_folder_is_built_of_several_sources_and_says_what_it_left_out(documents, tmp_path):
    (tmp_path / "files").mkdir()
    for number in range(30):
        (tmp_path / "files" / f"{number}.txt").write_text(f"text {number} " + documents[number][1])
    (tmp_path / "files" / "other.bin").write_bytes(b"x")
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes " + documents[n][1]}]} for n in range(40)]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, [*rows, rows[3]])))
    folder = build_token_folder(tmp_path / "out", [
        SourceConfig(kind="text", path=str(tmp_path / "files"), licence="MIT"),
        SourceConfig(kind="jsonl", path=str(tmp_path / "talk.jsonl"), content="messages", licence="CC0-1.0")], vocab_size=300)
    assert folder.meta["licences"] == ["MIT", "CC0-1.0"]
    assert [(b["name"], b["documents"], b["left_out"]) for b in folder.meta["built_from"]] == [
        ("files", 30, {"other suffix": 1}), ("talk.jsonl", 40, {"copy of an earlier one": 1})]
    names = [*folder.train.names, *folder.heldout.names]
    assert len(names) == len(set(names)) == 70 and {name.split("/")[0] for name in names} == {"files", "talk.jsonl"}
    # The same documents are held out as when the sources are mixed without a folder, where names carry no prefix.
    assert all(is_held_out(name.split("/", 1)[1]) for name in folder.heldout.names)
    for index, name in enumerate(folder.train.names):
        weights = folder.train.document_weights(index)
        assert (weights.all() if name.startswith("files") else 0 < weights.mean() < 1), name
    assert folder.train.num_bytes + folder.heldout.num_bytes == sum(len(f"text {n} {documents[n][1]}") for n in range(30)) + sum(
        len(m["content"]) for row in rows for m in row["messages"])


def test_building_refuses(tmp_path, folder):
    with pytest.raises(ValueError, match="got corpus of kind token_folder"):
        build_token_folder(tmp_path / "out", [SourceConfig(path=str(folder.path), name="corpus")])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose me")
    with pytest.raises(ValueError, match="exists and is no token folder"):
        build_corpus(tmp_path / "mine", [(f"{n}.py", f"text {n}") for n in range(40)], vocab_size=280, name="x", source="x", licences=[])
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "do not lose me"
    with pytest.raises(ValueError, match="no document for 'heldout'"):
        build_corpus(tmp_path / "out", [("argparse.py", "x = 1")], vocab_size=280, name="x", source="x", licences=[])
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.fixture
def copy(documents, tmp_path):
    return build_corpus(tmp_path / "copy", documents, vocab_size=300, name="small", source="generated", licences=[]).path


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage, says", [
    (lambda p: flip(p / "train/tokens.npy"), "contents of train/tokens.npy"),
    (lambda p: (p / "heldout/offsets.npy").write_bytes((p / "heldout/offsets.npy").read_bytes()[:-8]), "heldout/offsets.npy has"),
    (lambda p: (p / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    (lambda p: (p / "meta.json").write_text("{"), "meta.json cannot be read"),
    (lambda p: (p / "meta.json").unlink(), "no meta.json"),
    (lambda p: (p / "meta.json").write_text(json.dumps({**json.loads((p / "meta.json").read_text()), "format": 7})), "format 7"),
])
def test_damage_is_named(copy, damage, says):
    damage(copy)
    with pytest.raises(ValueError, match=says):
        read_token_folder(copy)


def test_mixed_folders_are_refused(copy):
    meta = json.loads((copy / "meta.json").read_text())
    meta["splits"]["train"]["tokens"] += 1
    (copy / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="meta.json says"):
        read_token_folder(copy)
    meta["files"]["train/tokens.npy"]["sha256"] = hashlib.sha256(b"").hexdigest()
    (copy / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="fingerprint"):
        read_token_folder(copy)
