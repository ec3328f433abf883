"""States of tasks of Prefect."""

from __future__ import annotations

import uuid
from typing import Any

from distributed import Client
from prefect.states import Completed, State, exception_to_failed_state
from prefect.utilities.asyncutils import run_coro_as_sync
from prefect_dask.task_runners import PrefectDaskFuture

from tasks.cluster import TaskFuture
from tests.bench.waits import wait_until


def failed(client: Client, error: BaseException) -> TaskFuture:
    """Future of a task that raised this error."""
    state: State[object] | None = run_coro_as_sync(exception_to_failed_state(error))
    future = client.submit(lambda: state, pure=False)
    future.result()
    return PrefectDaskFuture(uuid.uuid4(), future)


def completed(client: Client, data: Any = 7) -> TaskFuture:
    state: State[Any] = Completed(data=data)
    future = client.submit(lambda: state, pure=False)
    wait_until(future.done, "its end")
    return PrefectDaskFuture(uuid.uuid4(), future)


def queued(client: Client) -> TaskFuture:
    return PrefectDaskFuture(uuid.uuid4(), client.submit(int, pure=False, resources={"@nobody": 1}))
