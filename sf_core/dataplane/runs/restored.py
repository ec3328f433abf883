"""What the events of an earlier process tell a rollout manager, after a restart of the data plane."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from sf_core.dataplane.runs.groups import Group
from sf_core.dataplane.runs.rollout_manager import Batch, RolloutManager
from sf_core.dataplane.sessions.claims import Claim
from sf_core.recipes.outcomes import Outcome, Pick, Result, TaskRef


class RestoredManager(RolloutManager):
    """A rollout manager that also takes what an earlier process has decided."""

    def remember(self, outcomes: Iterable[Outcome]) -> None:
        """Have outcomes of earlier iterations count for the tasks to come, and those that are here: while the
        run had no curriculum, none did."""
        self.tasks.observe(chain(outcomes, *self.ended_by.values(), self.ended))

    def restore_admitted(self, index: int, pick: Pick, version: int) -> None:
        """Note the task that a group was begun with."""
        if index in self._done:
            return
        self._admit_up_to(index)
        group = self.groups[index]
        if group.pick is not None:
            self.tasks.release(group.pick.task)
        self.tasks.note(pick)
        if group.num_open < group.size:
            # begun by an attempt that chose nothing, so that what it was is told now
            group.pick, group.version = pick, version
        else:
            planned = Group("train", index, pick.size, False, self.first_attempt, pick, version)
            group = self._begin_in_place(planned)
        group.is_recorded = True

    def restore_attempt(self, claim: Claim) -> None:
        """Note that a session was given out before a restart, so that its attempt number is not reused."""
        if (group := self._restored_group(claim)) is not None:
            group.note_given_out(claim)

    def restore_declared(self, index: int, size: int) -> None:
        """Note a group from outside that was declared before a restart."""
        self._admit_up_to(index)
        plain = self.groups.get(index)
        if plain is not None and plain.pick is not None:
            self.tasks.release(plain.pick.task)
            self._begin(Group("train", index, size, True, self.first_attempt, version=plain.version))

    def restore_running(self, claim: Claim) -> bool:
        """Note that a session given out before a restart may still run; False if it does not count."""
        if (group := self._restored_group(claim)) is None:
            return False
        if group.is_complete:
            # given out while the end was recorded that made the group complete
            group.note_given_out(claim)
            return False
        group.resume(claim)
        return True

    def restore_finished(self, claim: Claim, result: Result | None, min_version: int | None) -> list[int]:
        """Note a finished session, which before a restart an earlier process gave out. Returns the groups
        rejected by it."""
        group = self._restored_group(claim)
        # the end of a session may have been recorded while another one made its group complete
        if group is None or group.is_complete:
            return []
        return self._finish(group, claim, result, min_version)

    def restore_rejected(self, index: int, reason: str) -> None:
        if index not in self._done:
            self._admit_up_to(index)
            self._reject([index], reason)

    def pick_untold(self) -> list[int]:
        """Have the curriculum pick for groups that were begun because later ones were told: what became of
        them is not in the journal any more. Returns these groups."""
        if self.rules.curriculum is None:
            return []
        own = [group for group in self.groups.values() if not group.is_outside]
        untold = {
            group.index: place
            for place, group in enumerate(own)
            if not group.is_recorded and group.num_open == group.size
        }
        for index in untold:
            if (plain := self.groups[index].pick) is not None:
                self.tasks.release(plain.task)
        for index, place in untold.items():
            self._begin_in_place(self._picked(index, place))
        return [*untold]

    def restore_sealed(self, index: int, batch: Batch) -> None:
        """Note a batch that was sealed before a restart."""
        self._consume(number for number in batch.groups if number in self.groups)
        for number, reason in batch.rejected.items():
            self._reject([number], reason)
        sealed = {*batch.groups, *batch.rejected}
        for number in sealed:
            # the rules of now may refuse what the batch has taken
            self.rejected.pop(number, None)
        self._done |= sealed
        self._keep(index, batch, [outcome for outcome in self.ended if outcome.group in sealed])
        # others left while the file of the batch was written
        self.ended = [outcome for outcome in self.ended if outcome.group not in sealed]
        self.next_batch = index + 1

    def _restored_group(self, claim: Claim) -> Group | None:
        if claim.attempt < self.first_attempt:
            return None
        if claim.place.split == "train":
            self._admit_up_to(claim.place.group)
        return self._group(claim)

    def _begin_in_place(self, group: Group) -> Group:
        """Begin a group in place of the one with its number, whose attempts are not given out again."""
        for member, earlier in zip(group.members, self.groups[group.index].members, strict=False):
            member.attempt, member.num_failures = earlier.attempt, earlier.num_failures
        return self._begin(group)

    def _admit_up_to(self, index: int) -> None:
        """Begin all groups up to this one as the rules without a curriculum would: what else was picked is
        told next."""
        for number in range(self._next_group, index + 1):
            if number not in self._done:
                need = self.rules.group_size
                pick = Pick(TaskRef("", number), 0, need, need + self.rules.spare_sessions)
                self.tasks.note(pick)
                self._begin(Group("train", number, pick.size, False, self.first_attempt, pick, self.version))
        self._next_group = max(self._next_group, index + 1)
