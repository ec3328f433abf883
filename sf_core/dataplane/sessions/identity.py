"""The identity of requests, of which only what is new is hashed.

A request repeats the whole history. Its messages are compared with those of the session's latest requests,
which is many times cheaper than hashing them, and hashed from the first new one on.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container

import orjson

from sf_core.dataplane.chat.messages import Message, chain_keys, extend_chain
from sf_core.dataplane.chat.tool_formats import Tool

NUM_KEPT = 16
"""Number of conversations of a session that may alternate without being hashed again."""


KEY_BYTES = 70
"""Memory of a message's key, and of the references to message and key."""


class Conversation:
    """One request's messages and their chained keys: one of the tools, then one per message."""

    __slots__ = ("_numbers", "keys", "messages", "num_known", "opening_text")

    def __init__(self, tools_key: bytes) -> None:
        self.messages: list[Message] = []
        self.keys = [tools_key]
        self.opening_text: str | None = None
        """Rendering of the messages up to the first user message; None until it is needed."""
        self.num_known = 0
        """Number of leading messages that an earlier request had."""
        self._numbers: dict[int, bytes] = {}
        """Encoded calls whose arguments hold numbers, by message: to Python 1, 1.0 and True are equal."""

    def extend(self, messages: list[Message], answers: Container[bytes]) -> None:
        for message in messages:
            if "tool_calls" in message and _has_number(calls := _calls(message)):
                self._numbers[len(self.messages)] = calls
            self.messages.append(message)
            key = extend_chain(self.keys[-1], message)
            if "name" in message and message["role"] == "assistant":
                # agents add a name to answers that they send back; the sampled answer has none
                unnamed = {field: value for field, value in message.items() if field != "name"}
                answer = extend_chain(self.keys[-1], unnamed)
                key = answer if answer in answers else key
            self.keys.append(key)

    def beginning(self, num_messages: int) -> Conversation:
        copy = Conversation(self.keys[0])
        copy.messages = self.messages[:num_messages]
        copy.keys = self.keys[: num_messages + 1]
        copy._numbers = {i: calls for i, calls in self._numbers.items() if i < num_messages}
        return copy

    def num_shared(self, messages: list[Message]) -> int:
        """Number of leading messages that this conversation and `messages` share."""
        num = len(self.messages)
        if self.messages != messages[:num]:
            pairs = zip(self.messages, messages, strict=False)
            num = next((i for i, (mine, other) in enumerate(pairs) if mine != other), min(num, len(messages)))
        for i, calls in self._numbers.items():
            if i >= num:
                break
            if messages[i] is not self.messages[i] and _calls(messages[i]) != calls:
                return i
        return num


class Conversations:
    def __init__(self) -> None:
        self._recent: list[Conversation] = []

    @property
    def num_bytes(self) -> int:
        """Approximate memory in bytes, without the messages."""
        texts = sum(sys.getsizeof(conversation.opening_text) for conversation in self._recent)
        return texts + sum(KEY_BYTES * len(conversation.keys) for conversation in self._recent)

    def recall(
        self, tools: list[Tool], messages: list[Message], answers: Container[bytes] = ()
    ) -> Conversation:
        """The conversation of exactly these messages. `answers` are the keys of sampled answers."""
        tools_key = chain_keys(tools, [])[0]
        best, shared = Conversation(tools_key), 0
        for conversation in reversed(self._recent):
            num = conversation.num_shared(messages) if conversation.keys[0] == tools_key else 0
            if num > shared:
                best, shared = conversation, num
                if num == len(conversation.messages):
                    break
        if shared < len(best.messages):
            best = best.beginning(shared)
        elif best in self._recent:
            self._recent.remove(best)
        best.num_known = shared
        best.extend(messages[shared:], answers)
        self._recent = [*self._recent[-NUM_KEPT + 1 :], best]
        return best


def _calls(message: Message) -> bytes:
    return orjson.dumps(message["tool_calls"], option=orjson.OPT_SORT_KEYS)


_NUMBER = re.compile(rb"[:,\[](?:[-0-9]|true|false)")


def _has_number(calls: bytes) -> bool:
    """Whether calls may hold a number; true for some strings as well, which costs time only."""
    return _NUMBER.search(calls) is not None
