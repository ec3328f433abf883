"""A session's turns as records, and back: for restarts, and for sessions on disk (journal/memory.py).

Owns the effect of each record on a session; turn_records.py owns the form of records.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from sf_core.dataplane.journal.journal import Record, kind_of
from sf_core.dataplane.sessions.tree import Node, Prompt, Turn
from sf_core.dataplane.sessions.turn_records import (
    RecordedTurn,
    Tokens,
    TurnKey,
    begun_record,
    chunk_record,
    delivered_record,
    prompt_record,
    read_prompt,
    read_turn,
    turn_record,
    unanswered_record,
)
from sf_core.types import FinishReason

if TYPE_CHECKING:
    from sf_core.dataplane.sessions.session import Session

COUNTED = -1
"""Replaces the number of a sample in its request if the session's counters include it already."""

NOBODY = b""
"""Identity of a request that cannot come again."""


def records_of(session: Session) -> Iterator[Record]:
    """Records of all turns of a session that has none in flight, in order. Lists that the session goes on to
    change are read before this returns, so that the records may be iterated in another thread."""
    may_come_again = {known.turn: known for known in session.recorded if known.turn is not None}
    ended = _records(session.session_id, [*session.nodes], [*session.abandoned], may_come_again)
    unfinished = [
        record
        for known in session.recorded
        if known.turn is None
        for record in (
            begun_record(known.key, COUNTED, known.identity, []),
            chunk_record(known.key, known.tokens, known.engines),
        )
    ]
    return chain(ended, unfinished)


def _records(
    session_id: str, nodes: list[Node], abandoned: list[Turn], may_come_again: dict[Turn, RecordedTurn]
) -> Iterator[Record]:
    for node in nodes:
        if isinstance(node, Prompt):
            yield prompt_record(node)
        else:
            yield from _turn_records(session_id, node, may_come_again.get(node))
    for turn in abandoned:
        yield from _turn_records(session_id, turn, None)


def _turn_records(session_id: str, turn: Turn, known: RecordedTurn | None) -> Iterator[Record]:
    key = TurnKey(session_id, turn.prompt.index, turn.sample)
    yield begun_record(key, COUNTED, NOBODY if known is None else known.identity, [])
    yield turn_record(key, turn, 0)
    if known is not None and known.delivered:
        yield delivered_record(key)
    if known is not None and known.unanswered:
        yield unanswered_record(key)


def replay(session: Session, record: Record) -> None:
    """Apply a record to a session. Records of one turn come in order, those of several may interleave."""
    kind = kind_of(record)
    if kind == "prompt":
        return session.restore_prompt(read_prompt(record["prompt"], session))
    if kind == "overflowed":
        session.has_overflowed = True
        return None
    key = TurnKey(*record[kind][:3])
    if kind == "begun":
        return _begin_turn(session, record, key)
    recorded = next((recorded for recorded in reversed(session.recorded) if recorded.key == key), None)
    if recorded is None:
        return  # a later turn extended it before its delivery was written
    match kind:
        case "chunk":
            *tokens, recorded.engines = record["chunk"][3:]
            recorded.chunks.append(Tokens.of(*tokens))
        case "turn":
            _end_turn(session, record, recorded)
        case "delivered":
            recorded.delivered = True
        case "unanswered":
            recorded.unanswered = True


def _begin_turn(session: Session, record: Record, key: TurnKey) -> None:
    nth, identity = record["begun"][3:]
    for value in record["prompts"]:
        session.restore_prompt(read_prompt(value, session))
        session.take_unrecorded()
    prompt = session.prompts[key.prompt]
    session.begin_sample(prompt, nth)
    if nth != COUNTED:
        session.recorded = [known for known in session.recorded if known.may_be_asked_again(prompt, identity)]
    session.recorded.append(RecordedTurn(key, identity, prompt))


def _end_turn(session: Session, record: Record, recorded: RecordedTurn) -> None:
    turn = read_turn(record, recorded.prompt, recorded.tokens)
    session.restore_turn(turn)
    if turn.finish_reason is FinishReason.ABORT or recorded.identity == NOBODY:
        session.recorded.remove(recorded)
    recorded.turn, recorded.engines, recorded.chunks = turn, turn.engine, []
