"""The turns of open sessions as a journal has them.

Owns what every record of a turn does to its session. Which sessions are open is known before: from other
records (recovery.py), or from the process that gives sessions out (gateways/process.py).
"""

from __future__ import annotations

from collections import defaultdict

from sf_core.dataplane.host import SessionHost
from sf_core.dataplane.journal import Record
from sf_core.dataplane.records import kind_of
from sf_core.dataplane.session import Session
from sf_core.dataplane.turn_records import RecordedTurn, Tokens, TurnKey, read_prompt, read_turn
from sf_core.types import FinishReason

TURN_KINDS = frozenset({"begun", "chunk", "turn", "delivered"})


def session_of(record: Record) -> str:
    """The session that a record of a turn is about."""
    return str(record[kind_of(record)][0])


class TurnReplay:
    """Brings the sessions of a host to where the records of their turns end."""

    def __init__(self, host: SessionHost) -> None:
        self._host = host
        self._turns: dict[TurnKey, RecordedTurn] = {}
        """Those whose end has not been read yet."""
        self._chunks: defaultdict[TurnKey, list[Tokens]] = defaultdict(list)

    def apply(self, record: Record) -> None:
        kind = kind_of(record)
        key = TurnKey(*record[kind][:3])
        # the records of a session that is over tell nothing any more
        if (session := self._host.sessions.get(key.session_id)) is None:
            return
        match kind:
            case "begun":
                self._begin(record, key, session)
            case "chunk":
                *tokens, engines = record["chunk"][3:]
                self._chunks[key].append(Tokens.of(*tokens))
                self._turns[key].engines = engines
            case "turn":
                self._end(record, key, session)
            case _:
                for recorded in session.recorded:
                    recorded.delivered |= recorded.key == key

    def finish(self) -> None:
        """No more records: what is left of turns that did not end is what their requests go on from."""
        for key, recorded in self._turns.items():
            recorded.tokens = self._tokens_of(key)
            self._note_versions(key, recorded.tokens)
        for session in self._host.sessions.values():
            session.recorded = _worth_keeping(session.recorded)

    def _begin(self, record: Record, key: TurnKey, session: Session) -> None:
        for value in record["prompts"]:
            session.restore_prompt(read_prompt(value, session))
        prompt = session.prompts[key.prompt]
        nth, identity = record["begun"][3:]
        session.begin_sample(prompt, nth)
        recorded = self._turns[key] = RecordedTurn(key, identity, prompt)
        session.recorded.append(recorded)

    def _end(self, record: Record, key: TurnKey, session: Session) -> None:
        recorded = self._turns.pop(key)
        turn = read_turn(record, recorded.prompt, self._tokens_of(key))
        session.restore_turn(turn)
        recorded.turn, recorded.engines = turn, turn.engine
        recorded.tokens = Tokens(turn.ids, turn.logprobs, turn.versions)
        if turn.finish_reason is FinishReason.ABORT:
            session.recorded.remove(recorded)
        else:
            self._note_versions(key, recorded.tokens)

    def _tokens_of(self, key: TurnKey) -> Tokens:
        return Tokens.joined(self._chunks.pop(key, []))

    def _note_versions(self, key: TurnKey, tokens: Tokens) -> None:
        session = self._host.sessions.get(key.session_id)
        if session is not None and session.claim is not None and len(tokens.versions):
            self._host.note_started(session.claim, int(tokens.versions.min()))


def _worth_keeping(recorded: list[RecordedTurn]) -> list[RecordedTurn]:
    """Turns whose request may come again: who extended an answer has got it, and of equal requests only the
    last one may still lack its answer."""
    open_ended = [r for r in recorded if r.turn is None or not r.turn.has_continuation]
    latest = {r.identity: r for r in open_ended if r.turn is not None}
    return [r for r in open_ended if r.turn is None or latest[r.identity] is r]
