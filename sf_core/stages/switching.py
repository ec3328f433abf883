"""What this process knows about the switches of its device between training and rollout: what they cost, and
the gate that decides on the next. It stays in the worker between tasks, as the trainer does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sf_core.engines.client import MakeEngine
from sf_core.engines.protocol import Engine
from sf_core.scheduling.lending import LendingGate, Refusal, Verdict, WorkLeft, not_lent
from sf_core.scheduling.timeline import Timeline
from sf_core.stages.run import Run
from sf_core.types import WeightsRef


class Switching:
    def __init__(self, gate: LendingGate, now: Callable[[], float] = time.monotonic) -> None:
        self.gate = gate
        self._now = now
        self._lease_over_at: float | None = None
        self._refusals: list[tuple[Refusal, float]] = []
        """Since the train step before; Unix seconds."""

    def decide(self, work: WorkLeft) -> Verdict:
        """Whether the device is lent now. A refusal is remembered until the next train step, whose timeline
        tells of it."""
        verdict = self.gate.decide(self._now(), work)
        if verdict.refusal is not None:
            self._refusals.append((verdict.refusal, time.time()))
        return verdict

    def measured(self, make_engine: MakeEngine) -> MakeEngine:
        """From the start of a lease until its engine holds its weights: the switch to rollout."""
        started = self._now()
        self._lease_over_at = None

        def make(weights: WeightsRef) -> Engine:
            engine = make_engine(weights)
            self.gate.note_to_rollout(self._now() - started)
            return engine

        return make

    def note_revoked(self) -> None:
        """The lease that began last is over, and training comes next. Any other end of it is no switch: a
        device that was released or lost its data plane waits for nobody knows what."""
        self._lease_over_at = self._now()

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """Other ranks are awaited: that is no switch of this device, however long theirs take. If they do not
        come, the next try begins whenever it can, and tells nothing of the switch."""
        over_at, self._lease_over_at, started = self._lease_over_at, None, self._now()
        yield
        if over_at is not None:
            self._lease_over_at = over_at + self._now() - started

    def note_training(self, timeline: Timeline) -> None:
        """The first work of a train step begins: since the end of the lease before it the device switched, or
        it waited because it was not lent."""
        if self._lease_over_at is not None:
            self.gate.note_to_train(self._now() - self._lease_over_at)
            self._lease_over_at = None
        ends = [at for _, at in self._refusals[1:]] + [time.time()]
        for (refusal, at), end in zip(self._refusals, ends, strict=False):
            timeline.add("wait", not_lent(refusal), at, end)
        self._refusals = []


_current: tuple[str, Switching] | None = None


def switching_of(run: Run) -> Switching:
    global _current
    bound = run.config.cluster.max_switches_per_minute
    if _current is None or _current[0] != run.ref.uri:
        _current = (run.ref.uri, Switching(LendingGate(bound)))
    _current[1].gate.max_switches_per_minute = bound  # a later attempt may have changed it
    return _current[1]


def work_left(status: dict[str, Any], trainers: tuple[str, ...]) -> WorkLeft:
    """In tokens, from the data plane's status of the run: what may be sampled before training needs its
    result, at the pace that the engines of other workers have had since they came."""
    others = [e for e in status["engines"] if e["worker"] not in trainers and e["version"] is not None]
    per_second = sum(e["tokens"] / e["seconds"] for e in others if e["seconds"])
    known = status["tokens_left"] is not None and per_second > 0
    return WorkLeft(
        units=status["tokens_left"] if known else 1.0,
        seconds_per_unit=1 / per_second if known else None,
        dedicated=len(others),
        lent=len(trainers),
    )
