"""The tokens of one session as a tree: prompts and turns, each holding only what it adds.

Owns which tokens are shared. A line is the path from the root to a node. A prompt shares the tokens of a line
as far as it repeats them, to the end of a turn or into the middle of a turn or prompt, and adds the rest.
Iterative throughout, because lines may be thousands of turns long.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple
from zlib import crc32

import numpy as np

from sf_core.dataplane.chat.messages import Message, size_of
from sf_core.dataplane.routing.generation import Generation
from sf_core.types import FinishReason, Ids, Sampling

TURN_BYTES = 1200
"""Measured memory of a turn, without tokens and texts."""

SAMPLED_BYTES = 4 + 4 + 4
"""Memory of the id, log-prob and version of a sampled token."""

NUM_TIPS = 16
"""Number of latest turns whose whole line is compared with a prompt given as ids."""

NUM_TAPES = 8
"""Number of lines of a session that may alternate without being put together again."""


class TextMark(NamedTuple):
    """Length and checksum of a text; both can be extended by further text without the text so far."""

    length: int
    """Number of characters."""
    crc: int

    def extend(self, text: str) -> TextMark:
        return TextMark(self.length + len(text), crc32(text.encode(), self.crc))

    def rest_of(self, text: str) -> str | None:
        """The rest of `text` after this one; None if `text` does not begin with this one."""
        if len(text) < self.length or NO_TEXT.extend(text[: self.length]) != self:
            return None
        return text[self.length :]


NO_TEXT = TextMark(0, 0)


class Seam(NamedTuple):
    """The last end-of-turn token in what a prompt encodes. Tokenizers split text there before encoding, so a
    rendering that differs only behind the seam can be encoded from the seam on."""

    num_tokens: int
    """Tokens of the whole prompt before the seam."""
    text: TextMark
    """The rendering before the seam."""


@dataclass(slots=True, eq=False)
class Prompt:
    """What one request adds to the tokens recorded before it. Each time it is asked it gets another turn."""

    parent: Node | None
    """Node whose line holds the prompt's tokens up to `start`."""
    start: int
    """Number of tokens before `ids`."""
    ids: Ids
    continues: Turn | None
    """The turn whose answer its new messages follow; also the parent unless the template rewrote it."""
    messages: list[Message]
    """Messages that it adds."""
    num_messages: int
    """Number of messages of the whole request."""
    chain: bytes
    """Identity of the whole request: tools and all messages, or all ids."""
    index: int
    """Position among the session's prompts."""
    text: TextMark
    """The rendering of the whole request, with which renderings of later extensions begin."""
    seam: Seam | None
    branch_reason: str | None
    """Why it begins a new branch; None if it extends the tokens of a turn, and for the first prompt."""
    forced: str = ""
    """Forced beginning of its answers: encoded at the end of `ids`, but no part of the rendering."""
    opening: Sequence[bytes] = ()
    """Chain keys of tools, and of tools with first message, if its conversation begins here."""
    tools: bytes = b""
    """The tools of its conversation as JSON; empty without any."""
    num_samples: int = 0
    """Number of turns begun from it."""
    tapes: Tapes = field(default_factory=lambda: Tapes())
    """Tapes of the whole session."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def version(self) -> int:
        """Policy version of the last sampled token before it; 0 if there is none."""
        for node, end in walk_line(self, self.end):
            if isinstance(node, Turn) and end > node.start:
                return int(node.versions[end - node.start - 1])
        return 0

    def full_ids(self) -> array[int]:
        """All int32 ids of the prompt, with names in place of pictures (pictures.py)."""
        return self.tapes.read(self)


@dataclass(slots=True, eq=False)
class Turn:
    """A sampled answer to a prompt."""

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
    """Position among the session's turns, or among its abandoned turns."""
    constrained: bool = False
    """It followed a grammar, so that its log-probs are not those of the policy alone: it does not train."""
    has_continuation: bool = False

    @classmethod
    def of(
        cls,
        generation: Generation,
        prompt: Prompt,
        sample: int,
        message: Message,
        finish_reason: FinishReason,
        num_unparsed_calls: int,
        index: int,
    ) -> Turn:
        """What a generation has sampled."""
        return cls(
            prompt,
            sample,
            np.array(generation.token_ids, dtype=np.int32),
            np.array(generation.logprobs, dtype=np.float32),
            np.array(generation.versions, dtype=np.int32),
            message,
            finish_reason,
            ",".join(generation.engines),
            generation.request.sampling,
            generation.interruptions,
            num_unparsed_calls,
            index,
            bool(generation.request.grammar),
        )

    @property
    def start(self) -> int:
        return self.prompt.end

    @property
    def end(self) -> int:
        return self.prompt.end + len(self.ids)

    @property
    def parent(self) -> Prompt:
        return self.prompt

    @property
    def num_bytes(self) -> int:
        """Approximate memory in bytes."""
        return TURN_BYTES + SAMPLED_BYTES * len(self.ids) + size_of(self.message)

    def conversation(self) -> Iterator[Turn]:
        """This turn and the earlier turns of its conversation, latest first."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.prompt.continues


Node = Prompt | Turn


def walk_line(node: Node | None, end: int) -> Iterator[tuple[Node, int]]:
    """The nodes that hold the first `end` tokens of a node's line, latest first, with the end of each."""
    while node is not None:
        yield node, end
        end = node.start
        node = node.parent


class Tapes:
    """The ids of the latest lines as flat arrays: extending one costs a copy, not a walk over its turns."""

    def __init__(self) -> None:
        self._tapes: list[tuple[Node, array[int]]] = []
        """Last node and ids of each line, the latest line last."""

    @property
    def num_bytes(self) -> int:
        return sum(4 * len(tape) for _, tape in self._tapes)

    def clear(self) -> None:
        """Forget all lines. Prompts and tapes refer to each other, so nothing would be freed otherwise."""
        self._tapes.clear()

    def read(self, node: Node) -> array[int]:
        """All ids up to the end of a node, int32."""
        parts: list[Ids] = []
        tape: array[int] = array("i")
        for part, end in walk_line(node, node.end):
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
class TreePosition:
    """The position after the first `at` tokens of a node's line."""

    node: Node | None
    at: int


@dataclass(slots=True)
class TokenTree:
    _children: dict[tuple[Node | None, int, int], list[Node]] = field(default_factory=dict)
    """Nodes by parent, start and first id."""

    def add(self, node: Node) -> None:
        if len(node.ids):
            key = (node.parent, node.start, int(node.ids[0]))
            self._children.setdefault(key, []).append(node)

    def follow(self, place: TreePosition, ids: Ids) -> tuple[TreePosition, Ids]:
        """Walk on from a place while recorded tokens equal `ids`; returns the end and the remaining ids."""
        node = place.node
        at = place.at
        if node is not None and at < node.end:
            num_common = common_length(node.ids[at - node.start :], ids)
            at = at + num_common
            ids = ids[num_common:]
        while len(ids):
            longest = 0
            best = node
            for child in self._children.get((node, at, int(ids[0])), ()):
                if (num_common := common_length(child.ids, ids)) > longest:
                    longest = num_common
                    best = child
            if not longest:
                break
            node = best
            at = at + longest
            ids = ids[longest:]
        return TreePosition(node, at), ids


def place_at(node: Node | None, at: int) -> TreePosition:
    """The place behind the first `at` tokens of a node's line."""
    while node is not None and at <= node.start:
        node = node.parent
    return TreePosition(node, at)


def last_whole_turn(place: TreePosition) -> Turn | None:
    """The last turn that the line up to a place holds whole."""
    for node, end in walk_line(place.node, place.at):
        if isinstance(node, Turn) and end == node.end:
            return node
    return None


def branch_reason(
    place: TreePosition, matched: Turn | None, added: list[Message], keys: list[bytes], openings: set[bytes]
) -> str | None:
    """Why a prompt begins a new branch whose ids leave the recorded lines at a place; None if it extends the
    turn that it matched. `keys` are the chain keys of its conversation. `openings` are those of tools, and of
    tools with first message, seen before."""
    if matched is not None and (place.node is not matched or place.at != matched.end):
        return "template_rewrote"
    if any(message["role"] == "assistant" for message in added):
        return "edited_history"
    if matched is not None:
        return "forked" if matched.has_continuation else None
    if keys[0] not in openings:
        return "other_tools"
    return "new_conversation" if keys[1] in openings else "other_system"


def branch_reason_of_ids(place: TreePosition) -> str | None:
    """Why a prompt begins a new branch that was given as ids and leaves the recorded lines at a place; None
    if it extends the tokens of a turn."""
    if place.node is None:
        return "new_conversation"
    if not isinstance(place.node, Turn):
        return "edited_history"
    if place.at < place.node.end:
        return "retokenised"
    return "forked" if place.node.has_continuation else None


def common_length(a: Ids, b: Ids) -> int:
    num = min(len(a), len(b))
    differing = np.flatnonzero(a[:num] != b[:num])
    return int(differing[0]) if len(differing) else num


def find_repeated(turns: Sequence[Turn], tapes: Tapes, ids: Ids) -> Turn | None:
    """One of the latest turns whose whole line the ids begin with; most requests have one."""
    for turn in islice(reversed(turns), NUM_TIPS):
        # the turn's own ids first: they tell most lines apart at little cost
        ends_alike = turn.end <= len(ids) and np.array_equal(turn.ids, ids[turn.start : turn.end])
        if ends_alike and np.array_equal(tapes.read(turn), ids[: turn.end]):
            return turn
    return None
