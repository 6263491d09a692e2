"""A small token folder of generated text, shared by the tests of this room."""

import numpy as np
import pytest

from longmoe.data.corpus import build_corpus

WORDS = "def return if else for in while import class self None True lambda yield print range len sum value index total".split()


@pytest.fixture(scope="session")
def documents() -> list[tuple[str, str]]:
    """60 names with texts of 1 to 400 words, a few of them longer than any row in the tests."""
    rng = np.random.default_rng(0)
    return [(f"package/module_{i}.py", " ".join(rng.choice(WORDS, int(rng.integers(1, 400))))) for i in range(60)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory, documents):
    return build_corpus(tmp_path_factory.mktemp("corpus") / "small", documents, vocab_size=300, name="small", source="generated", licences=["none"])
