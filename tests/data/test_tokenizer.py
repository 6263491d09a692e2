import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from longmoe.configs import DataConfig, SourceConfig
from longmoe.data.chat import CHAT_TOKENS
from longmoe.data.sources import load_tokenizer, open_sources, open_tokenizer
from longmoe.data.tokenizer import Tokenizer

TRAINED = Tokenizer.train(["some plain text, <|end|> and <|endoftext|> too"] * 3, 310, CHAT_TOKENS)
BYTES = Tokenizer.of_bytes(CHAT_TOKENS)
TEXTS = ("", "naïve café ☃ 😀\n\t  x", "<|endoftext|> inside, twice <|endoftext|>", "\x00\x7f", "<|user|>x<|end|>")


@pytest.mark.parametrize("tokenizer", [TRAINED, BYTES])
@settings(max_examples=50, deadline=None)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(st.characters(exclude_categories=["Cs"]), max_size=40)))
def test_any_text_survives_and_never_makes_a_special_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.decode_with_special_tokens(ids) == text and not set(ids) & set(tokenizer.special_ids.values())
    assert sum(tokenizer.bytes_per_token()[i] for i in ids) == len(text.encode())


def test_bytes_are_their_own_ids():
    text = bytes(range(128)).decode() + "".join(map(chr, range(128, 900))) + "😀"
    assert BYTES.encode(text) == list(text.encode()) and BYTES.eos_id == 256 and BYTES.vocab_size == 257 + len(CHAT_TOKENS)
    assert load_tokenizer("bytes").fingerprint == BYTES.fingerprint != TRAINED.fingerprint


@pytest.mark.parametrize("tokenizer", [TRAINED, BYTES])
def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(str(tmp_path))
    assert again.fingerprint == tokenizer.fingerprint and again.special_ids == tokenizer.special_ids
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    # The library itself reads the file in the same way.
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.encode_special_tokens = True
    assert [library.encode(text).ids for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert again.token(again.special_ids["<|end|>"]) == "<|end|>" and again.decode([again.eos_id]) == ""


def test_a_tokenizer_of_other_making(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "[UNK]": 1, "a": 2, "b": 5}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    backend.enable_truncation(1)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.eos_id == 0 and tokenizer.vocab_size == 6 and tokenizer.encode("a b a") == [2, 5, 2]
    assert tokenizer.bytes_per_token().tolist() == [0, 5, 1, 0, 0, 1]


def test_tokenizer_refuses(tmp_path):
    with pytest.raises(ValueError, match="vocab_size: got 256"):
        Tokenizer.train(["x"], 256)
    with pytest.raises(ValueError, match="wanted at least 262"):
        Tokenizer.train(["x"], 261, CHAT_TOKENS)
    with pytest.raises(ValueError, match="cannot read"):
        Tokenizer.load("/nowhere/tokenizer.json")
    plain = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    with pytest.raises(ValueError, match="without '<|endoftext|>'"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_the_tokenizer_of_sources_without_their_documents(folder, tmp_path):
    copy = Path(shutil.copytree(folder.path, tmp_path / "words"))
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps({"text": f"note {number}"}) + "\n" for number in range(40)))
    own, notes = SourceConfig(path=str(copy)), SourceConfig(kind="jsonl", path=str(tmp_path / "notes.jsonl"))
    both = DataConfig(sources=(own, notes))
    wanted = {source.tokenizer.fingerprint for source in open_sources(both, "heldout")}
    (tmp_path / "notes.jsonl").unlink()
    (copy / "train" / "tokens.npy").unlink()
    assert {open_tokenizer(both).fingerprint} == {open_tokenizer(DataConfig(path=str(copy))).fingerprint} == wanted == {folder.tokenizer.fingerprint}
    assert open_tokenizer(DataConfig(sources=(notes,), tokenizer="bytes")).fingerprint == load_tokenizer("bytes").fingerprint
    with pytest.raises(ValueError, match="different vocabularies"):
        open_tokenizer(DataConfig(sources=(own,), tokenizer="bytes"))
    with pytest.raises(ValueError, match='tokenizer: got nothing, wanted "bytes"'):
        open_tokenizer(DataConfig(sources=(notes,)))
    shutil.copy(tmp_path / "words" / "meta.json", copy / "tokenizer.json")
    with pytest.raises(ValueError, match="tokenizer.json has"):
        open_tokenizer(DataConfig(path=str(copy)))
