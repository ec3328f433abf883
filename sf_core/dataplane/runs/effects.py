"""What every event of a run's journal does to the run, when it happens and again after a restart.

Owns the effects on groups, runners, results and router; those of registrations are in recovery.py, those of
turns in turns/recovery.py. Three decisions take effect before their event is recorded: claims
(RolloutManager.claim), the choice of a batch (RolloutManager.seal) and published weights (DataPlane.publish).
Their effects here are for restarts alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sf_core.config.failures import Reason
from sf_core.dataplane.journal.journal import Record, kind_of
from sf_core.dataplane.runs.records import read_opened
from sf_core.dataplane.runs.rollout_manager import Batch
from sf_core.dataplane.sessions.claims import Claim, read_claim
from sf_core.dataplane.sessions.finished import FinishedSession, read_finished
from sf_core.dataplane.sessions.session import Session
from sf_core.types import WeightsRef

if TYPE_CHECKING:
    from sf_core.dataplane.runs.run import ServedRun


class Effects:
    def __init__(self, run: ServedRun) -> None:
        self._run = run

    def apply(self, record: Record) -> None:
        """Apply a record of the journal that is neither a registration nor of a turn."""
        run = self._run
        match kind_of(record):
            case "weights":
                run.router.weights = WeightsRef(*record["weights"])
                run.manager.set_version(run.router.weights.version)
            case "evaluation":
                run.manager.start_evaluation(*record["evaluation"])
            case "opened":
                self.opened(read_opened(record))
            case "rewarded":
                self.rewarded(record["rewarded"], record["reward"], record["parts"])
            case "named":
                self.named(record["named"], record["task_id"], record["environment"])
            case "answered":
                self.answered(record["answered"], record["answer"])
            case "closed":
                run.forget(record["closed"])
            case "lost":
                self.lost(read_claim(record["lost"]))
            case "failed":
                self.failed(read_claim(record["failed"]), record.get("reason", "agent_error"))
            case "finished":
                self.restored(read_finished(record))
            case "stored":
                run.results.drop_opened(record["stored"])
            case "rejected":
                self.rejected(*record["rejected"])
            case "sealed":
                self.sealed(record["sealed"], Batch(**record["batch"]))
            case "revoked":
                run.revoked_leases.add(record["revoked"])
            case "paused":
                run.router.note_paused(record["paused"])
            case "resumed":
                run.router.resume(record["resumed"])
            case "released":
                run.release()

    def opened(self, sessions: list[Session]) -> None:
        for session in sessions:
            if session.claim is None or self._run.manager.restore_running(session.claim):
                self._run.open(session)

    def rewarded(self, session_id: str, reward: float | None, parts: Mapping[str, float]) -> None:
        if (session := self._run.sessions.get(session_id)) is not None:
            session.reward, session.reward_parts = reward, dict(parts)

    def named(self, session_id: str, task_id: str, environment: str) -> None:
        if (session := self._run.sessions.get(session_id)) is not None:
            session.task_id, session.environment = task_id, environment

    def answered(self, session_id: str, answer: str) -> None:
        if (session := self._run.sessions.get(session_id)) is not None:
            session.answer = answer
            self._run.runners.await_reward(session)

    def lost(self, claim: Claim) -> None:
        self._end(claim)
        self._run.manager.lose(claim)

    def failed(self, claim: Claim, reason: Reason) -> list[int]:
        """Returns the groups that are to be rejected."""
        self._end(claim)
        return self._run.manager.fail(claim, reason)

    def finished(self, result: FinishedSession) -> list[int]:
        """Returns the groups that are to be rejected."""
        run, claim = self._run, result.claim
        run.forget(result.session_id)
        if claim is None:
            run.results.keep_opened(result)
            return []
        rejected = run.manager.restore_finished(claim, result.reward, result.min_version)
        if not rejected and run.manager.is_done(claim):
            run.results.keep(claim.place, result)
        return rejected

    def restored(self, result: FinishedSession) -> None:
        """Apply a result that was recorded earlier, and what became of its group then."""
        for index in self.finished(result):
            self._run.drop_group(index)

    def rejected(self, index: int, reason: str) -> None:
        self._run.manager.restore_rejected(index, reason)
        self._run.drop_group(index)

    def sealed(self, index: int, batch: Batch) -> None:
        self._run.manager.restore_sealed(index, batch)
        for group in (*batch.groups, *batch.rejected):
            self._run.drop_group(group)

    def _end(self, claim: Claim) -> None:
        self._run.forget(claim.session_id(self._run.spec.run_id))
