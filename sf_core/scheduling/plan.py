"""Which worker does what: the cluster, read from Dask, matched with the tags a run needs.

A worker's capability tags are its Dask resources. One more resource, @name, belongs to it alone: tasks are
pinned by it, because a restarted worker declares it again (a pinned address would hang).
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from distributed import Client, get_worker

from sf_core.config import RunConfig
from sf_core.scheduling.pipelines import PIPELINES


@dataclass(frozen=True, slots=True)
class Worker:
    name: str
    tags: frozenset[str]


@dataclass(frozen=True, slots=True)
class Plan:
    """The workers of a run by duty."""

    rollout: tuple[str, ...]
    """Hold a rollout lease for the whole run."""
    trainers: tuple[str, ...]
    """One rank each, rank 0 first."""
    lent: bool
    """The trainers carry `rollout` too and are lent to it between train steps."""
    agent: tuple[str, ...]


def read_workers(scheduler: str, timeout_s: float = 30.0) -> list[Worker]:
    """The workers connected to a scheduler. Raises ValueError if it cannot be reached."""
    try:
        with Client(scheduler, set_as_default=False, timeout=timeout_s) as client:
            infos = client.scheduler_info(n_workers=-1)["workers"].values()
    except (OSError, TimeoutError) as error:
        raise ValueError(f"no Dask scheduler answers at {scheduler}: {error}") from None
    return [worker_of(info["resources"]) for info in infos]


def worker_of(resources: dict[str, float]) -> Worker:
    names = [key[1:] for key in resources if key.startswith("@")]
    tags = frozenset(key for key in resources if not key.startswith("@"))
    if len(names) != 1:
        raise ValueError(
            f"a Dask worker with resources {sorted(resources)} needs exactly one private resource; "
            'start it with --resources "TAG=1 @NAME=1"'
        )
    return Worker(names[0], tags)


def make_plan(workers: list[Worker], config: RunConfig) -> Plan:
    """Assign duties. Raises ValueError, one sentence: what the run needs and what the workers offer."""
    for tag in ("rollout", "train", "cpu", "agent"):
        if not any(tag in worker.tags for worker in workers):
            raise ValueError(f"no worker carries {tag!r}; workers: {_offered(workers)}")
    for worker in workers:
        if {"agent", "cpu"} <= worker.tags:
            raise ValueError(
                f"worker {worker.name!r} carries both `agent` and `cpu`; agent work would starve the filter, "
                "so give them to different workers"
            )
    trainers = _choose_trainers(workers, config)
    names = {worker.name for worker in trainers}
    rollout = tuple(sorted(w.name for w in workers if "rollout" in w.tags and w.name not in names))
    lent = PIPELINES[config.pipeline].lent is not False and all("rollout" in w.tags for w in trainers)
    if not rollout and (not lent or config.pipeline == "multiplexed"):
        means = f"pipeline {config.pipeline}" if config.pipeline else "a trainer that is not lent"
        raise ValueError(
            f"{means} needs a worker that carries rollout beside the trainers {', '.join(sorted(names))}; "
            f"workers: {_offered(workers)}"
        )
    return Plan(
        rollout=rollout,
        trainers=tuple(worker.name for worker in trainers),
        lent=lent,
        agent=tuple(sorted(worker.name for worker in workers if "agent" in worker.tags)),
    )


def _choose_trainers(workers: list[Worker], config: RunConfig) -> list[Worker]:
    ranks = config.train.workers
    needs = {"rollout", "train"} if PIPELINES[config.pipeline].lent else {"train"}
    # a pure trainer first: a worker that can also roll out is worth more as an engine
    able = sorted((w for w in workers if needs <= w.tags), key=lambda w: ("rollout" in w.tags, w.name))
    if config.pipeline == "colocated":
        if odd := [w for w in workers if needs & w.tags and not needs <= w.tags]:
            raise ValueError(
                "pipeline colocated needs every device worker to carry rollout and train; "
                f"{', '.join(f'{w.name} carries {_tags(w)}' for w in odd)}"
            )
        if ranks != len(able):
            raise ValueError(
                f"pipeline colocated trains on every device worker: set train.workers to {len(able)}, not "
                f"{ranks}; workers: {_offered(workers)}"
            )
    if len(able) < ranks:
        raise ValueError(
            f"train.workers is {ranks}, and {len(able)} workers carry {' and '.join(sorted(needs))}; "
            f"workers: {_offered(workers)}"
        )
    return able[:ranks]


def _offered(workers: list[Worker]) -> str:
    return ", ".join(f"{w.name} {_tags(w)}" for w in workers) or "none"


def _tags(worker: Worker) -> str:
    return f"{{{', '.join(sorted(worker.tags))}}}"


def current_worker() -> str:
    """Name of the worker that runs the calling task."""
    return worker_of(get_worker().state.total_resources).name


def current_host() -> str:
    """Address by which other workers reach the worker that runs the calling task."""
    host = urlsplit(get_worker().address).hostname
    assert host is not None
    return host
