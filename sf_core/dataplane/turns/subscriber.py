"""A client of a turn, which gets all pieces of the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.turns.answer import Pieces
from sf_core.dataplane.turns.live_turn import LiveTurn


class Subscriber:
    """A request that waits for a turn and gets all pieces of its answer."""

    def __init__(self, turn: LiveTurn) -> None:
        self.turn = turn
        self._is_gone = False
        turn.subscribe()

    async def pieces(self) -> AsyncIterator[Pieces]:
        """All pieces of the turn's answer. Raises what the turn raised."""
        turn = self.turn
        num_sent = 0
        while True:
            while num_sent < len(turn.pieces):
                num_sent += 1
                yield turn.pieces[num_sent - 1]
            if self._is_gone:
                raise ApiError(400, "The client went away before its answer was complete.")
            if turn.error is not None:
                raise turn.error
            if turn.is_over:
                return
            turn.check()
            await turn.changed.wait()

    def leave(self, has_answer: bool = False) -> None:
        """End the subscription: the client has its answer, or is gone. An unfinished turn goes on for a
        while, for a retry."""
        if not self._is_gone:
            self._is_gone = True
            if has_answer:
                self.turn.record_delivery()
            self.turn.unsubscribe()
