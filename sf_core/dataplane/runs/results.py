"""Results of a run's finished sessions: those in memory until their rows are in the run directory, what each
counts as in its group, and what status reports of the latest ones.

Events change them (state.py), sealing.py writes them.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from sf_core.config.rollout_config import REASONS
from sf_core.dataplane.api_schemas import MAX_PARTS, MAX_STEPS, FinishBody, RewardBody, RunSpec
from sf_core.dataplane.errors import ApiError, WrongField
from sf_core.dataplane.journal.journal_file import encode
from sf_core.dataplane.sessions.claims import Claim, SessionSlot, Split, is_external
from sf_core.dataplane.sessions.finished import FinishedSession
from sf_core.dataplane.sessions.memory_budget import MemoryBudget
from sf_core.dataplane.sessions.session import Session
from sf_core.recipes.outcomes import Outcome, Pick, Result, Success, TaskRef

NUM_RECENT = 256

MAX_LOGGED_ENDS = 4096
"""Reports on ended sessions of no group that are recognised when they come again."""


class Results:
    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self.by_slot: dict[SessionSlot, FinishedSession] = {}
        """Results of claimed sessions, for their batches and evaluations."""
        self.external: dict[str, FinishedSession] = {}
        """Results of external sessions, by id, in the order in which the journal has them."""
        self.cut: dict[int, list[int]] = {}
        """Tokens that were sampled in sessions without which their group was complete, by group."""

    def add(self, slot: SessionSlot, result: FinishedSession) -> None:
        """Keep a result for its batch or evaluation, until `drop`."""
        self.drop(slot)
        self.by_slot[slot] = result
        self._memory.add(result)

    def add_external(self, result: FinishedSession) -> None:
        """Keep the result of an external session, until `drop_external`."""
        self.external[result.session_id] = result
        self._memory.add(result)

    def drop(self, slot: SessionSlot) -> FinishedSession | None:
        if (result := self.by_slot.pop(slot, None)) is not None:
            self._memory.remove(result)
        return result

    def drop_groups(self) -> None:
        """Drop all results of training groups."""
        for slot in list(self.by_slot):
            if slot.split == "train":
                self.drop(slot)
        self.cut.clear()

    def drop_evaluations(self, version: int) -> None:
        """Drop the results of the evaluation of a version, and of earlier ones."""
        for slot in list(self.by_slot):
            if slot.split == "holdout" and slot.group <= version:
                self.drop(slot)

    def drop_external(self, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            if (result := self.external.pop(session_id, None)) is not None:
                self._memory.remove(result)

    def drop_all(self) -> None:
        for slot in list(self.by_slot):
            self.drop(slot)
        self.drop_external(list(self.external))
        self.cut.clear()

    def lengths(self, groups: Iterable[int], accepted: Iterable[FinishedSession]) -> dict[str, Any]:
        """Mean sampled tokens of the sessions that count in these groups, and of those that were ended
        because their group was complete, up to that moment. Of a session of before a restart these may not be
        known: sessions in which nothing was sampled are left out. None if there were none."""
        cut = [num_tokens for group in groups for num_tokens in self.cut.get(group, ()) if num_tokens]
        return {
            "length_kept": _mean([_num_sampled(session) for session in accepted]),
            "length_cut": _mean(cut),
            "cut_sessions": len(cut),
        }


def result_of(finished: FinishedSession, success: Success | None) -> Result | None:
    """What a session counts as in its group; None if it was not judged."""
    rows = finished.trajectories
    if finished.reward is None:
        return None
    score = finished.reward
    if success is not None and success.part is not None:
        score = rows[0].reward_parts.get(success.part, 0.0) if rows else 0.0
    has_failed = finished.status in REASONS
    task_id = rows[0].task_id if rows else ""
    tokens = _num_sampled(finished)
    return Result(finished.reward, 0.0 if has_failed else score, tokens, finished.status, task_id)


def fault_of(report: FinishBody | RewardBody, session: Session) -> ApiError | None:
    """What is wrong with the reward that a session is given."""
    if isinstance(report, FinishBody) and not report.has_reward:
        return WrongField("reward", "A finished session needs a reward that is a finite number.")
    for name, most in (("reward_parts", MAX_PARTS), ("step_rewards", MAX_STEPS)):
        if (number := len(getattr(report, name))) > most:
            return WrongField(name, f"{name} must have at most {most} entries, got {number}")
    for answer in report.step_rewards:
        if session.find_turn_id(answer) is None:
            sentence = f"step_rewards names {answer!r}, which is not the id of an answer of this session."
            return WrongField("step_rewards", sentence)
    return None


def fault_of_parts(report: FinishBody, claim: Claim, spec: RunSpec) -> ApiError | None:
    """What is wrong with the reward of a training session without the part that says whether it was right."""
    success = spec.rollout.success
    if success is None or success.part is None or claim.slot.split == "holdout":
        return None
    reported_parts = sorted(name for name, value in report.reward_parts.items() if value is not None)
    if success.part in reported_parts:
        return None
    parts = ", ".join(map(repr, reported_parts))
    way_out = f"its parts are {parts}: set rollout.success.part to one of these, or return the missing part"
    if not reported_parts:
        way_out = "it has no parts: return a mapping of named parts, or remove rollout.success.part"
    sentence = f"The reward has no part {success.part!r} (rollout.success.part); {way_out}."
    return WrongField("reward_parts", sentence)


def row_of(outcome: Outcome, run_id: str) -> dict[str, Any]:
    """An outcome as a row of `outcomes` (storage/tables/outcomes.py)."""
    pick = outcome.pick
    results = outcome.results
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
        task = TaskRef(row["source"], row["task_index"])
        pick = Pick(task, row["position"], row["need"], row["size"])
    sessions = zip(row["rewards"], row["scores"], row["tokens"], row["statuses"], strict=True)
    results = tuple(Result(*facts, row["task_id"]) for facts in sessions)
    return Outcome(row["number"], pick, row["size"], row["version"], results, row["verdict"])


def digest_of(report: FinishBody) -> str:
    """Names a report by all that it says."""
    fields = [getattr(report, name) for name in FinishBody.model_fields]
    return blake2b(encode(fields), digest_size=16).hexdigest()


class Ends:
    """Digests of the reports that ended sessions: of groups until their batch is sealed, of other sessions
    the latest."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._external: set[str] = set()
        """Sessions on which external agents worked, also those that no report ended."""
        self._groups: defaultdict[tuple[Split, int], list[str]] = defaultdict(list)
        self._logged: deque[str] = deque()
        """Ids of the ended sessions of each group, and of external ones that have no claim."""

    def note(self, session_id: str, claim: Claim | None, digest: str) -> None:
        """Note the report that ended a session; an empty digest: no report did."""
        if not (digest or is_external(claim)):
            return
        if is_external(claim):
            self._external.add(session_id)
        self._digests[session_id] = digest
        if claim is not None:
            self._groups[claim.slot.split, claim.slot.group].append(session_id)
            return
        self._logged.append(session_id)
        if len(self._logged) > MAX_LOGGED_ENDS:
            self._forget(self._logged.popleft())

    def drop(self, split: Split, group: int) -> None:
        """Forget the reports on the sessions of a group."""
        for session_id in self._groups.pop((split, group), ()):
            self._forget(session_id)

    def find(self, session_id: str) -> str | None:
        """Digest of the report that ended a session; None if none is known."""
        return self._digests.get(session_id) or None

    def is_external(self, session_id: str) -> bool:
        """Whether an external agent is known to have worked on the ended session."""
        return session_id in self._external

    def _forget(self, session_id: str) -> None:
        self._digests.pop(session_id, None)
        self._external.discard(session_id)


class RecentResults:
    def __init__(self) -> None:
        self._rewards: deque[float] = deque(maxlen=NUM_RECENT)
        self._tokens: deque[int] = deque(maxlen=NUM_RECENT)
        self.last_error = ""
        self.failures_in_a_row = 0
        """Sessions of the run's own agents that failed and are retried or excluded, since the last one that
        counted. External agents must not end the run by failing."""
        self.discarded: Counter[str] = Counter()
        """Training sessions that failed and were retried or excluded since the last batch, by reason."""
        self.reports: Counter[str] = Counter()
        """Reports on sessions that had ended, since the last batch: `late_reports` changed nothing, and
        `refused_reports` differed from the reports that ended the sessions."""

    def note_finished(self, result: FinishedSession, claim: Claim) -> None:
        """Count a session with its reward, also one whose failure counts as the policy's."""
        self.failures_in_a_row = self.failures_in_a_row if claim.is_external else 0
        self.last_error = result.error or self.last_error
        if result.reward is not None:
            self._rewards.append(result.reward)
        self._tokens.append(_num_sampled(result))

    def note_failed(self, error: str, claim: Claim) -> None:
        self.failures_in_a_row += not claim.is_external
        self.last_error = error

    def forget_failures(self) -> None:
        """Reset the failures, whose cause may have been mended."""
        self.discarded.clear()
        self.failures_in_a_row = 0
        self.last_error = ""

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of the last NUM_RECENT sessions; None before one has finished."""
        return _mean(self._rewards)

    @property
    def mean_tokens(self) -> float | None:
        """Mean tokens sampled per session, of the last NUM_RECENT; None before one has finished."""
        return _mean(self._tokens)


def _mean(values: Collection[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _num_sampled(session: FinishedSession) -> int:
    return sum(int(row.loss_mask.sum()) for row in session.trajectories)


@dataclass
class TokenRate:
    """Tokens in total, and per second over a sliding window."""

    window_s: float = 10.0
    total: int = 0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, num_tokens: int) -> None:
        self.total += num_tokens
        self._recent.append((time.monotonic(), num_tokens))
        self._forget()

    def per_second(self) -> float:
        self._forget()
        return sum(n for _, n in self._recent) / self.window_s

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - self.window_s:
            self._recent.popleft()


class Dropped(NamedTuple):
    """A session that ended because of another event than its own end."""

    session: Session
    reason: str
