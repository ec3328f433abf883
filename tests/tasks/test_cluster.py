import uuid
from concurrent.futures import Future

import pytest
from distributed.client import FutureCancelledError
from prefect.futures import PrefectConcurrentFuture

from sf_core.scheduling.plan import Worker
from tasks.cluster import OwnWorkers, SchedulerLostError, crash_without_scheduler, result_of


def submitted(future: Future[int]) -> PrefectConcurrentFuture[int]:
    return PrefectConcurrentFuture(uuid.uuid4(), future)


def test_what_a_task_returned_is_its_result() -> None:
    done: Future[int] = Future()
    done.set_result(3)
    assert result_of(submitted(done), "batch 3", 60) == 3


def test_a_task_that_does_not_end_is_given_up_and_named() -> None:
    with pytest.raises(TimeoutError, match=r"waited 0 s, since .*, for batch 3"):
        result_of(submitted(Future()), "batch 3", 0.02)


def test_a_task_that_timed_out_itself_says_why() -> None:
    failed: Future[int] = Future()
    failed.set_exception(TimeoutError("no engine"))
    with pytest.raises(TimeoutError) as raised:
        result_of(submitted(failed), "batch 3", 60)
    assert "no engine" in f"{raised.value} {raised.value.__cause__}"


def test_a_run_whose_scheduler_died_crashes_and_says_so() -> None:
    with pytest.raises(SchedulerLostError, match="the Dask scheduler ended"), crash_without_scheduler():
        raise FutureCancelledError("lease-1", "scheduler-connection-lost")


def test_a_task_that_was_given_up_is_no_dead_scheduler() -> None:
    with pytest.raises(FutureCancelledError), crash_without_scheduler():
        raise FutureCancelledError("lease-1", None)


def test_the_tasks_of_a_run_beside_others_take_turns_on_its_own_workers() -> None:
    own = OwnWorkers()
    connected = [Worker(name, frozenset({name[0]})) for name in ("c1", "r0", "c0")]
    assert [own.choose("c", connected) for _ in range(3)] == ["c0", "c1", "c0"]
    # a worker that is being restarted is waited for, or the task would go to a worker of another run
    assert own.choose("r", []) == "r0"
    with pytest.raises(ValueError, match="none of the workers that SF_WORKERS names has the tag 't'"):
        own.choose("t", connected)
