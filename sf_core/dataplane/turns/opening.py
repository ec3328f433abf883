"""From a request to its turns: its prompt in the session, and whether each turn is new, continued, or already
served.

A retry joins its turn instead of sampling another (request.py). No turn is begun if one of the
requests is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import jinja2
import numpy as np

from sf_core.dataplane.chat.answer_grammar import answer_grammar
from sf_core.dataplane.chat.calls.formats import FORMATS
from sf_core.dataplane.chat.renderer import Renderer, TooManyTokensError
from sf_core.dataplane.chat.tool_formats import tool_name
from sf_core.dataplane.errors import ApiError, ContextOverflow, WrongField
from sf_core.dataplane.large_requests import SMALL_CHARACTERS, in_thread_if
from sf_core.dataplane.sessions.encoding import Draft, Encoded
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.tree import Prompt
from sf_core.dataplane.sessions.turn_events import RecordedTurn
from sf_core.dataplane.turns.answer import AFTER_THINKING
from sf_core.dataplane.turns.live_turn import LiveTurn, LiveTurns
from sf_core.dataplane.turns.request import RequestFingerprint, TurnRequest
from sf_core.dataplane.turns.subscriber import Subscriber
from sf_core.types import Ids, to_ids

MAX_COUNTED = 2**21
"""Most tokens that are counted; no context window holds as many."""

NO_FORMAT = (
    "The policy cannot call tools: its chat template writes tool calls in an unknown format. Set "
    f"`tool_format` in its tokenizer_config.json (one of {', '.join(FORMATS)}), or use a template that "
    "writes tool calls."
)


Drafted = str | Ids | Draft | Prompt
"""A prompt on its way: texts and drafts are still to be encoded, only a Prompt is in the session."""

Encoding = Ids | Encoded | Prompt
"""A prompt whose tokens are known."""


class Prepared(NamedTuple):
    """A request that is rendered but not encoded."""

    prompt: Drafted
    renderer: Renderer
    """With the template options of the request."""
    grammar: str
    """The grammar of the answers; empty: none."""
    adds_special: bool = False
    """Whether the tokenizer adds its special tokens to the text."""


async def open_turns(
    turns: LiveTurns,
    session: Session,
    requests: Sequence[TurnRequest],
    fingerprint: RequestFingerprint,
    *,
    is_large: bool = False,
    recheck: Callable[[], None] = lambda: None,
) -> list[Subscriber]:
    """Subscribe to the turns that answer these requests. Raises ApiError if one cannot become a turn.

    While this waits for threads, no other request of the session may be opened, and the session may end:
    `recheck` then raises ApiError."""
    first = fingerprint.for_turn(0)
    is_retry = _find_served(turns, session, first) or _find_recorded(session, first)
    if not is_retry:
        turns.router.check_room()
        turns.journal.check()
    renderer = turns.renderer
    context_length = turns.spec.context_length
    is_large = is_large or any(_is_costly(renderer, request) for request in requests)
    drafts = [
        await in_thread_if(is_large, _prepare_request, renderer, session, request, context_length)
        for request in requests
    ]
    is_long = is_large or sum(_num_characters(draft.prompt) for draft in drafts) > SMALL_CHARACTERS
    encodings = [
        await in_thread_if(is_long, _encode_prompt, session, draft, context_length) for draft in drafts
    ]
    if is_long:
        recheck()
    subscribers: list[Subscriber] = []
    for request, draft, encoding in zip(requests, drafts, encodings, strict=True):
        prompt = _add_prompt(session, draft.prompt, encoding)
        prompt_ids = prompt.full_ids()
        for nth in range(request.num_samples):
            own = fingerprint.for_turn(len(subscribers))
            turn = _join_or_begin(turns, session, request, prompt, prompt_ids, draft, nth, own)
            subscribers.append(Subscriber(turn))
    return subscribers


def count_tokens(renderer: Renderer, request: TurnRequest) -> int:
    """Number of tokens of a request's prompt, rendered without recorded turns. Raises ApiError, which is
    ContextOverflow for more than MAX_COUNTED."""
    session = Session("count")
    encoded = _encode_prompt(session, _prepare_request(renderer, session, request, MAX_COUNTED), MAX_COUNTED)
    return len(encoded) if isinstance(encoded, np.ndarray) else len(encoded.ids)


def open_prompt(renderer: Renderer, session: Session, request: TurnRequest) -> Prompt:
    """The prompt of a request in its session, of any length. Raises ApiError if it cannot be rendered."""
    draft = _draft_prompt(renderer, session, request)
    return _add_prompt(session, draft.prompt, _encode_prompt(session, draft, inf))


def _is_costly(renderer: Renderer, request: TurnRequest) -> bool:
    """Whether even a small request takes long: a schema is compiled, or a template is probed."""
    options = request.template_options
    has_new_options = bool(options) and not renderer.is_ready_for(options)
    return request.schema is not None or has_new_options


def _prepare_request(
    renderer: Renderer, session: Session, request: TurnRequest, context_length: int
) -> Prepared:
    """Nothing is encoded. Raises ApiError if the request cannot be rendered, and ContextOverflow for a prompt
    that certainly has `context_length` tokens or more."""
    _check_tools(renderer, request)
    if isinstance(request.text_or_ids, list):
        _check_length(len(request.text_or_ids), context_length)
    draft = _draft_prompt(renderer, session, request)
    prompt = draft.prompt
    try:
        if isinstance(prompt, str):
            _check_length(renderer.min_num_tokens(prompt, context_length), context_length)
        elif isinstance(prompt, Draft):
            prompt.unencoded.check_length(context_length)
        return draft._replace(grammar=_make_grammar(draft.renderer, request))
    except ApiError:
        _discard(session, prompt)
        raise


def _draft_prompt(renderer: Renderer, session: Session, request: TurnRequest) -> Prepared:
    if isinstance(request.text_or_ids, str):
        return Prepared(renderer.mend(request.text_or_ids), renderer, "", request.adds_special)
    if request.text_or_ids is not None:
        return Prepared(_check_ids(renderer, request.text_or_ids), renderer, "")
    try:
        renderer = renderer.with_options(request.template_options)
        forced = _make_forced_text(request, renderer)
        messages = request.messages
        if request.merges_system:
            messages = renderer.merge_late_system(messages)
        return Prepared(session.draft(messages, request.tools, renderer, forced), renderer, "")
    except jinja2.TemplateError as error:
        raise WrongField("messages", f"The chat template refuses these messages: {error}") from None


def _num_characters(drafted: Drafted) -> int:
    """Characters that are still to be encoded."""
    text = drafted.unencoded.text if isinstance(drafted, Draft) else drafted
    return len(text) if isinstance(text, str) else 0


def _encode_prompt(session: Session, draft: Prepared, context_length: float) -> Encoding:
    """Raises ContextOverflow for a prompt that has `context_length` tokens or more."""
    prompt = draft.prompt
    renderer = draft.renderer
    try:
        if isinstance(prompt, Draft):
            return prompt.encode(context_length)
        if isinstance(prompt, str):
            ids = renderer.encode(prompt, limit=context_length, adds_special=draft.adds_special)
            prompt = _check_ids(renderer, ids)
        _check_length(prompt.end if isinstance(prompt, Prompt) else len(prompt), context_length)
        return prompt
    except TooManyTokensError as error:
        raise ContextOverflow(error.num_tokens, int(context_length)) from None
    except ContextOverflow:
        _discard(session, prompt)
        raise


def _add_prompt(session: Session, drafted: Drafted, encoded: Encoding) -> Prompt:
    if isinstance(encoded, Prompt):
        return encoded
    if isinstance(encoded, Encoded):
        assert isinstance(drafted, Draft)
        return session.add(drafted, encoded)
    return session.open_prompt_from_ids(encoded)


def _discard(session: Session, drafted: Drafted) -> None:
    if isinstance(drafted, Draft):
        session.discard(drafted.conversation)


def _check_length(num_tokens: int, context_length: float) -> None:
    if num_tokens >= context_length:
        raise ContextOverflow(num_tokens, int(context_length))


def _join_or_begin(
    turns: LiveTurns,
    session: Session,
    request: TurnRequest,
    prompt: Prompt,
    prompt_ids: array[int],
    draft: Prepared,
    nth: int,
    fingerprint: RequestFingerprint,
) -> LiveTurn:
    """The turn for which a request waits: a turn that is served, a recorded turn continued, or a new turn."""
    if (served := _find_served(turns, session, fingerprint)) is not None:
        return served
    if (recorded := _find_recorded(session, fingerprint)) is not None:
        session.recorded.remove(recorded)
    turn = LiveTurn(
        turns,
        session,
        request,
        prompt,
        prompt_ids,
        draft.renderer,
        draft.grammar,
        nth,
        fingerprint,
        recorded,
    )
    digest = fingerprint.digest
    session.discard_answered(turn.prompt, digest)
    in_flight = turns.in_flight.get(session.session_id, ())
    others = [other for other in in_flight if other.recorded.may_be_retried(turn.prompt, digest)]
    turns.in_flight[session.session_id] = [*others, turn]
    return turn


def _find_served(turns: LiveTurns, session: Session, fingerprint: RequestFingerprint) -> LiveTurn | None:
    in_flight = reversed(turns.in_flight.get(session.session_id, ()))
    return next((turn for turn in in_flight if turn.answers(fingerprint)), None)


def _find_recorded(session: Session, fingerprint: RequestFingerprint) -> RecordedTurn | None:
    for recorded in reversed(session.recorded):
        # an agent that has the answer and repeats the body asks for another sample
        may_continue = fingerprint.is_marked or not recorded.delivered
        if recorded.fingerprint == fingerprint.digest and may_continue:
            return recorded
    return None


def _check_tools(renderer: Renderer, request: TurnRequest) -> None:
    """Raises ApiError if the request has tools to call, but calls of the policy cannot be parsed."""
    if request.calls_tools and not renderer.tool_format:
        raise WrongField("tools", NO_FORMAT)


def _make_grammar(renderer: Renderer, request: TurnRequest) -> str:
    """`renderer` has the template options of the request."""
    if request.schema is None or request.tool_choice.kind == "required":
        return ""
    return answer_grammar(request.schema, request.tools if request.calls_tools else [], renderer)


def _check_ids(renderer: Renderer, given: Sequence[int] | Ids) -> Ids:
    try:
        ids = given if isinstance(given, np.ndarray) else to_ids(given)
        is_known = len(ids) > 0 and 0 <= ids.min() <= ids.max() < renderer.vocab_size
    except OverflowError:
        is_known = False
    if not is_known:
        raise WrongField("prompt", f"Token ids must be from 0 to {renderer.vocab_size - 1}.")
    if renderer.image_processor is not None and renderer.image_processor.token_id in ids:
        token = renderer.image_processor.token_id
        raise WrongField(
            "prompt",
            f"prompt contains the token {token}, which is reserved for images; to send images, use messages",
        )
    return ids


def _make_forced_text(request: TurnRequest, renderer: Renderer) -> str:
    """The beginning of an answer that must call a tool; empty if no call is required."""
    choice = request.tool_choice
    if choice.kind != "required":
        return ""
    tool = next((tool for tool in request.tools if tool_name(tool) == choice.name), None)
    opening = renderer.mend(FORMATS[renderer.tool_format].opening(tool))
    return (AFTER_THINKING if renderer.opens_thinking else "") + opening
