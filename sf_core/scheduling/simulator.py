"""A run on simulated devices: the rules of the real one on a clock of events.

Which sessions are given out and which groups make a batch (RolloutManager), whether a trainer is lent
(LendingGate), who does what (Plan), how long devices take (DeviceModel) and how requests share an engine
(ContinuousBatch) are the same code as in a real run. The order of an iteration is that of flows/train.py and
tasks/: batch full, filter, revoke and yield, train, publish. What the machine needs between the steps is
given (`Overheads`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sf_core.config import RunConfig
from sf_core.dataplane.rollout_manager import BatchRules, RolloutManager
from sf_core.scheduling.device_model import DeviceModel
from sf_core.scheduling.event_clock import EventClock, Process, Signal
from sf_core.scheduling.lending import LendingGate, WorkLeft
from sf_core.scheduling.plan import Plan
from sf_core.scheduling.roofline import Device
from sf_core.scheduling.simulated_fleet import Fleet, SimulatedEngine, SimulatedSession
from sf_core.scheduling.switching import work_left
from sf_core.scheduling.timeline import Span

Length = Callable[[int, int], tuple[int, int]]
"""Tokens of the prompt and of the answer of a session, by its group and its place there."""

LOOK_AGAIN_S = 0.25
"""How often a batch that is nearly full is looked at."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds of orchestration, on the clock of the machine: no time dilation."""

    seal: float = 0.2
    """From a full batch to its stored rows, filter included."""
    hand_over: float = 0.3
    """From the stored batch until training may begin: revoking, yielding, the start of the ranks."""
    lease: float = 0.3
    """From the end of training until the next lease begins to load."""
    publish: float = 0.3
    """From the end of training until engines begin to load the new version."""
    next_iteration: float = 0.5
    """From one iteration's end until the next one may seal its batch."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Devices die at random moments and come back."""

    mean_between_s: float
    """Mean time between failures of one device, in seconds of the clock."""
    repair_s: float


@dataclass(frozen=True, slots=True)
class SimulatedIteration:
    start: float
    end: float
    """From the end of the one before to its own end, as in a real run's windows."""
    tokens: int
    max_lag: int
    train_seconds: float


@dataclass(slots=True)
class Simulated:
    iterations: list[SimulatedIteration] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    yields: int = 0
    not_lent: int = 0
    moves: int = 0
    """Sessions moved from a long queue to a short one."""
    failures: int = 0


def simulate(
    config: RunConfig,
    plan: Plan,
    length: Length,
    *,
    devices: Mapping[str, Device] | None = None,
    overheads: Overheads | None = None,
    failures: Failures | None = None,
) -> Simulated:
    """All iterations of that configuration; the same arguments give the same result. `devices` by worker;
    one that is not there is the device of the configuration's `emulation`."""
    return _Simulation(config, plan, length, devices or {}, overheads or Overheads(), failures).run()


class _Simulation:
    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        length: Length,
        devices: Mapping[str, Device],
        overheads: Overheads,
        failures: Failures | None,
    ) -> None:
        self._config, self._plan, self._length = config, plan, length
        self._overheads, self._failures = overheads, failures
        self._random = random.Random(config.seed)
        self._clock = EventClock()
        self._model = DeviceModel(config.emulation)
        self._models = {
            worker: DeviceModel(config.emulation, devices.get(worker))
            for worker in (*plan.rollout, *plan.trainers)
        }
        self._manager = RolloutManager(rules_of(config), next_batch=0, version=0, done_groups=[])
        self._fleet = Fleet(
            self._clock,
            self._model.weight_load_s(),
            config.engine.max_running,
            recompute=config.engine.kv_on_update == "recompute",
            typical=sum(length(0, member)[1] for member in range(config.rollout.group_size))
            / config.rollout.group_size,
            budget=config.rollout.max_tokens,
        )
        self._fleet.on_started = lambda session, version: self._manager.note_started(session.claim, version)
        self._fleet.on_finished = self._finish
        self._gates = {w: LendingGate(config.cluster.max_switches_per_minute) for w in plan.trainers}
        self._engines: dict[str, SimulatedEngine] = {}
        self._down: set[str] = set()
        self._training = False
        self._step_failed = False
        self._num_complete = 0
        self._arrived = 0
        self._sizes: dict[int, tuple[int, int]] = {}
        """Tokens of a finished group: sampled, and all of them."""
        self._oldest: dict[int, int] = {}
        """Version of the oldest token of a finished group."""
        self._recent = 0.0
        """Tokens that a session samples: moving mean."""
        self._work: tuple[float, WorkLeft] | None = None
        """When it was last looked at, and what it was."""
        self._changed = Signal()
        self._result = Simulated()
        self._is_over = False

    def run(self) -> Simulated:
        for worker in self._plan.rollout:
            self._clock.start(self._serve(worker))
        if self._plan.lent:
            for worker in self._plan.trainers:
                self._clock.start(self._lend(worker))
        if self._failures is not None:
            for worker in (*self._plan.rollout, *self._plan.trainers):
                self._clock.start(self._break_down(worker, self._failures))
        self._claim()
        self._clock.start(self._flow())
        self._clock.run(lambda: self._is_over)
        self._fleet.finish()
        self._result.moves = self._fleet.num_moves
        self._result.spans += self._fleet.spans
        return self._result

    # --- the flow

    def _flow(self) -> Process:
        end = 0.0
        for number in range(self._config.train.iterations):
            yield from self._full_batch(number)
            yield self._overheads.seal
            batch = self._manager.seal(number)
            self._num_complete -= len(batch.groups)
            sizes = [self._sizes.pop(group) for group in batch.groups]
            lag = number - min(self._oldest.pop(group) for group in batch.groups)
            self._claim()
            yield self._overheads.hand_over
            self._take_back()
            started = self._clock.now
            yield from self._train(sum(total for _, total in sizes))
            seconds = self._clock.now - started
            if self._plan.lent:
                for worker in self._plan.trainers:
                    self._clock.start(self._lend(worker))
            yield self._overheads.publish
            self._fleet.set_version(number + 1)
            self._manager.set_version(number + 1)
            yield self._model.weight_load_s()
            self._claim()
            start, end = end, self._clock.now
            tokens = sum(sampled for sampled, _ in sizes)
            self._result.iterations.append(SimulatedIteration(start, end, tokens, lag, seconds))
            yield self._overheads.next_iteration
        self._is_over = True

    def _full_batch(self, number: int) -> Process:
        while True:
            if self._num_complete < self._config.rollout.groups_per_batch:
                yield self._changed
            elif not self._manager.readiness(number).ready:
                yield LOOK_AGAIN_S
            else:
                return

    def _train(self, num_tokens: int) -> Process:
        """A step by all trainers together; one that breaks down costs the step."""
        num_ranks = len(self._plan.trainers)
        while True:
            while any(worker in self._down for worker in self._plan.trainers):
                yield LOOK_AGAIN_S
            self._step_failed = False
            switch = self._model.to_train_s(num_ranks) if self._plan.lent else 0.0
            switched_from = self._clock.now
            yield switch
            begun = self._clock.now
            yield max(self._models[w].train_s(num_tokens, num_ranks) for w in self._plan.trainers)
            if not self._step_failed:
                break
        self._training = False
        for worker in self._plan.trainers:
            self._result.spans.append(Span(worker, "train", switched_from, begun, "moving"))
            self._result.spans.append(Span(worker, "train", begun, self._clock.now, "busy"))
            self._gates[worker].note_to_train(switch)

    # --- devices

    def _serve(self, worker: str) -> Process:
        yield self._model.to_rollout_s()
        self._open(worker)

    def _lend(self, worker: str) -> Process:
        yield self._overheads.lease
        if self._result.iterations and not self._gates[worker].decide(self._clock.now, self._work_now()).lend:
            self._result.not_lent += 1
            return
        started = self._clock.now
        yield self._model.to_rollout_s()
        self._result.spans.append(Span(worker, "rollout", started, self._clock.now, "moving"))
        self._gates[worker].note_to_rollout(self._clock.now - started)
        if not self._training:
            self._open(worker)

    def _open(self, worker: str) -> None:
        if worker not in self._down and worker not in self._engines:
            self._engines[worker] = self._fleet.add_engine(
                worker, self._manager.version, self._models[worker]
            )

    def _take_back(self) -> None:
        for worker in self._plan.trainers:
            self._close(worker)
        self._training = True

    def _close(self, worker: str) -> None:
        if (engine := self._engines.pop(worker, None)) is not None:
            self._fleet.remove_engine(engine)
            self._result.yields += 1

    def _break_down(self, worker: str, failures: Failures) -> Process:
        while True:
            yield self._random.expovariate(1 / failures.mean_between_s)
            self._result.failures += 1
            self._down.add(worker)
            self._close(worker)
            if worker in self._plan.trainers:
                self._step_failed = self._training
            yield failures.repair_s
            self._down.discard(worker)
            if worker not in self._plan.trainers or (self._plan.lent and not self._training):
                self._clock.start(self._serve(worker))

    def _work_now(self) -> WorkLeft:
        """All trainers that ask at one moment see the same."""
        if self._work is None or self._work[0] != self._clock.now:
            self._work = self._clock.now, self._work_left()
        return self._work[1]

    def _work_left(self) -> WorkLeft:
        """Told from what the status of a real run would show now."""
        engines = [
            {
                "worker": engine.worker,
                "version": engine.version,
                "tokens": engine.num_tokens,
                "seconds": self._clock.now - engine.serving_since,
            }
            for engine in self._fleet.engines
        ]
        tokens_left = self._manager.num_sessions_left() * self._recent if self._recent else None
        return work_left({"tokens_left": tokens_left, "engines": engines}, self._plan.trainers)

    # --- sessions

    def _claim(self) -> None:
        """Agents take every session that may run."""
        sessions = []
        for claim in self._manager.claim(1 << 30):
            num_prompt, num_wanted = self._length(claim.place.group, claim.place.member)
            sessions.append(SimulatedSession(claim, self._arrived, num_prompt, num_wanted))
            self._arrived += 1
        self._fleet.submit(sessions)

    def _finish(self, session: SimulatedSession) -> None:
        group = session.claim.place.group
        sampled, total = self._sizes.get(group, (0, 0))
        length = session.num_wanted
        self._sizes[group] = (sampled + length, total + length + session.num_prompt)
        assert session.min_version is not None
        self._oldest[group] = min(self._oldest.get(group, session.min_version), session.min_version)
        self._recent += (length - self._recent) / 256 if self._recent else length
        # rewards differ, so that every group counts
        self._manager.finish(session.claim, float(session.claim.place.member), session.min_version)
        if self._manager.groups[group].is_complete:
            self._num_complete += 1
            self._clock.give(self._changed)


def rules_of(config: RunConfig) -> BatchRules:
    """As the data plane gets them when a run is registered."""
    rollout = config.rollout
    return BatchRules(
        group_size=rollout.group_size,
        groups_per_batch=rollout.groups_per_batch,
        lag_bound=config.lag_bound,
        on_max_lag=rollout.on_max_lag,
        gate=rollout.gate,
        session_attempts=1,
        num_batches=config.train.iterations,
    )
