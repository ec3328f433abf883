"""How many runs of a sweep compute at once: the workers, divided into equal shares. Pure.

A share is enough for a run if a plan can be made of it. Shares are equal, so that the seconds of runs can be
compared; workers that are left over stay idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from sf_core.config import RunConfig, WorkerConfig
from sf_core.scheduling.plan import Worker, make_plan

Share = tuple[str, ...]
"""Names of the workers of one run."""


def divide(workers: Sequence[Worker], configs: Sequence[RunConfig], most: int | None = None) -> list[Share]:
    """As many shares as possible, at most `most`, such that each configuration has a plan on each of them.
    One share has all workers, whether or not a plan can be made: the run tells what is missing."""
    kinds: dict[object, list[str]] = defaultdict(list)
    for worker in sorted(workers, key=lambda worker: worker.name):
        kinds[worker.tags, worker.device, worker.memory].append(worker.name)
    by_name = {worker.name: worker for worker in workers}
    for number in range(min(most or len(workers), len(workers)), 1, -1):
        shares = _deal(kinds.values(), number)
        if all(_has_plan([by_name[name] for name in share], configs) for share in shares):
            return shares
    return [tuple(sorted(by_name))]


def _deal(kinds: Collection[list[str]], number: int) -> list[Share]:
    shares: list[list[str]] = [[] for _ in range(number)]
    for names in kinds:
        each = len(names) // number
        for at, share in enumerate(shares):
            share += names[at * each : (at + 1) * each]
    return [tuple(sorted(share)) for share in shares]


def _has_plan(workers: list[Worker], configs: Sequence[RunConfig]) -> bool:
    try:
        for config in configs:
            make_plan(workers, config)
    except ValueError:
        return False
    return True


def copy_workers(
    workers: Mapping[str, WorkerConfig], num_gpus: int, most: int | None, *, may_move: bool
) -> dict[str, WorkerConfig]:
    """The workers of one run on a machine with so many GPUs, as many times as its GPUs suffice, at most
    `most` times. Without GPUs one run uses all cores: then once, unless `most` asks for more. `may_move`: the
    user has named no device."""
    num_taken = sum(worker.device != "cpu" for worker in workers.values())
    copies = most or 1
    if num_taken:
        copies = min(most or num_gpus, num_gpus // num_taken) if may_move else 1
    if copies <= 1:
        return dict(workers)
    return {
        f"{name}-{copy}": _move(worker, copy * num_taken)
        for copy in range(copies)
        for name, worker in workers.items()
    }


def _move(worker: WorkerConfig, by: int) -> WorkerConfig:
    device = str(worker.device)
    if device == "cpu":
        return worker
    return worker.model_copy(update={"device": f"cuda:{int(device.removeprefix('cuda:')) + by}"})


def describe_shares(shares: Sequence[Share]) -> str:
    if len(shares) == 1:
        return f"one run at a time, on {', '.join(shares[0])}"
    return f"{len(shares)} runs at a time, on {'; '.join(', '.join(share) for share in shares)}"
