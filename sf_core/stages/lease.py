"""What lease tasks run: a worker as an engine, as an agent runner or as a scorer, until told to yield.

Dask decides when a lease starts, the data plane when it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sf_core.agents.authorities import read_authorities_lazily
from sf_core.agents.judges.judges import Judges, endpoint_of
from sf_core.agents.runner import AgentRunner
from sf_core.config import EnvironmentConfig, RunConfig
from sf_core.dataplane.api_schemas import Work
from sf_core.dataplane.operator_key import operator_key
from sf_core.engines.drivers.serve import serve_engine
from sf_core.engines.vllm.judge_server import serve_judges
from sf_core.engines.wire import Hello
from sf_core.environments.registry import (
    agent_of,
    check_host,
    group_reward_of,
    prepare_of,
    reward_of,
    tasks_of,
)
from sf_core.scheduling.leases import Lease
from sf_core.scheduling.lending import work_left
from sf_core.scheduling.timeline import Timeline
from sf_core.scheduling.worker_state import WorkerState
from sf_core.stages.preflight.other_models import describe_incomplete
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.backends import trainer_backend
from sf_core.training.policy_folder import policy_folder
from sf_core.types import Task

log = logging.getLogger(__name__)


def serve_lease(worker: WorkerState, ref: RunRef, lease: Lease, epoch: int) -> str:
    """Hold the worker's device as an engine until revoked; returns why the lease ended. `epoch` is the number
    of this start of the lease. Raises ConnectionError as `serve_engine` does."""
    run = OpenRun(ref)
    if lease.after is not None and run.directory.read_manifest(lease.after, "train") is None:
        # the lease overtook the train task in the worker's queue, or training failed: training comes first
        return "training comes first"
    switching = worker.measure_switches(ref.uri, run.config.cluster.max_switches_per_minute)
    if lease.after is not None:
        status = run.dataplane.status()
        verdict = switching.decide(work_left(status["tokens_left"], status["engines"], lease.trainers))
        if not verdict.lend:
            log.info("worker %s is not lent to rollout: %s", lease.worker, verdict.reason)
            return f"not worth it: {verdict.reason}"
        # the engine may need the memory that the trainer has on this device
        trainer_backend(run.config, worker).rest()
    hello = Hello(
        run_id=ref.run_id,
        attempt=ref.attempt,
        lease_id=lease.lease_id,
        epoch=epoch,
        engine_id=lease.holder,
        worker=lease.worker,
        max_running=run.config.engine.max_running,
    )
    with (
        Timeline(run.directory, lease.worker, "rollout", lease.lease_id) as timeline,
        worker.engine.lend(run.config, run.directory.start_dir, run.origin) as (engine, is_new),
    ):
        switching.begin_rollout(is_first_start=is_new)
        key = operator_key(ref.dataplane_url)
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
    read_authorities_lazily()
    with open_judges(environment, work) as judges:
        runner = AgentRunner(
            url=ref.dataplane_url,
            key=operator_key(ref.dataplane_url),
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
            judges=judges,
        )
        return asyncio.run(runner.run())


@contextmanager
def open_judges(environment: EnvironmentConfig, work: Work) -> Iterator[Judges | None]:
    """The judges that a runner's functions may ask; None if it asks none. Runners of answers serve those that
    are given as `model`. Raises as `serve_judges` does."""
    served = environment.served_judges
    judges = environment.judges
    if not judges or (served and work != "reward"):
        yield None
        return
    folders = {name: (judges[name], policy_folder(model)) for name, model in served.items()}
    # the folders may exist only on this worker
    for name, (_, folder) in folders.items():
        if fault := describe_incomplete(folder, f"environment.judges.{name}.model"):
            raise ValueError(fault)
    endpoints = {name: endpoint_of(name, judge) for name, judge in judges.items() if name not in served}
    with serve_judges(folders) as served_here:
        yield Judges(judges, endpoints | served_here)


def tasks_to_work_on(config: RunConfig) -> Callable[..., Task]:
    """The tasks of a run, each held-out one as often as it is answered."""
    tasks = tasks_of(config.environment)
    answers = config.evaluate.answers

    def task(split: str, index: int, *source: str) -> Task:
        return tasks(split, index // answers if split == "holdout" else index, *source)

    return task
