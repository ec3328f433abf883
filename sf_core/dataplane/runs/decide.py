"""The rollout manager: decides what happens next to the groups of a run. Functions of its ledger and rules,
which they do not change; what they decide is recorded and then applied.

Lag: batch k updates version k, so a group whose oldest token is of version m must be in a batch no later than
m + lag_bound, its deadline.

Two rules hold every group to its deadline. Admission: at version v at most groups_per_batch * (v + 1 +
lag_bound) groups are consumed, accepted or in flight, so that a group first sampled at v has a place by v +
lag_bound. Earliest deadline first: a batch takes the accepted groups with the earliest deadlines, and is not
ready while what it leaves behind could not all be consumed in time. External groups have places of their
own in every batch; both rules hold for each kind by itself.

A group that cannot count is rejected whole, with the reason. Which task a group gets is the curriculum's
choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from sf_core.config.rollout_config import Reason
from sf_core.dataplane.runs.events import Admitted
from sf_core.dataplane.runs.groups import Group
from sf_core.dataplane.runs.ledger import Batch, Ledger
from sf_core.dataplane.sessions.claims import Claim, SessionSlot


@dataclass(frozen=True, slots=True)
class Readiness:
    ready: bool
    accepted: int
    needed: int
    in_flight: int
    waiting_for: str
    """One sentence; empty when ready."""


# --- sessions


def admit(ledger: Ledger, limit: int, is_full: bool = False) -> Iterator[Admitted]:
    """The groups to begin so that `limit` sessions can be given out, as far as the lag bound admits them.
    Each is to be begun before the next one is decided. While memory `is_full`, a group is begun only if the
    next batch needs it and none is in flight."""
    missing = limit - sum(1 for _ in islice(_open_sessions(ledger), limit))
    for _ in range(_num_admissible(ledger, is_full) - len(_list_groups(ledger))):
        if missing <= 0:
            return
        index = ledger.next_group
        num_before = sum(group.index < index for group in _list_groups(ledger))
        # the batch that it would fill, were the groups before it in earlier ones
        batch = ledger.next_batch + num_before // max(1, _num_slots(ledger, external=False))
        admitted = Admitted(index, ledger.tasks.pick(index, batch), ledger.version)
        missing -= admitted.pick.size
        yield admitted


def claim(ledger: Ledger, limit: int) -> list[Claim]:
    """The sessions to give out next: evaluations first, then whole groups in index order."""
    return list(islice(_open_sessions(ledger), limit))


def claim_held_out(ledger: Ledger, limit: int) -> list[Claim]:
    """The held-out sessions to give to an external agent."""
    open_ones = (evaluation.claims(is_external=True) for evaluation in ledger.evaluations.values())
    return list(islice(chain.from_iterable(open_ones), limit))


def declare(ledger: Ledger, size: int) -> list[Claim]:
    """The sessions of a new external group; none if no batch within the lag bound has a place."""
    if len(_list_groups(ledger, external=True)) >= _num_admissible(ledger, external=True):
        return []
    index = ledger.next_group
    attempt = ledger.first_attempt
    return [Claim(SessionSlot("train", index, member), attempt, 0, True) for member in range(size)]


# --- ends


def worth(ledger: Ledger, claim: Claim, reason: Reason, can_train: bool) -> float | None:
    """The reward with which a failed session ends; None: it has none, because it is retried or its group is
    rejected. `can_train`: the policy has sampled a token in it. A held-out session ends with the reward at
    its last attempt in any case, because the mean is over all tasks. The only attempt of an external group
    is the last."""
    if (group := ledger.group_of(claim)) is None:
        return None
    rules = ledger.rules
    rule = rules.on_failure.rule_for(reason) if can_train else "retry_then_exclude"
    num_failures = group.members[claim.slot.member].num_failures + 1
    is_last = group.is_external or num_failures >= rules.session_attempts
    ends = rule == "zero" or (is_last and (rule == "retry_then_zero" or group.split == "holdout"))
    return rules.failed_reward if ends else None


def judge(ledger: Ledger, group: Group) -> str:
    """Why a group is to be rejected now; empty if it counts or is in flight."""
    if group.lost is not None:
        return group.lost
    if group.split == "holdout" or not group.is_complete:
        return ""
    if _is_expired(ledger, group, ledger.next_batch):
        return "max_lag"
    return ledger.rules.gate.refusal(group.results, ledger.rules.success)


def judge_again(ledger: Ledger) -> Iterator[tuple[int, str]]:
    """Groups, with reasons, whose rejection the last process could not record any more."""
    for group in list(ledger.groups.values()):
        is_judged = group.lost is None and group.index != ledger.completed_last
        if not is_judged and (reason := judge(ledger, group)):
            yield group.index, reason


# --- batches


def readiness(ledger: Ledger, batch: int) -> Readiness:
    rules = ledger.rules
    needed = rules.groups_per_batch
    accepted = [group for group in ledger.groups.values() if group.is_complete]
    in_flight = len(ledger.groups) - len(accepted)
    if batch < ledger.next_batch:
        return Readiness(True, needed, needed, in_flight, "")
    waiting_for = ""
    if batch > ledger.next_batch:
        waiting_for = f"batch {ledger.next_batch}, which comes first"
    elif missing := [
        text for external in (False, True) if (text := _say_missing(ledger, accepted, external))
    ]:
        waiting_for = " and ".join(missing)
    elif rules.on_max_lag == "wait" and (late := _find_late(ledger, _take_earliest(ledger), batch)):
        waiting_for = f"groups that would exceed the lag bound of {ledger.lag_bound}: {late}"
    return Readiness(not waiting_for, len(accepted), needed, in_flight, waiting_for)


def choose(ledger: Ledger, batch: int) -> Batch:
    """The groups that a batch takes, and those that it drops. Raises ValueError if it is not ready."""
    ready = readiness(ledger, batch)
    if not ready.ready:
        raise ValueError(f"batch {batch} is not ready: waiting for {ready.waiting_for}")
    if batch < ledger.next_batch:
        raise ValueError(f"batch {batch} was sealed before this data plane opened the run")
    chosen = _take_earliest(ledger)
    # with `wait` none is late, or the batch would not be ready
    late = _find_late(ledger, chosen, batch)
    gone = {*chosen, *late}
    dropped = late + [
        group.index
        for group in ledger.groups.values()
        if group.index not in gone and _is_expired(ledger, group, batch + 1)
    ]
    return Batch(chosen, ledger.rejected | dict.fromkeys(dropped, "max_lag"), dropped)


def num_sessions_left(ledger: Ledger) -> int:
    """Sessions still to run for the next batch, for the batches that the lag bound admits before it is
    trained on, and for evaluations. Counts those groups that have the fewest sessions left."""
    held_out = sum(group.num_left for group in ledger.evaluations.values())
    num_batches = min(1 + ledger.lag_bound, ledger.num_batches - ledger.next_batch)
    num_groups = ledger.rules.groups_per_batch * max(0, num_batches)
    fewest_left = sorted(group.num_left for group in ledger.groups.values())[:num_groups]
    num_new_groups = num_groups - len(fewest_left)
    return held_out + sum(fewest_left) + ledger.rules.group_size * num_new_groups


def num_open_sessions(ledger: Ledger, is_full: bool = False) -> int:
    """Number of sessions that claims could get now; fewer if the curriculum makes groups smaller."""
    groups = [*ledger.evaluations.values(), *ledger.groups.values()]
    num_open = sum(group.num_open for group in groups)
    num_new_groups = max(0, _num_admissible(ledger, is_full) - len(_list_groups(ledger)))
    sessions_per_group = ledger.rules.group_size + ledger.rules.spare_sessions
    return num_open + sessions_per_group * num_new_groups


# --- rules


def _open_sessions(ledger: Ledger) -> Iterator[Claim]:
    for group in chain(ledger.evaluations.values(), ledger.groups.values()):
        yield from group.claims()


def _num_slots(ledger: Ledger, external: bool) -> int:
    """Groups of one kind in each batch."""
    num_external = ledger.rules.outside_groups
    return num_external if external else ledger.rules.groups_per_batch - num_external


def _list_groups(ledger: Ledger, external: bool = False) -> list[Group]:
    """Groups of one kind that are accepted or in flight."""
    return [group for group in ledger.groups.values() if group.is_external is external]


def _num_admissible(ledger: Ledger, is_full: bool = False, external: bool = False) -> int:
    """Most groups of one kind that may be accepted or in flight now."""
    batches = min(ledger.version + 1 + ledger.lag_bound, ledger.num_batches)
    slots_per_batch = _num_slots(ledger, external)
    num_groups = slots_per_batch * (batches - ledger.next_batch)
    if is_full:
        # one at a time up to a whole batch: its results can only be stored together
        num_accepted = sum(group.is_complete for group in _list_groups(ledger, external))
        num_groups = min(num_groups, num_accepted + 1, slots_per_batch)
    return num_groups


def _say_missing(ledger: Ledger, accepted: list[Group], external: bool) -> str:
    """What the next batch lacks of one kind; empty if nothing."""
    num_accepted = sum(group.is_external is external for group in accepted)
    needed = _num_slots(ledger, external)
    if num_accepted >= needed:
        return ""
    kind = "external groups" if external else "groups"
    in_flight = len(_list_groups(ledger, external)) - num_accepted
    return f"{needed - num_accepted} of {needed} {kind}; {in_flight} are in flight"


def _deadline(ledger: Ledger, group: Group) -> int:
    # a group without tokens yet will be sampled by this version or a later one
    oldest = ledger.version if group.min_version is None else group.min_version
    return oldest + ledger.lag_bound


def _is_expired(ledger: Ledger, group: Group, next_batch: int) -> bool:
    """Whether its deadline has passed, which only a restart with other rules or versions can cause."""
    return _deadline(ledger, group) < next_batch


def _take_earliest(ledger: Ledger) -> list[int]:
    """Accepted groups for the next batch, earliest deadline first."""

    def deadline(group: Group) -> int:
        return _deadline(ledger, group)

    chosen: list[Group] = []
    for external in (False, True):
        accepted = sorted((g for g in _list_groups(ledger, external) if g.is_complete), key=deadline)
        chosen += accepted[: _num_slots(ledger, external)]
    return [group.index for group in sorted(chosen, key=lambda group: (deadline(group), group.index))]


def _find_late(ledger: Ledger, chosen: list[int], batch: int) -> list[int]:
    """In-flight groups that keep `batch` from being made of `chosen`: were they left behind, the batches up
    to some deadline could not hold all groups due by then. As few as possible, earliest first."""
    chosen_indices = set(chosen)
    late: list[int] = []
    for external in (False, True):
        rest = [
            g
            for g in _list_groups(ledger, external)
            if g.index not in chosen_indices and g.min_version is not None
        ]
        rest.sort(key=lambda group: (_deadline(ledger, group), not group.is_complete))
        fitting = 0
        for group in rest:
            if fitting < _num_slots(ledger, external) * (_deadline(ledger, group) - batch):
                fitting += 1
            elif not group.is_complete:
                late.append(group.index)
    return late
