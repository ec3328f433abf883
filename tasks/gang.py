"""The train stage as the flow sees it: one rank task per trainer, all or none, retried if ranks lose each
other or their worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from distributed import wait
from distributed.scheduler import NoValidWorkerError

from sf_core.dataplane.control.client import UNANSWERED
from sf_core.scheduling.cluster import kill_worker, list_connected
from sf_core.scheduling.leases import lease_of
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.gang import GangError, GangPlan, Lent, RankEnd, SupersededError
from sf_core.waits import waiting_for
from storage.gangs import GangFiles
from tasks.cluster import TaskFuture, dask_client, outcome_of, scheduler_address, submit
from tasks.stages import train

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval of checks for workers that have left or joined."""


class Gang:
    """The attempts at the train stage of one iteration as tasks. Ending an attempt fences it off."""

    def __init__(self, run: RunRef, iteration: int, trainers: tuple[str, ...]) -> None:
        """Without trainers there is nothing to do, and the stage counts as committed."""
        self._run = OpenRun(run)
        self._iteration = iteration
        self._plan = GangPlan(trainers, self._run.config, _addresses())
        self._ranks: dict[str, TaskFuture] = {}

    def submit(self, wait_for: Sequence[TaskFuture]) -> list[TaskFuture]:
        """Submit one rank task per worker, rank 0 first; its return means that the stage is committed."""
        for assignment in self._plan.begin_attempt():
            worker = assignment.workers[assignment.rank]
            self._ranks[worker] = submit(
                train, self._run.ref, self._iteration, assignment, worker=worker, wait_for=wait_for
            )
        return list(self._ranks.values())

    def revoke_first(self, lent: Iterable[Lent]) -> None:
        """Revoke the leases (worker, lease id) of this gang, and those that have replaced them meanwhile. A
        rank is ahead of the next lease in its worker's queue, so it gets the device directly. The process of
        a worker whose rank has not begun in time is killed, because its device is not yielded."""
        plan = self._plan
        awaited = f"devices to begin training of iteration {self._iteration}"
        with waiting_for(awaited, plan.yield_s) as waited:
            self._revoke(plan.revoke_first(lent, _addresses()))
            while late := plan.late(self._find_begun(), _addresses()):
                waited.reason = f"{', '.join(late)} have not freed their devices yet"
                if not waited.left_s:
                    for worker in late:
                        log.warning(
                            "%s did not free its device within %g s: the worker process is killed",
                            worker,
                            plan.yield_s,
                        )
                        kill_worker(scheduler_address(), worker)
                    return
                self._revoke_on(late)
                time.sleep(0.2)

    def _revoke_on(self, workers: Collection[str]) -> None:
        """Revoke the leases that hold the devices of these workers."""
        engines = self._run.dataplane.status()["engines"]
        self._revoke(self._plan.revoke_next(lease_of(e["id"]) for e in engines if e["worker"] in workers))

    def _revoke(self, leases: Collection[Lent]) -> None:
        if leases:
            bound_s = self._run.config.cluster.yield_timeout_s
            dataplane = self._run.dataplane
            with ThreadPoolExecutor(len(leases)) as pool:
                list(pool.map(lambda lease: dataplane.revoke(lease[1], bound_s), leases))

    def has_committed(self) -> bool:
        """Wait for the ranks. False if they lost each other or a worker was lost; `submit` then retries on
        workers that are connected now. Raises the error of a rank if no attempt is left, and
        TimeoutError if too few able workers join."""
        self._await_ranks()
        if not self._ranks or self._run.directory.read_manifest(self._iteration, "train") is not None:
            return True
        failure = self._plan.judge(self._ends())
        if failure.is_final:
            raise failure.error
        log.warning(
            "training of iteration %d: attempt %d failed (%s)",
            self._iteration,
            self._plan.step_attempt,
            failure.error,
        )
        for worker in failure.unfinished:
            kill_worker(scheduler_address(), worker)
            self._ranks[worker].wrapped_future.cancel()
        self._choose_again()
        self._ranks = {}
        log.warning("training of iteration %d: retry on %s", self._iteration, ", ".join(self._plan.workers))
        return False

    def has_returned(self) -> bool:
        """Whether rank 0 also returned to Dask. It may have failed after its commit, or been lost with its
        worker, and with it a task that depends on it."""
        return not self._ranks or _end_of(self._ranks[self._plan.workers[0]]).error is None

    def _await_ranks(self) -> None:
        """Wait until all ranks have ended, or those that have not are given up."""
        awaited = f"training of iteration {self._iteration} on {', '.join(self._plan.workers)}"
        with waiting_for(awaited, self._run.config.cluster.stage_timeout_s) as waited:
            while running := [f.wrapped_future for f in self._ranks.values() if not f.wrapped_future.done()]:
                waited.check()
                state = self._plan.observe(time.monotonic(), _addresses(), self._ends())
                waited.reason = f"not connected: {', '.join(state.away)}" if state.away else ""
                if state.fence:
                    self._files.end()
                if state.give_up:
                    break
                if state.restarted:
                    with suppress(*UNANSWERED):
                        self._revoke_on(state.restarted)
                with suppress(TimeoutError), running[0].client.as_current():
                    wait(running, timeout=LOOK_S, return_when="FIRST_COMPLETED")

    def _choose_again(self) -> None:
        """Wait while the workers that could train instead are too few."""
        awaited = f"workers to train iteration {self._iteration}"
        with waiting_for(awaited, self._run.config.cluster.stage_timeout_s) as waited:
            while True:
                try:
                    return self._plan.choose_again(list_connected(dask_client()).values())
                except ValueError as error:
                    waited.reason = str(error)
                waited.check()
                time.sleep(LOOK_S)

    @property
    def _files(self) -> GangFiles:
        return GangFiles(self._run.directory, self._iteration, self._run.ref.attempt, self._plan.step_attempt)

    def _ends(self) -> dict[str, RankEnd]:
        """Ends of the ranks that have ended, by worker."""
        return {w: _end_of(future) for w, future in self._ranks.items() if future.wrapped_future.done()}

    def _find_begun(self) -> set[str]:
        """Workers whose ranks have begun."""
        return {
            worker
            for rank, worker in enumerate(self._plan.workers)
            if self._files.has_begun(rank) or self._ranks[worker].wrapped_future.done()
        }


def _addresses() -> dict[str, str]:
    """Addresses of the connected workers by name. A restarted process has another address."""
    return {worker.name: address for address, worker in list_connected(dask_client()).items()}


def _end_of(future: TaskFuture) -> RankEnd:
    error = outcome_of(future)
    if error is None:
        return RankEnd(GangError("the result of a rank was lost with its worker"), "others")
    if not isinstance(error, BaseException):
        return RankEnd()
    if isinstance(error, GangError):
        return RankEnd(error, "others")
    return RankEnd(error, "worker" if isinstance(error, SupersededError | NoValidWorkerError) else "rank")
