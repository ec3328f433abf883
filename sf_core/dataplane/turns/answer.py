"""A turn's answer in the form that dialects get: in pieces while it is sampled, and whole at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from sf_core.dataplane.chat.answer_parser import Reasoning
from sf_core.dataplane.chat.messages import Message


class MadeCall(NamedTuple):
    """A tool call of an answer."""

    call_id: str
    name: str
    arguments: str
    """A JSON object."""


class TokenLogprob(NamedTuple):
    text: str
    """Text of the token, and of the tokens before it that end inside a character; empty if this token does
    too."""
    data: bytes
    """The token's own bytes."""
    logprob: float
    """Natural log."""


Event = str | Reasoning | MadeCall
"""A piece of content, a piece of reasoning, or a whole call."""


class Pieces(NamedTuple):
    """The parts of an answer that became final since the last pieces."""

    events: list[Event]
    logprobs: list[TokenLogprob] | None
    """Log-probs of the tokens sampled since; None if the request did not ask for them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished turn."""

    turn_id: str
    message: Message
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop: str | None
    """The stop string that ended the answer; None if none did."""
    num_prompt_tokens: int
    num_sampled_tokens: int
    logprobs: list[TokenLogprob] | None

    @property
    def reasoning(self) -> str:
        return str(self.message.get("reasoning_content", ""))

    @property
    def content(self) -> str:
        return str(self.message["content"])

    @property
    def calls(self) -> list[MadeCall]:
        return [
            MadeCall(call["id"], call["function"]["name"], encode_arguments(call["function"]["arguments"]))
            for call in self.message.get("tool_calls", [])
        ]


def encode_arguments(arguments: dict[str, object]) -> str:
    return msgspec.json.encode(arguments).decode()
