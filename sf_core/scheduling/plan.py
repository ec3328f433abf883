"""Which worker does what: the cluster as Dask reports it, matched with the tags that a run needs.

A worker's capability tags are its Dask resources. One more resource, @name, belongs to it alone: tasks are
pinned by it, because a restarted worker declares it again (a pinned address would hang).
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from distributed import Client, get_worker
from distributed.system import MEMORY_LIMIT

from sf_core.config import RunConfig
from sf_core.config.devices import Device, known_device, step_of, train_priority
from sf_core.config.environment import scheduler_address
from sf_core.config.pipelines import PIPELINES
from sf_core.scheduling.owners import run_of, running_owners
from sf_core.scheduling.tags import needed_tags
from sf_core.scheduling.tls import require_certificates

log = logging.getLogger(__name__)

Duty = Literal["agent", "rollout", "reward"]
"""The tags under which a worker may be held throughout a run."""
DUTIES: tuple[Duty, ...] = get_args(Duty)

ANSWER_S = 30.0
"""How long a scheduler may take to answer."""

JOIN_S = 120.0
"""How long after a scheduler's start its workers may join: those of one that crashed start again as well."""

GIVEN_BACK_S = 120.0
"""How long another run may still hold workers: it may be ending, and an engine or runner without a data plane
frees its worker after 60 s."""

LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Worker:
    name: str
    tags: frozenset[str]
    device: Device | None = None
    """None if the worker declared none."""
    memory: int | None = None
    """Memory of that device in bytes; None if the worker did not tell."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Assignment of a run's workers to duties."""

    rollout: tuple[str, ...]
    """Workers that hold a rollout lease for the whole run."""
    trainers: tuple[str, ...]
    """Workers that train, one rank each, rank 0 first."""
    lent: bool
    """Whether the trainers carry `rollout` too and are lent to it between train steps."""
    agent: tuple[str, ...]
    reward: tuple[str, ...] = ()
    """Workers that score what agents answer; if there are none, those that run the agents do."""

    @property
    def held(self) -> dict[Duty, tuple[str, ...]]:
        return {"agent": self.agent, "rollout": self.rollout, "reward": self.reward}


def duty_of(worker: Worker, trainers: Container[str]) -> Duty | None:
    """The one duty that a worker is held for from the moment it joins, since a lease takes all of a worker;
    None for a trainer. Trainers are chosen at the start, and again before every iteration."""
    if worker.name in trainers:
        return None
    return next((duty for duty in DUTIES if duty in worker.tags), None)


def read_workers(scheduler: str) -> list[Worker]:
    """Workers connected to a scheduler. Raises ValueError if it does not answer, or a worker is not ours."""
    return _workers_of(_ask(scheduler))


def _workers_of(found: dict[str, Any]) -> list[Worker]:
    return [_worker_of(info) for info in found["workers"].values()]


def _worker_of(info: dict[str, Any]) -> Worker:
    return worker_of(info["resources"], info.get("device"), info.get("memory"))


def _ask(scheduler: str) -> dict[str, Any]:
    with _client(scheduler) as client:
        return dict(client.scheduler_info(n_workers=-1))


@contextmanager
def _client(scheduler: str) -> Iterator[Client]:
    require_certificates(scheduler)
    try:
        with Client(scheduler, set_as_default=False, timeout=ANSWER_S) as client:
            yield client
    except (OSError, ValueError) as error:  # a ValueError if it is no address
        raise ValueError(f"no Dask scheduler answers at {scheduler}: {error}") from None


def connected_workers(client: Client) -> dict[str, Worker]:
    """Our workers by address; none if the scheduler does not answer or is lost for good."""

    async def ask() -> dict[str, Any]:
        if client.status in ("running", "connecting") and client.scheduler is not None:
            with suppress(OSError):
                # `scheduler_info` may answer what the client asks for by itself now and then, without workers
                return dict((await client.scheduler.identity(n_workers=-1))["workers"])
        return {}

    return our_workers(client.sync(ask))


def our_workers(infos: dict[str, Any]) -> dict[str, Worker]:
    """Our workers by address, of all that Dask reports. A worker that was not started for us is skipped, or
    its joining would end the run."""
    found = {}
    for address, info in infos.items():
        with suppress(ValueError):
            found[address] = _worker_of(info)
    return found


def scheduler_of(config: RunConfig) -> str | None:
    """Address of the scheduler whose workers a run gets: the configuration's, else that of SF_SCHEDULER; None
    if the configuration's own workers are started on this machine."""
    return config.cluster.scheduler or scheduler_address()


def find_workers(config: RunConfig, scheduler: str | None = None) -> list[Worker]:
    """Workers connected to that scheduler, else those that a run would get (`scheduler_of`). Raises
    ValueError if the scheduler cannot be reached."""
    if address := scheduler or scheduler_of(config):
        return read_workers(address)
    return [
        Worker(
            name,
            frozenset(worker.tags),
            known_device(worker.device_kind) if worker.device_kind else None,
            # memory of a GPU is known only to the process that uses it
            int(MEMORY_LIMIT) if worker.device == "cpu" else None,
        )
        for name, worker in config.cluster.workers.items()
    ]


def worker_of(
    resources: dict[str, float], device: dict[str, Any] | None = None, memory: int | None = None
) -> Worker:
    """Worker from what Dask knows of it: its resources, and the device and memory that it registered with."""
    names = [key[1:] for key in resources if key.startswith("@")]
    tags = frozenset(key for key in resources if not key.startswith("@"))
    if len(names) != 1:
        raise ValueError(
            f"a Dask worker with resources {sorted(resources)} needs exactly one private resource; "
            'start it with --resources "TAG=1 @NAME=1"'
        )
    return Worker(names[0], tags, Device(**device) if device else None, memory)


def make_plan(workers: list[Worker], config: RunConfig, *, trained: Collection[str] | None = None) -> Plan:
    """Assign duties. Raises ValueError, one sentence: what the run needs and what the workers offer.

    `trained` are the trainers so far of a run under way. Such a run may continue with less:
    `train.min_workers` trainers, no rollout-only worker if trainers are lent, and workers that a colocated
    run could not start with. Its workers that run agents or score keep doing so."""
    carried = {tag for worker in workers for tag in worker.tags}
    if missing := [repr(tag) for tag in needed_tags() if tag not in carried]:
        raise ValueError(f"no worker carries {' or '.join(missing)}; workers: {_offered(workers)}")
    for worker in workers:
        if "cpu" in worker.tags and (long := sorted(worker.tags & {"agent", "reward"})):
            raise ValueError(
                f"worker {worker.name!r} carries both `{long[0]}` and `cpu`; {long[0]} work would starve the "
                "filter, so give them to different workers"
            )
    if twice := [name for name, count in Counter(w.name for w in workers).items() if count > 1]:
        raise ValueError(f"two workers are named {twice[0]!r}; tasks are pinned by name, so rename one")
    trainers = choose_trainers(workers, config, trained=trained)
    names = {worker.name for worker in trainers}
    held = {d: tuple(sorted(w.name for w in workers if duty_of(w, names) == d)) for d in DUTIES}
    rollout = held["rollout"]
    lent = PIPELINES[config.pipeline].lent is not False and all("rollout" in w.tags for w in trainers)
    if not rollout and not (lent and (trained is not None or config.pipeline != "multiplexed")):
        means = f"pipeline {config.pipeline}" if config.pipeline else "a trainer that is not lent"
        raise ValueError(
            f"{means} needs a worker that carries rollout beside the trainers {', '.join(sorted(names))}; "
            f"workers: {_offered(workers)}"
        )
    if not held["agent"]:
        raise ValueError(
            f"no worker is left to agents: {', '.join(sorted(names))} trains, and agents would never let it; "
            f"workers: {_offered(workers)}"
        )
    return Plan(
        rollout=rollout,
        trainers=tuple(worker.name for worker in trainers),
        lent=lent,
        agent=held["agent"],
        reward=held["reward"],
    )


def await_plan(scheduler: str, config: RunConfig, tell: Callable[[str], None] = log.warning) -> Plan:
    """The plan for the workers connected to a scheduler. Waits for workers to join one that has just started,
    and for another run to give them back; `tell` is called with what is awaited. Raises ValueError like
    `make_plan` and `read_workers`, and if the other run does not end."""
    begun, told = time.monotonic(), ""
    while True:
        found = _ask(scheduler)
        try:
            plan = make_plan(_workers_of(found), config)
        except ValueError as error:
            fault, left_s = error, JOIN_S - max(0.0, time.time() - found["started"])
            hope = "the Dask scheduler has just started: workers are awaited"
        else:
            if not (held := held_by_others(scheduler, config.run_id)):
                return plan
            fault = ValueError(
                f"{held}, and a cluster serves one run at a time: wait until it has ended, or cancel it; if "
                "nobody works on it any more, start these workers again"
            )
            left_s = GIVEN_BACK_S - (time.monotonic() - begun)
            hope = "it may be ending, and is awaited"
        if left_s <= 0:
            raise fault
        if hope != told:
            tell(f"{fault}; {hope} for {left_s:.0f} s")
            told = hope
        time.sleep(LOOK_S)


def held_by_others(scheduler: str, run_id: str | None) -> str:
    """Which workers run tasks of other runs than this one, in words; empty if none does. A worker that does
    not answer in time counts as free. Raises ValueError like `read_workers`."""
    with _client(scheduler) as client:
        workers = connected_workers(client)
        running = client.sync(running_owners, client, workers)
    held: dict[str, list[str]] = {}
    for address, worker in workers.items():
        for other in {run_of(owner) for owner in running[address] or ()} - {run_id}:
            held.setdefault(other, []).append(worker.name)
    return ", ".join(
        f"{'workers' if len(names) > 1 else 'worker'} {', '.join(sorted(names))} "
        f"{'are' if len(names) > 1 else 'is'} held by run {other}"
        for other, names in sorted(held.items())
    )


def choose_trainers(
    workers: list[Worker], config: RunConfig, *, trained: Collection[str] | None = None
) -> list[Worker]:
    """The members of the gang, rank 0 first; `trained` as in `make_plan`. Raises ValueError, one sentence, if
    they are too few."""
    ranks, needs = config.train.workers, _trainer_tags(config)
    able = able_to_train(workers, config)
    key, fewest = "train.workers", ranks
    if trained is not None:
        busy = [w for w in able if w.name not in trained and duty_of(w, ()) not in (None, "rollout")]
        able = [w for w in able if w not in busy]
        if busy and not able:
            names = ", ".join(worker.name for worker in busy)
            raise ValueError(
                f"nobody is left to train: {names} runs agents or scores; workers: {_offered(workers)}"
            )
        if config.train.min_workers:
            key, fewest = "train.min_workers", config.train.min_workers
    elif config.pipeline == "colocated":
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
    if not able:
        raise ValueError(f"no worker carries {' and '.join(sorted(needs))}; workers: {_offered(workers)}")
    if len(able) < fewest:
        raise ValueError(
            f"{key} is {fewest}, more than the {len(able)} that carry {' and '.join(sorted(needs))}; "
            f"workers: {_offered(workers)}"
        )
    return able[:ranks]


def able_to_train(workers: list[Worker], config: RunConfig) -> list[Worker]:
    """Workers with the tags that the pipeline needs of a trainer, in the order in which they are chosen."""
    needs = _trainer_tags(config)
    return sorted((w for w in workers if needs <= w.tags), key=lambda w: training_order(w, config))


def _trainer_tags(config: RunConfig) -> set[str]:
    return {"rollout", "train"} if PIPELINES[config.pipeline].lent else {"train"}


def training_order(worker: Worker, config: RunConfig) -> tuple[int, float, bool, str]:
    """Sort key of trainers, the best first: with the tags that the user prefers, then compute-rich
    (train_priority; unknown devices last), then without the tag `rollout`, because the others are worth more
    as engines, then by name."""

    def preferred(duty: Literal["rollout", "train"]) -> int:
        return len(worker.tags & set(config.cluster.prefer.get(duty, ())))

    priority = priority_of(worker, config)
    return (
        preferred("rollout") - preferred("train"),
        math.inf if priority is None else -step_of(priority),
        "rollout" in worker.tags,
        worker.name,
    )


def priority_of(worker: Worker, config: RunConfig) -> float | None:
    """The worker's train_priority in this run; None if its device is unknown."""
    if worker.device is None:
        return None
    return train_priority(
        worker.device,
        tokens_per_microbatch=config.train.tokens_per_microbatch,
        max_running=config.engine.max_running,
    )


def _offered(workers: list[Worker]) -> str:
    return ", ".join(f"{w.name} {_tags(w)}" for w in workers) or "none"


def _tags(worker: Worker) -> str:
    return f"{{{', '.join(sorted(worker.tags))}}}"


def current_worker() -> str:
    """Name of the worker that runs the calling task."""
    return worker_of(get_worker().state.total_resources).name


def current_epoch() -> int:
    """Number of this start of the calling task. The scheduler counts what it hands to workers, so a later
    start has a higher number than every earlier one, whenever each begins to run."""
    worker = get_worker()
    return int(worker.state.tasks[worker.get_current_task()].run_id)


def current_host() -> str:
    """Address by which other workers reach the worker that runs the calling task."""
    host = urlsplit(get_worker().address).hostname
    assert host is not None
    return host
