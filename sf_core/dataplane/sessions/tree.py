"""The tokens of one session as a tree: prompts and turns, each holding only what it adds.

Owns which tokens are shared. A path leads from the root to a node. A prompt shares the tokens of a path as
far as it repeats them, to the end of a turn or into the middle of a turn or prompt, and adds the rest.
Iterative throughout, because paths may be thousands of turns long.
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

MAX_COMPARED_TURNS = 16
"""Number of latest turns whose whole path is compared with a prompt given as ids."""

MAX_PATH_BUFFERS = 8
"""Number of paths of a session that may alternate without being put together again."""


class PrefixDigest(NamedTuple):
    """Length and checksum of a text. Both can be extended by further text without the text so far."""

    length: int
    """Number of characters."""
    crc: int

    def extend(self, text: str) -> PrefixDigest:
        return PrefixDigest(self.length + len(text), crc32(text.encode(), self.crc))

    def remainder_of(self, text: str) -> str | None:
        """The remainder of `text` after the digested text; None if `text` does not begin with that text."""
        if len(text) < self.length or EMPTY_PREFIX.extend(text[: self.length]) != self:
            return None
        return text[self.length :]


EMPTY_PREFIX = PrefixDigest(0, 0)


class LastTurnBoundary(NamedTuple):
    """The last end-of-turn token in the newly encoded part of a prompt. Tokenizers split text there before
    encoding, so a rendering that differs only after the boundary can be encoded from the boundary on."""

    num_tokens: int
    """Tokens of the whole prompt before the boundary."""
    rendered: PrefixDigest
    """Digest of the rendering before the boundary."""


@dataclass(slots=True, eq=False)
class Prompt:
    """The tokens that one request adds to those recorded before it. Each repetition of the request gets
    another turn."""

    parent: Node | None
    """Node whose path holds the prompt's tokens up to `start`."""
    start: int
    """Number of tokens before `ids`."""
    ids: Ids
    continues: Turn | None
    """The turn whose answer the new messages follow; also the parent unless the template rewrote the
    answer."""
    messages: list[Message]
    """Messages that the request adds."""
    num_messages: int
    """Number of messages of the whole request."""
    chain: bytes
    """Chain key of the whole request: of tools and all messages, or of all ids."""
    index: int
    """Position among the session's prompts."""
    rendered: PrefixDigest
    """Digest of the rendering of the whole request, with which renderings of later extensions begin."""
    boundary: LastTurnBoundary | None
    """None: `ids` hold no end-of-turn token."""
    branch_reason: str | None
    """Why the prompt begins a new branch; None if it extends the tokens of a turn, and for the first
    prompt."""
    forced: str = ""
    """Forced beginning of its answers: encoded at the end of `ids`, but no part of the rendering."""
    opening: Sequence[bytes] = ()
    """Chain keys of tools, and of tools with first message, if the conversation begins with this prompt."""
    tools: bytes = b""
    """The tools of its conversation as JSON; empty without any."""
    num_samples: int = 0
    """Number of turns begun from it."""
    path_buffers: PathBuffers = field(default_factory=lambda: PathBuffers())
    """Buffers of the whole session."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def version(self) -> int:
        """Policy version of the last sampled token up to the end of the prompt; 0 if there is none."""
        for node, end in walk_path(self, self.end):
            if isinstance(node, Turn) and end > node.start:
                return int(node.versions[end - node.start - 1])
        return 0

    def full_ids(self) -> array[int]:
        """All int32 ids of the prompt, with names in place of images (images.py)."""
        return self.path_buffers.read(self)


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
    """Whether the answer followed a grammar: its log-probs are not those of the policy alone, so it does not
    train."""
    has_continuation: bool = False

    @classmethod
    def from_generation(
        cls,
        generation: Generation,
        prompt: Prompt,
        sample: int,
        message: Message,
        finish_reason: FinishReason,
        num_unparsed_calls: int,
        index: int,
    ) -> Turn:
        """The turn of a generation, as far as it is sampled."""
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


def walk_path(node: Node | None, end: int) -> Iterator[tuple[Node, int]]:
    """The nodes that hold the first `end` tokens of a node's path, latest first, with the end of each."""
    while node is not None:
        yield node, end
        end = node.start
        node = node.parent


class PathBuffers:
    """The ids of the latest paths as flat arrays: extending a path costs a copy, not a walk over its
    turns."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Node, array[int]]] = []
        """Last node and ids of each path, the latest path last."""

    @property
    def num_bytes(self) -> int:
        return sum(4 * len(ids) for _, ids in self._buffers)

    def clear(self) -> None:
        """Discard all paths. Prompts and buffers refer to each other, so nothing would be freed otherwise."""
        self._buffers.clear()

    def read(self, node: Node) -> array[int]:
        """All ids up to the end of a node, int32."""
        missing: list[Ids] = []
        buffer: array[int] = array("i")
        for ancestor, end in walk_path(node, node.end):
            index = next((i for i, (last, _) in enumerate(self._buffers) if last is ancestor), None)
            if index is not None and end == ancestor.end:
                _, buffer = self._buffers.pop(index)
                break
            missing.append(ancestor.ids[: end - ancestor.start])
        for ids in reversed(missing):
            buffer.frombytes(ids.tobytes())
        self._buffers = [*self._buffers[-MAX_PATH_BUFFERS + 1 :], (node, buffer)]
        return buffer[:]


@dataclass(slots=True)
class Position:
    """The position after the first `offset` tokens of a node's path."""

    node: Node | None
    offset: int


@dataclass(slots=True)
class TokenTree:
    _children: dict[tuple[Node | None, int, int], list[Node]] = field(default_factory=dict)
    """Nodes by parent, start and first id."""

    def add(self, node: Node) -> None:
        if len(node.ids):
            key = (node.parent, node.start, int(node.ids[0]))
            self._children.setdefault(key, []).append(node)

    def follow(self, position: Position, ids: Ids) -> tuple[Position, Ids]:
        """Walk on from a position while recorded tokens equal `ids`; returns the end and the remaining
        ids."""
        node = position.node
        offset = position.offset
        if node is not None and offset < node.end:
            num_common = common_length(node.ids[offset - node.start :], ids)
            offset = offset + num_common
            ids = ids[num_common:]
        while len(ids):
            longest = 0
            best = node
            for child in self._children.get((node, offset, int(ids[0])), ()):
                if (num_common := common_length(child.ids, ids)) > longest:
                    longest = num_common
                    best = child
            if not longest:
                break
            node = best
            offset = offset + longest
            ids = ids[longest:]
        return Position(node, offset), ids


def position_at(node: Node | None, offset: int) -> Position:
    """The position after the first `offset` tokens of a node's path."""
    while node is not None and offset <= node.start:
        node = node.parent
    return Position(node, offset)


def last_whole_turn(position: Position) -> Turn | None:
    """The last turn that the path up to a position holds whole."""
    for node, end in walk_path(position.node, position.offset):
        if isinstance(node, Turn) and end == node.end:
            return node
    return None


def branch_reason(
    position: Position, matched: Turn | None, added: list[Message], keys: list[bytes], openings: set[bytes]
) -> str | None:
    """Why a prompt begins a new branch, if its ids leave the recorded paths at `position`; None if it extends
    the matched turn. `keys` are the chain keys of its conversation. `openings` are the chain keys of tools,
    and of tools with first message, of earlier prompts."""
    if matched is not None and (position.node is not matched or position.offset != matched.end):
        return "template_rewrote"
    if any(message["role"] == "assistant" for message in added):
        return "edited_history"
    if matched is not None:
        return "forked" if matched.has_continuation else None
    if keys[0] not in openings:
        return "other_tools"
    return "new_conversation" if keys[1] in openings else "other_system"


def branch_reason_of_ids(position: Position) -> str | None:
    """Why a prompt that was given as ids begins a new branch, if it leaves the recorded paths at `position`;
    None if it extends the tokens of a turn."""
    if position.node is None:
        return "new_conversation"
    if not isinstance(position.node, Turn):
        return "edited_history"
    if position.offset < position.node.end:
        return "retokenised"
    return "forked" if position.node.has_continuation else None


def common_length(a: Ids, b: Ids) -> int:
    num = min(len(a), len(b))
    differing = np.flatnonzero(a[:num] != b[:num])
    return int(differing[0]) if len(differing) else num


def find_repeated_turn(turns: Sequence[Turn], path_buffers: PathBuffers, ids: Ids) -> Turn | None:
    """The latest turn whose whole path the ids begin with, among the last few; most requests have one."""
    for turn in islice(reversed(turns), MAX_COMPARED_TURNS):
        # the turn's own ids first: they tell most paths apart at little cost
        ends_alike = turn.end <= len(ids) and np.array_equal(turn.ids, ids[turn.start : turn.end])
        if ends_alike and np.array_equal(path_buffers.read(turn), ids[: turn.end]):
            return turn
    return None
