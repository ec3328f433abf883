"""Which worker does what: the cluster, read from Dask, matched with the tags a run needs.

A worker's capability tags are its Dask resources. One more resource, @name, belongs to it alone: tasks are
pinned by it, because a restarted worker declares it again (a pinned address would hang).
"""

from __future__ import annotations

from dataclasses import dataclass

from distributed import Client, get_worker


@dataclass(frozen=True, slots=True)
class Worker:
    name: str
    tags: frozenset[str]


@dataclass(frozen=True, slots=True)
class Plan:
    """The workers of a run by duty."""

    rollout: tuple[str, ...]
    """Carry `rollout` but not the trainer: their lease lasts the run."""
    trainer: str
    lent: bool
    """The trainer carries `rollout` too and is lent to it between train steps."""
    agent: tuple[str, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        return (*self.rollout, self.trainer)


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


def make_plan(workers: list[Worker]) -> Plan:
    """Assign duties. Raises ValueError naming the missing tag and what the workers offer."""

    def carrying(tag: str) -> list[Worker]:
        found = sorted((w for w in workers if tag in w.tags), key=lambda w: w.name)
        if not found:
            offered = ", ".join(f"{w.name} {{{', '.join(sorted(w.tags))}}}" for w in workers) or "none"
            raise ValueError(f"no worker carries {tag!r}; workers: {offered}")
        return found

    rollout, train = carrying("rollout"), carrying("train")
    carrying("cpu")
    agents = tuple(w.name for w in carrying("agent"))
    if mixed := [w.name for w in carrying("agent") if "cpu" in w.tags]:
        raise ValueError(
            f"worker {mixed[0]!r} carries both `agent` and `cpu`; agent work would starve the filter, "
            "so give them to different workers"
        )
    # a pure trainer first: a worker that can also roll out is worth more as an engine
    trainer = min(train, key=lambda w: ("rollout" in w.tags, w.name))
    return Plan(
        rollout=tuple(w.name for w in rollout if w.name != trainer.name),
        trainer=trainer.name,
        lent="rollout" in trainer.tags,
        agent=agents,
    )


def current_worker() -> str:
    """Name of the worker that runs the calling task."""
    return worker_of(get_worker().state.total_resources).name
