"""Simulation of a run: the rules of the real one on an event clock.

Which sessions are given out and which groups make a batch (Rollout), whether a trainer is lent
(LendingGate), worker duties (Plan), how long devices take (DeviceModel) and how requests share an engine
(ContinuousBatch) are the same code as in a real run. The order of an iteration is that of flows/train.py and
tasks/: batch full, filter, revoke and yield, train, publish. The time between these steps is given
(`Overheads`).
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from benchmarks.emulation.device_model import DeviceModel
from benchmarks.simulation.clock import EventClock, Process, Signal
from benchmarks.simulation.device import Failures, SimulatedDevice
from benchmarks.simulation.fleet import Fleet, SimulatedSession, Turn
from benchmarks.simulation.idle import Causes, causes_of_engines
from benchmarks.simulation.outcome import Simulated, SimulatedIteration
from benchmarks.simulation.overheads import Overheads
from benchmarks.simulation.rollout import Rollout
from sf_core.config import RunConfig
from sf_core.config.devices import Device
from sf_core.dataplane.api_schemas import EnginePace
from sf_core.dataplane.runs import decide
from sf_core.dataplane.runs.results import NUM_RECENT
from sf_core.recipes.outcomes import Result
from sf_core.scheduling.lending import LendingGate, WorkLeft, work_left
from sf_core.scheduling.plan import Plan
from sf_core.scheduling.timeline import Kind, Span

Turns = Callable[[int, int], Sequence[Turn]]
"""Function from a session's group and its index there to its turns."""

LOOK_AGAIN_S = 0.25
"""How often a batch with enough groups is checked for being ready."""


def simulate(
    config: RunConfig,
    plan: Plan,
    turns: Turns,
    *,
    devices: Mapping[str, Device] | None = None,
    overheads: Overheads | None = None,
    failures: Failures | None = None,
) -> Simulated:
    """Simulate all iterations of a configuration; equal arguments give equal results. `devices` is by worker;
    a worker that is not in it has the device of the configuration's `emulation`."""
    return _Simulation(config, plan, turns, devices or {}, overheads or Overheads(), failures).run()


class _Simulation:
    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        turns: Turns,
        devices: Mapping[str, Device],
        overheads: Overheads,
        failures: Failures | None,
    ) -> None:
        self._config = config
        self._plan = plan
        self._turns = turns
        self._overheads = overheads
        self._failures = failures
        self._random = random.Random(config.seed)
        self._clock = EventClock()
        self._model = DeviceModel(config.emulation)
        self._devices = {
            worker: SimulatedDevice(
                worker, DeviceModel(config.emulation, devices.get(worker)), self._new_gate()
            )
            for worker in (*plan.rollout, *plan.trainers)
        }
        self._trainers = [self._devices[worker] for worker in plan.trainers]
        self._manager = Rollout(config.rollout, config.lag_bound, config.train.iterations)
        first_group = [turn for member in range(config.rollout.group_size) for turn in turns(0, member)]
        self._fleet = Fleet(
            self._clock,
            self._model.weight_load_s(),
            config.engine.max_running,
            kv_tokens=config.emulation.kv_tokens,
            recompute=config.engine.kv_on_update == "recompute",
            typical=fmean(turn.num_wanted for turn in first_group),
            budget=config.rollout.turn_tokens,
        )
        self._fleet.on_started = lambda session, version: self._manager.note_started(session.claim, version)
        self._fleet.on_answered = self._go_on
        self._training = self._has_trained = self._step_failed = False
        self._checkpoint_at = 0.0  # when the one that is being stored is complete
        self._freed = Signal()
        """Given when a trainer is repaired."""
        self._num_complete = 0
        self._sizes: dict[int, tuple[int, int]] = {}
        """Tokens of each group's finished sessions: sampled, and all."""
        self._oldest: dict[int, int] = {}
        """Lowest policy version in each group's finished sessions."""
        self._recent: deque[int] = deque(maxlen=NUM_RECENT)
        """Sampled tokens of the last sessions, as many as a real run remembers."""
        self._work: tuple[float, WorkLeft] | None = None
        """The last estimate of the work left, and its time."""
        self._changed = Signal()
        self._num_in_tools = 0
        self._idle: Causes = defaultdict(float)
        """Device-seconds since the last iteration ended."""
        self._clock.on_pass = self._note_idle
        self._result = Simulated()
        self._is_over = False

    def run(self) -> Simulated:
        for worker in self._plan.rollout:
            self._clock.start(self._hold(self._devices[worker]))
        if self._failures is not None:
            for device in self._devices.values():
                self._clock.start(self._break_down(device, self._failures))
        self._claim()
        self._clock.start(self._flow())
        self._clock.run(lambda: self._is_over)
        self._fleet.finish()
        for device in self._devices.values():
            self._note_lease(device)
        self._result.moves = self._fleet.num_moves
        spans = [*self._result.spans, *self._fleet.spans]
        self._result.spans = sorted(spans, key=lambda span: (span.worker, span.start))
        return self._result

    # --- the flow

    def _flow(self) -> Process:
        end = 0.0
        for number in range(self._config.train.iterations):
            # a loan that was refused after training may be granted now
            self._lend_trainers()
            if number:
                yield self._overheads.next_iteration
            yield from self._full_batch(number)
            yield self._overheads.seal
            batch = self._manager.seal_next(number)
            if batch.dropped:
                self._drop(batch.dropped)
            self._num_complete = sum(group.is_complete for group in self._manager.groups.values())
            sizes = [self._sizes.pop(group) for group in batch.groups]
            lag = number - min(self._oldest.pop(group) for group in batch.groups)
            self._claim()
            yield self._overheads.hand_over
            yield from self._train(number + 1, sum(total for _, total in sizes))
            self._lend_trainers()
            yield self._overheads.publish
            self._manager.set_version(number + 1)
            if self._fleet.engines:
                self._fleet.set_version(number + 1)
                yield self._model.weight_load_s()
            self._claim()
            start = end
            end = self._clock.now
            tokens = sum(sampled for sampled, _ in sizes)
            self._result.iterations.append(SimulatedIteration(start, end, tokens, lag, self._idle))
            self._idle = defaultdict(float)
        self._is_over = True

    def _full_batch(self, number: int) -> Process:
        while True:
            if self._num_complete < self._config.rollout.groups_per_batch:
                yield self._changed
            elif not decide.readiness(self._manager, number).ready:
                yield LOOK_AGAIN_S
            else:
                return

    def _train(self, version: int, num_tokens: int) -> Process:
        """One step of all trainers together, which makes this version, begun again if one fails."""
        num_ranks = len(self._trainers)
        is_last = version == self._config.train.iterations
        has_checkpoint = is_last or version % self._config.train.interval == 0
        self._training = True
        for device in self._trainers:
            self._end_lease(device)
        while True:
            while any(device.is_down for device in self._trainers):
                yield self._freed
            self._step_failed = False
            started = self._clock.now
            begins = []
            ends = []
            for device in self._trainers:
                switch = self._switch_to_train(device)
                begins.append(started + switch)
                ends.append(started + switch + device.model.train_s(num_tokens, num_ranks))
            trained = max(ends)
            for device, begun in zip(self._trainers, begins, strict=True):
                # busy to the end: a rank that has computed its share waits in the exchange of gradients
                device.computes = begun, trained
            yield trained - started
            # the checkpoint before is stored meanwhile
            wait_s = self._checkpoint_at - trained if has_checkpoint else 0.0
            yield max(self._model.save_s(), wait_s)
            if not self._step_failed:
                break
        if has_checkpoint:
            self._checkpoint_at = self._clock.now + self._model.save_checkpoint_s()
            if is_last:
                yield self._model.save_checkpoint_s()
        end = self._clock.now
        for device, begun in zip(self._trainers, begins, strict=True):
            self._note(device, "train", started, begun, "moving")
            self._note(device, "train", begun, trained, "busy")
            self._note(device, "train", trained, end, "moving")
            self._note(device, "train", started, end, "held")
        self._training = False
        self._has_trained = True

    def _switch_to_train(self, device: SimulatedDevice) -> float:
        """Switch to training; returns the seconds it takes, 0 if the device still holds its trainer."""
        switch = device.model.to_train_s() if device.tag != "train" else 0.0
        if device.tag == "rollout":
            device.gate.note_switch("train", switch)
        device.tag = "train"
        return switch

    # --- devices

    def _lend_trainers(self) -> None:
        if self._plan.lent:
            for device in self._trainers:
                if device.leased_at is None:
                    self._clock.start(self._lend(device))

    def _lend(self, device: SimulatedDevice) -> Process:
        life = device.num_lives
        yield self._overheads.lease
        # it may have failed or been lent meanwhile; before the first step the gate is not asked
        if (device.num_lives, device.leased_at) != (life, None) or device.is_down or self._training:
            return
        if self._has_trained and not device.gate.decide(self._clock.now, self._work_now()).lend:
            self._result.not_lent += 1
            return
        yield from self._hold(device)

    def _hold(self, device: SimulatedDevice) -> Process:
        """Start of a lease, up to the moment from which its engine serves."""
        device.num_leases += 1
        number = device.num_leases
        started = self._clock.now
        device.leased_at = started
        device.tag = "rollout"
        version = self._manager.version
        yield device.model.to_rollout_s()
        # a version published meanwhile is loaded too before the engine serves
        while self._is_held(device, number) and version != self._manager.version:
            version = self._manager.version
            yield device.model.weight_load_s()
        if not self._is_held(device, number):
            return
        self._note(device, "rollout", started, self._clock.now, "moving")
        if number > device.first_lease:
            device.gate.note_switch("rollout", self._clock.now - started)
        device.engine = self._fleet.add_engine(device.worker, self._manager.version, device.model)

    @staticmethod
    def _is_held(device: SimulatedDevice, number: int) -> bool:
        """Whether the lease of this number goes on."""
        return device.leased_at is not None and device.num_leases == number

    def _end_lease(self, device: SimulatedDevice) -> None:
        """No effect without a lease; an engine that loads yields at once."""
        if device.engine is not None:
            self._fleet.remove_engine(device.engine)
            device.engine = None
        elif device.leased_at is not None:
            self._note(device, "rollout", device.leased_at, self._clock.now, "moving")
            if device.num_leases > device.first_lease:
                device.gate.note_switch("rollout", self._clock.now - device.leased_at)
        self._note_lease(device)
        device.leased_at = None

    def _break_down(self, device: SimulatedDevice, failures: Failures) -> Process:
        is_trainer = device in self._trainers
        while True:
            yield self._random.expovariate(1 / failures.mean_between_s)
            self._result.failures += 1
            self._end_lease(device)
            device.is_down = True
            device.tag = None
            device.gate = self._new_gate()
            device.num_lives += 1
            device.first_lease = device.num_leases + 1
            self._step_failed |= is_trainer and self._training
            yield failures.repair_s
            device.is_down = False
            self._clock.give(self._freed)
            if not is_trainer:
                self._clock.start(self._hold(device))
            elif self._plan.lent and not self._training:
                self._clock.start(self._lend(device))

    def _new_gate(self) -> LendingGate:
        return LendingGate(self._config.cluster.max_switches_per_minute)

    def _note_idle(self, start: float, end: float) -> None:
        """Nothing changes between the two moments."""
        num_idle = 0
        for device in self._devices.values():
            if device.is_down:
                self._idle["failures"] += end - start
            elif self._training and device in self._trainers:
                begun, trained = device.computes
                self._idle["weights"] += end - start - max(0.0, min(end, trained) - max(start, begun))
            elif device.leased_at is None:
                self._idle["batch"] += end - start
            elif device.engine is None:
                self._idle["weights"] += end - start
            else:
                num_idle += not device.engine.running
        if num_idle:
            is_sampling = any(engine.running for engine in self._fleet.engines)
            for cause, number in causes_of_engines(num_idle, self._num_in_tools, is_sampling).items():
                self._idle[cause] += number * (end - start)

    def _note_lease(self, device: SimulatedDevice) -> None:
        if device.leased_at is not None:
            self._note(device, "rollout", device.leased_at, self._clock.now, "held")

    def _note(self, device: SimulatedDevice, tag: str, start: float, end: float, kind: Kind) -> None:
        if end > start:
            self._result.spans.append(Span(device.worker, tag, start, end, kind))

    def _work_now(self) -> WorkLeft:
        """The work left now, the same for all trainers that ask at one moment."""
        if self._work is None or self._work[0] != self._clock.now:
            self._work = self._clock.now, self._work_left()
        return self._work[1]

    def _work_left(self) -> WorkLeft:
        """Computed from the fields that the status of a real run would have now."""
        engines = [
            EnginePace(
                worker=engine.worker,
                version=engine.version,
                tokens=engine.num_tokens,
                seconds=self._clock.now - engine.serving_since,
            )
            for engine in self._fleet.engines
        ]
        tokens_left = decide.num_sessions_left(self._manager) * fmean(self._recent) if self._recent else None
        return work_left(tokens_left, engines, self._plan.trainers)

    # --- sessions

    def _claim(self) -> None:
        """Claim every session that may run, and submit its first turn."""
        claims = self._manager.claim(1 << 30)
        self._fleet.submit(
            [SimulatedSession(claim, self._turns(claim.slot.group, claim.slot.member)) for claim in claims]
        )

    def _go_on(self, session: SimulatedSession) -> None:
        """After a turn: run the session's tools, or finish the session."""
        if session.is_over:
            self._finish(session)
        else:
            self._num_in_tools += 1
            tool_s = session.turns[session.number - 1].tool_s
            self._clock.after(self._model.real_s(tool_s), self._ask_again, session)

    def _ask_again(self, session: SimulatedSession) -> None:
        self._num_in_tools -= 1
        if session.claim.slot.group in self._manager.groups:
            self._fleet.submit([session])

    def _drop(self, groups: list[int]) -> None:
        self._fleet.drop(groups)
        for group in groups:
            self._sizes.pop(group, None)
            self._oldest.pop(group, None)

    def _finish(self, session: SimulatedSession) -> None:
        group = session.claim.slot.group
        if self._manager.group_of(session.claim) is None:
            # the group was dropped at the moment this session ended, or is complete without it
            return
        sampled, total = self._sizes.get(group, (0, 0))
        length = sum(turn.num_wanted for turn in session.turns)
        self._sizes[group] = (sampled + length, total + session.num_tokens)
        assert session.min_version is not None
        self._oldest[group] = min(self._oldest.get(group, session.min_version), session.min_version)
        self._recent.append(length)
        # rewards differ, so that every group counts
        reward = float(session.claim.slot.member)
        result = Result(reward, reward, length, "finished")
        self._manager.end(session.claim, result, session.min_version)
        if self._manager.groups[group].is_complete:
            self._num_complete += 1
            self._clock.give(self._changed)
