"""Byte-level BPE: any string encodes, and every token stands for a known number of bytes."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
_BYTE_ALPHABET = 256


class Tokenizer:
    """A trained byte-level BPE. `Tokenizer.train`, `Tokenizer.load`, `save`; ids are Python ints below `vocab_size`."""

    def __init__(self, backend: tokenizers.Tokenizer):
        eos_id = backend.token_to_id(END_OF_DOCUMENT)
        if eos_id is None:
            raise ValueError(f"tokenizer: got a vocabulary without {END_OF_DOCUMENT!r}, which separates documents; "
                             "train one with Tokenizer.train")
        self._backend = backend
        self.eos_id: int = eos_id

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Trains on `texts`; `vocab_size` counts the 256 bytes and the end-of-document token. Same texts, same tokenizer."""
        if vocab_size <= _BYTE_ALPHABET:
            raise ValueError(f"vocab_size: got {vocab_size}, wanted at least {_BYTE_ALPHABET + 1} "
                             "(256 bytes and the end-of-document token)")
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a `tokenizer.json`. ValueError when the file is missing, damaged or not a byte-level BPE of ours."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except ValueError:
            raise
        except Exception as error:   # the Rust side raises bare Exception for a missing file and for bad JSON
            raise ValueError(f"tokenizer: cannot read {path}: {error}; build the corpus again") from error

    def save(self, path: str | Path) -> None:
        self._backend.save(str(path), pretty=False)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no end-of-document token added. Text that spells that token out is encoded as plain text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # The token would otherwise be recognised inside source text that merely mentions it.
        parts = [text.split(END_OF_DOCUMENT) for text in texts]
        if all(len(p) == 1 for p in parts):
            return [e.ids for e in self._backend.encode_batch(list(texts), add_special_tokens=False)]
        return [self._encode_literal(p) for p in parts]

    def _encode_literal(self, parts: list[str]) -> list[int]:
        head, tail = END_OF_DOCUMENT[:2], END_OF_DOCUMENT[2:]
        pieces = [parts[0]]
        for part in parts[1:]:
            pieces[-1] += head
            pieces.append(tail + part)
        return [i for e in self._backend.encode_batch(pieces, add_special_tokens=False) for i in e.ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; end-of-document tokens vanish, and bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def token(self, token_id: int) -> str:
        """One token as text, for tables and plots."""
        return END_OF_DOCUMENT if token_id == self.eos_id else self._backend.decode([int(token_id)])

    def bytes_per_token(self) -> np.ndarray:
        """int32 [vocab_size]: the bytes of text that each token stands for; 0 for the end-of-document token.

        In the byte-level alphabet one character is one byte, so this is the length of the token's own spelling.
        """
        table = np.array([len(self._backend.id_to_token(i)) for i in range(self.vocab_size)], np.int32)
        table[self.eos_id] = 0
        return table
