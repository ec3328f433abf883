"""The tokens of a request: recorded ones as far as they match its rendering, newly encoded ones after them.
Rendering and encoding are apart, because a long text is encoded in a thread (large_requests.py).

Owns where encoding begins: at a special token (docs/concepts/token-truth.md), never inside recorded tokens.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from sf_core.dataplane.chat.messages import Message
from sf_core.dataplane.chat.rendered import shows_whole_answer
from sf_core.dataplane.chat.renderer import Renderer, TooManyTokensError
from sf_core.dataplane.chat.template_probes import opening_messages, render_addition
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.errors import ContextOverflow
from sf_core.dataplane.sessions.conversation_keys import Conversation
from sf_core.dataplane.sessions.images import ExpandPlaceholders, SessionImages
from sf_core.dataplane.sessions.tree import (
    EMPTY_PREFIX,
    LastTurnBoundary,
    Position,
    PrefixDigest,
    Turn,
    position_at,
)
from sf_core.types import Ids


class Encoded(NamedTuple):
    position: Position
    """Where the recorded tokens of the request end."""
    ids: Ids
    """The newly encoded tokens."""
    rendered: PrefixDigest
    """Digest of the whole rendering."""
    boundary: LastTurnBoundary | None
    """None: the new tokens hold no end-of-turn token."""


class Unencoded(NamedTuple):
    """The part of a request that no recorded tokens cover, as text."""

    position: Position
    """Where the recorded tokens of the request end."""
    prefix: PrefixDigest
    """Digest of the rendering up to that position."""
    text: str
    """The rendering after that position."""
    preceding_stop: str
    """The end-of-turn token right before `text`; empty: there is none."""
    renderer: Renderer
    name: ExpandPlaceholders

    def check_length(self, context_length: int) -> None:
        """Raises ContextOverflow if the request certainly has `context_length` tokens or more. Nothing is
        encoded."""
        num_recorded = self.position.offset
        num_tokens = num_recorded + self.renderer.min_num_tokens(self.text, context_length - num_recorded)
        if num_tokens >= context_length:
            raise ContextOverflow(num_tokens, context_length)

    def encode(self, forced: str = "", context_length: float = inf) -> Encoded:
        """`forced` is the beginning of the answer, which is no part of the rendering. Raises ContextOverflow
        if the request has `context_length` tokens or more."""
        renderer = self.renderer
        text = self.text
        num_recorded = self.position.offset
        try:
            ids = self.name(renderer.encode(text, self.preceding_stop, context_length - num_recorded))
        except TooManyTokensError as error:
            raise ContextOverflow(num_recorded + error.num_tokens, int(context_length)) from None
        boundary = None
        rendered = self.prefix
        stop_at = 0
        if (last_stop := renderer.last_stop(text, ids)) is not None:
            stop_at, num_ids_before_stop = last_stop
            rendered = rendered.extend(text[:stop_at])
            boundary = LastTurnBoundary(num_recorded + num_ids_before_stop, rendered)
        rendered = rendered.extend(text[stop_at:])
        if forced:
            ids = np.concatenate([ids, renderer.encode_behind_text(forced)])
        if (num_tokens := num_recorded + len(ids)) >= context_length:
            raise ContextOverflow(num_tokens, int(context_length))
        return Encoded(self.position, ids, rendered, boundary)


class Draft(NamedTuple):
    """A request that is to become a prompt."""

    conversation: Conversation
    matched: Turn | None
    """The deepest recorded turn whose conversation the request begins with."""
    added: list[Message]
    """The messages after that turn."""
    unencoded: Unencoded
    forced: str
    tools: bytes
    """As in Prompt."""
    num_bytes: int
    """Memory of the added messages."""

    def encode(self, context_length: float = inf) -> Encoded:
        """Raises ContextOverflow if the request has `context_length` tokens or more."""
        return self.unencoded.encode(self.forced, context_length)


def render_request(
    conversation: Conversation,
    matched: Turn | None,
    tools: list[Tool],
    renderer: Renderer,
    images: SessionImages,
) -> Unencoded:
    """Render the part of a request that is not recorded. `matched` is the deepest recorded turn whose
    conversation the request begins with. Raises jinja2.TemplateError."""
    placeholder_expander = images.placeholder_expander(conversation.messages, renderer.image_processor)
    added = list[Message]()
    if matched is not None:
        added = conversation.messages[matched.prompt.num_messages + 1 :]
        remainder = _render_after_prompt(conversation, matched, tools, renderer)
        if remainder is not None:
            extension = _cut_extension(matched, remainder, added, renderer, placeholder_expander)
            if extension is not None:
                return extension
    messages = list(conversation.messages)
    first_answer_at = None
    for turn in matched.conversation() if matched else ():
        # agents send answers back without their reasoning; the template decides how much of it is shown
        first_answer_at = turn.prompt.num_messages
        messages[first_answer_at] = turn.message
    text = renderer.render(messages, tools, first_answer_at)
    if matched is None:
        renderer.check_image_placeholders(text, messages)
        return Unencoded(Position(None, 0), EMPTY_PREFIX, text, "", renderer, placeholder_expander)
    remainder = matched.prompt.rendered.remainder_of(text)
    if remainder is None:
        renderer.disable_append_only(added)
    else:
        extension = _cut_extension(matched, remainder, added, renderer, placeholder_expander)
        if extension is not None:
            return extension
    renderer.check_image_placeholders(text, messages)
    position, prefix = _last_common_boundary(matched, text)
    return Unencoded(position, prefix, text[prefix.length :], "", renderer, placeholder_expander)


def _render_after_prompt(
    conversation: Conversation, matched: Turn, tools: list[Tool], renderer: Renderer
) -> str | None:
    """The part of the rendering that follows the matched turn's prompt, made without the history between the
    opening and that turn; None if the whole conversation must be rendered."""
    num_before = matched.prompt.num_messages
    added = conversation.messages[num_before + 1 :]
    has_doubled = num_before.bit_length() != len(conversation.messages).bit_length()
    if has_doubled:
        # now and then the whole history is rendered, to notice a template that fooled the probes
        return None
    if not renderer.is_append_only(added):
        return None
    beginning = opening_messages(conversation.messages)
    if beginning is None or len(beginning) > num_before:
        return None
    if conversation.opening_text is None:
        conversation.opening_text = renderer.render(beginning, tools)
    answered = [matched.message, *added]
    return render_addition(renderer.render, beginning, conversation.opening_text, answered, tools)


def _cut_extension(
    turn: Turn,
    remainder: str,
    added: list[Message],
    renderer: Renderer,
    placeholder_expander: ExpandPlaceholders,
) -> Unencoded | None:
    """The text that a request adds to `turn`: `remainder`, the rendering after the turn's prompt, without the
    answer. None if `remainder` does not begin with the whole answer and its end-of-turn token."""
    if any(stop in str(turn.message) for stop in renderer.stop_texts.values()):
        # the answer spells an end-of-turn token in ordinary tokens: the cut would fall inside the answer
        return None
    last_id = int(turn.ids[-1]) if len(turn.ids) else None
    suffix = renderer.suffix_after_turn(remainder, last_id)
    if suffix is None:
        return None
    answer = remainder[: len(remainder) - len(suffix)]
    if not shows_whole_answer(answer, turn.message):
        return None
    renderer.check_image_placeholders(suffix, added)
    prefix = turn.prompt.rendered.extend(answer)
    stop = "" if last_id is None else renderer.stop_texts.get(last_id, "")
    preceding_stop = stop if answer.endswith(stop) else ""
    return Unencoded(Position(turn, turn.end), prefix, suffix, preceding_stop, renderer, placeholder_expander)


def _last_common_boundary(matched: Turn, text: str) -> tuple[Position, PrefixDigest]:
    """The last turn boundary in the conversation's recorded tokens up to which `text` repeats their
    rendering: its position, and the digest of the text before it."""
    boundaries = [
        (turn.prompt.boundary, turn.prompt)
        for turn in matched.conversation()
        if turn.prompt.boundary is not None
    ]
    position = Position(None, 0)
    common = EMPTY_PREFIX
    prefix = EMPTY_PREFIX
    for boundary, prompt in sorted(boundaries, key=lambda pair: pair[0].rendered.length):
        if boundary.rendered.length > len(text):
            break
        prefix = prefix.extend(text[prefix.length : boundary.rendered.length])
        if prefix == boundary.rendered:
            position = position_at(prompt, boundary.num_tokens)
            common = prefix
    return position, common
