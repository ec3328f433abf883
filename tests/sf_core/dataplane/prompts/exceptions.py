"""Where our prompts differ from those of vLLM or transformers: the table of docs/your-agent.md, as code.

A row says which requests it is about, and has one of them, which differs from the references that the table
says. The tests hold that nothing else differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.sf_core.dataplane.prompts.shapes import JSON, WRITERS, Call, Request, Said, Shape, is_object

VLLM, TRANSFORMERS = "vLLM", "transformers"
SAME = "as here"
"""What the table says where a reference does not differ."""

_PAGE = Path(__file__).parents[4] / "docs" / "your-agent.md"


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


class Row(NamedTuple):
    differs: frozenset[str]
    """References from which the example differs."""
    matches: Callable[[Case], bool]
    example: Case


def read_table() -> dict[str, dict[str, str]]:
    """Rows of the docs' table by their first cells; cells by the head of their column."""
    section = _PAGE.read_text().split("## What the model sees")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def explained(case: Case, reference: str) -> list[str]:
    """First cells of the rows that are about this case and the reference."""
    return [name for name, row in ROWS.items() if reference in row.differs and row.matches(case)]


def _has_role(case: Case, role: str) -> bool:
    return any(said.role == role for said in case.shape.messages)


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
    return called and case.kind in ("mistral", "smollm3") and case.dialect != "responses"


def _has_billing_line(case: Case) -> bool:
    beginning = "x-anthropic-billing-header"
    return any(text.startswith(beginning) for said in case.shape.messages for text in said.parts)


_USER = Said("user", ("hi",))
_CALL = Said("assistant", calls=(Call("c12345678", "find", '{"x": 1}'),))
_WRONG = Said("assistant", calls=(Call("c12345678", "find", "{'x': 1}"),))
_FOUND = Said("tool", ("found",), answers="c12345678")
_FIND: JSON = {"name": "find", "description": "Finds.", "parameters": {"type": "object", "properties": {}}}


def _chat(kind: str, *messages: Said, tools: tuple[JSON, ...] = (), effort: str = "") -> Case:
    return Case(kind, "byte_level", "chat", Shape(messages, tools, {}, effort))


_BOTH = frozenset({VLLM, TRANSFORMERS})
_OF_VLLM, _OF_TRANSFORMERS = frozenset({VLLM}), frozenset({TRANSFORMERS})

ROWS = {
    "a `developer` message after a recorded answer": Row(
        _BOTH,
        _is_late_developer,
        Case(
            *("qwen3", "byte_level", "chat"),
            Shape((_USER, Said("assistant", ("said",)), Said("developer", ("do",)), _USER)),
            recorded=True,
        ),
    ),
    "another `developer` message": Row(
        _OF_TRANSFORMERS,
        lambda case: _has_role(case, "developer"),
        _chat("qwen3", Said("developer", ("be",)), _USER),
    ),
    "several parts of text in one message": Row(
        _OF_TRANSFORMERS, _has_parts, _chat("qwen3", Said("user", ("one", "two")))
    ),
    "a call whose arguments are no JSON object": Row(
        _OF_TRANSFORMERS, _has_other_arguments, _chat("qwen3", _USER, _WRONG, _FOUND, tools=(_FIND,))
    ),
    "a tool without a description or parameters": Row(
        _OF_TRANSFORMERS, _has_bare_tool, _chat("qwen3", _USER, tools=({"name": "find"},))
    ),
    "a system message after the first, in Messages": Row(
        _OF_TRANSFORMERS,
        _has_late_system,
        Case(
            *("qwen36", "byte_level", "messages"),
            Shape((_USER, Said("assistant", ("said",)), Said("system", ("do",)), _USER)),
        ),
    ),
    "a call, where the template writes the whole function as JSON": Row(
        _OF_VLLM, _writes_whole_function, _chat("mistral", _USER, _CALL, _FOUND, tools=(_FIND,))
    ),
    "an effort of thinking": Row(
        _OF_VLLM, lambda case: bool(case.shape.effort), _chat("qwen3", _USER, effort="none")
    ),
    "a line `x-anthropic-billing-header: ...`": Row(
        _OF_VLLM,
        _has_billing_line,
        _chat("qwen3", Said("system", ("x-anthropic-billing-header: 1\nbe",)), _USER),
    ),
}
