"""Claims sessions from the rollout manager, has each prepared, run and scored (phases.py), and reports. Where
other runners score, they claim the agents' answers in the same way.

The agent is a black box: it gets a task and an endpoint. What it raises fails its session, never the runner.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from traceback import extract_tb, format_exception
from typing import Any, Literal

import httpx
import msgspec
import orjson

from sf_core.agents.event_loop import log_blocks
from sf_core.agents.judges.judges import Judges
from sf_core.agents.phases import Phase, Phases, Prepare, Work
from sf_core.agents.reports import Effort, Reports, as_text, shorten
from sf_core.config import RolloutConfig
from sf_core.process.environment_variables import reach_directly
from sf_core.process.user_code import own_place
from sf_core.types import Endpoint, NotJudged, Task

log = logging.getLogger(__name__)

MAX_CLAIM = 256
"""Most sessions of one claim: if more agents started at once, the first of them would wait for the others."""

BEAT_S = 3.0
"""Seconds between heartbeats, and between claims that name the runner's sessions."""

MAX_NAMES = 4096
"""Task ids and environments of more bytes are left out of claims and sent with the session's report only."""

MAX_JUDGED = 2**22
"""Most bytes of judgements in a report, which leaves out further questions. Data planes take twice that."""

LOOK_S = 2.0
"""Seconds after which a runner without room or new sessions asks again what has become of its sessions."""


class AgentRunner:
    """Works on many sessions at once on one event loop, with plain functions in threads."""

    def __init__(
        self,
        *,
        url: str,
        key: str | None,
        run_id: str,
        runner_id: str,
        attempt: int | None = None,
        tasks: Callable[..., Task],
        agent: Callable[..., Any],
        reward: Callable[..., Any],
        group_reward: Callable[..., Any] | None = None,
        prepare: Prepare | None = None,
        rules: RolloutConfig,
        seed: int,
        work: Literal["agent", "reward"] = "agent",
        patience_s: float = 60.0,
        judges: Judges | None = None,
    ) -> None:
        """A runner with `work` "reward" claims answers only. See `run` for `patience_s`. It opens and closes
        the judges."""
        self._url = url
        self._run_id = run_id
        self._runner_id = runner_id
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._attempt = attempt
        """Attempt of the flow: when a later one begins, the data plane releases this runner."""
        self._tasks = tasks
        self._kind = work
        self._patience_s = patience_s
        self._judges_groups = group_reward is not None
        self._judges = judges
        self._phases = Phases(rules, agent, reward, prepare, group_reward, judges)
        self._alone_since: float | None = None
        """Monotonic time of the first claim that failed since one was answered."""
        self._is_scored_elsewhere = False
        self._first_index = {"train": first_index(seed), "holdout": 0}
        self._sessions: dict[str, asyncio.Task[None]] = {}
        """Sessions until they are reported. When a claim names sessions, the data plane takes back those that
        it does not name."""
        self._named_at = -math.inf
        """Monotonic time at which a claim last named them."""
        self._due: Counter[str] = Counter()
        """Reports by session id that the data plane has not answered."""
        self._reports = Reports(f"/runs/{run_id}/finished", self._note_reported)
        self._has_reported = asyncio.Event()
        """Whether a report was answered since the last claim began."""
        self._logged: set[tuple[str, str, int]] = set()

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
        self._effort = Effort()
        http = httpx.AsyncClient(base_url=self._url, headers=self._headers, timeout=timeout, transport=direct)
        async with AsyncExitStack() as stack:
            self._http = await stack.enter_async_context(http)
            if self._judges is not None:
                await stack.enter_async_context(self._judges)
            reporter = asyncio.create_task(self._reports.send(http))
            try:
                with self._send_heartbeats(), log_blocks(lambda: len(self._sessions)):
                    while await self._claim():
                        if reporter.done():
                            reporter.result()  # raises what ended it
            except ConnectionError:
                if num_lost := sum(task.done() for task in self._sessions.values()):
                    log.warning("%d sessions have ended, but their reports could not be sent", num_lost)
                raise
            finally:
                tasks = [*self._sessions.values(), reporter]
                for task in tasks:
                    task.cancel()
                for ended in await asyncio.gather(*tasks, return_exceptions=True):
                    if isinstance(ended, Exception):
                        log.error("a task of the runner failed", exc_info=ended)
        return self._reports.num_finished

    @contextmanager
    def _send_heartbeats(self) -> Iterator[None]:
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
        room = min(self._room(), MAX_CLAIM)
        now = time.monotonic()
        begun = dict(self._phases.begun)
        answered = [*self._phases.answered]
        names_sessions = now - self._named_at >= BEAT_S
        body = {
            "runner": self._runner_id,
            "attempt": self._attempt,
            "max": room,
            "work": self._kind,
            "tasks": begun,
            "answered": answered,
            "wait_s": LOOK_S if room else 0.0,
            "running": list(self._sessions) if names_sessions else None,
            "spent": self._effort.spent(),
        }
        try:
            response = await self._http.post(f"/runs/{self._run_id}/claim", content=orjson.dumps(body))
            response.raise_for_status()
        except httpx.HTTPError as error:
            self._note_failure(str(error).partition("\n")[0] or type(error).__name__)
            await asyncio.sleep(0.5)
            return True
        self._alone_since = None
        self._phases.note_told(begun, answered)
        if names_sessions:
            self._named_at = now
        answer = orjson.loads(response.content)
        self._is_scored_elsewhere = answer["scored_elsewhere"]
        for session_id in answer["ended"]:
            if (ended := self._sessions.get(session_id)) is not None and not ended.done():
                ended.cancel()
                # a judge has the answers of others too, which another one gets
                for member in [member for member, task in self._sessions.items() if task is ended]:
                    self._forget(member)
        for claims in self._group_claims(answer["sessions"]):
            task = asyncio.create_task(self._work(claims))
            self._sessions |= {claim["session_id"]: task for claim in claims}
        if room == 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_reported.wait(), LOOK_S)
        # sessions end in bursts: one claim for several is cheaper than one each
        await asyncio.sleep(0.01)
        return not answer["released"]

    def _room(self) -> int:
        """Number of sessions, or of answers, to claim."""
        room = self._phases.room if self._kind == "agent" else self._phases.room_for_answers
        return room(len(self._sessions))

    def _note_failure(self, sentence: str) -> None:
        """Raises ConnectionError when claims have failed for too long."""
        now = time.monotonic()
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since > self._patience_s:
            problem = (
                f"the data plane at {self._url} did not answer any claim of {self._runner_id} on run "
                f"{self._run_id}"
            )
            raise ConnectionError(f"{problem} for {self._patience_s:g} s: {sentence}")
        log.warning("the claim of new sessions failed and is retried: %s", sentence)

    def _group_claims(self, claims: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Claims one by one, but the answers of a group together if it is judged as a whole."""
        groups: dict[Any, list[dict[str, Any]]] = {}
        for claim in claims:
            is_judged = self._judges_together(claim) and claim["answer"] is not None
            name = claim["group"] if is_judged else claim["session_id"]
            groups.setdefault(name, []).append(claim)
        return list(groups.values())

    def _judges_together(self, claim: dict[str, Any]) -> bool:
        return self._judges_groups and claim["split"] == "train"

    async def _work(self, claims: list[dict[str, Any]]) -> None:
        """Work on a session, or on all answers of a group."""
        works = [Work(claim["session_id"]) for claim in claims]
        try:
            reports = await self._make_reports(claims, works)
            for work, report in zip(works, reports, strict=True):
                self._reports.add(work.session_id, report | _name_judgements(work))
                self._due[work.session_id] += 1
        # user code may raise anything, exit the program or cancel itself: that fails its sessions only
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            self._add_failures(works, error)
        self._effort.num_ended += len(works)

    def _add_failures(self, works: list[Work], error: BaseException) -> None:
        sentence = _describe_error(error, works[0].phase)
        where = extract_tb(error.__traceback__)[-1]
        kind = type(error).__name__, where.filename, where.lineno or 0
        # thousands may fail alike, and their sentences differ by the session
        if kind not in self._logged:
            self._logged.add(kind)
            trace = as_text("".join(format_exception(error)))
            log.warning("session %s failed: %s\n%s", works[0].session_id, as_text(sentence), trace)
        for work in works:
            more = work.facts | _name_judgements(work)
            self._reports.add_failure(work.session_id, sentence, work.cause_of(error), **more)
            self._due[work.session_id] += 1

    def _note_reported(self, session_id: str) -> None:
        self._due[session_id] -= 1
        task = self._sessions.get(session_id)
        # its answer may have come back to be judged before the report of the answer was answered
        if self._due[session_id] == 0 and (task is None or task.done()):
            self._forget(session_id)
        self._has_reported.set()

    def _forget(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._due.pop(session_id, None)
        self._phases.ended.discard(session_id)

    async def _make_reports(self, claims: list[dict[str, Any]], works: list[Work]) -> list[dict[str, Any]]:
        """Run the agent, or take what agents have answered; score it, or leave that to others."""
        claim = claims[0]
        work = works[0]
        source = (claim["source"],) if claim["source"] else ()
        index = claim["task_index"] + self._first_index[claim["split"]]
        task = self._tasks(claim["split"], index, *source)
        for each in works:
            each.facts |= _name_task(task)
        if claim["answer"] is None:
            url = f"{self._url}/sessions/{claim['session_id']}/v1"
            answers = [await self._phases.run(work, task, Endpoint(url, claim["key"], "policy"))]
            if self._is_scored_elsewhere or self._judges_together(claim):
                return [{"status": "answered", "answer": as_json(answers[0]), **work.facts}]
        else:
            answers = [orjson.loads(each["answer"]) for each in claims]
        try:
            if not self._judges_together(claim):
                scores = [await self._phases.score(work, task, answers[0])]
            elif (judged := await self._phases.judge(works, task, answers)) is None:
                return [{"status": "failed", "cause": "group", **each.facts} for each in works]
            else:
                scores = judged
        except NotJudged as error:
            report = {"status": "unjudged", "error": shorten(_describe_error(error, "reward"))}
            answered = zip(works, claims, answers, strict=True)
            return [
                report | {"answer": as_json(answer), "scoring": claim["scoring"], **work.facts}
                for work, claim, answer in answered
            ]
        names = {"task_id": task.task_id, "environment": task.environment}
        pairs = zip(works, scores, strict=True)
        return [{"status": "finished", **score, **each.facts, **names} for each, score in pairs]


def first_index(seed: int) -> int:
    """Index of a run's first training task: every seed starts elsewhere among them; the held-out ones are the
    same for all."""
    return seed * 0x9E3779B1 % 2**32


def _name_task(task: Task) -> dict[str, str]:
    """Id and environment of a task; empty if a claim cannot carry them, which the session's report tells."""
    names = {"task_id": task.task_id, "environment": task.environment}
    try:
        is_told = len(orjson.dumps(names)) < MAX_NAMES
    except TypeError:
        return {}
    return names if is_told and all(isinstance(name, str) for name in names.values()) else {}


def _name_judgements(work: Work) -> dict[str, Any]:
    """What was asked and noted of an answer, as a field of its report: without the texts of those that a
    report has no room for."""
    judgements = list[Any]()
    num_bytes = 0
    for judgement in work.judgements:
        fields = msgspec.to_builtins(judgement)
        num_bytes += len(msgspec.json.encode(judgement))
        judgements.append(fields if num_bytes <= MAX_JUDGED else fields | {"messages": None})
    return {"judgements": judgements} if judgements else {}


def _describe_error(error: BaseException, phase: Phase) -> str:
    """What was raised and, if it was in the user's own code, where and by which of the functions."""
    try:
        text = str(error)
    except Exception:  # __str__ is user code too
        text = "(the error has no readable message)"
    sentence = f"{type(error).__name__}: {text}"
    return f"{place}: {phase} raised {sentence}" if (place := own_place(error)) else sentence


def as_json(answer: Any) -> str:
    try:
        # a dataclass would come back as a mapping
        return orjson.dumps(answer, option=orjson.OPT_PASSTHROUGH_DATACLASS).decode()
    except TypeError as error:
        raise ValueError(
            f"the agent returned {type(answer).__name__}, which cannot be written as JSON ({error}); "
            "an answer must be JSON if a worker tagged reward scores the answer, or if the answer is scored "
            "again"
        ) from None
