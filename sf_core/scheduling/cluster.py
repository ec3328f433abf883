"""The cluster as Dask reports it: its workers, whose tasks they run, and the forced end of their processes.

Every task is annotated with its owner, one attempt of a run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from distributed import Client
from distributed.system import MEMORY_LIMIT

from sf_core.config import RunConfig, WorkerConfig
from sf_core.config.devices import find_device
from sf_core.process.environment_variables import count_gpus, gpu_memory, own_workers, scheduler_address
from sf_core.scheduling.plan import Plan, Worker, duty_of, local_workers, make_plan, worker_of
from sf_core.scheduling.tls import require_certificates

log = logging.getLogger(__name__)

ANSWER_S = 30.0
"""How long a scheduler may take to answer."""

TASKS_S = 2.0
"""How long a worker may take to say what it runs."""

JOIN_S = 120.0
"""How long after a scheduler's start its workers may join: those of one that crashed start again as well."""

GIVEN_BACK_S = 120.0
"""How long another run may still hold workers: it may be ending, and an engine or runner without a data plane
frees its worker after 60 s."""

KILL_S = 30.0
"""How long a nanny may take to restart its worker; it asks for 4 s, then kills."""

LOOK_S = 0.5
POLL_S = 0.2


def read_workers(scheduler: str) -> list[Worker]:
    """Workers connected to a scheduler. Raises ValueError if it does not answer, or a worker is not ours."""
    return [worker_of(info) for info in _ask(scheduler)["workers"].values()]


def select_own(workers: Iterable[Worker]) -> list[Worker]:
    """The workers that the runs of this process may use (SF_WORKERS)."""
    names = own_workers()
    return [worker for worker in workers if names is None or worker.name in names]


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


def list_connected(client: Client) -> dict[str, Worker]:
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
    its joining would end the run; so is one that belongs to other runs."""
    workers = {}
    for address, info in infos.items():
        with suppress(ValueError):
            for worker in select_own([worker_of(info)]):
                workers[address] = worker
    return workers


WORK = {
    "rollout": "its answers continue",
    "agent": "its sessions start again",
    "reward": "its answers are scored",
    "cpu": "its stage starts again",
    "train": "training continues from the last committed weights",
}
"""The work of a lost worker, by the tag under which the run uses the worker."""


class Losses:
    """Tells which of its workers a run loses, and where their work continues. Facts in, sentences out."""

    def __init__(self) -> None:
        self._last_seen: dict[str, tuple[str, Worker]] = {}
        """Address and description of each worker, as it was last connected."""
        self._lost: set[str] = set()

    def describe_losses(
        self, connected: Mapping[str, Worker], plan: Plan, leased: Container[str]
    ) -> list[str]:
        """What has happened since the last look, a sentence per worker. `connected`: workers by address, none
        if the scheduler does not answer. `leased`: names of the workers with a lease; the run does not miss
        other agents and engines."""
        if not connected:
            return []
        now = {worker.name: (address, worker) for address, worker in connected.items()}
        sentences = []
        for name, (address, worker) in sorted(self._last_seen.items()):
            tag = _tag_of_use(worker, plan)
            is_missed = tag in ("train", "cpu") or (tag in WORK and name in leased)
            if name in now:
                if name in self._lost:
                    self._lost.remove(name)
                    sentences.append(f"worker {name} is back")
                elif is_missed and now[name][0] != address:
                    sentences.append(f"worker {name} was lost and is back: {WORK[tag]} there")
            elif is_missed and name not in self._lost:
                self._lost.add(name)
                successors = sorted(w.name for _, w in now.values() if _takes_over(w, tag, plan))
                resumption = (
                    f"on {', '.join(successors)}" if successors else f"when {name} is back or is replaced"
                )
                sentences.append(f"worker {name} is lost: {WORK[tag]} {resumption}")
        self._last_seen |= now
        return sentences


def _tag_of_use(worker: Worker, plan: Plan) -> str:
    """The tag under which the run uses the worker; empty if it does not."""
    if worker.name in plan.trainers:
        return "train"
    return duty_of(worker, plan.trainers) or ("cpu" if "cpu" in worker.tags else "")


def _takes_over(worker: Worker, tag: str, plan: Plan) -> bool:
    """Whether the run uses this worker under the same tag. A lost trainer is first waited for."""
    if tag == "train":
        return False
    is_lent = tag == "rollout" and plan.lent and worker.name in plan.trainers
    return is_lent or _tag_of_use(worker, plan) == tag


def scheduler_of(config: RunConfig) -> str | None:
    """Address of the scheduler whose workers a run gets: the configuration's, else that of SF_SCHEDULER; None
    if the configuration's own workers are started on this machine."""
    return config.cluster.scheduler or scheduler_address()


def find_workers(config: RunConfig, scheduler: str | None = None, worker_bytes: int = 0) -> list[Worker]:
    """Workers connected to that scheduler, else those that a run would get (`scheduler_of`). `worker_bytes`:
    as that of `workers_here`. Raises ValueError if the scheduler cannot be reached."""
    if address := scheduler or scheduler_of(config):
        return select_own(read_workers(address))
    return [
        Worker(
            name,
            frozenset(worker.tags),
            find_device(worker.device_kind) if worker.device_kind else None,
            _memory_of(str(worker.device)),
            "127.0.0.1" if worker.device == "cpu" and not worker.device_kind else None,
        )
        for name, worker in workers_here(config, worker_bytes).items()
    ]


def workers_here(config: RunConfig, worker_bytes: int = 0) -> dict[str, WorkerConfig]:
    """The workers that this machine starts for a run, each with its device. Emulated ones compute nothing.
    `worker_bytes`: bytes of the host's memory that all processes take, if one worker samples and another one
    trains on CPUs."""
    num_gpus = 0 if config.engine.kind == "emulated" else count_gpus()
    return local_workers(config, num_gpus, has_room=worker_bytes <= int(MEMORY_LIMIT))


def _memory_of(device: str) -> int | None:
    return int(MEMORY_LIMIT) if device == "cpu" else gpu_memory(int(device.removeprefix("cuda:")))


def await_plan(scheduler: str, config: RunConfig, report: Callable[[str], None] = log.warning) -> Plan:
    """The plan for the workers connected to a scheduler. Waits for workers to join one that has just started,
    and for another run to give them back; `tell` is called with what is awaited. Raises ValueError like
    `make_plan` and `read_workers`, and if the other run does not end."""
    begun = time.monotonic()
    reported = ""
    while True:
        state = _ask(scheduler)
        try:
            plan = make_plan(select_own(map(worker_of, state["workers"].values())), config)
        except ValueError as error:
            fault = error
            left_s = JOIN_S - max(0.0, time.time() - state["started"])
            hope = "the Dask scheduler has just started: waiting for workers"
        else:
            if not (holders := describe_holders(scheduler, config.run_id)):
                return plan
            fault = ValueError(
                f"{holders}, and a cluster serves one run at a time: wait until that run ends, or cancel "
                "that run; if the flow of that run has ended, restart these workers"
            )
            left_s = GIVEN_BACK_S - (time.monotonic() - begun)
            hope = "that run may be ending: waiting"
        if left_s <= 0:
            raise fault
        if hope != reported:
            report(f"{fault}; {hope} for {left_s:.0f} s")
            reported = hope
        time.sleep(LOOK_S)


def describe_holders(scheduler: str, run_id: str | None) -> str:
    """Which workers run tasks of other runs than this one, in words; empty if none does. A worker that does
    not answer in time counts as free. Raises ValueError like `read_workers`."""
    with _client(scheduler) as client:
        workers = list_connected(client)
        running = client.sync(list_owners, client, workers)
    workers_by_run: dict[str, list[str]] = {}
    for address, worker in workers.items():
        for run_id_of_worker in {run_of(owner) for owner in running[address] or ()} - {run_id}:
            workers_by_run.setdefault(run_id_of_worker, []).append(worker.name)
    return ", ".join(
        f"{'workers' if len(names) > 1 else 'worker'} {', '.join(sorted(names))} "
        f"{'are' if len(names) > 1 else 'is'} held by run {run_id_of_worker}"
        for run_id_of_worker, names in sorted(workers_by_run.items())
    )


def owner_of(run_id: str, attempt: int) -> str:
    """Owner with which the tasks of an attempt are annotated."""
    return f"{run_id}.{attempt}"


def run_of(owner: str) -> str:
    """
    >>> run_of("first.try.2")
    'first.try'
    """
    return owner.rpartition(".")[0]


async def list_owners(client: Client, addresses: Collection[str]) -> dict[str, set[str] | None]:
    """Owners of the tasks that each worker runs, by its address, whether or not Dask still wants those tasks;
    None for a worker that does not answer in time."""
    answers = await asyncio.gather(*(_owners_on(client, address) for address in addresses))
    return dict(zip(addresses, answers, strict=True))


async def _owners_on(client: Client, address: str) -> set[str] | None:
    reply = client.run(_owners, workers=[address], on_error="ignore")
    try:
        return set((await asyncio.wait_for(reply, TASKS_S)).get(address, ()))
    except TimeoutError:
        return None


def _owners(dask_worker: Any) -> list[str]:
    """Executed on a worker, whose tasks still include one that was given up while it ran."""
    tasks = (dask_worker.state.tasks.get(key) for key in dask_worker.active_threads.values())
    annotations = [task.annotations or {} for task in tasks if task is not None]
    return [annotation["owner"] for annotation in annotations if "owner" in annotation]


def kill_worker(scheduler: str, worker: str) -> None:
    """Kill the process of this worker; its nanny starts another one, and Dask runs there again what was
    running or queued. If no such worker is connected, its process is gone already."""
    with Client(scheduler, set_as_default=False) as client:
        connected = list_connected(client)
        addresses = [address for address, seen in connected.items() if seen.name == worker]
        if addresses:
            client.restart_workers(addresses, timeout=KILL_S, raise_for_error=False)


def end_tasks(scheduler: str, owner: str, patience_s: float) -> list[str]:
    """Wait until no worker runs a task annotated with this owner, whether or not Dask still wants it. Workers
    that do after `patience_s` are killed; returns their names. Dask would run a task that it wants again, so
    the caller gives it up first. Raises OSError if the scheduler does not answer."""
    return asyncio.run(_end_tasks(scheduler, owner, patience_s))


async def _end_tasks(scheduler: str, owner: str, patience_s: float) -> list[str]:
    deadline = time.monotonic() + patience_s
    async with Client(scheduler, asynchronous=True, set_as_default=False, timeout=TASKS_S) as client:
        while busy := await _busy(client, owner):
            if time.monotonic() > deadline:
                await client.restart_workers(list(busy), timeout=KILL_S, raise_for_error=False)
                return sorted(busy.values())
            await asyncio.sleep(POLL_S)
    return []


async def _busy(client: Client, owner: str) -> dict[str, str]:
    """Names of the workers that run a task of this owner, by address. A worker that does not
    answer hangs and may hold its device, so it counts too."""
    workers = our_workers((await client.scheduler.identity(n_workers=-1))["workers"])
    running = await list_owners(client, workers)
    return {
        address: worker.name
        for address, worker in workers.items()
        if (owners := running[address]) is None or owner in owners
    }
