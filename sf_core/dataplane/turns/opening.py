"""From a request to its turns: its prompt in the session, and whether each turn is new, goes on, or is served
already.

A retry joins its turn instead of sampling another (identity.py). No turn is begun if one of the requests is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import jinja2

from sf_core.dataplane.chat.answer_grammar import answer_grammar
from sf_core.dataplane.chat.calls.formats import FORMATS
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.chat.tool_formats import name_of
from sf_core.dataplane.errors import ContextOverflow, WrongField
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.tree import Prompt
from sf_core.dataplane.sessions.turn_events import RecordedTurn
from sf_core.dataplane.turns.answer_reader import AFTER_THINKING
from sf_core.dataplane.turns.identity import RequestIdentity
from sf_core.dataplane.turns.live_turn import LiveTurn, LiveTurns, Subscriber
from sf_core.dataplane.turns.request import TurnRequest

NO_FORMAT = (
    "The policy cannot call tools: its chat template writes tool calls in an unknown format. Set "
    f"`tool_format` in its tokenizer_config.json (one of {', '.join(FORMATS)}), or use a template that "
    "writes tool calls."
)


def open_turns(
    turns: LiveTurns, session: Session, requests: Sequence[TurnRequest], identity: RequestIdentity
) -> list[Subscriber]:
    """Subscribe to the turns that answer these requests. Raises ApiError if one cannot become a turn."""
    first = identity.of_turn(0)
    if _find_served(turns, session, first) is None and _find_recorded(session, first) is None:
        turns.router.check_room()
        turns.journal.check()
    opened = [(request, *_open(turns, session, request)) for request in requests]
    begins = [(*one, nth) for one in opened for nth in range(one[0].num_samples)]
    return [
        Subscriber(_join_or_begin(turns, session, *begin, identity.of_turn(i)))
        for i, begin in enumerate(begins)
    ]


def count_tokens(renderer: Renderer, request: TurnRequest) -> int:
    """Number of tokens of a request's prompt, rendered without recorded turns. Raises ApiError."""
    _check_tools(renderer, request)
    return len(open_prompt(renderer, Session("count"), request).ids)


def open_prompt(renderer: Renderer, session: Session, request: TurnRequest) -> Prompt:
    """The prompt of a request in its session. Raises ApiError if it cannot be rendered."""
    if request.text_or_ids is not None:
        return session.open_ids(_read_ids(renderer, request.text_or_ids))
    try:
        renderer = renderer.with_options(request.template_options)
        forced = _make_forced_text(request, renderer)
        messages = request.messages
        if request.merges_system:
            messages = renderer.merge_late_system(messages)
        return session.open_prompt(messages, request.tools, renderer, forced)
    except jinja2.TemplateError as error:
        raise WrongField("messages", f"The chat template refuses these messages: {error}") from None


def _join_or_begin(
    turns: LiveTurns,
    session: Session,
    request: TurnRequest,
    prompt: Prompt,
    grammar: str,
    nth: int,
    identity: RequestIdentity,
) -> LiveTurn:
    """The turn that a request waits for: one that is served, a recorded turn continued, or a new one."""
    if (served := _find_served(turns, session, identity)) is not None:
        return served
    if (recorded := _find_recorded(session, identity)) is not None:
        session.recorded.remove(recorded)
    turn = LiveTurn(turns, session, request, prompt, grammar, nth, identity, recorded)
    asked = turn.prompt, identity.digest
    session.forget_answered(*asked)
    in_flight = turns.in_flight.get(session.session_id, ())
    others = [other for other in in_flight if other.recorded.may_be_asked_again(*asked)]
    turns.in_flight[session.session_id] = [*others, turn]
    return turn


def _find_served(turns: LiveTurns, session: Session, identity: RequestIdentity) -> LiveTurn | None:
    in_flight = reversed(turns.in_flight.get(session.session_id, ()))
    return next((turn for turn in in_flight if turn.is_answer_to(identity)), None)


def _find_recorded(session: Session, identity: RequestIdentity) -> RecordedTurn | None:
    for recorded in reversed(session.recorded):
        # an agent that has the answer and repeats the body asks for another sample
        if recorded.identity == identity.digest and (identity.insists or not recorded.delivered):
            return recorded
    return None


def _open(turns: LiveTurns, session: Session, request: TurnRequest) -> tuple[Prompt, str]:
    """The prompt of a request in its session, and what its answers follow."""
    _check_tools(turns.renderer, request)
    grammar = _make_grammar(turns.renderer, request)
    prompt = open_prompt(turns.renderer, session, request)
    if prompt.end >= turns.spec.context_length:
        raise ContextOverflow(prompt.end, turns.spec.context_length)
    return prompt, grammar


def _check_tools(renderer: Renderer, request: TurnRequest) -> None:
    """Raises ApiError if the request has tools to call and calls cannot be read."""
    if request.calls_tools and not renderer.tool_format:
        raise WrongField("tools", NO_FORMAT)


def _make_grammar(renderer: Renderer, request: TurnRequest) -> str:
    """What the answers of a request follow; empty: nothing."""
    if request.schema is None or request.tool_choice.kind == "required":
        return ""
    renderer = renderer.with_options(request.template_options)
    return answer_grammar(request.schema, request.tools if request.calls_tools else [], renderer)


def _read_ids(renderer: Renderer, given: str | list[int]) -> list[int]:
    ids = renderer.encode(given).tolist() if isinstance(given, str) else given
    if not 0 <= min(ids) <= max(ids) < renderer.vocab_size:
        raise WrongField("prompt", f"Token ids must be from 0 to {renderer.vocab_size - 1}.")
    if renderer.sight is not None and renderer.sight.token_id in ids:
        told = f"prompt contains the token {renderer.sight.token_id}, which is reserved for pictures"
        raise WrongField("prompt", f"{told}; to send pictures, use messages")
    return ids


def _make_forced_text(request: TurnRequest, renderer: Renderer) -> str:
    """The beginning of an answer that must call a tool; empty if it need not."""
    choice = request.tool_choice
    if choice.kind != "required":
        return ""
    tool = next((tool for tool in request.tools if name_of(tool) == choice.name), None)
    opening = FORMATS[renderer.tool_format].opening(tool)
    return (AFTER_THINKING if renderer.opens_thinking else "") + opening
