"""The train stage as the flow sees it: one rank task per trainer, all or none, retried if ranks lose each
other or their worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from distributed import wait
from distributed.scheduler import NoValidWorkerError
from prefect_dask.task_runners import PrefectDaskFuture

from sf_core.scheduling.cluster import connected_workers, kill_worker
from sf_core.scheduling.plan import Worker, choose_trainers
from sf_core.stages.lease import lease_of
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.gang import GangError, RankAssignment, SupersededError
from sf_core.waits import waiting_for
from storage.gangs import GangFiles
from tasks.cluster import dask_client, is_known, scheduler_address, submit
from tasks.train import train

log = logging.getLogger(__name__)

MAX_TRIES = 3

LOOK_S = 1.0
"""Interval of checks for workers that have left or joined."""

OF_OTHERS = (GangError, SupersededError, NoValidWorkerError)
"""Errors of a rank that are caused by something else."""

Future = PrefectDaskFuture[Any]


class Gang:
    """The tries at the train stage of one iteration. Each try has an epoch; ending a try fences it off."""

    def __init__(self, run: RunRef, iteration: int, trainers: tuple[str, ...]) -> None:
        """Without trainers there is nothing to do, and the stage counts as committed."""
        self._run, self._iteration = OpenRun(run), iteration
        self._epoch = -1
        self._ranks: dict[str, Future] = {}
        self._workers = self._planned = trainers
        if len(trainers) > 1 and (fewest := self._run.config.train.min_workers):
            here = _here(trainers)
            self._workers = here if len(here) >= fewest else trainers

    def submit(self, wait_for: Sequence[Future]) -> list[Future]:
        """Submit one rank task per worker, rank 0 first; its return means that the stage is committed."""
        self._epoch += 1
        for rank, worker in enumerate(self._workers):
            seat = RankAssignment(self._workers, rank, self._epoch)
            self._ranks[worker] = submit(
                train, self._run.ref, self._iteration, seat, worker=worker, wait_for=wait_for
            )
        return list(self._ranks.values())

    def take_devices(self, lent: Iterable[tuple[str, str]]) -> None:
        """Revoke the leases (worker, lease id) of this gang, and those that have replaced them meanwhile. A
        rank is ahead of the next lease in its worker's queue, so it gets the device directly. The process of
        a worker whose rank has not begun in time is killed, because its device is not yielded."""
        config, is_first = self._run.config, self._epoch == 0
        known = {(worker, lease_id) for worker, lease_id in lent if worker in self._workers and is_first}
        # the lease on a worker that replaces another may be known only once it has begun there
        workers = [*dict(known)] if is_first else self._workers
        bound_s = config.cluster.yield_timeout_s + (0 if is_first else config.train.gang_timeout_s)
        what = f"devices to begin training of iteration {self._iteration}"
        with waiting_for(what, bound_s) as waited:
            holders = _connected()
            self._revoke(known)
            while late := [worker for worker in workers if not self._has_begun(worker)]:
                connected = _connected()
                # nothing holds the device of a worker that is away or was restarted
                late = [w for w in late if w in connected and connected[w] == holders.get(w)]
                if not late:
                    return
                waited.reason = f"{', '.join(late)} did not yield yet"
                if not waited.left_s:
                    for worker in late:
                        log.warning("%s did not yield within %g s: its process is ended", worker, bound_s)
                        kill_worker(scheduler_address(), worker)
                    return
                engines = self._run.dataplane.status()["engines"]
                holding = {lease_of(engine["id"]) for engine in engines if engine["worker"] in late}
                self._revoke(holding - known)
                known |= holding
                time.sleep(0.2)

    def _revoke(self, leases: Collection[tuple[str, str]]) -> None:
        if leases:
            bound_s, dataplane = self._run.config.cluster.yield_timeout_s, self._run.dataplane
            with ThreadPoolExecutor(len(leases)) as pool:
                list(pool.map(lambda lease: dataplane.revoke(lease[1], bound_s), leases))

    def has_committed(self) -> bool:
        """Wait for the ranks. False if they lost each other or a worker was lost; `submit` then retries on
        workers that are connected now. Raises the error of a rank if there is nothing left to try, and
        TimeoutError if too few able workers join."""
        unfinished = self._await_ranks()
        if not self._ranks or self._run.directory.read_manifest(self._iteration, "train") is not None:
            return True
        errors = {w: _error_of(future) for w, future in self._ranks.items() if w not in unfinished}
        failed = [w for w, error in errors.items() if error is not None and not isinstance(error, OF_OTHERS)]
        reasons = [errors[w] for w in failed] + [error for error in errors.values() if error is not None]
        if not reasons:
            away_s = self._run.config.train.gang_timeout_s
            reasons = [GangError(f"{', '.join(unfinished)} left and did not come back within {away_s:g} s")]
        if len(failed) == len(self._workers) or self._epoch + 1 == MAX_TRIES:
            assert reasons[0] is not None
            raise reasons[0]
        log.warning("train of iteration %d: try %d failed (%s)", self._iteration, self._epoch, reasons[0])
        for worker in unfinished:
            # the rank may hang, or go on in vain: no later try shares the device with it
            kill_worker(scheduler_address(), worker)
            self._ranks[worker].wrapped_future.cancel()
        lost = [w for w, error in errors.items() if error is not None and not isinstance(error, GangError)]
        self._workers = self._able_without({*lost, *unfinished})
        self._ranks = {}
        log.warning("train of iteration %d: trying again on %s", self._iteration, ", ".join(self._workers))
        return False

    def has_returned(self) -> bool:
        """Whether rank 0 also returned to Dask. It may have failed after its commit, or been lost with its
        worker, and with it a task that depends on it."""
        return not self._ranks or _error_of(self._ranks[self._workers[0]]) is None

    def _await_ranks(self) -> list[str]:
        """Wait until all ranks are done. Once rank 0 is, or a rank has failed, or its worker was away for too
        long, the others have `gang_timeout_s` to end. Returns the workers of unfinished ranks."""
        config = self._run.config
        what = f"training of iteration {self._iteration} on {', '.join(self._workers)}"
        deadline: float | None = None
        with waiting_for(what, config.cluster.stage_timeout_s) as waited:
            seen = dict.fromkeys(self._workers, time.monotonic())
            while unfinished := [w for w, future in self._ranks.items() if not future.wrapped_future.done()]:
                waited.check()
                now, here = time.monotonic(), _here(unfinished)
                seen |= dict.fromkeys(here, now)
                away = [w for w in unfinished if w not in here]
                waited.reason = f"not connected: {', '.join(away)}" if away else ""
                failed = any(_error_of(self._ranks[w]) for w in self._workers if w not in unfinished)
                failed |= any(now - seen[worker] > config.train.gang_timeout_s for worker in away)
                if deadline is None and (failed or self._workers[0] not in unfinished):
                    deadline = now + config.train.gang_timeout_s
                    if failed:
                        self._files.end()
                if deadline and (now > deadline or not here):
                    break
                self._await_any(unfinished)
        return unfinished

    def _able_without(self, lost: set[str]) -> tuple[str, ...]:
        """Workers that train instead, chosen as at the start of the run. Lost workers, restarted by their
        nannies, are included only if the others are too few. Waits while all together are too few."""
        config = self._run.config
        what = f"workers to train iteration {self._iteration}"
        with waiting_for(what, config.cluster.stage_timeout_s) as waited:
            while True:
                here = [worker for _, worker in _connected().values()]
                for candidates in ([w for w in here if w.name not in lost], here):
                    try:
                        chosen = choose_trainers(candidates, config, trained=self._planned)
                        return tuple(worker.name for worker in chosen)
                    except ValueError as error:
                        waited.reason = str(error)
                waited.check()
                time.sleep(LOOK_S)

    def _await_any(self, workers: list[str]) -> None:
        """Wait for the first of these ranks to end, for at most `LOOK_S`."""
        futures = [self._ranks[worker].wrapped_future for worker in workers]
        with suppress(TimeoutError), futures[0].client.as_current():
            wait(futures, timeout=LOOK_S, return_when="FIRST_COMPLETED")

    @property
    def _files(self) -> GangFiles:
        return GangFiles(self._run.directory, self._iteration, self._run.ref.attempt, self._epoch)

    def _has_begun(self, worker: str) -> bool:
        begun = self._files.is_taken(self._workers.index(worker))
        return begun or bool(self._ranks[worker].wrapped_future.done())


def _connected() -> dict[str, tuple[str, Worker]]:
    """Address and worker by name. A restarted process has another address."""
    found = connected_workers(dask_client())
    return {worker.name: (address, worker) for address, worker in found.items()}


def _here(workers: Iterable[str]) -> tuple[str, ...]:
    """The connected ones of these workers."""
    connected = _connected()
    return tuple(worker for worker in workers if worker in connected)


def _error_of(future: Future) -> Exception | None:
    try:
        if not is_known(future):
            return GangError("how a rank ended was lost with its worker")
        future.result()
    except Exception as error:  # the gang decides what follows from any error
        return error
    return None
