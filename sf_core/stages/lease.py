"""A worker's time under `rollout`, `agent` or `reward`: what the lease tasks run, until told to yield.

The data plane decides when a lease ends; Dask only decides when it starts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from sf_core.agents.runner import AgentRunner
from sf_core.config.environment import dataplane_key
from sf_core.dataplane.runs.runners import Work
from sf_core.engines.client import serve_engine
from sf_core.engines.protocol import Engine
from sf_core.scheduling.plan import current_epoch
from sf_core.scheduling.timeline import Timeline
from sf_core.stages.run import Run, RunRef, load_object
from sf_core.stages.switching import switching_of, work_left
from sf_core.types import WeightsRef
from storage.files import local_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseSpec:
    run: RunRef
    worker: str
    lease_id: str
    """Names the lease within the run; a lease that Dask runs again keeps it."""
    after: int | None = None
    """Iteration that must be trained before this lease may start on the trainer."""
    trainers: tuple[str, ...] = ()
    """The workers that are lent together, this one among them; none if its lease lasts the run."""

    @property
    def holder(self) -> str:
        """Names the engine or runner in the data plane."""
        return f"{self.worker}:{self.lease_id}"


def lease_of(holder: str) -> tuple[str, str]:
    """The worker and the lease id of a `LeaseSpec.holder`."""
    worker, _, lease_id = holder.partition(":")
    return worker, lease_id


def serve_lease(spec: LeaseSpec) -> str:
    """Hold the device as an engine until revoked; returns why the lease ended. Raises ConnectionError as
    `serve_engine` does."""
    run = Run(spec.run)
    if spec.after is not None and run.directory.read_manifest(spec.after, "train") is None:
        # the lease overtook the train task in the worker's queue, or training failed: training comes first
        return "training comes first"
    switching = switching_of(run)
    if spec.after is not None:
        verdict = switching.decide(work_left(run.dataplane.status(), spec.trainers))
        if not verdict.lend:
            log.info("%s is not lent: %s", spec.worker, verdict.reason)
            return f"not worth it: {verdict.reason}"
    hello = {
        "run_id": spec.run.run_id,
        "attempt": spec.run.attempt,
        "lease_id": spec.lease_id,
        "epoch": current_epoch(),
        "engine_id": spec.holder,
        "worker": spec.worker,
        "max_running": run.config.engine.max_running,
    }
    make = switching.measured(engine_factory(run))
    with Timeline(run.directory, spec.worker, "rollout", spec.lease_id) as timeline:
        reason = serve_engine(spec.run.dataplane_url, dataplane_key(), hello, make, timeline)
        if reason == "revoked":
            switching.note_revoked()
    return reason


def engine_factory(run: Run) -> Callable[[WeightsRef], Engine]:
    """How this run's engine is made from published weights."""
    settings = run.config.engine

    def make(weights: WeightsRef) -> Engine:
        if settings.kind == "scripted":
            from sf_core.engines.scripted import ScriptedEngine

            assert settings.script is not None
            script = load_object(settings.script)
            return ScriptedEngine(script, version=weights.version, max_running=settings.max_running)
        if settings.kind == "emulated":
            from sf_core.engines.emulated_device import emulated_engine

            return emulated_engine(run.config, weights.version)
        from sf_core.engines.torch.torch_engine import TorchEngine, local_device

        engine = TorchEngine(
            local_folder(run.start_dir),
            version=0,
            max_running=settings.max_running,
            context_length=settings.context_length,
            kv_on_update=settings.kv_on_update,
            device=local_device(),
        )
        if weights.version:
            engine.load_weights(weights.uri, weights.version)
        return engine

    return make


def run_sessions(spec: LeaseSpec, work: Work) -> int:
    """Hold a worker: claim sessions and run the agent on them, or score what it answered, until released.
    Returns how many. Raises ConnectionError as `AgentRunner.run` does."""
    run = Run(spec.run)
    environment = run.config.environment
    runner = AgentRunner(
        url=spec.run.dataplane_url,
        key=dataplane_key(),
        run_id=spec.run.run_id,
        runner_id=spec.holder,
        attempt=spec.run.attempt,
        tasks=load_object(environment.tasks),
        agent=load_object(environment.agent),
        reward=load_object(environment.reward),
        concurrency=run.config.rollout.concurrency,
        seed=run.config.seed,
        work=work,
    )
    return asyncio.run(runner.run())
