import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longmoe.configs import DataConfig, SourceConfig
from longmoe.data.chat import CHAT_TOKENS, ROLES, encode_messages
from longmoe.data.loader import make_loader
from longmoe.data.sources import open_sources
from longmoe.data.tokenizer import Tokenizer

BYTES = Tokenizer.of_bytes(CHAT_TOKENS)
SPELLED = Tokenizer.of_bytes()
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"},
        {"role": "tool", "content": "log"}, {"role": "assistant", "content": "Done.\n"}]


@pytest.mark.parametrize("tokenizer", [BYTES, SPELLED])
def test_the_template_and_its_mask(tokenizer):
    tokens, weights = encode_messages(tokenizer, TALK)
    assert tokenizer.decode_with_special_tokens(tokens) == ("<|system|>Be brief.<|end|><|user|>2 + 2?<|end|><|assistant|>4<|end|><|tool|>log<|end|>"
                                                           "<|assistant|>Done.\n<|end|><|endoftext|>")
    assert tokenizer.decode_with_special_tokens(tokens[weights == 1]) == "4<|end|>Done.\n<|end|>" and set(weights.tolist()) == {0.0, 1.0}
    assert weights.dtype == np.float32 and tokens[-1] == tokenizer.eos_id and weights[-1] == 0
    assert (len(tokens) < 70) == (tokenizer is BYTES)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ROLES), st.one_of(st.sampled_from(CHAT_TOKENS), st.text(st.characters(exclude_categories=["Cs"]), max_size=9))),
                max_size=6))
def test_no_content_can_forge_a_marker(said):
    tokens, weights = encode_messages(BYTES, [{"role": role, "content": content} for role, content in said])
    ends = np.flatnonzero(tokens == BYTES.special_ids["<|end|>"])
    starts = np.flatnonzero(np.isin(tokens, [BYTES.special_ids[f"<|{role}|>"] for role in ROLES]))
    assert len(starts) == len(ends) == len(said)
    for (role, content), start, end in zip(said, starts, ends):
        assert BYTES.decode(tokens[start + 1:end]) == content
        assert weights[start] == 0 and (weights[start + 1:end + 1] == (role == "assistant")).all()


def test_conversations_train_on_the_assistant_alone(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "a" * n}]} for n in range(60)]
    rows += [{"messages": [{"role": "user", "content": "anyone?"}]}, {"messages": []}]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = SourceConfig(kind="jsonl", path=str(tmp_path / "talk.jsonl"), content="messages")
    cfg = DataConfig(sources=(source,), tokenizer="bytes", sequence_length=16, batch_size=2)
    opened = open_sources(cfg, "train")[0]
    assert opened.left_out == {"nothing by the assistant": 1, "empty": 1}
    batches = [batch for batch, _ in make_loader(cfg, seed=0, split="heldout")]
    assert len(batches) > 3
    counted = [int(t) for b in batches for t in b["targets"][b["loss_weights"] > 0]]
    end, held_out = BYTES.special_ids["<|end|>"], 60 - len(opened.documents)
    # Documents are cut at row ends (rows of 16): the mask goes with the tokens.
    assert set(counted) == {ord("a"), end} and counted.count(end) == held_out > 0
    for batch in batches:
        assert (batch["loss_weights"][batch["segment_ids"] == 0] == 0).all() and (batch["loss_weights"][batch["targets"] == BYTES.eos_id] == 0).all()


@pytest.mark.parametrize("messages, says", [
    ("hello", "got str, wanted a list of messages"), ([{"role": "user"}], r"message 0: got \['role'\], wanted role and content alone"),
    ([{"role": "user", "content": "x", "tool_calls": []}], "write whatever the model shall see into the content"),
    ([{"role": "human", "content": "x"}], "got role 'human', wanted one of system, user, assistant, tool"),
    ([{"role": "user", "content": ["x"]}], "got content of type list, wanted text")])
def test_bad_conversations_are_named(messages, says, tmp_path):
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": messages}))
    source = SourceConfig(kind="jsonl", path=str(tmp_path / "talk.jsonl"), content="messages")
    with pytest.raises(ValueError, match=f"talk.jsonl:1.*{says}"):
        open_sources(DataConfig(sources=(source,), tokenizer="bytes"), "train")


def test_spelled_out_markers_may_not_stand_in_content(tmp_path):
    SPELLED.save(tmp_path / "tokenizer.json")
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "say <|end|>"}]}))
    source = SourceConfig(kind="jsonl", path=str(tmp_path / "talk.jsonl"), content="messages")
    with pytest.raises(ValueError, match="cannot tell from a marker"):
        open_sources(DataConfig(sources=(source,), tokenizer=str(tmp_path)), "train")
    assert len(open_sources(DataConfig(sources=(source,), tokenizer="bytes"), "train")[0].documents) == 1
