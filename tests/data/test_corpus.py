import hashlib
import json
import sysconfig
from pathlib import Path

import pytest

from longmoe.data.corpus import build_corpus, is_held_out, main, read_documents, stdlib_documents
from longmoe.data.token_folder import read_token_folder
from longmoe.data.tokenizer import Tokenizer


def test_stdlib_has_no_tests_and_no_installed_packages():
    names = [name for name, _ in stdlib_documents()]
    assert names == sorted(names) and len(names) > 300 and "argparse.py" in names
    unwanted = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert not [n for n in names if unwanted & set(n.split("/")[:-1])]
    assert (Path(sysconfig.get_paths()["stdlib"]) / names[0]).is_file()


def test_held_out_files_are_fixed_by_name_and_disjoint(folder, documents):
    held_out = set(folder.heldout.names)
    assert held_out == {name for name, _ in documents if is_held_out(name)}
    assert not held_out & set(folder.train.names)
    assert [is_held_out(n) for n in ("turtle.py", "argparse.py", "statistics.py")] == [True, False, True]


def test_reading_skips_copies_empty_and_other_encodings(tmp_path):
    for name, data in {"b.py": b"x = 1\r\n", "copy.py": b"x = 1\r\n", "empty.py": b" \n", "latin.py": b"\xe9", "a/t.py": b"y", "test/z.py": b"z",
                       "data.bin": b"w", "config-3.12-linux/s.py": b"s"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert read_documents(tmp_path, skipped_folders=("test", "config-*")) == [("a/t.py", "y"), ("b.py", "x = 1\n")]
    with pytest.raises(ValueError, match="no folder"):
        read_documents(tmp_path / "missing")


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


def test_any_text_survives_the_tokenizer():
    tokenizer = Tokenizer.train(["some plain text"], 300)
    for text in ("", "naïve café ☃ 😀\n\t  x", "<|endoftext|> inside, twice <|endoftext|>", "\x00\x7f"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.eos_id not in ids
        assert tokenizer.bytes_per_token()[ids].sum() == len(text.encode()) if ids else text == ""


def test_tokenizer_refuses():
    with pytest.raises(ValueError, match="vocab_size: got 256"):
        Tokenizer.train(["x"], 256)
    with pytest.raises(ValueError, match="cannot read"):
        Tokenizer.load("/nowhere/tokenizer.json")


def test_command_line_reads_a_folder_of_text(documents, tmp_path, capsys):
    (tmp_path / "text").mkdir()
    for name, text in documents:
        (tmp_path / "text" / name.replace("/", "_")).write_text(text)
    main([str(tmp_path / "out"), "--text", str(tmp_path / "text"), "--vocab-size", "280", "--licence", "MIT"])
    assert read_token_folder(tmp_path / "out").meta["licences"] == ["MIT"] and "heldout:" in capsys.readouterr().out


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
