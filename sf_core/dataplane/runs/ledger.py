"""The groups of a run: those in flight and accepted, those that were rejected, and those that batches took.

A value without clock and IO. Each method does what one event of the run says, when it happens and again after
a restart. What is to happen next is decided in decide.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from sf_core.config import RolloutConfig
from sf_core.config.rollout_config import Reason
from sf_core.dataplane.runs.groups import Group, Progress
from sf_core.dataplane.sessions.claims import Claim
from sf_core.recipes.curriculum import Tasks
from sf_core.recipes.outcomes import SEALED, Outcome, Pick, Result, TaskRef


@dataclass(frozen=True, slots=True)
class Batch:
    groups: list[int]
    """Group indices in order of (min_version, index)."""
    rejected: dict[int, str]
    """Groups rejected since the last batch, and why."""
    dropped: list[int] = field(default_factory=list)
    """Groups among `rejected` that sealing this batch has rejected because of the lag bound."""


class Ledger:
    def __init__(
        self,
        rules: RolloutConfig,
        lag_bound: int,
        num_batches: int,
        *,
        next_batch: int = 0,
        version: int = 0,
        done_groups: Iterable[int] = (),
        first_attempt: int = 0,
        seed: int = 0,
    ) -> None:
        """Claims whose attempt is lower than `first_attempt` do not count."""
        self.tasks = Tasks(seed)
        self.set_rules(rules, lag_bound, num_batches)
        self.next_batch = next_batch
        self.version = version
        """Oldest policy version that an engine may sample with from now on."""
        self.first_attempt = first_attempt
        self.groups: dict[int, Group] = {}
        """Accepted or in flight, in index order."""
        self.rejected: dict[int, str] = {}
        """Groups rejected since the last batch, and why."""
        self.evaluations: dict[int, Group] = {}
        self.batches: dict[int, Batch] = {}
        self.ended: list[Outcome] = []
        """Groups that have left since the last batch."""
        self.ended_by: dict[int, list[Outcome]] = {}
        """The same for each of the last batches, with the groups that it took."""
        self.largest_group = rules.group_size + rules.spare_sessions
        self._done = set(done_groups)
        self._next_group = 0
        self._dropped: Counter[str] = Counter()
        self.completed_last: int | None = None
        """The group that was complete last. It counts, unless the next rejection is its own."""

    def set_rules(self, rules: RolloutConfig, lag_bound: int, num_batches: int) -> None:
        """`num_batches` are those of the whole run: no group is started that none of them needs."""
        self.rules = rules
        self.lag_bound = lag_bound
        self.num_batches = num_batches
        self.tasks.set_rules(rules.curriculum, rules.success, rules.group_size, rules.spare_sessions)

    def set_version(self, version: int) -> None:
        self.version = max(self.version, version)

    @property
    def next_group(self) -> int:
        """Index of the group that is begun next: the first of those that have not begun."""
        while self._next_group in self._done or self._next_group in self.groups:
            self._next_group += 1
        return self._next_group

    # --- groups

    def begin(self, index: int, pick: Pick, version: int) -> None:
        """Begin a group with this task. Only a journal of an earlier version says so of a group that has
        begun: it stays, unless it has another task and all its sessions are open."""
        if index in self._done:
            return
        earlier = self.groups.get(index)
        if earlier is not None and earlier.pick is not None:
            self.tasks.release(earlier.pick.task)
        self.tasks.note(pick)
        if earlier is not None and (earlier.pick == pick or earlier.num_open < earlier.size):
            earlier.pick = pick
            earlier.version = version
            return
        group = Group("train", index, pick.size, False, self.first_attempt, pick, version)
        if earlier is not None:
            group.note_attempts(earlier)
        self._add(group)

    def declare(self, index: int, size: int) -> None:
        """Begin an external group."""
        if index not in self._done and index not in self.groups:
            self._add(Group("train", index, size, True, self.first_attempt, version=self.version))

    def open(self, claim: Claim) -> bool:
        """Give out a session; False if it does not count."""
        if (group := self._group(claim)) is None:
            return False
        if group.is_complete:
            # given out while the end was recorded that made the group complete
            group.note_given_out(claim)
            return False
        group.open(claim)
        return True

    def note_given_out(self, claim: Claim) -> None:
        """Note that a session was given out before the run started over: its attempt is not reused."""
        if (group := self._group(claim)) is not None:
            group.note_given_out(claim)

    def note_started(self, claim: Claim, version: int) -> None:
        """Note that an engine of this version may have sampled a token of the session."""
        if (group := self.group_of(claim)) is not None:
            group.note_started(claim, version)

    def finish(self, claim: Claim, result: Result | None, min_version: int | None) -> None:
        """Count a finished session; `min_version` is that of its oldest token. A held-out one that was not
        judged has no result."""
        group = self._group(claim)
        # the end of a session may have been recorded while another one made its group complete
        if group is not None and not group.is_complete:
            group.finish(claim, result, min_version)
            self._note_complete(group)

    def fail(self, claim: Claim, reason: Reason) -> None:
        """Open the place of a failed session again, or have its group go on without it."""
        if (group := self.group_of(claim)) is None:
            return
        if group.fail(claim) < self.rules.session_attempts and not group.is_external:
            return
        if group.split == "holdout":
            group.finish(claim, None, None)
            return
        least = group.need if self.rules.least_sessions is None else self.rules.least_sessions
        group.leave_out(claim, group.need if group.is_external else min(least, group.need), reason)
        self._note_complete(group)

    def lose(self, claim: Claim) -> None:
        """Open the place of a session whose runner is gone."""
        if (group := self.group_of(claim)) is not None:
            group.reopen(claim)

    def reject(self, index: int, reason: str) -> None:
        if index in self._done:
            return
        group = self.groups.get(index)
        if group is None:
            # external, and not begun again when the run started over
            group = Group("train", index, self.rules.group_size, True, version=self.version)
        self._leave(group, reason)
        self.rejected[index] = reason
        # nothing is sampled in place of an external one until another is declared
        if not group.is_external:
            self._count_dropped(index, reason)

    def seal(self, index: int, batch: Batch) -> None:
        """Have a batch take its groups."""
        for number, reason in batch.rejected.items():
            self.reject(number, reason)
        for number in batch.groups:
            if number in self.groups:
                self._leave(self.groups[number], SEALED)
        sealed = {*batch.groups, *batch.rejected}
        for number in sealed:
            self.rejected.pop(number, None)
        self._done |= sealed
        self.batches[index] = batch
        self.ended_by[index] = [outcome for outcome in self.ended if outcome.group in sealed]
        self.batches.pop(index - 2, None)
        self.ended_by.pop(index - 2, None)
        # others left while the file of the batch was written
        self.ended = [outcome for outcome in self.ended if outcome.group not in sealed]
        self.next_batch = index + 1

    # --- evaluations

    def start_evaluation(self, version: int, num_tasks: int) -> None:
        if version not in self.evaluations:
            self.evaluations[version] = Group("holdout", version, num_tasks, first_attempt=self.first_attempt)

    # --- questions

    def group_of(self, claim: Claim) -> Group | None:
        """The group of a session, if it still counts."""
        group = self._group(claim)
        running = group is not None and group.members[claim.slot.member].is_running(claim.attempt)
        return group if running else None

    def train_group_of(self, claim: Claim | None) -> Group | None:
        """The group of a training session, accepted or in flight; None for any other session."""
        return self.groups.get(claim.slot.group) if claim and claim.slot.split == "train" else None

    def is_done(self, claim: Claim) -> bool:
        """Whether a batch or an evaluation that is not written yet needs the session's result."""
        if (group := self._group(claim)) is None:
            return False
        member = group.members[claim.slot.member]
        return member.progress is Progress.DONE and member.attempt == claim.attempt

    @property
    def dropped_in_a_row(self) -> Counter[str]:
        """Groups of the run's own that were dropped since the last one that counts, by reason."""
        return self._dropped if self.completed_last is None else Counter()

    def forget_dropped(self) -> None:
        """Have another attempt of the flow count anew the groups that are dropped in a row."""
        self._dropped.clear()

    def task_of(self, claim: Claim) -> TaskRef:
        """The task of a session that was given out."""
        group = self._group(claim)
        return TaskRef("", claim.slot.group) if group is None or group.pick is None else group.pick.task

    def list_incomplete(self) -> list[Group]:
        """The run's own groups that are not complete."""
        return [group for group in self.groups.values() if not (group.is_external or group.is_complete)]

    def knows_batch(self, batch: int) -> bool:
        """Whether a flow whose next batch is this one can go on with the groups here; it may have missed the
        answer to the last seal."""
        return batch == self.next_batch or (batch == self.next_batch - 1 and batch in self.batches)

    def list_done_before(self, batch: int) -> list[int]:
        """Groups consumed or rejected before this batch, which is the last sealed one or the next."""
        later: set[int] = set()
        for index, sealed in self.batches.items():
            if index >= batch:
                later.update(sealed.groups, sealed.rejected)
        return sorted(self._done - later - self.rejected.keys())

    # --- what a registration takes over

    def remember(self, outcomes: Iterable[Outcome]) -> None:
        """Have outcomes of earlier iterations count for the tasks to come, and those that are here: while the
        run had no curriculum, none did."""
        self.tasks.observe(chain(outcomes, *self.ended_by.values(), self.ended))

    def _group(self, claim: Claim) -> Group | None:
        if claim.attempt < self.first_attempt:
            return None
        groups = self.groups if claim.slot.split == "train" else self.evaluations
        group = groups.get(claim.slot.group)
        return group if group is not None and claim.slot.member < group.size else None

    def _add(self, group: Group) -> None:
        is_last = next(reversed(self.groups), -1) < group.index
        self.groups[group.index] = group
        if not is_last:
            # the run has started over, and the journal did not have this group any more
            self.groups = dict(sorted(self.groups.items()))
        self.largest_group = max(self.largest_group, group.size)

    def _note_complete(self, group: Group) -> None:
        if group.split == "train" and group.is_complete:
            self._count_from_last()
            self.completed_last = group.index

    def _count_dropped(self, index: int, reason: str) -> None:
        if self.completed_last != index:
            self._count_from_last()
        self.completed_last = None
        self._dropped[reason] += 1

    def _count_from_last(self) -> None:
        """Count dropped groups anew if the group that was complete last counts."""
        if self.completed_last is not None:
            self._dropped.clear()

    def _leave(self, group: Group, verdict: str) -> None:
        """Have what came of a group count for the tasks to come."""
        self.groups.pop(group.index, None)
        self._done.add(group.index)
        if group.pick is not None:
            self.tasks.release(group.pick.task)
        outcome = group.outcome(verdict)
        self.ended.append(outcome)
        self.tasks.observe([outcome])
