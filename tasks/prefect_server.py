"""Our Prefect server, for `uvicorn --factory`: Prefect's own, whose 503 answers say when to retry, and which
takes one report of each crash."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from prefect.server.api import server
from prefect.server.orchestration.core_policy import CoreFlowPolicy
from prefect.server.orchestration.dependencies import ORCHESTRATION_DEPENDENCIES
from prefect.server.orchestration.rules import FlowRunOrchestrationRule
from prefect.server.schemas.states import StateType
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tasks.server import OURS

SOON_S, LATE_S = 0.1, 10.0
"""Bounds of Retry-After; a transaction on SQLite lasts some milliseconds, on a disk that is busy seconds."""


class RetrySoon:
    """Adds Retry-After to answers of status 503. On SQLite one of two simultaneous writers gets such an
    answer, and without the header Prefect's client retries only after two seconds. It gives up after five
    retries: while refusals follow each other, they name longer times, some eight seconds in all."""

    def __init__(self, app: ASGIApp, now: Callable[[], float] = time.monotonic) -> None:
        self._app, self._now = app, now
        self._first = self._last = 0.0
        """Times of the first and the last of the refusals that follow each other."""
        self._told_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 503:
                header = b"retry-after", f"{self._retry_after_s():.1f}".encode()
                message["headers"] = [*message["headers"], header]
            await send(message)

        await self._app(scope, receive, tell)

    def _retry_after_s(self) -> float:
        now = self._now()
        # or it is a new cause
        if now - self._last > 3 * self._told_s:
            self._first = now
        self._last, self._told_s = now, min(max(SOON_S, 2 * (now - self._first)), LATE_S)
        return self._told_s


class RefuseSecondReport(FlowRunOrchestrationRule):
    """Refuses the second report of a crash. A process worker reports that a flow's process has died, starts
    another one, which imports the flow for its hooks, and then reports the same again. On a busy machine this
    takes a minute. The flow run has been restarted by then, and would be restarted once more beside that."""

    FROM_STATES = {StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING}  # noqa: RUF012
    TO_STATES = {StateType.CRASHED}  # noqa: RUF012

    async def before_transition(self, initial_state: Any, proposed_state: Any, context: Any) -> None:
        queue, said = context.run.work_queue, proposed_state.message or ""
        # workers of other pools report a crash only in this way
        is_ours = OURS in context.run.tags and queue is not None and queue.work_pool.type == "process"
        if is_ours and said.startswith("Flow run infrastructure exited with"):
            await self.abort_transition("The worker has reported this crash before.")


class FlowPolicy(CoreFlowPolicy):
    @staticmethod
    def priority() -> list[Any]:
        return [RefuseSecondReport, *CoreFlowPolicy.priority()]


async def _provide_policy() -> type[FlowPolicy]:
    return FlowPolicy


def create_app() -> FastAPI:
    ORCHESTRATION_DEPENDENCIES["flow_policy_provider"] = _provide_policy
    app = server.create_app(final=True)
    app.add_middleware(RetrySoon)
    return app
