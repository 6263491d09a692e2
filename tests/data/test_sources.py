import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from longmoe.configs import DataConfig, SourceConfig
from longmoe.data.hashing import is_held_out
from longmoe.data.loader import make_loader
from longmoe.data.sources import open_sources

TEXTS = [f"document {number}: " + "naïve ☃ 😀 \n\t x " * (number % 7) for number in range(40)]
RECORD_KINDS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "array_record", "hugging_face")


def write(kind: str, path: Path, records: list, field: str = "text") -> SourceConfig:
    """Writes `records` (contents) as a source of one kind, with a column besides."""
    rows = [{"id": number, field: content} for number, content in enumerate(records)]
    packed = "\n".join(map(json.dumps, rows)).encode() + b"\n"
    file = path / f"made.{kind}"
    if kind == "jsonl":
        file.write_bytes(packed)
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress(packed))
    elif kind == "jsonl.zst":
        import zstandard
        # Two frames, as parallel compressors write them.
        file.write_bytes(zstandard.compress(packed[:101]) + zstandard.compress(packed[101:]))
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=7)
    elif kind == "array_record":
        from array_record.python.array_record_module import ArrayRecordWriter
        writer = ArrayRecordWriter(str(file), "group_size:1")
        for row in rows:
            writer.write(json.dumps(row).encode())
        writer.close()
    elif kind == "hugging_face":
        import datasets
        datasets.Dataset.from_list(rows).save_to_disk(str(file))
    return SourceConfig(kind=kind.split(".")[0], path=str(file), name="made")


def open_one(source: SourceConfig, split: str = "train", tokenizer: str = "bytes"):
    return open_sources(DataConfig(sources=(source,), tokenizer=tokenizer), split)[0]


def contents(source: SourceConfig) -> dict[str, str]:
    """Document name -> text, of both splits."""
    found = {}
    for split in ("train", "heldout"):
        opened = open_one(source, split)
        for index in range(len(opened.documents)):
            tokens, weights = opened.documents.document(index)
            assert tokens[-1] == opened.documents.eos_id and weights is None
            name = opened.documents.document_name(index)
            assert is_held_out(name) == (split == "heldout") and name not in found
            found[name] = opened.tokenizer.decode(tokens)
    return found


@pytest.mark.parametrize("kind", RECORD_KINDS)
def test_every_kind_gives_the_same_documents(kind, tmp_path):
    source = write(kind, tmp_path, TEXTS)
    found = contents(source)
    assert sorted(found.values()) == sorted(TEXTS)
    number = {name: int(name.rpartition(":")[2]) for name in found}
    first = 1 if kind.startswith("jsonl") else 0   # lines count from 1, rows from 0
    assert all(TEXTS[number[name] - first] == text for name, text in found.items())
    fingerprints = {open_one(source, split).documents.fingerprint for split in ("train", "heldout")} | {
        open_one(source, tokenizer=tokenizer).documents.fingerprint for tokenizer in ("bytes", _other_tokenizer(tmp_path))}
    assert len(fingerprints) == 3
    changed = write(kind, _fresh(tmp_path), [*TEXTS[:-1], TEXTS[-1] + "."])
    assert len(fingerprints | {open_one(changed, split).documents.fingerprint for split in ("train", "heldout")}) == 4   # one split holds the change


def _other_tokenizer(path: Path) -> str:
    from longmoe.data.tokenizer import Tokenizer
    Tokenizer.of_bytes().save(path / "tokenizer.json")
    return str(path / "tokenizer.json")


def _fresh(path: Path) -> Path:
    (path / "again").mkdir()
    return path / "again"


def test_a_folder_of_text_files(tmp_path):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number % 3}").mkdir(exist_ok=True)
        (tmp_path / f"{number % 3}" / f"{number}.txt").write_bytes(text.replace("\n", "\r\n").encode())
    assert contents(SourceConfig(kind="text", path=str(tmp_path))) == {f"{n % 3}/{n}.txt": text for n, text in enumerate(TEXTS)}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "array_record"])
def test_a_folder_of_shards(kind, tmp_path):
    for shard in range(3):
        (tmp_path / f"part-{shard}").mkdir()
        write(kind, tmp_path / f"part-{shard}", TEXTS[13 * shard:13 * shard + 13])
    found = contents(SourceConfig(kind=kind, path=str(tmp_path)))
    assert sorted(found.values()) == sorted(TEXTS[:39]) and {name.split("/")[0] for name in found} == {"part-0", "part-1", "part-2"}


def test_what_is_left_out_is_counted(tmp_path):
    files = {"a.txt": b"one", "copy.txt": b"one", "copy of windows.txt": b"two\r\n", "unix.txt": b"two\n", "empty.txt": b" \n", "latin.txt": b"\xe9",
             "data.bin": b"w", ".git/config.txt": b"x", "sub/b.txt": b"three"}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    os.symlink(tmp_path, tmp_path / "sub" / "up")   # a walk that followed it would never end
    os.symlink("loop.txt", tmp_path / "loop.txt")
    os.symlink("nowhere", tmp_path / "dangling.txt")
    os.symlink("sub/b.txt", tmp_path / "z-link.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    source = SourceConfig(kind="text", path=str(tmp_path))
    names = list(contents(source))
    assert sorted(names) == ["a.txt", "copy of windows.txt", "sub/b.txt"]
    assert open_one(source).left_out == {"copy of an earlier one": 3, "empty": 1, "not UTF-8": 1, "other suffix": 1, "skipped folder": 1, "link to a folder": 1,
                               "broken link": 2, "no plain file": 1}
    # All but the link to a folder and the folder that is skipped.
    assert len(names) + sum(open_one(source).left_out.values()) == len(files) + 5


def test_records_left_out(tmp_path):
    lines = [b'{"text": "a"}', b"", b'{"text": ""}', b'{"text": null}', b'{"text": "a", "more": 1}', b'{"text": "\\ud800"}', b'{"text": "\xe9"}', b'"bare"']
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines))
    opened = open_one(SourceConfig(kind="jsonl", path=str(tmp_path / "x.jsonl")))
    assert opened.left_out == {"blank line": 1, "empty": 2, "copy of an earlier one": 1, "not UTF-8": 2}
    assert [opened.documents.document_name(i) for i in range(len(opened.documents))] == ["x.jsonl:1", "x.jsonl:8"]


def test_a_line_of_ten_megabytes_is_a_document(tmp_path):
    text = "long line " * 2**20
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": text}).encode(), 1))
    documents = open_one(SourceConfig(kind="jsonl", path=str(tmp_path / "x.jsonl.gz"))).documents
    assert len(documents) == 1 and documents.document(0).tokens[:-1].astype(np.uint8).tobytes() == text.encode()


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("damage", [lambda data: data[:len(data) // 2], lambda data: data[:-3], lambda data: b"no archive at all"])
def test_a_damaged_archive_is_refused(suffix, damage, tmp_path):
    rng = np.random.default_rng(0)
    source = write(suffix, tmp_path, ["".join(map(chr, rng.integers(97, 123, 200))) for _ in range(50)])
    Path(source.path).write_bytes(damage(Path(source.path).read_bytes()))
    with pytest.raises(ValueError, match=f"made.{suffix} is damaged or was cut short"):
        open_one(source)


@pytest.mark.parametrize("kind", RECORD_KINDS)
def test_a_missing_field_is_named(kind, tmp_path):
    source = write(kind, tmp_path, TEXTS, field="body")
    with pytest.raises(ValueError, match="'id', 'body', wanted 'text'; set the source's field"):
        open_one(source)
    assert len(contents(SourceConfig(kind=source.kind, path=source.path, field="body"))) == len(TEXTS)


@pytest.mark.parametrize("line, says", [
    (b'{"text": "b"', "x.jsonl:2: got .*no JSON"), (b"[1, 2]", "x.jsonl:2: got list, wanted an object"),
    (b'{"text": 7}', "x.jsonl:2: got int in the field 'text'"), (b'{"body": "b"}', "x.jsonl:2: got the fields 'body', wanted 'text'")])
def test_a_bad_line_is_named(line, says, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=says):
        open_one(SourceConfig(kind="jsonl", path=str(tmp_path / "x.jsonl")))


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "array_record", "hugging_face"])
def test_places_that_hold_nothing(kind, tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        open_one(SourceConfig(kind=kind, path=str(tmp_path / "missing")))
    with pytest.raises(ValueError, match="cannot be read as a saved Hugging Face" if kind == "hugging_face" else "holds no file ending in"):
        open_one(SourceConfig(kind=kind, path=str(tmp_path)))
    (tmp_path / "file").write_bytes(b"  ")
    with pytest.raises(ValueError, match="gives no document|cannot be read|no JSON"):
        open_one(SourceConfig(kind=kind, path=str(tmp_path / "file")))


def test_hugging_face_splits_must_be_named(tmp_path):
    import datasets
    rows = datasets.Dataset.from_list([{"text": text} for text in TEXTS])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ValueError, match="holds the splits train, test"):
        open_one(SourceConfig(kind="hugging_face", path=str(tmp_path / "both")))
    assert len(contents(SourceConfig(kind="hugging_face", path=str(tmp_path / "both" / "test")))) == len(TEXTS)


def test_whole_records_as_text(tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter
    writer = ArrayRecordWriter(str(tmp_path / "x.array_record"), "group_size:1")
    for text in [*TEXTS, "\xe9"]:
        writer.write(text.encode("latin-1") if text == "\xe9" else text.encode())
    writer.close()
    source = SourceConfig(kind="array_record", path=str(tmp_path), field="*")
    assert sorted(contents(source).values()) == sorted(TEXTS) and open_one(source).left_out == {"not UTF-8": 1}


def test_a_file_that_changes_under_a_run_is_not_read_as_another_document(tmp_path):
    source = write("jsonl", tmp_path, TEXTS)
    documents = open_one(source).documents
    documents.document(0)
    Path(source.path).write_text(Path(source.path).read_text().replace("document", "Document"))
    with pytest.raises(ValueError, match="made.jsonl:1 has changed since the source was opened"):
        documents.document(0)
    Path(source.path).unlink()
    with pytest.raises(ValueError, match="made.jsonl cannot be read"):
        documents.document(0)


def test_a_split_without_documents_is_refused(tmp_path):
    (tmp_path / "argparse.py").write_text("x = 1")
    with pytest.raises(ValueError, match=r"has no document in the split 'heldout' \(documents are held out by a hash of their name\)"):
        open_one(SourceConfig(kind="text", path=str(tmp_path)), "heldout")
    sources = (SourceConfig(kind="text", path=str(tmp_path)), write("jsonl", _fresh(tmp_path), TEXTS))
    assert [s.name for s in open_sources(DataConfig(sources=sources, tokenizer="bytes"), "heldout")] == ["made"]
    assert len(open_sources(DataConfig(sources=sources, tokenizer="bytes"), "train")) == 2


def test_text_needs_a_tokenizer(tmp_path):
    source = write("jsonl", tmp_path, TEXTS)
    with pytest.raises(ValueError, match='tokenizer: got nothing, wanted "bytes"'):
        open_one(source, tokenizer="")
    with pytest.raises(ValueError, match="the tokenizer of made needs 262"):
        make_loader(DataConfig(sources=(source,), tokenizer="bytes"), seed=0, vocab_size=256)
