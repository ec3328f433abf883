"""Renders the new messages of a conversation without its history.

Most chat templates append: new messages leave the text of all earlier ones unchanged. The text of an answer
and of what follows it can then be taken from a short conversation, the opening and that answer. Probes find
the roles that a template appends; where it rewrites earlier text (Qwen3 drops old reasoning after a user
message), the whole conversation must be rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, product

import jinja2

from sf_core.dataplane.chat.messages import IMAGE, Message, canonical, tool_call
from sf_core.dataplane.chat.tool_formats import Tool

Render = Callable[[list[Message], list[Tool]], str]


def opening_messages(messages: list[Message]) -> list[Message] | None:
    """The messages up to the first user message, which templates treat specially; None without one."""
    for i, message in enumerate(messages):
        if message["role"] == "user":
            return messages[: i + 1]
    return None


def render_addition(
    render: Render, beginning: list[Message], beginning_text: str, added: list[Message], tools: list[Tool]
) -> str | None:
    """The text of `added`, an answer and what follows it, in any conversation that begins with `beginning`;
    None if the template refuses `added` right after the beginning, or rewrites the beginning."""
    try:
        text = render([*beginning, *added], tools)
    except jinja2.TemplateError:
        return None
    return text[len(beginning_text) :] if text.startswith(beginning_text) else None


def append_only_roles(render: Render) -> frozenset[str]:
    """Roles whose messages, added after an answer, render the same with and without the history before it."""
    render = _cache_renderings(render)
    return frozenset(
        role
        for role in ("user", "tool")
        if all(_is_append_only(render, probe) for probe in _make_probes(role))
    )


def _cache_renderings(render: Render) -> Render:
    """A cache of the rendering: other probes need two or three of the four texts of a probe. Probes consist
    of the message objects of this module, so the ids of the objects identify a conversation."""
    results: dict[tuple[int, ...], str | jinja2.TemplateError] = {}

    def render_once(messages: list[Message], tools: list[Tool]) -> str:
        key = (*map(id, messages), len(tools))
        if key not in results:
            try:
                results[key] = render(messages, tools)
            except jinja2.TemplateError as error:
                results[key] = error
        result = results[key]
        if isinstance(result, str):
            return result
        raise result

    return render_once


def with_images(render: Render) -> Render:
    """A rendering in which everything that comes from outside shows an image too."""

    def render_shown(messages: list[Message], tools: list[Tool]) -> str:
        return render([_add_image(message) for message in messages], tools)

    return render_shown


def _add_image(message: Message) -> Message:
    if message["role"] not in ("user", "tool"):
        return message
    return {**message, "content": canonical([message["content"], {"type": IMAGE}])}


def shows_tools(render: Render) -> bool:
    """Whether the template shows the tools of a request. A template that refuses tools does not."""
    try:
        with_tool = render([_USER], [_TOOL])
    except jinja2.TemplateError:
        return False
    try:
        return with_tool != render([_USER], [])
    except jinja2.TemplateError:  # the template is only for requests with tools
        return True


def roles_shown_as_lists(render: Render) -> list[str]:
    """Roles whose text the template writes as a Python list of parts. Such a template loops over the parts of
    some messages, so it gets lists, but prints the lists of other messages as they are."""
    conversations: dict[str, list[Message]] = {
        "system": [_SYSTEM, _USER],
        "user": [_USER],
        "assistant": [_USER, _ANSWERS[0], _USER],
        "tool": [_USER, _ANSWERS[3], _RESULT],
    }
    conversations["assistant with a call"] = [_USER, {**_ANSWERS[3], "content": "said"}, _RESULT]
    return [role for role, messages in conversations.items() if _shows_list(render, messages)]


def _shows_list(render: Render, messages: list[Message]) -> bool:
    tools = [_TOOL] if any("tool_calls" in message for message in messages) else []
    try:
        text = render(messages, tools)
    except jinja2.TemplateError:
        return False
    return "'type': 'text'" in text or '"type": "text"' in text


def keeps_rows(render: Render, role: str, *, after_reasoning: bool) -> bool:
    """Whether an answer stays in the training row of its prompt when messages of this role follow: the text
    with these messages begins with the prompt, and shows the whole answer. `after_reasoning`: the answers
    have reasoning."""
    answers = [answer for answer in _ANSWERS if "<think>" not in answer["content"]]
    rounds = [
        [answer, *_make_following(answer)]
        for answer in answers
        if ("reasoning_content" in answer) == after_reasoning
    ]
    of_role = [messages for messages in rounds if messages[1]["role"] == role]
    histories = [[], *of_role, *(messages * 3 for messages in of_role)]
    tools = [_TOOL] if role == "tool" else []
    starts: list[list[Message]] = [[_USER], [_SYSTEM, _USER]]
    return all(
        _keeps_row(render, [*start, *history], added, tools)
        for start, history, added in product(starts, histories, of_role)
    )


def _keeps_row(render: Render, history: list[Message], added: list[Message], tools: list[Tool]) -> bool:
    try:
        before = render(history, tools)
        whole = render([*history, *added], tools)
    except jinja2.TemplateError:
        return True  # such a request is refused
    words_of_answer = [word for word in ("said", "why", "find") if word in str(added[0])]
    addition = whole[len(before) :]
    return whole.startswith(before) and all(word in addition for word in words_of_answer)


def find_end_of_turn(
    render: Render, render_only: Render, known_stops: tuple[str, ...], tokens: Iterable[str]
) -> str | None:
    """The token among `tokens` with which the template ends an answer; None if a token of `known_stops` ends
    it. `render_only` does not open the next answer, so the text after an answer cannot be the beginning of
    another turn."""
    try:
        last = _after_answer(render_only([_USER, _ANSWERS[0]], []))
        followed = _after_answer(render([_USER, _ANSWERS[0], _USER], []))
    except jinja2.TemplateError:
        return None
    if last.startswith(known_stops) or followed.startswith(known_stops):
        return None
    ends = (token for token in tokens if last.startswith(token) and followed.startswith(token))
    return max(ends, key=len, default=None)


def _after_answer(text: str) -> str:
    return text.rpartition(_ANSWERS[0]["content"])[2].lstrip() if _ANSWERS[0]["content"] in text else ""


_Probe = tuple[list[Message], list[Message], list[Tool]]
"""A history that waits for an answer, that answer with the messages after it, and the tools."""


def _is_append_only(render: Render, probe: _Probe) -> bool:
    history, added, tools = probe
    try:
        whole = render([*history, *added], tools)
        before = render(history, tools)
    except jinja2.TemplateError:
        return True  # cannot be rendered either way: such a request is refused
    beginning = opening_messages(history)
    assert beginning is not None
    try:
        beginning_text = render(beginning, tools)
    except jinja2.TemplateError:
        return False
    addition = render_addition(render, beginning, beginning_text, added, tools)
    return addition is not None and whole == before + addition


_SYSTEM: Message = {"role": "system", "content": "be"}
_USER: Message = {"role": "user", "content": "ask"}
_RESULT: Message = {"role": "tool", "content": "found", "tool_call_id": "c"}
_CALLS = [tool_call("c", "find", {"x": 1})]
_TOOL: Tool = {
    "type": "function",
    "function": {"name": "find", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


_ANSWERS: list[Message] = [
    {"role": "assistant", "content": "said"},
    {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nsaid"},
    {"role": "assistant", "content": "said", "reasoning_content": "why"},
    {"role": "assistant", "content": "", "tool_calls": _CALLS},
    {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nsaid", "tool_calls": _CALLS},
    {"role": "assistant", "content": "said", "reasoning_content": "why", "tool_calls": _CALLS},
    {"role": "assistant", "content": "", "tool_calls": _CALLS * 2},
]


def _make_probes(role: str) -> Iterator[_Probe]:
    rounds = [[answer, *_make_following(answer)] for answer in _ANSWERS]
    pairs_of_rounds = [first + second for first, second in product(rounds, rounds[:5:2])]
    rounds_of_role = [messages for messages in rounds if messages[1]["role"] == role]
    for history, added in product([[], *rounds, *pairs_of_rounds], rounds_of_role):
        yield _make_probe(history, added)
    # longer and longer histories too: some templates count messages
    repeated = rounds_of_role[0]
    for num in range(3, 12):
        yield _make_probe(repeated * num, repeated)
    longest = list(chain.from_iterable(rounds * 3))
    yield _make_probe(longest, repeated)


def _make_following(answer: Message) -> list[Message]:
    return [_RESULT] * len(answer.get("tool_calls", [])) or [_USER]


def _make_probe(history: list[Message], added: list[Message]) -> _Probe:
    start: list[Message] = [_SYSTEM, _USER] if len(history) % 3 else [_USER]
    has_calls = any("tool_calls" in message for message in [*history, *added])
    tools = [_TOOL] if has_calls else []
    return [*start, *history], added, tools
