"""The identity of requests, of which only what is new is hashed.

A request repeats the whole history. Its messages are compared with those of the session's latest requests,
which is many times cheaper than hashing them, and hashed from the first new one on. An answer that comes back
with a name, or with other ids of its calls, is the recorded one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sf_core.dataplane.chat.json_text import encode_sorted
from sf_core.dataplane.chat.messages import Message, as_said, chain_keys, extend_chain, size_of, without_ids
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.sessions.tree import Turn

NUM_KEPT = 16
"""Number of conversations of a session that may alternate without being hashed again."""


Answers = Mapping[bytes, Turn]
"""Sampled answers by their chain keys, with the ids of their calls and without."""

KEY_BYTES = 70
"""Memory of a message's key, and of the references to message and key."""


class Conversation:
    """One request's messages and their chained keys: one of the tools, then one per message."""

    __slots__ = ("_numbers", "_renamed", "_sent", "keys", "messages", "num_known", "opening_text")

    def __init__(self, tools_key: bytes) -> None:
        self.messages: list[Message] = []
        self.keys = [tools_key]
        self.opening_text: str | None = None
        """Rendering of the messages up to the first user message; None until it is needed."""
        self.num_known = 0
        """Number of leading messages that an earlier request had."""
        self._numbers: dict[int, bytes] = {}
        """Encoded calls whose arguments hold numbers, by message: to Python 1, 1.0 and True are equal."""
        self._sent: dict[int, Message] = {}
        """What the agent sent, where another message stands for it."""
        self._renamed: dict[str, str] | None = None
        """See _match_calls; None until a result needs it."""

    def extend(self, messages: list[Message], answers: Answers) -> None:
        for sent in messages:
            at = len(self.messages)
            if "tool_calls" in sent and _has_number(calls := _calls(sent)):
                self._numbers[at] = calls
            message = self._recall_message(sent, answers)
            if message is not sent:
                self._sent[at] = sent
            if message["role"] == "assistant":
                self._renamed = None
            self.messages.append(message)
            self.keys.append(extend_chain(self.keys[-1], message))

    def _recall_message(self, sent: Message, answers: Answers) -> Message:
        """The message that stands for the one sent: the recorded answer, and results by its calls' ids."""
        if sent["role"] == "tool":
            call_id = self._match_calls().get(sent["tool_call_id"])
            return sent if call_id is None else {**sent, "tool_call_id": call_id}
        if sent["role"] != "assistant":
            return sent
        said = as_said(sent)
        if extend_chain(self.keys[-1], said) in answers:
            return sent if said == sent else said
        turn = answers.get(extend_chain(self.keys[-1], without_ids(said)))
        return sent if turn is None else as_said(turn.message)

    def _match_calls(self) -> dict[str, str]:
        """Recorded ids of the last answer's calls, by those that the agent sent."""
        if self._renamed is not None:
            return self._renamed
        at = len(self.messages) - 1
        while at >= 0 and self.messages[at]["role"] != "assistant":
            at -= 1
        sent = self._sent.get(at, {})
        ours = self.messages[at].get("tool_calls", ()) if sent else ()
        pairs = zip(sent.get("tool_calls", ()), ours, strict=True)
        self._renamed = {theirs["id"]: recorded["id"] for theirs, recorded in pairs}
        return self._renamed

    @property
    def num_bytes(self) -> int:
        """Approximate memory in bytes of what only this conversation holds."""
        # a thread may be extending it
        return sys.getsizeof(self.opening_text) + sum(map(size_of, list(self._sent.values())))

    def hold_once(self, matched: Turn) -> None:
        """Replace messages of the request by the recorded objects of the turn that it extends, to hold them
        once."""
        for turn in matched.conversation():
            at = turn.prompt.num_messages
            if at < self.num_known:
                break
            begin = at - len(turn.prompt.messages)
            for i, message in enumerate([*turn.prompt.messages, turn.message], begin):
                if self.messages[i] == message:  # reasoning may have been left out
                    self.messages[i] = message

    def copy_beginning(self, num_messages: int) -> Conversation:
        copy = Conversation(self.keys[0])
        copy.messages = self.messages[:num_messages]
        copy.keys = self.keys[: num_messages + 1]
        copy._numbers = {i: calls for i, calls in self._numbers.items() if i < num_messages}
        copy._sent = {i: message for i, message in self._sent.items() if i < num_messages}
        return copy

    def num_shared(self, messages: list[Message]) -> int:
        """Number of leading messages that this conversation and `messages` share."""
        num = len(self.messages)
        if self._sent or self.messages != messages[:num]:
            sent = (self._sent.get(i, message) for i, message in enumerate(self.messages))
            pairs = zip(sent, messages, strict=False)
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
        """Approximate memory in bytes, without the messages that the session holds."""
        texts = sum(conversation.num_bytes for conversation in self._recent)
        return texts + sum(KEY_BYTES * len(conversation.keys) for conversation in self._recent)

    def recall(
        self,
        tools: list[Tool],
        messages: list[Message],
        answers: Answers = MappingProxyType({}),
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Conversation:
        """The conversation of exactly these messages. `options` are further variables of
        the template."""
        tools_key = chain_keys([*tools, dict(options)] if options else tools, [])[0]
        best = Conversation(tools_key)
        shared = 0
        for conversation in reversed(self._recent):
            num = conversation.num_shared(messages) if conversation.keys[0] == tools_key else 0
            if num > shared:
                best = conversation
                shared = num
                if num == len(conversation.messages):
                    break
        if shared < len(best.messages):
            best = best.copy_beginning(shared)
        elif best in self._recent:
            self._recent.remove(best)
        best.num_known = shared
        best.extend(messages[shared:], answers)
        self._recent = [*self._recent[-NUM_KEPT + 1 :], best]
        return best

    def forget(self, conversation: Conversation) -> None:
        self._recent = [one for one in self._recent if one is not conversation]


def _calls(message: Message) -> bytes:
    return encode_sorted(message["tool_calls"])


_NUMBER = re.compile(rb"[:,\[](?:[-0-9]|true|false)")


def _has_number(calls: bytes) -> bool:
    """Whether calls may hold a number; true for some strings as well, which costs time only."""
    return _NUMBER.search(calls) is not None
