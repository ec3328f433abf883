"""The train stage as the flow sees it: one rank task per trainer, all or none, tried again if they lose each
other."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from distributed import Client, wait
from prefect_dask.task_runners import PrefectDaskFuture

from sf_core.run import Run, RunRef
from sf_core.scheduling.force import end_by_force
from sf_core.scheduling.plan import connected_workers
from sf_core.training.seats import GangError, Seat
from sf_core.waits import waiting_for
from storage.gangs import GangFiles
from tasks.cluster import scheduler_address, submit
from tasks.train import train

log = logging.getLogger(__name__)

MAX_TRIES = 3

Future = PrefectDaskFuture[Any]


class Gang:
    """The tries at one iteration's train stage. Each try has an epoch; ending a try fences it off."""

    def __init__(self, run: RunRef, iteration: int, trainers: tuple[str, ...]) -> None:
        """Without trainers there is nothing to do, and all of it is done."""
        self._run, self._iteration = Run(run), iteration
        self._epoch = -1
        self._ranks: dict[str, Future] = {}
        self._workers = trainers
        if len(trainers) > self._fewest:
            self._workers = self._kept(sorted(set(trainers) - _connected()))

    def submit(self, wait_for: Sequence[Future]) -> list[Future]:
        """One rank task per worker; rank 0, whose return means that the stage is committed, first."""
        self._epoch += 1
        for rank, worker in enumerate(self._workers):
            seat = Seat(self._workers, rank, self._epoch)
            self._ranks[worker] = submit(
                train, self._run.ref, self._iteration, seat, worker=worker, wait_for=wait_for
            )
        return list(self._ranks.values())

    def take_devices(self, lent: Iterable[tuple[str, str]]) -> None:
        """Revoke the leases (worker, lease id) of this gang. A rank is ahead of the next lease in its
        worker's queue: the device goes straight to it. A worker whose rank has not begun in time is held by
        something that does not yield, and is ended by force."""
        held = [(worker, lease_id) for worker, lease_id in lent if worker in self._workers]
        if not held or self._epoch:
            return
        bound_s = self._run.config.cluster.yield_timeout_s
        deadline = time.monotonic() + bound_s
        dataplane = self._run.dataplane
        with ThreadPoolExecutor(len(held)) as pool:
            list(pool.map(lambda lease: dataplane.revoke(lease[1], bound_s), held))
        while late := [worker for worker in dict(held) if not self._has_begun(worker)]:
            if time.monotonic() > deadline:
                for worker in late:
                    log.warning("%s did not yield within %g s: its process is ended", worker, bound_s)
                    end_by_force(scheduler_address(), worker)
                return
            time.sleep(0.05)

    def has_committed(self) -> bool:
        """Wait for the ranks. False: they lost each other, and `submit` tries again, if `train.min_workers`
        allows it without those that were lost. Raises what a rank raised if there is nothing left to try."""
        unfinished = self._await_ranks()
        if not self._ranks or self._run.directory.read_manifest(self._iteration, "train") is not None:
            return True
        errors = {w: _error_of(future) for w, future in self._ranks.items() if w not in unfinished}
        lost = [w for w, error in errors.items() if error is not None and not isinstance(error, GangError)]
        reasons = [errors[w] for w in lost] + [error for error in errors.values() if error is not None]
        if len(lost) == len(self._workers) or self._epoch + 1 == MAX_TRIES:
            assert reasons and reasons[0] is not None
            raise reasons[0]
        for worker in unfinished:
            # it may hang, or compute for nobody: no later try shares the device with it
            end_by_force(scheduler_address(), worker)
        self._workers = self._kept([*lost, *unfinished])
        self._ranks = {}
        log.warning(
            "train of iteration %d: try %d failed (%s); trying again on %s",
            *(self._iteration, self._epoch, reasons[0], ", ".join(self._workers)),
        )
        return False

    def _await_ranks(self) -> list[str]:
        """Until all ranks are through or, after rank 0 or a failed one was, the others had time to notice or
        are gone. Returns the workers of those that are not through."""
        config = self._run.config
        what = f"training of iteration {self._iteration} on {', '.join(self._workers)}"
        deadline: float | None = None
        with waiting_for(what, config.cluster.stage_timeout_s) as waited:
            while unfinished := [w for w, future in self._ranks.items() if not future.wrapped_future.done()]:
                waited.check()
                failed = any(_error_of(self._ranks[w]) for w in self._workers if w not in unfinished)
                if deadline is None and (failed or self._workers[0] not in unfinished):
                    deadline = time.monotonic() + config.train.gang_timeout_s
                    if failed:
                        self._files.end()
                if deadline and (time.monotonic() > deadline or not set(unfinished) & _connected()):
                    break
                self._await_any(unfinished)
        return unfinished

    def _await_any(self, workers: list[str]) -> None:
        """For a second at most."""
        futures = [self._ranks[worker].wrapped_future for worker in workers]
        with suppress(TimeoutError), futures[0].client.as_current():
            wait(futures, timeout=1.0, return_when="FIRST_COMPLETED")

    @property
    def _files(self) -> GangFiles:
        return GangFiles(self._run.directory, self._iteration, self._run.ref.attempt, self._epoch)

    def _has_begun(self, worker: str) -> bool:
        begun = self._files.is_taken(self._workers.index(worker))
        return begun or bool(self._ranks[worker].wrapped_future.done())

    @property
    def _fewest(self) -> int:
        config = self._run.config.train
        return config.min_workers or config.workers

    def _kept(self, lost: list[str]) -> tuple[str, ...]:
        """The workers without the lost ones, unless that leaves too few: then all, since nannies restart."""
        left = tuple(worker for worker in self._workers if worker not in lost)
        return left if len(left) >= self._fewest else self._workers


def _connected() -> set[str]:
    with Client(scheduler_address(), set_as_default=False) as client:
        return {worker.name for worker in connected_workers(client).values()}


def _error_of(future: Future) -> Exception | None:
    try:
        future.result()
    except Exception as error:  # whatever it is, the gang decides what follows from it
        return error
    return None
