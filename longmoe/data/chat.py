"""Conversations as tokens: our chat template, and which tokens are targets.

    <|system|>Be brief.<|end|><|user|>2 + 2?<|end|><|assistant|>4<|end|><|endoftext|>

Each message is its role's marker, its content as it stands, and the end marker. Markers are single tokens where the tokenizer has them
(`Tokenizer.train(..., special_tokens=CHAT_TOKENS)`); else they are encoded as the text they are spelled with. The loss counts the content of
assistant messages and the end marker after each; nothing else, the end-of-document token neither.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from longmoe.data.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
END_OF_TURN = "<|end|>"
CHAT_TOKENS = (*(f"<|{role}|>" for role in ROLES), END_OF_TURN)
Message = Mapping[str, Any]


def check_messages(messages: Any, where: str, *, spelled_out: bool) -> None:
    """ValueError unless `messages` is a list of {"role", "content"} that the template can write without loss.

    `spelled_out`: markers are plain text to the tokenizer, so that content which holds one could not be told from a marker.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"{where}: got {type(messages).__name__}, wanted a list of messages")
    for number, message in enumerate(messages):
        place = f"{where}: message {number}"
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            got = sorted(message) if isinstance(message, Mapping) else type(message).__name__
            raise ValueError(f"{place}: got {got}, wanted role and content alone; write whatever the model shall see into the content")
        if message["role"] not in ROLES:
            raise ValueError(f"{place}: got role {message['role']!r}, wanted one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise ValueError(f"{place}: got content of type {type(message['content']).__name__}, wanted text")
        markers = [marker for marker in CHAT_TOKENS if marker in message["content"]]
        if spelled_out and markers:
            raise ValueError(f"{place}: got content that holds {markers[0]}, which this tokenizer cannot tell from a marker; "
                             "use a tokenizer with the chat tokens, or change the text")


def has_chat_tokens(tokenizer: Tokenizer) -> bool:
    """Whether every marker is a token of its own."""
    return all(marker in tokenizer.special_ids for marker in CHAT_TOKENS)


def encode_messages(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
    """-> (tokens int64 [n], weights float32 [n], 1 where the token is a target), the end-of-document token last."""
    special = tokenizer.special_ids if has_chat_tokens(tokenizer) else {}
    marker = lambda spelling: [special[spelling]] if special else tokenizer.encode(spelling)
    tokens: list[int] = []
    weights: list[float] = []
    for message, content in zip(messages, tokenizer.encode_batch([m["content"] for m in messages]), strict=True):
        head, said = marker(f"<|{message['role']}|>"), [*content, *marker(END_OF_TURN)]
        tokens += head + said
        weights += [0.0] * len(head) + [float(message["role"] == "assistant")] * len(said)
    return np.array([*tokens, tokenizer.eos_id], np.int64), np.array([*weights, 0.0], np.float32)
