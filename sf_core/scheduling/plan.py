"""Which worker does what: workers matched with the tags that a run needs. Pure.

Capability tags are free words for what a worker can do, and its Dask resources. Only this module says which
of them a run's tasks need. A user's own tags (`h20`, `spot`) say which workers to prefer where there is a
choice (`cluster.prefer`). One more resource, @name, belongs to the worker alone: tasks are pinned by it,
because a restarted worker declares it again (a pinned address would hang).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sf_core.config import RunConfig, WorkerConfig
from sf_core.config.devices import Device, step_of, train_priority
from sf_core.config.pipelines import PIPELINES
from sf_core.config.run_config import ClusterConfig

COMPUTING = frozenset({"rollout", "train"})
"""Tags of workers that compute on their device."""


@dataclass(frozen=True, slots=True)
class TaskKind:
    tag: str
    """Tag that a worker must carry."""
    priority: int = 0
    """Place in a worker's queue; higher goes first."""
    is_optional: bool = False
    """A run can do without such a worker: others do its work."""


TASK_KINDS: dict[str, TaskKind] = {
    "lease": TaskKind("rollout"),
    "agents": TaskKind("agent"),
    # without such workers the agent runners score
    "rewards": TaskKind("reward", is_optional=True),
    "warmstart": TaskKind("train"),
    # ahead of the next lease, which waits in the same queue
    "train": TaskKind("train", priority=1),
    **dict.fromkeys(("demonstrate", "rollout", "filter", "publish", "evaluate", "finish"), TaskKind("cpu")),
}
"""Task kinds by the name of the Prefect task."""

Duty = Literal["agent", "rollout", "reward"]
"""The tags under which a worker may be held throughout a run."""
DUTIES: tuple[Duty, ...] = get_args(Duty)


@dataclass(frozen=True, slots=True)
class Worker:
    name: str
    tags: frozenset[str]
    device: Device | None = None
    """None if the worker declared none."""
    memory: int | None = None
    """Memory of that device in bytes; None if the worker did not tell."""
    shared_host: str | None = None
    """The host on whose cores it computes, as others may; None if it declared a device, has a GPU, or did not
    tell."""


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
    def workers_by_duty(self) -> dict[Duty, tuple[str, ...]]:
        return {"agent": self.agent, "rollout": self.rollout, "reward": self.reward}


def duty_of(worker: Worker, trainers: Container[str]) -> Duty | None:
    """The one duty that a worker is held for from the moment it joins, since a lease takes all of a worker;
    None for a trainer. Trainers are chosen at the start, and again before every iteration."""
    if worker.name in trainers:
        return None
    return next((duty for duty in DUTIES if duty in worker.tags), None)


def worker_of(info: Mapping[str, Any]) -> Worker:
    """Worker from what Dask knows of it: its resources, and the device and memory that it registered with."""
    resources = info["resources"]
    device = info.get("device")
    names = [key[1:] for key in resources if key.startswith("@")]
    tags = frozenset(key for key in resources if not key.startswith("@"))
    if len(names) != 1:
        raise ValueError(
            f"a Dask worker with resources {sorted(resources)} needs exactly one resource @NAME; "
            'start it with --resources "TAG=1 @NAME=1"'
        )
    own_device = Device(**device) if device else None
    return Worker(names[0], tags, own_device, info.get("memory"), info.get("shared_host"))


def local_workers(config: RunConfig, num_gpus: int, *, has_room: bool = True) -> dict[str, WorkerConfig]:
    """The workers that a machine with so many GPUs starts, each with its device. A device that is chosen
    here is never stored: a run may resume on other hardware. `has_room`: whether CPUs have memory for a
    worker that samples beside one that trains. Raises ValueError, one sentence, if these GPUs are too few for
    trainers and engines."""
    workers = config.cluster.workers
    # vLLM serves the judges there
    needed_tags = COMPUTING | {"reward"} if config.environment.served_judges else COMPUTING
    share = [name for name, w in workers.items() if w.device is None and needed_tags & {*w.tags}]
    is_apart = _keeps_engines_apart(config)
    if num_gpus == 1 and share and is_apart:
        raise ValueError(
            "engine.kind vllm with train.lora needs two GPUs, but this machine has one GPU: leave "
            "engine.kind out, so that the built-in engine samples and trains on the same GPU"
        )
    is_default = workers == ClusterConfig().workers
    has_one_place = num_gpus == 1 or (num_gpus == 0 and not has_room)
    if is_default and has_one_place and config.pipeline in (None, "colocated") and not is_apart:
        workers = {name: worker for name, worker in workers.items() if name != "r0"}
    named = {worker.device for worker in workers.values()}
    free = [device for n in range(num_gpus) if (device := f"cuda:{n}") not in named]
    compute = [name for name in share if name in workers]
    chosen = dict(
        zip(sorted(compute, key=lambda name: "train" not in workers[name].tags), free, strict=False)
    )
    return {
        name: worker.model_copy(update={"device": worker.device or chosen.get(name, "cpu")})
        for name, worker in workers.items()
    }


def make_plan(workers: list[Worker], config: RunConfig, *, trained: Collection[str] | None = None) -> Plan:
    """Assign duties. Raises ValueError, one sentence: what the run needs and what the workers offer.

    `trained` are the trainers so far of a run under way. Such a run may continue with less:
    `train.min_workers` trainers, no rollout-only worker if trainers are lent, and workers that a colocated
    run could not start with. Its workers that run agents or score keep doing so."""
    carried = {tag for worker in workers for tag in worker.tags}
    without = ("agents",) if config.rollout.is_external else ()
    if missing := [repr(tag) for tag in list_needed_tags(without) if tag not in carried]:
        raise ValueError(f"no worker has the tag {' or '.join(missing)}; workers: {_list_offers(workers)}")
    for worker in workers:
        if "cpu" in worker.tags and (long := sorted(worker.tags & {"agent", "reward"})):
            raise ValueError(
                f"worker {worker.name!r} has both tags `{long[0]}` and `cpu`; {long[0]} work would starve "
                "the filter, so give the tags to different workers"
            )
    if twice := [name for name, count in Counter(w.name for w in workers).items() if count > 1]:
        raise ValueError(
            f"two workers are named {twice[0]!r}; a task names its worker, so rename one of the two"
        )
    trainers = choose_trainers(workers, config, trained=trained)
    names = {worker.name for worker in trainers}
    workers_by_duty = {d: tuple(sorted(w.name for w in workers if duty_of(w, names) == d)) for d in DUTIES}
    lent = lends(config) is not False and all("rollout" in w.tags for w in trainers)
    computes = config.engine.kind in ("torch", "vllm")
    if lends(config) is None and computes and _share_cores(trainers, workers, workers_by_duty["rollout"]):
        # what trainers sample on these cores, the others sample less
        lent = False
    if not workers_by_duty["rollout"] and not (
        lent and (trained is not None or config.pipeline != "multiplexed")
    ):
        means = f"pipeline {config.pipeline}" if config.pipeline else "a trainer that is not lent"
        means += " (engine.kind vllm with train.lora)" if _keeps_engines_apart(config) else ""
        raise ValueError(
            f"{means} needs a worker tagged rollout in addition to the trainers "
            f"{', '.join(sorted(names))}; workers: {_list_offers(workers)}"
        )
    if not workers_by_duty["agent"] and not config.rollout.is_external:
        raise ValueError(
            f"no worker is left for agents: {', '.join(sorted(names))} trains, and agents would delay "
            f"training; workers: {_list_offers(workers)}"
        )
    if not workers_by_duty["reward"] and (name := next(iter(config.environment.served_judges), None)):
        raise ValueError(
            f"environment.judges.{name}.model needs a worker tagged reward, without the tags agent and "
            f"rollout; workers: {_list_offers(workers)}"
        )
    return Plan(trainers=tuple(worker.name for worker in trainers), lent=lent, **workers_by_duty)


def lends(config: RunConfig) -> bool | None:
    """Whether the pipeline lends trainers to rollout between train steps; None: if their tags allow it."""
    chosen = PIPELINES[config.pipeline].lent
    return False if chosen is None and _keeps_engines_apart(config) else chosen


def _share_cores(trainers: Collection[Worker], workers: Collection[Worker], names: Collection[str]) -> bool:
    """Whether every trainer has the cores of one of the workers of these names."""
    hosts = {worker.shared_host for worker in workers if worker.name in names} - {None}
    return all(worker.shared_host in hosts for worker in trainers)


def _keeps_engines_apart(config: RunConfig) -> bool:
    """Whether trainers are never lent: a vLLM server that has slept is not known to keep an adapter."""
    return config.engine.kind == "vllm" and config.train.lora is not None


def list_needed_tags(without: Collection[str]) -> list[str]:
    """Every tag that some task of a run needs, without those of the task kinds that it does without."""
    kinds = TASK_KINDS.items()
    return sorted({kind.tag for name, kind in kinds if not kind.is_optional and name not in without})


def choose_trainers(
    workers: list[Worker], config: RunConfig, *, trained: Collection[str] | None = None
) -> list[Worker]:
    """The members of the gang, rank 0 first; `trained` as in `make_plan`. Raises ValueError, one sentence, if
    they are too few."""
    ranks = config.train.workers
    needs = _trainer_tags(config)
    able = list_able_to_train(workers, config)
    key = "train.workers"
    fewest = ranks
    if trained is not None:
        busy = [w for w in able if w.name not in trained and duty_of(w, ()) not in (None, "rollout")]
        able = [w for w in able if w not in busy]
        if busy and not able:
            names = ", ".join(worker.name for worker in busy)
            raise ValueError(
                f"no worker is left to train, because {names} must run agents or score answers; "
                f"workers: {_list_offers(workers)}"
            )
        if config.train.min_workers:
            key = "train.min_workers"
            fewest = config.train.min_workers
    elif config.pipeline == "colocated":
        if odd := [w for w in workers if needs & w.tags and not needs <= w.tags]:
            raise ValueError(
                "with pipeline colocated, a worker tagged rollout or train needs both of these tags; "
                f"{', '.join(f'{w.name} has {_tags(w)}' for w in odd)}"
            )
        if ranks != len(able):
            raise ValueError(
                f"pipeline colocated trains on every worker tagged rollout and train: set train.workers to "
                f"{len(able)}, not {ranks}; workers: {_list_offers(workers)}"
            )
    if not able:
        raise ValueError(
            f"no worker is tagged {' and '.join(sorted(needs))}; workers: {_list_offers(workers)}"
        )
    if len(able) < fewest:
        raise ValueError(
            f"{key} is {fewest}, but the number of workers tagged {' and '.join(sorted(needs))} is "
            f"{len(able)}; workers: {_list_offers(workers)}"
        )
    return able[: config.train.largest_gang(len(able))]


def list_able_to_train(workers: list[Worker], config: RunConfig) -> list[Worker]:
    """Workers with the tags that the pipeline needs of a trainer, in the order in which they are chosen."""
    needs = _trainer_tags(config)
    return sorted((w for w in workers if needs <= w.tags), key=lambda w: trainer_order_key(w, config))


def _trainer_tags(config: RunConfig) -> set[str]:
    return {"rollout", "train"} if lends(config) else {"train"}


def trainer_order_key(worker: Worker, config: RunConfig) -> tuple[int, float, bool, str]:
    """Sort key of trainers, the best first: with the tags that the user prefers, then compute-rich
    (train_priority; unknown devices last), then without the tag `rollout`, because the others are worth more
    as engines, then by name."""

    def count_preferred(duty: Literal["rollout", "train"]) -> int:
        return len(worker.tags & set(config.cluster.prefer.get(duty, ())))

    priority = priority_of(worker, config)
    return (
        count_preferred("rollout") - count_preferred("train"),
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
        tokens_per_microbatch=config.train.pass_tokens,
        max_running=config.engine.max_running,
    )


def _list_offers(workers: list[Worker]) -> str:
    return ", ".join(f"{w.name} {_tags(w)}" for w in workers) or "none"


def _tags(worker: Worker) -> str:
    return f"{{{', '.join(sorted(worker.tags))}}}"
