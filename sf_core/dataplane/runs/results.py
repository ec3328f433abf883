"""Results of a run's finished sessions, until their rows are in the run directory.

Owns which results there are. sealing.py and external.py write them; memory.py holds them, at times on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sf_core.dataplane.journal.memory import Memory
from sf_core.dataplane.sessions.claims import SessionSlot
from sf_core.dataplane.sessions.finished import FinishedSession, read_finished
from storage.schema import Trajectory


class Results:
    def __init__(self, memory: Memory, folder: Path) -> None:
        """Results are spilled to `folder` while memory has no room for them."""
        self._memory, self._folder = memory, folder
        self.by_place: dict[SessionSlot, FinishedSession] = {}
        """Results of claimed sessions, for their batches and evaluations."""
        self.opened: dict[str, FinishedSession] = {}
        """Results of external sessions, by id, in the order in which the journal has them."""

    def hold(self, result: FinishedSession) -> FinishedSession:
        """Count a result against the memory bound until it is dropped or let go."""
        # results go first because they are not read before they are written
        self._memory.add(result, self._folder, goes_first=True)
        return result

    def let_go(self, result: FinishedSession) -> None:
        self._memory.remove(result)

    def keep(self, place: SessionSlot, result: FinishedSession) -> None:
        """Keep a result for its batch or evaluation, until `drop`."""
        self.drop(place)
        self.by_place[place] = result

    def drop(self, place: SessionSlot) -> None:
        if (result := self.by_place.pop(place, None)) is not None:
            self.let_go(result)

    def drop_opened(self, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            self.let_go(self.opened.pop(session_id))

    def drop_all(self) -> None:
        for place in list(self.by_place):
            self.drop(place)
        self.drop_opened(list(self.opened))

    def reader_of(self, result: FinishedSession) -> Callable[[], Sequence[Trajectory]]:
        """Function that returns the trajectories, in any thread. It raises OSError if they cannot be read."""
        read, trajectories = self._memory.reader(result), result.trajectories
        if read is None:
            return lambda: trajectories
        return lambda: [row for record in read() for row in read_finished(record).trajectories]
