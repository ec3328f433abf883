"""Decides which sessions are given out and which groups make a batch. No clock, no IO.

Owns admission under the lag bound, the group rule, the gate and the choice of a batch. A group that cannot
count is rejected whole, with the reason. Which task a group gets is the curriculum's choice. What restarts
tell a manager is in restored.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from sf_core.config import RolloutConfig
from sf_core.config.failures import Reason
from sf_core.dataplane.runs.groups import Group, Progress
from sf_core.dataplane.sessions.claims import Claim
from sf_core.recipes.curriculum import Tasks
from sf_core.recipes.outcomes import SEALED, Outcome, Result, TaskRef


@dataclass(frozen=True, slots=True)
class Readiness:
    ready: bool
    accepted: int
    needed: int
    in_flight: int
    waiting_for: str
    """One sentence; empty when ready."""


@dataclass(frozen=True, slots=True)
class Batch:
    groups: list[int]
    """Group indices in order of (min_version, index)."""
    rejected: dict[int, str]
    """Groups rejected since the last batch, and why."""
    dropped: list[int] = field(default_factory=list)
    """Groups among `rejected` that sealing this batch has rejected because of the lag bound."""


class RolloutManager:
    """Lag: batch k updates version k, so a group whose oldest token is of version m must be in a
    batch no later than m + lag_bound, its deadline.

    Two rules hold every group to its deadline. Admission: at version v at most
    groups_per_batch * (v + 1 + lag_bound) groups are consumed, accepted or in flight, so that a group first
    sampled at v has a place by v + lag_bound. Earliest deadline first: a batch takes the accepted groups with
    the earliest deadlines, and is not ready while what it leaves behind could not all be consumed in time.
    Groups from outside have places of their own in every batch; both rules hold for each kind by itself.
    """

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
        self.first_attempt = first_attempt
        self.groups: dict[int, Group] = {}
        """Accepted or in flight, in index order."""
        self.rejected: dict[int, str] = {}
        self.evaluations: dict[int, Group] = {}
        self.batches: dict[int, Batch] = {}
        self.ended: list[Outcome] = []
        """Groups that have left since the last batch."""
        self.ended_by: dict[int, list[Outcome]] = {}
        """The same for each of the last batches, with the groups that it took."""
        self.dropped_in_a_row: Counter[str] = Counter()
        """Groups of the run's own that were dropped since the last one that counts, by reason."""
        self.largest_group = rules.group_size + rules.spare_sessions
        self._done = set(done_groups)
        self._next_group = 0

    def set_rules(self, rules: RolloutConfig, lag_bound: int, num_batches: int) -> None:
        """`num_batches` are those of the whole run: no group is started that none of them needs."""
        self.rules, self.lag_bound, self.num_batches = rules, lag_bound, num_batches
        self.tasks.set_rules(rules.curriculum, rules.success, rules.group_size, rules.spare_sessions)

    # --- sessions

    def claim(self, limit: int, is_full: bool = False) -> list[Claim]:
        """Sessions to run now: evaluations first, then whole groups in index order. While memory `is_full`, a
        group is begun only if the next batch needs it and none is in flight."""
        return list(islice(self._open_sessions(is_full), limit))

    def declare(self, size: int) -> list[Claim]:
        """The sessions of a new group from outside; none if no batch within the lag bound has a place."""
        if self._num_groups(outside=True) >= self._num_admissible(outside=True):
            return []
        return list(self._admit(size).claims(is_outside=True))

    def claim_held_out(self, limit: int) -> list[Claim]:
        """Held-out sessions for an agent outside."""
        open_ones = (evaluation.claims(is_outside=True) for evaluation in self.evaluations.values())
        return list(islice(chain.from_iterable(open_ones), limit))

    def group_of(self, claim: Claim) -> Group | None:
        """The group of a session, if it still counts."""
        groups = self.groups if claim.place.split == "train" else self.evaluations
        group = groups.get(claim.place.group)
        running = group is not None and group.members[claim.place.member].is_running(claim.attempt)
        return group if running else None

    def note_started(self, claim: Claim, version: int) -> None:
        """Note that an engine of this version may have sampled a token of the session."""
        if (group := self.group_of(claim)) is not None:
            group.note_started(claim, version)

    def task_of(self, claim: Claim) -> TaskRef:
        """The task of a session that was given out."""
        group = self._group(claim)
        return TaskRef("", claim.place.group) if group is None or group.pick is None else group.pick.task

    def finish(self, claim: Claim, result: Result, min_version: int | None) -> list[int]:
        """Count a finished session; `min_version` is that of its oldest token. Returns rejected groups."""
        group = self.group_of(claim)
        return [] if group is None else self._finish(group, claim, result, min_version)

    def worth(self, claim: Claim, reason: Reason, can_train: bool) -> float | None:
        """The reward with which a failed session ends; None: it is to `fail`, because it is retried or its
        group is rejected. `can_train`: the policy has sampled a token in it. A held-out session ends with the
        reward at its last attempt in any case, because the mean is over all tasks. The only attempt of a
        group from outside is the last."""
        if (group := self.group_of(claim)) is None:
            return None
        rule = self.rules.on_failure.rule_for(reason) if can_train else "retry_then_exclude"
        num_failures = group.members[claim.place.member].num_failures + 1
        is_last = group.is_outside or num_failures >= self.rules.session_attempts
        ends = rule == "zero" or (is_last and (rule == "retry_then_zero" or group.split == "holdout"))
        return self.rules.failed_reward if ends else None

    def fail(self, claim: Claim, reason: Reason) -> list[int]:
        """Open the place of a failed session again, or reject its group. Returns the groups rejected."""
        if (group := self.group_of(claim)) is None:
            return []
        if group.fail(claim) < self.rules.session_attempts and not group.is_outside:
            return []
        if group.split == "holdout":
            group.finish(claim, None, None)
            return []
        least = group.need if self.rules.least_sessions is None else self.rules.least_sessions
        if group.is_outside or not group.leave_out(claim, min(least, group.need)):
            return self._reject([group.index], reason)
        return self._gate(group)

    def lose(self, claim: Claim) -> None:
        """Open the place of a session whose runner is gone."""
        if (group := self.group_of(claim)) is not None:
            group.reopen(claim)

    # --- batches

    def set_version(self, version: int) -> None:
        self.version = max(self.version, version)

    def readiness(self, batch: int) -> Readiness:
        needed = self.rules.groups_per_batch
        accepted = [group for group in self.groups.values() if group.is_complete]
        in_flight = len(self.groups) - len(accepted)
        if batch < self.next_batch:
            return Readiness(True, needed, needed, in_flight, "")
        waiting_for = ""
        if batch > self.next_batch:
            waiting_for = f"batch {self.next_batch}, which comes first"
        elif missing := [text for outside in (False, True) if (text := self._missing(accepted, outside))]:
            waiting_for = " and ".join(missing)
        elif self.rules.on_max_lag == "wait" and (late := self._late(self._choose(), batch)):
            waiting_for = f"groups that would exceed the lag bound of {self.lag_bound}: {late}"
        return Readiness(not waiting_for, len(accepted), needed, in_flight, waiting_for)

    def num_sessions_left(self) -> int:
        """Sessions still to run for the next batch, for the batches that the lag bound admits before it is
        trained on, and for evaluations. Counts those groups that have the fewest sessions left."""
        held_out = sum(group.num_left for group in self.evaluations.values())
        batches = min(1 + self.lag_bound, self.num_batches - self.next_batch)
        num_groups = self.rules.groups_per_batch * max(0, batches)
        missing = sorted(group.num_left for group in self.groups.values())[:num_groups]
        return held_out + sum(missing) + self.rules.group_size * (num_groups - len(missing))

    def num_open_sessions(self, is_full: bool = False) -> int:
        """Number of sessions that claims could get now; fewer if the curriculum makes groups smaller."""
        groups = [*self.evaluations.values(), *self.groups.values()]
        to_admit = max(0, self._num_admissible(is_full) - self._num_groups())
        size = self.rules.group_size + self.rules.spare_sessions
        return sum(group.num_open for group in groups) + size * to_admit

    def choose(self, batch: int) -> list[int]:
        """The groups that a batch would be made of now. Raises ValueError if it is not ready."""
        readiness = self.readiness(batch)
        if not readiness.ready:
            raise ValueError(f"batch {batch} is not ready: it waits for {readiness.waiting_for}")
        if batch < self.next_batch:
            raise ValueError(f"batch {batch} was sealed before this data plane knew the run")
        return self._choose()

    def seal(self, batch: int) -> Batch:
        """Consume the groups of a batch; the same batch again gives the same groups. Raises ValueError if it
        is not ready."""
        if batch in self.batches:
            return self.batches[batch]
        chosen = self.choose(batch)
        # with `wait` there are none, or the batch would not be ready
        dropped = self._reject(self._late(chosen, batch), "max_lag")
        self._consume(chosen)
        self.next_batch = batch + 1
        dropped += self._reject([g.index for g in self.groups.values() if self._is_expired(g)], "max_lag")
        self._keep(batch, Batch(chosen, self.rejected, dropped), self.ended)
        self.rejected, self.ended = {}, []
        return self.batches[batch]

    def _keep(self, index: int, batch: Batch, ended: list[Outcome]) -> None:
        self.batches[index], self.ended_by[index] = batch, ended
        self.batches.pop(index - 2, None)
        self.ended_by.pop(index - 2, None)

    # --- evaluations

    def start_evaluation(self, version: int, num_tasks: int) -> None:
        if version not in self.evaluations:
            self.evaluations[version] = Group("holdout", version, num_tasks, first_attempt=self.first_attempt)

    def is_done(self, claim: Claim) -> bool:
        """Whether a batch or an evaluation that is not written yet needs the session's result."""
        if (group := self._group(claim)) is None:
            return False
        member = group.members[claim.place.member]
        return member.progress is Progress.DONE and member.attempt == claim.attempt

    def done_before(self, batch: int) -> list[int]:
        """Groups consumed or rejected before this batch, which is the last sealed one or the next."""
        later = {group for b, sealed in self.batches.items() if b >= batch for group in sealed.groups}
        later |= {group for b, sealed in self.batches.items() if b >= batch for group in sealed.rejected}
        return sorted(self._done - later - self.rejected.keys())

    def _group(self, claim: Claim) -> Group | None:
        groups = self.groups if claim.place.split == "train" else self.evaluations
        group = groups.get(claim.place.group)
        return group if group is not None and claim.place.member < group.size else None

    # --- rules

    def _open_sessions(self, is_full: bool) -> Iterator[Claim]:
        for evaluation in self.evaluations.values():
            yield from evaluation.claims()
        for group in list(self.groups.values()):
            yield from group.claims()
        for _ in range(self._num_admissible(is_full) - self._num_groups()):
            yield from self._admit().claims()

    def _places(self, outside: bool) -> int:
        """Groups of one kind in each batch."""
        from_outside = self.rules.outside_groups
        return from_outside if outside else self.rules.groups_per_batch - from_outside

    def _of_kind(self, outside: bool) -> list[Group]:
        return [group for group in self.groups.values() if group.is_outside is outside]

    def _num_groups(self, outside: bool = False) -> int:
        """Groups of one kind that are accepted or in flight."""
        num_outside = sum(group.is_outside for group in self.groups.values())
        return num_outside if outside else len(self.groups) - num_outside

    def _num_admissible(self, is_full: bool = False, outside: bool = False) -> int:
        """Most groups of one kind that may be accepted or in flight now."""
        batches = min(self.version + 1 + self.lag_bound, self.num_batches)
        num_groups = self._places(outside) * (batches - self.next_batch)
        if is_full:
            # one at a time up to a whole batch: its results can only be stored together
            num_accepted = sum(group.is_complete for group in self._of_kind(outside))
            num_groups = min(num_groups, num_accepted + 1, self._places(outside))
        return num_groups

    def _missing(self, accepted: list[Group], outside: bool) -> str:
        """What the next batch lacks of one kind; empty if nothing."""
        num_accepted = sum(group.is_outside is outside for group in accepted)
        needed = self._places(outside)
        if num_accepted >= needed:
            return ""
        kind = "groups from outside" if outside else "groups"
        in_flight = self._num_groups(outside) - num_accepted
        return f"{needed - num_accepted} of {needed} {kind}; {in_flight} are in flight"

    def _admit(self, outside: int | None = None) -> Group:
        """Begin the next group: with a task, or from outside with so many sessions."""
        while self._next_group in self._done:
            self._next_group += 1
        index = self._next_group
        if outside is not None:
            return self._begin(Group("train", index, outside, True, self.first_attempt, version=self.version))
        return self._begin(self._picked(index, self._num_groups()))

    def _picked(self, index: int, num_before: int) -> Group:
        """A group with the task that the curriculum picks for it, behind so many others."""
        # the batch that it would fill, were the groups before it in earlier ones
        batch = self.next_batch + num_before // max(1, self._places(outside=False))
        pick = self.tasks.pick(index, batch)
        return Group("train", index, pick.size, False, self.first_attempt, pick, self.version)

    def _begin(self, group: Group) -> Group:
        self.groups[group.index] = group
        self._next_group = max(self._next_group, group.index + 1)
        self.largest_group = max(self.largest_group, group.size)
        return group

    def _finish(
        self, group: Group, claim: Claim, result: Result | None, min_version: int | None
    ) -> list[int]:
        group.finish(claim, result, min_version)
        return self._gate(group)

    def _consume(self, indices: Iterable[int]) -> None:
        """Note that a batch has taken these groups."""
        for index in indices:
            self._leave(self.groups[index], SEALED)

    def _leave(self, group: Group, verdict: str) -> None:
        """Have what came of a group count for the tasks to come."""
        del self.groups[group.index]
        self._done.add(group.index)
        if group.pick is not None:
            self.tasks.release(group.pick.task)
        outcome = group.outcome(verdict)
        self.ended.append(outcome)
        self.tasks.observe([outcome])

    def _gate(self, group: Group) -> list[int]:
        if group.split == "train" and group.is_complete:
            if self._is_expired(group):
                return self._reject([group.index], "max_lag")
            if reason := self.rules.gate.refusal(group.results, self.rules.success):
                return self._reject([group.index], reason)
            self.dropped_in_a_row.clear()
        return []

    def _reject(self, indices: list[int], reason: str) -> list[int]:
        for index in indices:
            if (group := self.groups.get(index)) is not None:
                self._leave(group, reason)
                self.rejected[index] = reason
                # nothing is sampled in place of one from outside until an agent there declares it
                if not group.is_outside:
                    self.dropped_in_a_row[reason] += 1
        return indices

    def _deadline(self, group: Group) -> int:
        # a group without tokens yet will be sampled by this version or a later one
        oldest = self.version if group.min_version is None else group.min_version
        return oldest + self.lag_bound

    def _is_expired(self, group: Group) -> bool:
        """Whether its deadline has passed, which only a restart with other rules or versions can cause."""
        return self._deadline(group) < self.next_batch

    def _choose(self) -> list[int]:
        """Accepted groups for the next batch, earliest deadline first."""
        chosen: list[Group] = []
        for outside in (False, True):
            accepted = sorted((g for g in self._of_kind(outside) if g.is_complete), key=self._deadline)
            chosen += accepted[: self._places(outside)]
        return [group.index for group in sorted(chosen, key=lambda g: (self._deadline(g), g.index))]

    def _late(self, chosen: list[int], batch: int) -> list[int]:
        """In-flight groups that keep `batch` from being made of `chosen`: were they left behind, the batches
        up to some deadline could not hold all groups due by then. As few as possible, earliest first."""
        taken = set(chosen)
        late: list[int] = []
        for outside in (False, True):
            rest = [g for g in self._of_kind(outside) if g.index not in taken and g.min_version is not None]
            rest.sort(key=lambda group: (self._deadline(group), not group.is_complete))
            fitting = 0
            for group in rest:
                if fitting < self._places(outside) * (self._deadline(group) - batch):
                    fitting += 1
                elif not group.is_complete:
                    late.append(group.index)
        return late
