"""Tokenizers: a byte-level BPE of our training, the 256 bytes alone, or any `tokenizer.json`."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
END_OF_DOCUMENT_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "<|endofdocument|>", "[EOS]", "<eos>", "</s>")
"""Spellings under which a `tokenizer.json` of other making may hold its end-of-document token; the first one found serves."""
_BYTE_ALPHABET = 256


class Tokenizer:
    """`Tokenizer.train`, `Tokenizer.of_bytes`, `Tokenizer.load`, `save`; ids are Python ints below `vocab_size`."""

    def __init__(self, backend: tokenizers.Tokenizer):
        found = [name for name in END_OF_DOCUMENT_NAMES if backend.token_to_id(name) is not None]
        if not found:
            raise ValueError(f"tokenizer: got a vocabulary without {' or '.join(map(repr, END_OF_DOCUMENT_NAMES))}, one of which separates documents; "
                             "add it to the file's added_tokens, or train a tokenizer with Tokenizer.train")
        self._backend = backend
        # Text that spells a special token out is text: only this package puts special tokens in.
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self.end_of_document: str = found[0]
        self.eos_id: int = backend.token_to_id(found[0])
        self._is_bytes = backend.get_vocab(with_added_tokens=False) == _BYTE_VOCABULARY and backend.normalizer is None

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> "Tokenizer":
        """Trains on `texts`; `vocab_size` counts the 256 bytes, the end-of-document token and `special_tokens`. Same texts, same tokenizer."""
        least = _BYTE_ALPHABET + 1 + len(special_tokens)
        if vocab_size < least:
            raise ValueError(f"vocab_size: got {vocab_size}, wanted at least {least} "
                             f"(256 bytes, the end-of-document token and {len(special_tokens)} further special tokens)")
        backend = _byte_level(tokenizers.models.BPE())
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT, *special_tokens], show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def of_bytes(cls, special_tokens: Sequence[str] = ()) -> "Tokenizer":
        """A byte is its own id, 256 ends a document, `special_tokens` follow."""
        backend = _byte_level(tokenizers.models.BPE(vocab=_BYTE_VOCABULARY, merges=[]))
        backend.add_special_tokens([END_OF_DOCUMENT, *special_tokens])
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a `tokenizer.json`. ValueError when the file is missing, damaged or has no end-of-document token."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except ValueError:
            raise
        except Exception as error:   # the Rust side raises bare Exception for a missing file and for bad JSON
            raise ValueError(f"tokenizer: cannot read {path}: {error}; wanted a tokenizer.json in the format of the tokenizers library") from error

    def save(self, path: str | Path) -> None:
        self._backend.save(str(path), pretty=False)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, so that it is the least size of a model's embedding."""
        return max(self._backend.get_vocab_size(), 1 + max(self._backend.get_vocab().values()))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over what decides the ids: pipeline, vocabulary, merges and special tokens, however the file was laid out."""
        plain = json.loads(self._backend.to_str())
        # Versions of the library write a merge as "a b" or as ["a", "b"].
        merges = [m if isinstance(m, str) else " ".join(m) for m in plain["model"].get("merges", ())]
        parts = [sorted(self._backend.get_vocab().items()), merges, sorted(self.special_ids.items()), plain["normalizer"], plain["pre_tokenizer"]]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Spelling -> id of every special token, the end-of-document token too."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: i for i, token in sorted(added.items()) if token.special} | {self.end_of_document: self.eos_id}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no end-of-document token added. Text that spells a special token out is encoded as plain text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, texts in parallel on all cores."""
        if self._is_bytes:   # what the library would give, a hundred times as fast
            return [list(text.encode()) for text in texts]
        return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; special tokens vanish, and bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def decode_with_special_tokens(self, ids: Iterable[int]) -> str:
        """Text of `ids` with special tokens spelled out, for people to read."""
        spelled, out, run = {i: name for name, i in self.special_ids.items()}, [], []
        for i in map(int, ids):
            if i in spelled:
                out += [self.decode(run), spelled[i]]
                run = []
            else:
                run.append(i)
        return "".join([*out, self.decode(run)])

    def token(self, token_id: int) -> str:
        """One token as text, for tables and plots."""
        return self.decode_with_special_tokens([token_id])

    def bytes_per_token(self) -> np.ndarray:
        """int32 [vocab_size]: the bytes of text that each token stands for; 0 for special tokens.

        In the byte-level alphabet one character is one byte, so this is the length of the token's own spelling. Elsewhere it is the spelling's
        UTF-8 length, a word mark counted as one space and `<0x0A>` as one byte.
        """
        byte_level = "ByteLevel" in str(json.loads(self._backend.to_str())["decoder"])
        table = np.zeros(self.vocab_size, np.int32)
        for spelling, i in self._backend.get_vocab().items():
            table[i] = len(spelling) if byte_level else _utf8_length(spelling)
        table[list(self.special_ids.values())] = 0
        return table


def _byte_level(model: tokenizers.models.Model) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _byte_characters() -> list[str]:
    """The byte-level alphabet's character of each byte: itself where it is printable and no space, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(_BYTE_ALPHABET) if byte not in printable]
    return [chr(byte) if byte in printable else chr(_BYTE_ALPHABET + others.index(byte)) for byte in range(_BYTE_ALPHABET)]


_BYTE_VOCABULARY = {character: byte for byte, character in enumerate(_byte_characters())}


def _utf8_length(spelling: str) -> int:
    is_byte = len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">")
    return 1 if is_byte else len(spelling.replace("\u2581", " ").encode())
