"""Replays the turns of open sessions from a journal.

Owns the effect of a turn's record on the host of its session; sessions/session_records.py owns the effect on
the session itself. Which sessions are open is known before: from other records (runs/recovery.py), or from
the hub, which gives sessions out (sharding/gateway_run.py).
"""

from __future__ import annotations

from sf_core.dataplane.journal.journal import Record, kind_of
from sf_core.dataplane.sessions.session_records import replay
from sf_core.dataplane.sessions.turn_records import Tokens
from sf_core.dataplane.turns.host import TurnHost

TURN_KINDS = frozenset({"begun", "chunk", "turn", "delivered", "overflowed"})


def session_of(record: Record) -> str:
    """The session that a record of a turn is about."""
    return str(record[kind_of(record)][0])


def replay_turn(host: TurnHost, record: Record) -> None:
    session = host.sessions.get(session_of(record))
    if session is None:
        return  # the session is over
    kind = kind_of(record)
    if kind in ("chunk", "turn") and session.claim is not None:
        versions = Tokens.of(*record[kind][3:6]).versions
        if len(versions):
            host.note_started(session.claim, int(versions.min()))
    replay(session, record)
    host.memory.weigh(session)
