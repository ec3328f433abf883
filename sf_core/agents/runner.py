"""Claims sessions from the rollout manager, runs the user's agent on each, scores it and reports. Where other
runners score, they claim the agents' answers in the same way.

The agent is a black box: it gets a task and an endpoint. What it raises fails its session, never the runner.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from traceback import extract_tb, format_exception
from typing import Any, Literal

import httpx
import orjson

from sf_core.agents.reports import Reports, as_text
from sf_core.agents.threads import Threads
from sf_core.config.environment import reach_directly
from sf_core.config.failures import Cause
from sf_core.types import Endpoint, Task

log = logging.getLogger(__name__)

MAX_CLAIM = 256
"""Most sessions of one claim: if more agents started at once, the first of them would wait for the others."""

BEAT_S = 3.0
"""Seconds between heartbeats, and between claims that name the runner's sessions."""

MAX_NAMES = 4096
"""Task ids and environments of more bytes are left out of claims and sent with the session's report only."""

LOOK_S = 2.0
"""Seconds after which a runner without room or new sessions asks again what has become of its sessions."""


@dataclass
class _Work:
    """Facts that the report on a failed session needs."""

    task: dict[str, str] = field(default_factory=dict)
    """Id and environment of the task, once it is made."""
    cause: Cause = "agent"


class AgentRunner:
    """Runs up to `concurrency` sessions at once on one event loop, with plain functions in threads."""

    def __init__(
        self,
        *,
        url: str,
        key: str | None,
        run_id: str,
        runner_id: str,
        attempt: int | None = None,
        tasks: Callable[[str, int], Task],
        agent: Callable[[Task, Endpoint], Any],
        reward: Callable[[Task, Any], Any],
        concurrency: int,
        seed: int,
        work: Literal["agent", "reward"] = "agent",
        patience_s: float = 60.0,
    ) -> None:
        """A runner with `work` "reward" claims answers only. See `run` for `patience_s`."""
        self._url, self._key, self._run_id, self._runner_id = url, key, run_id, runner_id
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._attempt = attempt
        """Attempt of the flow: when a later one begins, the data plane releases this runner."""
        self._tasks, self._agent, self._reward = tasks, agent, reward
        self._concurrency, self._kind, self._patience_s = concurrency, work, patience_s
        self._alone_since: float | None = None
        """Monotonic time of the first claim that failed since one was answered."""
        self._is_scored_elsewhere = False
        # every seed starts elsewhere among the training tasks; the held-out ones are the same for all
        self._first_index = {"train": seed * 0x9E3779B1 % 2**32, "holdout": 0}
        self._running: dict[str, asyncio.Task[None]] = {}
        """Sessions until they are reported. When a claim names sessions, the data plane takes back those that
        it does not name."""
        self._named_at = -math.inf
        """Monotonic time at which a claim last named them."""
        self._reports = Reports(f"/runs/{run_id}/finished", self._note_reported)
        self._has_reported = asyncio.Event()
        """Whether a report was answered since the last claim began."""
        self._threads = Threads()
        self._logged: set[tuple[str, str, int]] = set()
        self._untold: dict[str, dict[str, str]] = {}
        """Tasks of sessions that have begun, by session id, until a claim has told the data plane."""

    async def run(self) -> int:
        """Work until the data plane releases the runner; returns the number of sessions finished.

        A claim or a report that fails is sent again, while sessions go on. Raises ConnectionError when claims
        have failed for `patience_s`: the data plane is gone or has forgotten the run. It gives out again what
        was begun, and what could not be reported.
        """
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
        timeout = httpx.Timeout(60.0)
        # with a transport of its own the client uses no proxy of the environment; agents' clients may
        direct = httpx.AsyncHTTPTransport(limits=limits)
        reach_directly(self._url)
        http = httpx.AsyncClient(base_url=self._url, headers=self._headers, timeout=timeout, transport=direct)
        async with http:
            self._http = http
            reporter = asyncio.create_task(self._reports.send(http))
            try:
                with self._beating():
                    while await self._claim():
                        if reporter.done():
                            reporter.result()  # raises what ended it
            except ConnectionError:
                if num_lost := sum(task.done() for task in self._running.values()):
                    log.warning("%d sessions have ended and could not be reported", num_lost)
                raise
            finally:
                tasks = [*self._running.values(), reporter]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return self._reports.num_finished

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Send heartbeats from a thread: agents may keep the event loop busy, and a silent runner loses its
        sessions."""
        is_over = threading.Event()

        def beat() -> None:
            path = f"/runs/{self._run_id}/runners/{self._runner_id}/alive"
            direct = httpx.HTTPTransport()
            with httpx.Client(
                base_url=self._url, headers=self._headers, timeout=BEAT_S, transport=direct
            ) as http:
                while not is_over.wait(BEAT_S):
                    # claims notice a data plane that is away
                    with suppress(httpx.HTTPError):
                        http.post(path)

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()

    async def _claim(self) -> bool:
        """Ask for as many sessions as fit; False once released."""
        self._has_reported.clear()
        free = self._concurrency - len(self._running) - self._threads.num_excess
        room = min(max(0, free), MAX_CLAIM)
        now, tasks = time.monotonic(), dict(self._untold)
        names_sessions = now - self._named_at >= BEAT_S
        body = {
            "runner": self._runner_id,
            "attempt": self._attempt,
            "max": room,
            "work": self._kind,
            "tasks": tasks,
            "wait_s": LOOK_S if room else 0.0,
            "running": list(self._running) if names_sessions else None,
        }
        try:
            response = await self._http.post(f"/runs/{self._run_id}/claim", content=orjson.dumps(body))
            response.raise_for_status()
        except httpx.HTTPError as error:
            self._note_failure(str(error).partition("\n")[0] or type(error).__name__)
            await asyncio.sleep(0.5)
            return True
        self._alone_since = None
        for session_id in tasks:
            del self._untold[session_id]
        if names_sessions:
            self._named_at = now
        answer = orjson.loads(response.content)
        self._is_scored_elsewhere = answer["scored_elsewhere"]
        for session_id in answer["ended"]:
            if (ended := self._running.get(session_id)) is not None and not ended.done():
                ended.cancel()
                del self._running[session_id]
        for claim in answer["sessions"]:
            self._running[claim["session_id"]] = asyncio.create_task(self._work(claim, answer["key"]))
        if room == 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_reported.wait(), LOOK_S)
        # sessions end in bursts: one claim for several is cheaper than one each
        await asyncio.sleep(0.01)
        return not answer["released"]

    def _note_failure(self, sentence: str) -> None:
        """Raises ConnectionError when claims have failed for too long."""
        now = time.monotonic()
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since > self._patience_s:
            who = f"data plane at {self._url}: no claim of {self._runner_id} on run {self._run_id}"
            raise ConnectionError(f"{who} was answered for {self._patience_s:g} s: {sentence}")
        log.warning("claim failed, trying again: %s", sentence)

    async def _work(self, claim: dict[str, Any], run_key: str | None) -> None:
        session_id, work = claim["session_id"], _Work()
        try:
            self._reports.add(session_id, await self._report_on(claim, work, run_key or self._key or "none"))
        # user code may raise anything, exit the program or cancel itself: that fails one session
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            sentence = _sentence(error)
            where = extract_tb(error.__traceback__)[-1]
            kind = type(error).__name__, where.filename, where.lineno or 0
            # thousands may fail alike, and their sentences differ by the session
            if kind not in self._logged:
                self._logged.add(kind)
                trace = as_text("".join(format_exception(error)))
                log.warning("session %s failed: %s\n%s", session_id, as_text(sentence), trace)
            self._reports.add_failure(session_id, sentence, work.cause, **work.task)

    def _note_reported(self, session_id: str) -> None:
        self._running.pop(session_id, None)
        self._has_reported.set()

    async def _report_on(self, claim: dict[str, Any], work: _Work, key: str) -> dict[str, Any]:
        """Run the agent, or take what another runner's agent answered; score it, or leave that to others."""
        task = self._tasks(claim["split"], claim["task_index"] + self._first_index[claim["split"]])
        if named := _named(task):
            self._untold[claim["session_id"]] = work.task = named
        if claim["answer"] is not None:
            answer = orjson.loads(claim["answer"])
        else:
            url = f"{self._url}/sessions/{claim['session_id']}/v1"
            answer = await self._call(self._agent, task, Endpoint(url, key, "policy"))
            if self._is_scored_elsewhere:
                return {"status": "answered", "answer": _as_json(answer)}
        work.cause = "reward"
        reward, parts = _as_reward(await self._call(self._reward, task, answer))
        return {
            "status": "finished",
            "reward": reward,
            "reward_parts": parts,
            "task_id": task.task_id,
            "environment": task.environment,
        }

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a plain or an async function; plain ones must not block the other sessions."""
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        return await self._threads.call(function, *args)


def _named(task: Task) -> dict[str, str]:
    """Id and environment of a task; empty if a claim cannot carry them, which the session's report tells."""
    names = {"task_id": task.task_id, "environment": task.environment}
    try:
        is_told = len(orjson.dumps(names)) < MAX_NAMES
    except TypeError:
        return {}
    return names if is_told and all(isinstance(name, str) for name in names.values()) else {}


def _sentence(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # __str__ is user code too
        text = "it cannot say why"
    return f"{type(error).__name__}: {text}"


def _as_json(answer: Any) -> str:
    try:
        # a dataclass would come back as a mapping
        return orjson.dumps(answer, option=orjson.OPT_PASSTHROUGH_DATACLASS).decode()
    except TypeError as error:
        raise ValueError(
            f"the agent answered {type(answer).__name__}, which is not JSON ({error}); "
            "answers that `reward` workers score must be"
        ) from None


def _as_reward(value: Any) -> tuple[float, dict[str, float]]:
    parts = {str(name): float(part) for name, part in value.items()} if isinstance(value, Mapping) else {}
    total = sum(parts.values()) if parts else float(value)
    if not math.isfinite(total):
        raise ValueError(f"the reward must be a finite number, got {value!r}")
    return total, parts
