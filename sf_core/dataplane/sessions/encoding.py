"""The tokens of a request: recorded ones as far as they match its rendering, newly encoded ones after them.
Rendering and encoding are apart, because a long text is encoded in a thread (large.py).

Owns where encoding begins: at a special token (docs/concepts/token-truth.md), never inside recorded tokens.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from sf_core.dataplane.chat.messages import Message
from sf_core.dataplane.chat.renderer import Renderer, TooManyTokensError, shows
from sf_core.dataplane.chat.template_probes import opening, render_addition
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.errors import ContextOverflow
from sf_core.dataplane.sessions.identity import Conversation
from sf_core.dataplane.sessions.pictures import Namer, Pictures
from sf_core.dataplane.sessions.tree import NO_TEXT, Seam, TextMark, TreePosition, Turn, place_at
from sf_core.types import Ids


class Encoded(NamedTuple):
    place: TreePosition
    """Where the recorded tokens of the request end."""
    ids: Ids
    text: TextMark
    seam: Seam | None


class Unencoded(NamedTuple):
    """What is not recorded of a request, as text."""

    place: TreePosition
    """Where the recorded tokens of the request end."""
    mark: TextMark
    """The rendering up to there."""
    text: str
    after: str
    """The special token before it; empty: there is none."""
    renderer: Renderer
    name: Namer

    def check_length(self, most: int) -> None:
        """Raises ContextOverflow if the request certainly has as many tokens as this. Nothing is encoded."""
        fewest = self.renderer.least_tokens(self.text, most - self.place.at)
        if self.place.at + fewest >= most:
            raise ContextOverflow(self.place.at + fewest, most)

    def encode(self, forced: str = "", most: float = inf) -> Encoded:
        """`forced` is a text behind it that is no part of the rendering. Raises ContextOverflow if the
        request has as many tokens as `most`."""
        renderer = self.renderer
        text = self.text
        mark = self.mark
        try:
            ids = self.name(renderer.encode(text, self.after, most - self.place.at))
        except TooManyTokensError as error:
            raise ContextOverflow(self.place.at + error.num_tokens, int(most)) from None
        seam = None
        if (last_stop := renderer.last_stop(text, ids)) is not None:
            at, num_tokens = last_stop
            seam = Seam(self.place.at + num_tokens, mark.extend(text[:at]))
        whole = mark.extend(text) if seam is None else seam.text.extend(text[at:])
        if forced:
            ids = np.concatenate([ids, renderer.encode_behind_text(forced)])
        if (num_tokens := self.place.at + len(ids)) >= most:
            raise ContextOverflow(num_tokens, int(most))
        return Encoded(self.place, ids, whole, seam)


class Draft(NamedTuple):
    """A request that is to become a prompt."""

    conversation: Conversation
    matched: Turn | None
    """The deepest recorded turn with whose conversation it begins."""
    messages: list[Message]
    """Those that it adds."""
    text: Unencoded
    forced: str
    tools: bytes
    """As in Prompt."""
    num_bytes: int
    """Memory of its messages."""

    def encode(self, most: float = inf) -> Encoded:
        """Raises ContextOverflow if it has as many tokens as `most`."""
        return self.text.encode(self.forced, most)


def render_request(
    conversation: Conversation,
    matched: Turn | None,
    tools: list[Tool],
    renderer: Renderer,
    pictures: Pictures,
) -> Unencoded:
    """Render what is not recorded of a request. `matched` is the deepest recorded turn whose conversation
    this one begins with. Raises jinja2.TemplateError."""
    namer = pictures.namer(conversation.messages, renderer.sight)
    added = list[Message]()
    if matched is not None:
        added = conversation.messages[matched.prompt.num_messages + 1 :]
        rest = _render_after_prompt(conversation, matched, tools, renderer)
        if rest is not None and (extension := _extend(matched, rest, added, renderer, namer)):
            return extension
    messages = list(conversation.messages)
    num_first = None
    for turn in matched.conversation() if matched else ():
        # agents send answers back without their reasoning; the template decides how much of it is shown
        num_first = turn.prompt.num_messages
        messages[num_first] = turn.message
    text = renderer.render(messages, tools, num_first)
    if matched is None:
        renderer.check_shown(text, messages)
        return Unencoded(TreePosition(None, 0), NO_TEXT, text, "", renderer, namer)
    rest = matched.prompt.text.rest_of(text)
    if rest is None:
        renderer.note_rewrite(added)
    elif extension := _extend(matched, rest, added, renderer, namer):
        return extension
    renderer.check_shown(text, messages)
    place, mark = _last_common_seam(matched, text)
    return Unencoded(place, mark, text[mark.length :], "", renderer, namer)


def _render_after_prompt(
    conversation: Conversation, matched: Turn, tools: list[Tool], renderer: Renderer
) -> str | None:
    """The rendering after that of the matched turn's prompt, made without the history between the opening
    and that turn; None if the whole conversation must be rendered."""
    before = matched.prompt.num_messages
    added = conversation.messages[before + 1 :]
    if before.bit_length() != len(conversation.messages).bit_length():
        # whenever the history doubles all of it is rendered, to notice a template that fooled the probes
        return None
    if not renderer.is_append_only(added):
        return None
    beginning = opening(conversation.messages)
    if beginning is None or len(beginning) > before:
        return None
    if conversation.opening_text is None:
        conversation.opening_text = renderer.render(beginning, tools)
    answered = [matched.message, *added]
    return render_addition(renderer.render, beginning, conversation.opening_text, answered, tools)


def _extend(
    turn: Turn, rest: str, added: list[Message], renderer: Renderer, namer: Namer
) -> Unencoded | None:
    """The text of a request that extends `turn` by `added`, with `rest` rendered after the turn's prompt;
    None if `rest` does not begin with the whole answer and its end-of-turn token."""
    if any(stop in str(turn.message) for stop in renderer.stop_texts.values()):
        # the answer spells an end-of-turn token in ordinary tokens: the cut would fall inside the answer
        return None
    last_id = int(turn.ids[-1]) if len(turn.ids) else None
    suffix = renderer.suffix_after_turn(rest, last_id)
    if suffix is None:
        return None
    shown = rest[: len(rest) - len(suffix)]
    if not shows(shown, turn.message):
        return None
    renderer.check_shown(suffix, added)
    mark = turn.prompt.text.extend(shown)
    stop = "" if last_id is None else renderer.stop_texts.get(last_id, "")
    after = stop if shown.endswith(stop) else ""
    return Unencoded(TreePosition(turn, turn.end), mark, suffix, after, renderer, namer)


def _last_common_seam(matched: Turn, text: str) -> tuple[TreePosition, TextMark]:
    """The last seam in the conversation's recorded tokens up to which their text is a prefix of this one."""
    prompts = [turn.prompt for turn in matched.conversation() if turn.prompt.seam is not None]
    place = TreePosition(None, 0)
    last = NO_TEXT
    mark = NO_TEXT
    for prompt in sorted(prompts, key=lambda prompt: prompt.seam.text.length if prompt.seam else 0):
        assert prompt.seam is not None
        if prompt.seam.text.length > len(text):
            break
        mark = mark.extend(text[mark.length : prompt.seam.text.length])
        if mark == prompt.seam.text:
            place = place_at(prompt, prompt.seam.num_tokens)
            last = mark
    return place, last
