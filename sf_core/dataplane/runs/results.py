"""What finished sessions of a run have left, until their rows are in the run directory.

Owns which results there are. batches.py and opened.py write them; memory.py holds them, at times on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sf_core.dataplane.journal.memory import Memory
from sf_core.dataplane.sessions.claims import Place
from sf_core.dataplane.sessions.finished import FinishedSession, read_finished
from storage.schema import Trajectory


class Results:
    def __init__(self, memory: Memory, folder: Path) -> None:
        """While memory has no room for them, they are in files of this folder."""
        self._memory, self._folder = memory, folder
        self.by_place: dict[Place, FinishedSession] = {}
        """For their batches and evaluations."""
        self.opened: dict[str, FinishedSession] = {}
        """Of sessions that no runner was given, by id, in the order in which the journal has them."""

    def hold(self, result: FinishedSession) -> FinishedSession:
        """Count it among what memory holds, until it is kept and dropped, or let go."""
        # nobody asks for it before it is written
        self._memory.add(result, self._folder, goes_first=True)
        return result

    def let_go(self, result: FinishedSession) -> None:
        self._memory.remove(result)

    def keep(self, place: Place, result: FinishedSession) -> None:
        """For its batch or evaluation, until `drop`."""
        self.drop(place)
        self.by_place[place] = result

    def drop(self, place: Place) -> None:
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
        """Gives its trajectories, in any thread. Raises OSError if they are on disk and cannot be read."""
        read, trajectories = self._memory.reader(result), result.trajectories
        if read is None:
            return lambda: trajectories
        return lambda: [row for record in read() for row in read_finished(record).trajectories]
