"""Which tokens an answer is, and what share of them a scorer is given."""
import dataclasses
import itertools

import numpy as np
import planted_facts
import pytest

from longmoe.data.long_documents import Filling, log_uniform
from longmoe.data.planted import planted_documents
from longmoe.data.tokenizer import Tokenizer
from longmoe.evaluation.models import TokenScores

TEXTS = ["".join(f"naïve line {i} of text {n}, with nothing to find\n" for i in range(200)) for n in range(6)]
BUDGET = dataclasses.replace(planted_facts.BUDGETS["smoke"], row=1024, batch=2)


def made(tokenizer, count):
    return list(itertools.islice(planted_documents(Filling(TEXTS, tokenizer), seed=0, questions=log_uniform(1, 6), length=log_uniform(4, 200),
                                                   kinds=planted_facts.FACTS), count))


@pytest.fixture(scope="module", params=["bytes", "trained"])
def tokenizer(request):
    if request.param == "bytes":
        return Tokenizer.of_bytes()
    return Tokenizer.train((document.text for document in made(Tokenizer.of_bytes(), 200)), 600)


def test_answer_tokens_spell_the_answers(tokenizer):
    for document in made(tokenizer, 30):
        ids = tokenizer.encode(document.text)
        found = planted_facts.answer_tokens(document, ids, tokenizer.bytes_per_token())
        spelled = [tokenizer.decode(np.asarray(ids)[places].tolist()).strip() for places in found]
        assert spelled == [turn.content.removesuffix(".\n") for turn in document.turns[1::2]]


@pytest.mark.parametrize("wrong,share", [(False, 1.0), (True, 0.0)])
def test_shares_are_of_whole_answers_by_facts(tokenizer, wrong, share):
    def score(tokens, targets):
        assert tokens.shape == targets.shape == (2, 1024) and (tokens[:, 0] == tokenizer.eos_id).all()
        best = targets.copy()
        if wrong:
            best[:, ::2] += 1                                            # half of the tokens: no number of several tokens stays right
        return TokenScores(np.zeros(tokens.shape, np.float32), best)

    documents = made(tokenizer, 40)
    fitting = [document for document in documents if len(tokenizer.encode(document.text)) < 1024]
    found = planted_facts.share_right(score, tokenizer, documents, BUDGET)
    assert sum(cell["n"] for cell in found.values()) == sum(len(document.turns) // 2 for document in fitting)
    assert list(found)[-1] == "absent" and {"1", "2-3"} <= set(found) <= {"1", "2-3", "4-7", "8-15", "absent"}
    assert all(cell["mean"] == share for name, cell in found.items() if name != "absent")
