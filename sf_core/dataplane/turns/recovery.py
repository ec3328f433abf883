"""The turns of open sessions as a journal has them.

Owns what a record of a turn does to the host of its session; what it does to the session itself is in
session_records.py. Which sessions are open is known before: from other records (recovery.py), or from the
process that gives sessions out (gateways/gateway_run.py).
"""

from __future__ import annotations

from sf_core.dataplane.journal.journal import Record, kind_of
from sf_core.dataplane.sessions.session_records import replay
from sf_core.dataplane.sessions.turn_records import Tokens
from sf_core.dataplane.turns.host import SessionHost

TURN_KINDS = frozenset({"begun", "chunk", "turn", "delivered", "overflowed"})


def session_of(record: Record) -> str:
    """The session that a record of a turn is about."""
    return str(record[kind_of(record)][0])


async def replay_turn(host: SessionHost, record: Record) -> None:
    session = host.sessions.get(session_of(record))
    if session is None:
        return  # the records of a session that is over tell nothing any more
    kind = kind_of(record)
    if kind in ("chunk", "turn") and session.claim is not None:
        versions = Tokens.of(*record[kind][3:6]).versions
        if len(versions):
            host.note_started(session.claim, int(versions.min()))
    # what is on disk has the form of the journal: it needs not come back to be replayed
    if not await host.memory.append(session, record):
        replay(session, record)
        host.memory.use(session)
