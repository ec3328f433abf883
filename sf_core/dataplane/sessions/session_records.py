"""The effect of a turn's records on its session, after a restart; turn_records.py owns their form."""

from __future__ import annotations

from sf_core.dataplane.journal.journal import Record, kind_of
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.turn_records import (
    RecordedTurn,
    Tokens,
    TurnKey,
    read_prompt,
    read_turn,
)
from sf_core.types import FinishReason


def replay(session: Session, record: Record) -> None:
    """Apply a record to a session. Records of one turn come in order, those of several may interleave."""
    kind = kind_of(record)
    if kind == "overflowed":
        session.has_overflowed = True
        return
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


def _begin_turn(session: Session, record: Record, key: TurnKey) -> None:
    nth, identity = record["begun"][3:]
    for value in record["prompts"]:
        session.restore_prompt(read_prompt(value, session))
        session.take_unrecorded()
    prompt = session.prompts[key.prompt]
    session.begin_sample(prompt, nth)
    session.recorded = [known for known in session.recorded if known.may_be_asked_again(prompt, identity)]
    session.recorded.append(RecordedTurn(key, identity, prompt))


def _end_turn(session: Session, record: Record, recorded: RecordedTurn) -> None:
    turn = read_turn(record, recorded.prompt, recorded.tokens)
    session.restore_turn(turn)
    if turn.finish_reason is FinishReason.ABORT:
        session.recorded.remove(recorded)
    recorded.turn, recorded.engines, recorded.chunks = turn, turn.engine, []
