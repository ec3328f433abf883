"""Sends reports on ended sessions to the data plane: many in one request, each until it is answered. A report
says what the runner spent on its sessions beside the policy's answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import httpx
import orjson
from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential

from sf_core.agents.event_loop import read_schedule
from sf_core.config.rollout_config import Cause
from sf_core.dataplane.control.client import refusal_of

Spent = dict[str, float]
"""cpu_s: CPU seconds of this process, and of programs that it has started and that have ended. busy_s:
seconds in which the event loop computed or waited for a core. num_ended: sessions, or scored answers, that
have ended."""


class Effort:
    def __init__(self) -> None:
        """Counts what this process spends from now on. Its event loop runs in the calling thread."""
        self._thread = threading.get_native_id()
        self.num_ended = 0
        self._before = self._sum()

    def spent(self) -> Spent:
        """What was spent since this was made."""
        return {name: max(0, now - self._before[name]) for name, now in self._sum().items()}

    def _sum(self) -> Spent:
        times = os.times()
        loop = read_schedule(self._thread)
        cpu_s = times.user + times.system + times.children_user + times.children_system
        busy_s = loop.computed_s + loop.queued_s
        return {"cpu_s": cpu_s, "busy_s": busy_s, "num_ended": self.num_ended}


log = logging.getLogger(__name__)

REQUEST_BYTES = 2**20
"""Size limit of a request with more than one report, far below what data planes and proxies take."""

GATHER_S = 0.01
"""Sessions end in bursts: reports within this time share a request."""

MAX_ERROR = 2000
"""Most characters of the reason why a session failed."""

NOT_NOW = (404, 429, 502, 503, 504)
"""Statuses worth a retry: the data plane is away, cannot record anything, or does not know the run yet."""

Report = tuple[str, bytes]
"""Session id, and the report as JSON."""


class _NotNowError(Exception):
    """The request is to be sent again."""


class Reports:
    def __init__(self, path: str, on_answer: Callable[[str], None]) -> None:
        """`on_answer` is called with the id of each session whose report the data plane has answered."""
        self._path = path
        self._on_answer = on_answer
        self._waiting: asyncio.Queue[Report] = asyncio.Queue()
        self.num_finished = 0

    def add(self, session_id: str, report: dict[str, Any]) -> None:
        """Queue a report. Raises ValueError for one that cannot be sent."""
        try:
            self._waiting.put_nowait((session_id, orjson.dumps(report | {"session_id": session_id})))
        except TypeError as error:
            raise ValueError(
                f"the report of the session cannot be written as JSON ({error}): task_id, environment and "
                "the names of the reward's parts must be text"
            ) from None

    def add_failure(self, session_id: str, reason: str, cause: Cause = "agent", **facts: Any) -> None:
        """Queue a failure. `facts` are further fields of the report, where they are known."""
        self._waiting.put_nowait(_failure(session_id, reason, cause, **facts))

    async def send(self, http: httpx.AsyncClient) -> NoReturn:
        """Send queued reports, and again until they are answered. The runner cancels this when the data plane
        has not answered its claims for too long."""
        while True:
            reports = [await self._waiting.get()]
            await asyncio.sleep(GATHER_S)
            while not self._waiting.empty():
                reports.append(self._waiting.get_nowait())
            for part in _parts(reports):
                await self._deliver(http, part)

    async def _deliver(self, http: httpx.AsyncClient, reports: list[Report], instead: bool = False) -> None:
        """`instead`: the report replaces one that was refused."""
        response = await self._post(http, reports)
        if response.is_success:
            answer = orjson.loads(response.content)
            self.num_finished += len(answer["finished"])
            for session_id, reason in answer["refused"].items():
                log.warning("the report on session %s was refused: %s", session_id, reason)
        elif len(reports) > 1:
            # one of them may be the cause
            for report in reports:
                await self._deliver(http, [report])
            return
        else:
            [(session_id, _)] = reports
            reason = refusal_of(response)
            log.warning("the report on session %s was refused: %s", session_id, reason)
            if not instead:
                failure = _failure(session_id, f"the report of the session was refused: {reason}", "reward")
                return await self._deliver(http, [failure], instead=True)
        for session_id, _ in reports:
            self._on_answer(session_id)

    async def _post(self, http: httpx.AsyncClient, reports: list[Report]) -> httpx.Response:
        body = b'{"sessions":[' + b",".join(report for _, report in reports) + b"]}"
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type((httpx.RequestError, _NotNowError)),
            wait=wait_exponential(multiplier=0.1, max=5.0),
        ):
            with attempt:
                response = await http.post(self._path, content=body)
                if response.status_code in NOT_NOW:
                    raise _NotNowError(refusal_of(response))
        return response


def as_text(words: str) -> str:
    """Text of user code, which may hold anything that the agent has read, with invalid characters escaped."""
    return words.encode(errors="backslashreplace").decode()


def shorten(reason: str) -> str:
    """A reason as reports have it."""
    reason = as_text(reason)
    return reason if len(reason) <= MAX_ERROR else reason[:MAX_ERROR] + " ..."


def _failure(session_id: str, reason: str, cause: Cause, **facts: Any) -> Report:
    failure = {
        "session_id": session_id,
        "status": "failed",
        "error": shorten(reason),
        "cause": cause,
        **facts,
    }
    return session_id, orjson.dumps(failure)


def _parts(reports: list[Report]) -> Iterator[list[Report]]:
    """The reports of each request."""
    part: list[Report] = []
    num_bytes = 0
    for report in reports:
        if part and num_bytes + len(report[1]) > REQUEST_BYTES:
            yield part
            part = []
            num_bytes = 0
        part.append(report)
        num_bytes += len(report[1])
    yield part
