"""Whether a device that can train is worth lending to rollout now: a gate without clock or IO, and what
measures the switches that the gate weighs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from sf_core.dataplane.api_schemas import EnginePace
from sf_core.scheduling.timeline import Timeline

MEMORY = 3
"""Number of switches of each kind, the latest, whose mean cost predicts that of the next."""

PATIENCE = 16
"""Refusals for cost in a row after which the cost is measured anew: eight iterations, since the gate is asked
twice per iteration about a trainer that is not lent."""

MINUTE_S = 60.0
SWITCHES_PER_LOAN = 2
"""One to rollout, one back to training."""


@dataclass(frozen=True, slots=True)
class WorkLeft:
    """Rollout work still to be done, for the next batch and for those that the lag bound lets run with it."""

    units: float
    """Amount of work left, in tokens; a positive placeholder while its pace is unknown."""
    seconds_per_unit: float | None
    """Seconds per unit with the dedicated rollout devices alone; None if not measured yet."""
    dedicated: int
    """Number of devices that roll out whatever is decided."""
    lent: int
    """Number of trainers that would join them."""


Refusal = Literal["cost", "bound", "work"]
"""Why a loan is refused: its switches cost more than they gain, their bound is reached, no work is left."""


def not_lent(refusal: Refusal) -> str:
    """Label of the wait span in the timeline of a trainer that was not lent."""
    return f"training, not lent: {refusal}"


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: str
    refusal: Refusal | None = None

    @property
    def lend(self) -> bool:
        return self.refusal is None


class LendingGate:
    """Decides on loans: lend only if the time gained repays the two switches:

        units x seconds_per_unit x (1 - 1 / scale) > mean(to rollout) + mean(to train)
        scale = (lent + dedicated) / dedicated

    with the mean over the last `MEMORY` switches of each kind. This is the rule by which verl lends its
    training devices (dynamic schedule of its fully asynchronous trainer, PR 6556); what is unknown counts as
    worth it. Where no device is dedicated there is no choice: rollout would stand still.

    Only loans measure costs. One expensive switch (a process that imports its libraries, a trainer that is
    rebuilt) would forbid all loans, and with them the measurement that shows it to be an exception. So after
    `PATIENCE` refusals in a row the gate forgets what it has measured. Forgetting only the most expensive
    switch would keep the mean above the gain for further rounds; this way a wrong measurement costs one
    round, and a right one a futile loan every `PATIENCE` + 1 decisions.

    A device switches at most `max_switches_per_minute` times within any minute, unless none is dedicated.
    """

    def __init__(self, max_switches_per_minute: int) -> None:
        self.max_switches_per_minute = max_switches_per_minute
        self._costs = {"rollout": deque[float](maxlen=MEMORY), "train": deque[float](maxlen=MEMORY)}
        """Seconds that the last switches took."""
        self._loans: deque[float] = deque()
        """Times of the loans within the last minute."""
        self._refused = 0
        """Number of refusals for cost in a row."""

    def note_switch(self, to: Literal["rollout", "train"], seconds: float) -> None:
        """Note how long a switch took: to rollout, from the start of a lease until the device was an engine;
        to training, from the end of rollout until the device trained."""
        self._costs[to].append(seconds)

    @property
    def switch_cost_s(self) -> float | None:
        """Mean cost of both switches together, at least: one that is unknown counts as 0. None while both
        are unknown."""
        means = [mean(costs) for costs in self._costs.values() if costs]
        return sum(means) if means else None

    def decide(self, now_s: float, work: WorkLeft) -> Verdict:
        """Decide about a device that is free to be lent; a verdict to lend counts as a loan from then."""
        verdict = self._judge(now_s, work)
        if verdict.lend:
            self._loans.append(now_s)
            self._refused = 0
        elif verdict.refusal == "cost":
            self._refused += 1
            if self._refused == PATIENCE:
                self._refused = 0
                for costs in self._costs.values():
                    costs.clear()
        return verdict

    def _judge(self, now_s: float, work: WorkLeft) -> Verdict:
        if work.dedicated == 0:
            return Verdict("no other device rolls out")
        if work.units <= 0:
            return Verdict("nothing is left to roll out", "work")
        while self._loans and self._loans[0] <= now_s - MINUTE_S:
            self._loans.popleft()
        if SWITCHES_PER_LOAN * (len(self._loans) + 1) > self.max_switches_per_minute:
            bound = f"the bound of {self.max_switches_per_minute} switches per minute"
            return Verdict(f"{bound} is reached", "bound")
        if work.seconds_per_unit is None or (cost := self.switch_cost_s) is None:
            return Verdict("the gain is not known yet")
        scale = (work.lent + work.dedicated) / work.dedicated
        won = work.units * work.seconds_per_unit * (1 - 1 / scale)
        facts = f"{won:.2f} s to win, {cost:.2f} s to switch"
        return Verdict(facts, None if won > cost else "cost")


def work_left(
    tokens_left: float | None, engines: Iterable[EnginePace], trainers: tuple[str, ...]
) -> WorkLeft:
    """Work in tokens, from the data plane's status of the run: what may be sampled before training needs its
    result, at the pace of the other workers' engines since they connected."""
    other_engines = [
        engine for engine in engines if engine["worker"] not in trainers and engine["version"] is not None
    ]
    tokens_per_s = sum(engine["tokens"] / engine["seconds"] for engine in other_engines if engine["seconds"])
    if tokens_left is None or not tokens_per_s:
        return WorkLeft(1.0, None, dedicated=len(other_engines), lent=len(trainers))
    return WorkLeft(tokens_left, 1 / tokens_per_s, dedicated=len(other_engines), lent=len(trainers))


class Switching:
    """Measures a device's switches between training and rollout and asks the gate about the next. The
    worker keeps it between tasks."""

    def __init__(self, gate: LendingGate, now: Callable[[], float] = time.monotonic) -> None:
        self.gate = gate
        self._now = now
        self._began_at: float | None = None
        """When the lease began whose engine does not serve yet."""
        self._lease_over_at: float | None = None
        self._refusals: list[tuple[Refusal, float]] = []
        """Refusals since the last train step, with their Unix time."""

    def decide(self, work: WorkLeft) -> Verdict:
        """Whether the device is lent now. A refusal is kept until the next train step, which writes it to its
        timeline."""
        verdict = self.gate.decide(self._now(), work)
        if verdict.refusal is not None:
            self._refusals.append((verdict.refusal, time.time()))
        return verdict

    def begin_rollout(self, *, is_first_start: bool = False) -> None:
        """A lease begins. What it starts for the first time stays in the process, so that such a start says
        nothing of the next switches."""
        self._began_at = None if is_first_start else self._now()
        self._lease_over_at = None

    def note_serving(self) -> None:
        """The engine of the lease serves: the switch to rollout is over."""
        if self._began_at is not None:
            self.gate.note_switch("rollout", self._now() - self._began_at)
        self._began_at = None

    def note_revoked(self) -> None:
        """The lease was revoked for training: the switch to training begins. After any other end of a lease
        it is unknown what the device does next, so no switch is measured. A switch to rollout that was not
        over took this long at least."""
        self.note_serving()
        self._lease_over_at = self._now()

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """Leave the block, a wait for other ranks, out of the measured switch. If it raises because they did
        not come, this switch is not measured at all."""
        over_at, self._lease_over_at, started = self._lease_over_at, None, self._now()
        yield
        if over_at is not None:
            self._lease_over_at = over_at + self._now() - started

    def note_training(self, timeline: Timeline) -> None:
        """The work of a train step begins: record the duration of the switch to it, or the times in which the
        device waited because it was not lent."""
        if self._lease_over_at is not None:
            self.gate.note_switch("train", self._now() - self._lease_over_at)
            self._lease_over_at = None
        ends = [at for _, at in self._refusals[1:]] + [time.time()]
        for (refusal, at), end in zip(self._refusals, ends, strict=False):
            timeline.add("wait", not_lent(refusal), at, end)
        self._refusals = []
