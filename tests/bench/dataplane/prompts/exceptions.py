"""Where our prompts differ from those of vLLM or transformers: the table of docs/guides/agents/prompts.md, as
code.

A row says which requests it is about, and has one of them, which differs from the references that the table
says. The tests hold that nothing else differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.bench.dataplane.prompts.folders import KINDS
from tests.bench.dataplane.prompts.shapes import JSON, WRITERS, Call, Request, Said, Shape, is_object

VLLM = "vLLM"
TRANSFORMERS = "transformers"
SAME = "as the gateway"
"""What the table says where a reference does not differ."""

_PAGE = Path(__file__).parents[4] / "docs" / "guides" / "agents" / "prompts.md"


@dataclass(frozen=True)
class Case:
    """A shape for a model folder, in a dialect."""

    kind: str
    tokenizer: str
    dialect: str
    shape: Shape
    recorded: bool = False
    """Whether the answers in it were sampled in this session."""

    @property
    def request(self) -> Request:
        request = WRITERS[self.dialect](self.shape)
        assert request is not None
        return request


Matches = Callable[[Case], bool]


class Row(NamedTuple):
    """Which requests differ from each reference, and one that does."""

    example: Case
    vllm: Matches | None = None
    """None: none differs from vLLM's."""
    transformers: Matches | None = None

    def differs_from(self, reference: str) -> Matches | None:
        return self.vllm if reference == VLLM else self.transformers


def read_table() -> dict[str, dict[str, str]]:
    """Rows of the docs' table by their first cells; cells by the head of their column."""
    section = (
        _PAGE.read_text(encoding="utf-8")
        .split("## Differences from vLLM and transformers")[1]
        .split("\n## ")[0]
    )
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def explained(case: Case, reference: str) -> list[str]:
    """First cells of the rows that say that this case differs from the reference."""
    found = [(name, row.differs_from(reference)) for name, row in ROWS.items()]
    return [name for name, matches in found if matches is not None and matches(case)]


def _has_developer(case: Case) -> bool:
    return any(said.role == "developer" for said in case.shape.messages)


def _is_late_developer(case: Case) -> bool:
    roles = [said.role for said in case.shape.messages]
    return case.recorded and "developer" in roles and "assistant" in roles[: _last(roles, "developer")]


def _last(roles: list[str], role: str) -> int:
    return len(roles) - 1 - roles[::-1].index(role)


def _has_late_system(case: Case) -> bool:
    return case.dialect == "messages" and any(said.role == "system" for said in case.shape.messages[1:])


def _has_parts(case: Case) -> bool:
    return any(len(said.parts) > 1 for said in case.shape.messages)


def _has_other_arguments(case: Case) -> bool:
    return any(not is_object(call.arguments) for said in case.shape.messages for call in said.calls)


def _has_bare_tool(case: Case) -> bool:
    return any(not {"description", "parameters"} <= tool.keys() for tool in case.shape.tools)


def _writes_whole_function(case: Case) -> bool:
    called = any(said.calls for said in case.shape.messages)
    return called and case.kind in ("mistral", "smollm3")


def _has_answer_in_parts(case: Case) -> bool:
    answers = [said for said in case.shape.messages if said.role == "assistant"]
    return case.dialect == "responses" and any(len(said.parts) > 1 for said in answers)


def _must_call(case: Case) -> bool:
    return case.shape.must_call


def _adds_tokens(case: Case) -> bool:
    return case.dialect == "responses" and KINDS[case.kind].adds != ""


def _has_billing_line(case: Case) -> bool:
    beginning = "x-anthropic-billing-header"
    return any(text.startswith(beginning) for said in case.shape.messages for text in said.parts)


_USER = Said("user", ("hi",))
_BILLED = Said("system", ("x-anthropic-billing-header: 1\nbe",))
_CALL = Said("assistant", calls=(Call("c12345678", "find", '{"x": 1}'),))
_WRONG = Said("assistant", calls=(Call("c12345678", "find", "{'x': 1}"),))
_FOUND = Said("tool", ("found",), answers="c12345678")
_FIND: JSON = {"name": "find", "description": "Finds.", "parameters": {"type": "object", "properties": {}}}


def _chat(kind: str, *messages: Said, tools: tuple[JSON, ...] = ()) -> Case:
    return Case(kind, "byte_level", "chat", Shape(messages, tools))


_SAID = Said("assistant", ("said",))
_LATE = Shape((_USER, _SAID, Said("developer", ("do",)), _USER))
_LATE_SYSTEM = Shape((_USER, _SAID, Said("system", ("do",)), _USER))
_IN_PARTS = Shape((_USER, Said("assistant", ("one", "two")), _USER))

ROWS = {
    "a `developer` message after a recorded answer": Row(
        Case("qwen3", "byte_level", "chat", _LATE, recorded=True), _is_late_developer, _is_late_developer
    ),
    "a `developer` message that does not follow a recorded answer": Row(
        _chat("qwen3", Said("developer", ("be",)), _USER), transformers=_has_developer
    ),
    "several parts of text in one message": Row(
        _chat("qwen3", Said("user", ("one", "two"))), transformers=_has_parts
    ),
    "a call whose arguments are not a JSON object": Row(
        _chat("qwen3", _USER, _WRONG, _FOUND, tools=(_FIND,)), transformers=_has_other_arguments
    ),
    "a tool without a description or parameters": Row(
        _chat("qwen3", _USER, tools=({"name": "find"},)), transformers=_has_bare_tool
    ),
    "a system message after the first, in Messages": Row(
        Case("qwen36", "byte_level", "messages", _LATE_SYSTEM), transformers=_has_late_system
    ),
    "an answer of several parts, in Responses": Row(
        Case("qwen3", "byte_level", "responses", _IN_PARTS), _has_answer_in_parts, _has_answer_in_parts
    ),
    "a call, if the template converts the whole `function` object to JSON": Row(
        _chat("mistral", _USER, _CALL, _FOUND, tools=(_FIND,)), transformers=_writes_whole_function
    ),
    "any message, in Responses, if the tokenizer adds tokens to each text": Row(
        Case("llama3", "byte_level", "responses", Shape((_USER,))), _adds_tokens
    ),
    "a forced call (`tool_choice`)": Row(
        Case("qwen3", "byte_level", "chat", Shape((_USER,), (_FIND,), must_call=True)), _must_call, _must_call
    ),
    "a line `x-anthropic-billing-header: ...`": Row(
        Case("qwen3", "byte_level", "messages", Shape((_USER, _BILLED, _USER))),
        lambda case: case.dialect in ("messages", "responses") and _has_billing_line(case),
        _has_billing_line,
    ),
}
