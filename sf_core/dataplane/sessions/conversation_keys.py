"""Chained keys of conversations, of which only new messages are hashed.

A request repeats the whole history. Its messages are compared with those of the session's latest requests,
which is many times cheaper than hashing them, and hashed from the first new one on. An answer that comes back
with a name, or with other ids of its calls, counts as the recorded answer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sf_core.dataplane.chat.json_text import encode_sorted
from sf_core.dataplane.chat.messages import (
    Message,
    chain_keys,
    comparable_answer,
    extend_chain,
    size_of,
    without_ids,
)
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.sessions.tree import Turn

MAX_CONVERSATIONS = 16
"""Number of conversations of a session that may alternate without being hashed again."""


Answers = Mapping[bytes, Turn]
"""Sampled answers by their chain keys, with the ids of their calls and without."""

KEY_BYTES = 70
"""Memory of a message's key, and of the references to message and key."""


class Conversation:
    """One request's messages and their chained keys: one of the tools, then one per message."""

    __slots__ = (
        "_number_calls",
        "_recorded_call_ids",
        "_sent",
        "keys",
        "messages",
        "num_known",
        "opening_text",
    )

    def __init__(self, tools_key: bytes) -> None:
        self.messages: list[Message] = []
        self.keys = [tools_key]
        self.opening_text: str | None = None
        """Rendering of the messages up to the first user message; None until it is needed."""
        self.num_known = 0
        """Number of leading messages that an earlier request had."""
        self._number_calls: dict[int, bytes] = {}
        """Encoded calls with numbers in their arguments, by message: to Python 1, 1.0 and True are equal."""
        self._sent: dict[int, Message] = {}
        """Messages as the agent sent them, where the recorded message replaces the sent one."""
        self._recorded_call_ids: dict[str, str] | None = None
        """See _match_calls; None until a result needs it."""

    def extend(self, messages: list[Message], answers: Answers) -> None:
        for sent in messages:
            at = len(self.messages)
            if "tool_calls" in sent and _has_number(calls := _encode_calls(sent)):
                self._number_calls[at] = calls
            message = self._canonical_message(sent, answers)
            if message is not sent:
                self._sent[at] = sent
            if message["role"] == "assistant":
                self._recorded_call_ids = None
            self.messages.append(message)
            self.keys.append(extend_chain(self.keys[-1], message))

    def _canonical_message(self, sent: Message, answers: Answers) -> Message:
        """The canonical message for a sent one: the recorded answer, and results with its calls' ids."""
        if sent["role"] == "tool":
            call_id = self._match_calls().get(sent["tool_call_id"])
            return sent if call_id is None else {**sent, "tool_call_id": call_id}
        if sent["role"] != "assistant":
            return sent
        plain = comparable_answer(sent)
        if extend_chain(self.keys[-1], plain) in answers:
            return sent if plain == sent else plain
        turn = answers.get(extend_chain(self.keys[-1], without_ids(plain)))
        return sent if turn is None else comparable_answer(turn.message)

    def _match_calls(self) -> dict[str, str]:
        """Recorded ids of the last answer's calls, by those that the agent sent."""
        if self._recorded_call_ids is not None:
            return self._recorded_call_ids
        at = len(self.messages) - 1
        while at >= 0 and self.messages[at]["role"] != "assistant":
            at -= 1
        sent = self._sent.get(at, {})
        sent_calls = sent.get("tool_calls", ())
        recorded_calls = self.messages[at].get("tool_calls", ()) if sent else ()
        pairs = zip(sent_calls, recorded_calls, strict=True)
        self._recorded_call_ids = {sent_call["id"]: recorded["id"] for sent_call, recorded in pairs}
        return self._recorded_call_ids

    @property
    def num_bytes(self) -> int:
        """Approximate memory in bytes of what only this conversation holds."""
        # a thread may be extending the conversation
        return sys.getsizeof(self.opening_text) + sum(map(size_of, list(self._sent.values())))

    def share_recorded_messages(self, matched: Turn) -> None:
        """Replace messages of the request by the equal recorded objects of the turn that it extends, so that
        memory holds them once."""
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
        copy._number_calls = {i: calls for i, calls in self._number_calls.items() if i < num_messages}
        copy._sent = {i: message for i, message in self._sent.items() if i < num_messages}
        return copy

    def num_shared(self, messages: list[Message]) -> int:
        """Number of leading messages that this conversation and `messages` share."""
        num = len(self.messages)
        if self._sent or self.messages != messages[:num]:
            sent = (self._sent.get(i, message) for i, message in enumerate(self.messages))
            pairs = zip(sent, messages, strict=False)
            differing = (i for i, (message, other) in enumerate(pairs) if message != other)
            num = next(differing, min(num, len(messages)))
        for i, calls in self._number_calls.items():
            if i >= num:
                break
            if messages[i] is not self.messages[i] and _encode_calls(messages[i]) != calls:
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

    def find_or_create(
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
        self._recent = [*self._recent[-MAX_CONVERSATIONS + 1 :], best]
        return best

    def forget(self, conversation: Conversation) -> None:
        self._recent = [recent for recent in self._recent if recent is not conversation]


def _encode_calls(message: Message) -> bytes:
    return encode_sorted(message["tool_calls"])


_NUMBER = re.compile(rb"[:,\[](?:[-0-9]|true|false)")


def _has_number(calls: bytes) -> bool:
    """Whether calls may hold a number; true for some strings as well, which costs time only."""
    return _NUMBER.search(calls) is not None
