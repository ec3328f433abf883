"""Requests in the canonical form that every dialect is parsed into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from sf_core.dataplane.chat.answer_grammar import Schema
from sf_core.dataplane.chat.contents import LeftOut
from sf_core.dataplane.chat.messages import Message
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.types import Sampling


@dataclass(frozen=True, slots=True)
class ToolChoice:
    kind: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    """The tool that must be called; None with kind `required`: any tool."""
    parallel: bool = True
    """False: the turn ends with its first call."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One prompt and how to continue it."""

    messages: list[Message] = field(default_factory=list)
    merges_system: bool = False
    """System messages after the first are merged into it if the template refuses them elsewhere."""
    text_or_ids: str | list[int] | None = None
    """Text that is encoded as it is, or token ids; given instead of messages."""
    adds_special: bool = False
    """Whether the tokenizer adds its special tokens to that text, for example one that begins every text."""
    tools: list[Tool] = field(default_factory=list)
    """Tools as the chat template gets them."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    tool_choice: ToolChoice = ToolChoice()
    schema: Schema | None = None
    """JSON Schema of the answer's content; None: the content is free."""
    stop: list[str] = field(default_factory=list)
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    """The sampling that the agent asks for, without the seed."""
    seed: int | None = None
    """None: each turn has a random seed."""
    num_samples: int = 1
    """Number of turns to sample from the prompt."""
    stream: bool = False
    logprobs: bool = False
    left_out: LeftOut = field(default_factory=LeftOut)
    """Parts of the request that the model is not shown."""

    def texts(self) -> Iterator[Any]:
        """JSON values that hold all text of the prompt."""
        yield from self.messages
        yield from self.tools
        yield self.template_options
        if isinstance(self.text_or_ids, str):
            yield self.text_or_ids

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice.kind != "none"
