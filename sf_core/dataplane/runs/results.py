"""Results of a run's finished sessions, in memory until their rows are in the run directory.

Owns which results there are. sealing.py and external.py write them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sf_core.config.failures import REASONS
from sf_core.dataplane.sessions.claims import SessionSlot
from sf_core.dataplane.sessions.finished import FinishedSession
from sf_core.dataplane.sessions.memory import Memory
from sf_core.recipes.outcomes import Outcome, Pick, Result, Success, TaskRef


class Results:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.by_place: dict[SessionSlot, FinishedSession] = {}
        """Results of claimed sessions, for their batches and evaluations."""
        self.opened: dict[str, FinishedSession] = {}
        """Results of external sessions, by id, in the order in which the journal has them."""

    def keep(self, place: SessionSlot, result: FinishedSession) -> None:
        """Keep a result for its batch or evaluation, until `drop`."""
        self.drop(place)
        self.by_place[place] = result
        self._memory.add(result)

    def keep_opened(self, result: FinishedSession) -> None:
        """Keep the result of an external session, until `drop_opened`."""
        self.opened[result.session_id] = result
        self._memory.add(result)

    def drop(self, place: SessionSlot) -> FinishedSession | None:
        if (result := self.by_place.pop(place, None)) is not None:
            self._memory.remove(result)
        return result

    def drop_opened(self, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            if (result := self.opened.pop(session_id, None)) is not None:
                self._memory.remove(result)

    def drop_all(self) -> None:
        for place in list(self.by_place):
            self.drop(place)
        self.drop_opened(list(self.opened))


def result_of(finished: FinishedSession, success: Success | None) -> Result:
    """What a session counts as in its group."""
    rows = finished.trajectories
    score = finished.reward
    if success is not None and success.part is not None:
        score = rows[0].reward_parts.get(success.part, 0.0) if rows else 0.0
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    has_failed = finished.status in REASONS
    task_id = rows[0].task_id if rows else ""
    return Result(finished.reward, 0.0 if has_failed else score, tokens, finished.status, task_id)


def row_of(outcome: Outcome, run_id: str) -> dict[str, Any]:
    """An outcome as a row of `outcomes` (storage/outcomes.py)."""
    pick, results = outcome.pick, outcome.results
    task = TaskRef("", 0) if pick is None else pick.task
    return {
        "group_id": f"{run_id}.g{outcome.group}",
        "number": outcome.group,
        "source": task.source,
        "task_index": None if pick is None else task.number,
        "task_id": next((result.task_id for result in results if result.task_id), ""),
        "position": 0 if pick is None else pick.position,
        "need": outcome.size if pick is None else pick.need,
        "size": outcome.size,
        "version": outcome.version,
        "verdict": outcome.verdict,
        "rewards": [result.reward for result in results],
        "scores": [result.score for result in results],
        "tokens": [result.tokens for result in results],
        "statuses": [result.status for result in results],
    }


def outcome_of(row: Mapping[str, Any]) -> Outcome:
    """What a row of `outcomes` tells."""
    pick = None
    if row["task_index"] is not None:
        pick = Pick(TaskRef(row["source"], row["task_index"]), row["position"], row["need"], row["size"])
    told = zip(row["rewards"], row["scores"], row["tokens"], row["statuses"], strict=True)
    results = tuple(Result(*result, row["task_id"]) for result in told)
    return Outcome(row["number"], pick, row["size"], row["version"], results, row["verdict"])
