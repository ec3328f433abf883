"""The tokens of sessions as compressed blocks, decoded by the browser when a session is opened.

The most informative sessions of every iteration come first, then all others, newest first, until the budget
is used. A block is zlib over: the length of its JSON (uint32), the JSON, padding to four bytes, and four
arrays with one element per token: ids int32, policy versions int32, log-probs int16 in thousandths, states
uint8. All are little-endian. sessions.js reads it.
"""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from sf_core.reports.html.session_list import SessionFacts, choose_extreme, list_sessions
from sf_core.reports.sessions import SessionSet
from storage.media import read_image
from storage.tables.schema import MULTIMODAL_SCHEMA, NOT_SAMPLED, Trajectory
from storage.tables.trajectories import to_rows

BLOCK_TOKENS = 60_000
"""Most tokens in a block of several sessions: decoding takes a browser a few hundredths of a second."""

LAST_OUTPUT = 4000
"""Characters at the end of what a command wrote that a page holds; sessions of few tokens share a block."""

GIVEN = 0
CARRIED = 1
TRAINED = 2
"""State of a token: not sampled; sampled, trained in another branch; sampled and trained here."""

MAX_MISSES = 3
"""After this many sets of sessions in a row without a fitting session, older files are not read in full."""

THUMBNAIL = 160
"""Most pixels of a side of an image in a page."""

NO_LOGPROB = 1
"""Mark of a missing log-prob; no real one is positive."""


@dataclass(slots=True)
class Embedded:
    """The sessions embedded in a page."""

    facts: list[SessionFacts] = field(default_factory=list)
    block_of: list[int] = field(default_factory=list)
    """Number of the block that holds the session, one for each of `facts`."""
    blocks: list[str] = field(default_factory=list)
    token_ids: set[int] = field(default_factory=set)
    """All token ids that occur."""
    num_all: int = 0
    """Number of sessions in the run."""

    @property
    def num_characters(self) -> int:
        return sum(map(len, self.blocks))


def embed_sessions(session_sets: Sequence[SessionSet], media: str, budget: int) -> Embedded:
    """Blocks of at most `budget` characters in total. `media`: the folder of the run's images. Raises
    ValueError if a file of sessions is missing or broken."""
    newest_first = [(session_set, list_sessions(session_set)) for session_set in reversed(session_sets)]
    embedded = Embedded(num_all=sum(len(sessions) for _, sessions in newest_first))
    preferred = {session.session_id for _, sessions in newest_first for session in choose_extreme(sessions)}
    for is_preferred in (True, False):
        misses = 0
        for session_set, sessions in newest_first:
            wanted = [session for session in sessions if (session.session_id in preferred) == is_preferred]
            # blocks do not come in every size, so a little of the budget stays unused
            if wanted and misses < MAX_MISSES and embedded.num_characters < 0.98 * budget:
                fits = _embed(embedded, session_set, wanted, media, budget)
                misses = 0 if fits else misses + 1
    return embedded


def compress(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def _embed(
    embedded: Embedded, session_set: SessionSet, sessions: Sequence[SessionFacts], media: str, budget: int
) -> bool:
    """Add the sessions that fit; returns whether any did."""
    num_before = len(embedded.blocks)
    table = session_set.read(MULTIMODAL_SCHEMA.names)
    wanted = pa.array([session.session_id for session in sessions])
    rows: dict[str, list[Trajectory]] = {session.session_id: [] for session in sessions}
    for row in to_rows(table.filter(pc.is_in(table["session_id"], wanted))):
        rows[row.session_id].append(row)
    for part in _split(sessions):
        branches = [rows[session.session_id] for session in part]
        block = compress(encode_block(branches, media))
        if embedded.num_characters + len(block) > budget:
            break
        embedded.facts += part
        embedded.block_of += [len(embedded.blocks)] * len(part)
        embedded.blocks.append(block)
        for row in chain.from_iterable(branches):
            embedded.token_ids.update(np.unique(row.token_ids).tolist())
    return len(embedded.blocks) > num_before


def _split(sessions: Sequence[SessionFacts]) -> Iterator[list[SessionFacts]]:
    part: list[SessionFacts] = []
    for session in sessions:
        if part and sum(other.tokens for other in part) + session.tokens > BLOCK_TOKENS:
            yield part
            part = []
        part.append(session)
    if part:
        yield part


def encode_block(sessions: Sequence[Sequence[Trajectory]], media: str) -> bytes:
    """Block of the branches of some sessions, each without the prefix that it shares with its parent."""
    described = []
    own = []
    reached = 0
    for branches in sessions:
        first = branches[0]
        ids = {row.branch_id for row in branches}
        entries = []
        for row in branches:
            parent = row.parent_branch_id if row.parent_branch_id in ids else None
            shared = row.shared_prefix if parent is not None else 0
            entries.append(_describe_branch(row, parent, shared, reached))
            own.append((row, slice(shared, None)))
            reached += len(row.token_ids) - shared
        described.append(
            {
                "id": first.session_id,
                "seconds": round(max(0.0, first.finished_at - first.started_at), 3),
                "reward_parts": dict(first.reward_parts),
                "output": None if first.output is None else first.output[-LAST_OUTPUT:],
                "branches": entries,
                "pictures": {
                    span.sha256: make_thumbnail(media, span.sha256) for row in branches for span in row.images
                },
            }
        )
    head = orjson.dumps(described)
    head += b" " * (-len(head) % 4)
    arrays = [
        np.concatenate([row.token_ids[span] for row, span in own]).astype("<i4"),
        np.concatenate([row.policy_versions[span] for row, span in own]).astype("<i4"),
        np.concatenate([_in_thousandths(row.logprobs[span]) for row, span in own]).astype("<i2"),
        np.concatenate([_token_states(row)[span] for row, span in own]).astype("u1"),
    ]
    return b"".join([struct.pack("<I", len(head)), head, *(array.tobytes() for array in arrays)])


def _describe_branch(row: Trajectory, parent: str | None, shared: int, begin: int) -> dict[str, Any]:
    """`begin` is the index in the block of the branch's first token that is not its parent's."""
    return {
        "id": row.branch_id,
        "parent": parent,
        "shared": shared,
        "begin": begin,
        "length": len(row.token_ids) - shared,
        "interruptions": row.interruptions,
        "turns": [tuple(turn) for turn in row.turns],
        "images": [(span.start, span.length, span.sha256) for span in row.images],
    }


@lru_cache(maxsize=4096)
def make_thumbnail(media: str, sha256: str) -> str | None:
    """The image as a small data URL; None if its file is missing."""
    try:
        image = Image.open(io.BytesIO(read_image(media, sha256)))
    except ValueError:
        return None
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, "WEBP", quality=60)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()


def _in_thousandths(logprobs: np.ndarray) -> np.ndarray:
    whole = np.clip(np.round(logprobs * 1000), -32768, 0)
    return np.where(np.isnan(logprobs), NO_LOGPROB, np.nan_to_num(whole))


def _token_states(row: Trajectory) -> np.ndarray:
    sampled = row.policy_versions != NOT_SAMPLED
    return np.where(row.loss_mask, TRAINED, np.where(sampled, CARRIED, GIVEN))
