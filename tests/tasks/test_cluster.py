import uuid
from concurrent.futures import Future

import pytest
from distributed.client import FutureCancelledError
from prefect.futures import PrefectConcurrentFuture

from tasks.cluster import SchedulerLostError, crash_without_scheduler, result_of


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
