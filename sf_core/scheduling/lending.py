"""Whether a device that can train is worth lending to rollout now. Facts in, verdict out: no clock, no IO."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import mean
from typing import Literal

MEMORY = 3
"""Switches whose cost counts: the last ones tell what the next will cost."""

PATIENCE = 16
"""Refusals in a row for the cost, after which that is measured again. A trainer that is not lent is asked
about twice in an iteration: this is eight of them."""

MINUTE_S = 60.0
SWITCHES_PER_LOAN = 2
"""To rollout and back."""


@dataclass(frozen=True, slots=True)
class WorkLeft:
    """What rollout may still do: for the next batch, and for those that the lag bound lets run before it."""

    units: float
    """Of work, in tokens or sessions."""
    seconds_per_unit: float | None
    """That the dedicated devices take together; None while unknown."""
    dedicated: int
    """Devices that roll out whatever is decided."""
    lent: int
    """Devices that would come to their help."""


Refusal = Literal["cost", "bound", "work"]
"""The switches cost more than they win, there were too many of late, or nothing is left to do."""


def not_lent(refusal: Refusal) -> str:
    """What a trainer that was refused waits for, as its timeline has it."""
    return f"training, not lent: {refusal}"


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: str
    refusal: Refusal | None = None

    @property
    def lend(self) -> bool:
        return self.refusal is None


class LendingGate:
    """Lend only if the time won repays the two switches:

        units x seconds_per_unit x (1 - 1 / scale) > mean(to rollout) + mean(to train)
        scale = (lent + dedicated) / dedicated

    with the mean over the last `MEMORY` switches of each kind. This is the rule by which verl lends its
    training devices (dynamic schedule of its fully asynchronous trainer, PR 6556); what is unknown counts as
    worth it. Where no device is dedicated there is no choice: rollout would stand still.

    Costs are measured by loans alone. One dear switch (a process that imports its libraries, a trainer that
    is rebuilt) would forbid all loans, and with them the measurement that shows it to be past. So after
    `PATIENCE` refusals in a row it forgets what it has measured. To forget only the dearest would keep the
    mean above the gain for further rounds; this way a wrong measurement costs one round, and a right one a
    loan in vain every `PATIENCE` + 1 questions.

    A device changes its role at most `max_switches_per_minute` times within any minute, whatever the facts;
    only where no device is dedicated is that no bound.
    """

    def __init__(self, max_switches_per_minute: int) -> None:
        self.max_switches_per_minute = max_switches_per_minute
        self._to_rollout: deque[float] = deque(maxlen=MEMORY)
        self._to_train: deque[float] = deque(maxlen=MEMORY)
        self._loans: deque[float] = deque()
        """When it was lent, within the last minute."""
        self._refused = 0
        """Times in a row, for the cost."""

    def note_to_rollout(self, seconds: float) -> None:
        """So long did it take from the end of training until the device was an engine."""
        self._to_rollout.append(seconds)

    def note_to_train(self, seconds: float) -> None:
        """So long did it take from the end of rollout until the device trained."""
        self._to_train.append(seconds)

    @property
    def switch_cost_s(self) -> float | None:
        """Of both switches together; None while one of them is unknown."""
        if not self._to_rollout or not self._to_train:
            return None
        return mean(self._to_rollout) + mean(self._to_train)

    def decide(self, now_s: float, work: WorkLeft) -> Verdict:
        """Asked when the device is free to be lent; a verdict to lend counts as a loan from `now_s` on."""
        verdict = self._judge(now_s, work)
        if verdict.lend:
            self._loans.append(now_s)
            self._refused = 0
        elif verdict.refusal == "cost":
            self._refused += 1
            if self._refused == PATIENCE:
                self._refused = 0
                self._to_rollout.clear()
                self._to_train.clear()
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
            return Verdict("what it is worth is not known yet")
        scale = (work.lent + work.dedicated) / work.dedicated
        won = work.units * work.seconds_per_unit * (1 - 1 / scale)
        facts = f"{won:.2f} s to win, {cost:.2f} s to switch"
        return Verdict(facts, None if won > cost else "cost")
