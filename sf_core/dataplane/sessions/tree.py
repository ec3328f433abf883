"""The tokens of one session as a tree: prompts and turns, each holding only what it adds.

Owns which tokens are shared. A prompt begins with the tokens of a recorded line as far as it repeats them, be
it to the end of a turn, into the middle of one or of another prompt, and adds the rest. Iterative throughout:
lines may be thousands of turns long.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import numpy as np

from sf_core.dataplane.chat.messages import Message
from sf_core.types import FinishReason, Ids, Sampling

NUM_TAPES = 8
"""Lines of a session that may go on in turns without being put together anew."""


class TextMark(NamedTuple):
    """A text, known by its length and checksum; both follow from those of a beginning and the rest."""

    length: int
    """In characters."""
    crc: int

    def extended(self, text: str) -> TextMark:
        return TextMark(self.length + len(text), crc32(text.encode(), self.crc))

    def rest_of(self, text: str) -> str | None:
        """What follows this text in another; None if that one does not begin with it."""
        if len(text) < self.length or NO_TEXT.extended(text[: self.length]) != self:
            return None
        return text[self.length :]


NO_TEXT = TextMark(0, 0)


class Seam(NamedTuple):
    """The last end-of-turn token in what a prompt encodes. Text is split there before it is encoded, so
    whatever is rendered otherwise behind it can be encoded from it on."""

    num_tokens: int
    """Of the whole prompt, before it."""
    text: TextMark
    """Of the rendering, before it."""


@dataclass(slots=True, eq=False)
class Prompt:
    """What one request adds to the tokens recorded before it. Asked again, it gets another turn."""

    parent: Node | None
    """Whose line of tokens it begins with; all of it up to `start`."""
    start: int
    """Tokens before `ids`."""
    ids: Ids
    continues: Turn | None
    """The answer that its new messages follow; its tokens are the parent unless the template rewrote it."""
    messages: list[Message]
    """Those it adds."""
    num_messages: int
    """Of the whole request."""
    chain: bytes
    """Identity of the whole request: tools and all messages, or all ids."""
    index: int
    """Position among the session's prompts."""
    text: TextMark
    """The rendering of the whole request, which any later extension begins with."""
    seam: Seam | None
    branch_reason: str | None
    """Why it is no extension of the session's tokens so far; None if it is, and for the first."""
    forced: str = ""
    """How its answers begin: text at the end of `ids` that is no part of the rendering."""
    opening: Sequence[bytes] = ()
    """Identities of the tools, and of tools and first message, where its conversation begins here."""
    tools: bytes = b""
    """The tools of its conversation as JSON; empty without any."""
    num_samples: int = 0
    """Turns begun from it."""
    tapes: Tapes = field(default_factory=lambda: Tapes())
    """The session's."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def version(self) -> int:
        """Policy version of the last sampled token before it; 0 if there is none."""
        for node, end in line(self, self.end):
            if isinstance(node, Turn) and end > node.start:
                return int(node.versions[end - node.start - 1])
        return 0

    def full_ids(self) -> array[int]:
        """All int32 ids of the prompt."""
        return self.tapes.read(self)


@dataclass(slots=True, eq=False)
class Turn:
    """What was sampled for a prompt."""

    prompt: Prompt
    sample: int
    """Number among the turns begun from its prompt."""
    ids: Ids
    logprobs: np.ndarray
    """float32, one per token."""
    versions: np.ndarray
    """int32, one per token."""
    message: Message
    finish_reason: FinishReason
    engine: str
    sampling: Sampling
    interruptions: int
    num_unparsed_calls: int
    index: int
    """Position among the session's turns; of an abandoned one, among those."""
    has_continuation: bool = False

    @property
    def start(self) -> int:
        return self.prompt.end

    @property
    def end(self) -> int:
        return self.prompt.end + len(self.ids)

    @property
    def parent(self) -> Prompt:
        return self.prompt

    def conversation(self) -> Iterator[Turn]:
        """This turn and those its messages follow, latest first."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.prompt.continues


Node = Prompt | Turn


def line(node: Node | None, end: int) -> Iterator[tuple[Node, int]]:
    """The nodes that hold the first `end` tokens up to and with `node`, latest first; each with the position
    where its part ends."""
    while node is not None:
        yield node, end
        end = node.start
        node = node.parent


class Tapes:
    """The latest lines laid out flat: a prompt that extends one costs a copy, not a walk over its turns."""

    def __init__(self) -> None:
        self._tapes: list[tuple[Node, array[int]]] = []
        """Each with the node it ends with; the latest last."""

    @property
    def num_bytes(self) -> int:
        return sum(4 * len(tape) for _, tape in self._tapes)

    def clear(self) -> None:
        """Forget all; prompts hold the tapes, which hold prompts: nothing of a session would be freed."""
        self._tapes.clear()

    def read(self, node: Node) -> array[int]:
        """All ids up to the end of a node, int32."""
        parts: list[Ids] = []
        tape: array[int] = array("i")
        for part, end in line(node, node.end):
            kept = next((i for i, (tip, _) in enumerate(self._tapes) if tip is part), None)
            if kept is not None and end == part.end:
                tape = self._tapes.pop(kept)[1]
                break
            parts.append(part.ids[: end - part.start])
        for ids in reversed(parts):
            tape.frombytes(ids.tobytes())
        self._tapes = [*self._tapes[-NUM_TAPES + 1 :], (node, tape)]
        return tape[:]


@dataclass(slots=True)
class Place:
    """Behind the first `at` tokens of the line of a node."""

    node: Node | None
    at: int


@dataclass(slots=True)
class TokenTree:
    nodes: list[Node] = field(default_factory=list)
    """In the order in which they were added."""
    _children: dict[tuple[Node | None, int, int], list[Node]] = field(default_factory=dict)
    """By the place they begin at and their first id."""

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        if len(node.ids):
            key = (node.parent, node.start, int(node.ids[0]))
            self._children.setdefault(key, []).append(node)

    def follow(self, place: Place, ids: Ids) -> tuple[Place, Ids]:
        """Walk on from a place as far as recorded tokens repeat these ids: where that ends, and the rest."""
        node, at = place.node, place.at
        if node is not None and at < node.end:
            num_common = common_length(node.ids[at - node.start :], ids)
            at, ids = at + num_common, ids[num_common:]
        while len(ids):
            longest, best = 0, node
            for child in self._children.get((node, at, int(ids[0])), ()):
                if (num_common := common_length(child.ids, ids)) > longest:
                    longest, best = num_common, child
            if not longest:
                break
            node, at, ids = best, at + longest, ids[longest:]
        return Place(node, at), ids


def place_at(node: Node | None, at: int) -> Place:
    """The place behind the first `at` tokens of a node's line."""
    while node is not None and at <= node.start:
        node = node.parent
    return Place(node, at)


def last_whole_turn(place: Place) -> Turn | None:
    """The last turn before a place whose tokens are all on its line."""
    for node, end in line(place.node, place.at):
        if isinstance(node, Turn) and end == node.end:
            return node
    return None


def common_length(a: Ids, b: Ids) -> int:
    num = min(len(a), len(b))
    differing = np.flatnonzero(a[:num] != b[:num])
    return int(differing[0]) if len(differing) else num
