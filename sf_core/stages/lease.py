"""What lease tasks run: a worker as an engine, as an agent runner or as a scorer, until told to yield.

Dask decides when a lease starts, the data plane when it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sf_core.agents.runner import AgentRunner
from sf_core.config import RunConfig
from sf_core.dataplane.bodies import Work
from sf_core.engines.drivers.serve import serve_engine
from sf_core.engines.resident import engine_of
from sf_core.engines.wire import Hello
from sf_core.environments.registry import (
    agent_of,
    check_host,
    group_reward_of,
    prepare_of,
    reward_of,
    tasks_of,
)
from sf_core.scheduling.cluster import current_epoch
from sf_core.scheduling.leases import Lease
from sf_core.scheduling.lending import LendingGate, Refusal, Verdict, WorkLeft, not_lent, work_left
from sf_core.scheduling.timeline import Timeline
from sf_core.stages.run import OpenRun, RunRef
from sf_core.surroundings import dataplane_key
from sf_core.training.registry import trainer_backend
from sf_core.types import Task

log = logging.getLogger(__name__)


def serve_lease(ref: RunRef, lease: Lease) -> str:
    """Hold the device as an engine until revoked; returns why the lease ended. Raises ConnectionError as
    `serve_engine` does."""
    run = OpenRun(ref)
    if lease.after is not None and run.directory.read_manifest(lease.after, "train") is None:
        # the lease overtook the train task in the worker's queue, or training failed: training comes first
        return "training comes first"
    switching = switching_of(run)
    if lease.after is not None:
        status = run.dataplane.status()
        verdict = switching.decide(work_left(status["tokens_left"], status["engines"], lease.trainers))
        if not verdict.lend:
            log.info("%s is not lent: %s", lease.worker, verdict.reason)
            return f"not worth it: {verdict.reason}"
        # the engine may need the memory that the trainer has on this device
        trainer_backend(run.config).rest()
    hello = Hello(
        run_id=ref.run_id,
        attempt=ref.attempt,
        lease_id=lease.lease_id,
        epoch=current_epoch(),
        engine_id=lease.holder,
        worker=lease.worker,
        max_running=run.config.engine.max_running,
    )
    with (
        Timeline(run.directory, lease.worker, "rollout", lease.lease_id) as timeline,
        engine_of(run.config, run.start_dir, run.origin) as (engine, is_new),
    ):
        switching.begin_rollout(is_first_start=is_new)
        key = dataplane_key()
        reason = serve_engine(
            ref.dataplane_url, key, hello, engine, timeline, on_ready=switching.note_serving
        )
        if reason == "revoked":
            switching.note_revoked()
    return reason


def run_sessions(ref: RunRef, lease: Lease, work: Work) -> int:
    """Hold a worker: claim sessions and run the agent on them, or score answers, until released. Returns the
    number of sessions. Raises ConnectionError as `AgentRunner.run` does."""
    run = OpenRun(ref)
    environment = run.config.environment
    check_host(environment)
    runner = AgentRunner(
        url=ref.dataplane_url,
        key=dataplane_key(),
        run_id=ref.run_id,
        runner_id=lease.holder,
        attempt=ref.attempt,
        tasks=tasks_to_work_on(run.config),
        agent=agent_of(environment),
        reward=reward_of(environment),
        group_reward=group_reward_of(environment),
        prepare=prepare_of(environment),
        rules=run.config.rollout,
        seed=run.config.seed,
        work=work,
    )
    return asyncio.run(runner.run())


def tasks_to_work_on(config: RunConfig) -> Callable[..., Task]:
    """The tasks of a run, each held-out one as often as it is answered."""
    tasks, answers = tasks_of(config.environment), config.evaluate.answers

    def task(split: str, index: int, *source: str) -> Task:
        return tasks(split, index // answers if split == "holdout" else index, *source)

    return task


class Switching:
    """Measures a device's switches between training and rollout and asks the gate about the next. Kept in the
    worker process between tasks, as the trainer is."""

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
            self.gate.note_to_rollout(self._now() - self._began_at)
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
            self.gate.note_to_train(self._now() - self._lease_over_at)
            self._lease_over_at = None
        ends = [at for _, at in self._refusals[1:]] + [time.time()]
        for (refusal, at), end in zip(self._refusals, ends, strict=False):
            timeline.add("wait", not_lent(refusal), at, end)
        self._refusals = []


_current: tuple[str, Switching] | None = None


def switching_of(run: OpenRun) -> Switching:
    global _current
    bound = run.config.cluster.max_switches_per_minute
    if _current is None or _current[0] != run.ref.uri:
        _current = (run.ref.uri, Switching(LendingGate(bound)))
    _current[1].gate.max_switches_per_minute = bound  # a later attempt may have changed it
    return _current[1]
