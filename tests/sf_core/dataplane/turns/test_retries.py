"""Which request samples, and which joins a turn that is sampled already."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sf_core.dataplane.api_schemas import ClaimBody, FinishBody, RunSpec
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.runs import claiming, endings
from sf_core.dataplane.runs.recovery import open_run, reopen_run
from sf_core.dataplane.runs.run import ServedRun, limits_of
from sf_core.dataplane.sessions.memory_budget import MemoryBudget
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.answer import Answer
from sf_core.dataplane.turns.opening import open_turns
from sf_core.dataplane.turns.request import RequestFingerprint, TurnRequest
from tests.bench import dataplane, waits
from tests.bench.dataplane import planes


class Agent:
    """Repeats the same request, as SDKs and frameworks do, each time in a thread of its own."""

    def __init__(self, plane: planes.ServedPlane) -> None:
        self.server = plane
        [self.claim] = plane.claim()
        self.key = {"Authorization": f"Bearer {self.claim['key']}"}
        self._path = f"/sessions/{self.claim['session_id']}/v1/chat/completions"
        self._threads = ThreadPoolExecutor(4)

    def ask(self, headers: dict[str, str] | None = None, content: str = "hi") -> dict[str, Any]:
        body = {"model": "policy", "messages": [{"role": "user", "content": content}]}
        response = self.server.http.post(self._path, json=body, headers=self.key | (headers or {}))
        assert response.status_code == 200, response.text
        return dict(response.json())

    def start(self, headers: dict[str, str] | None = None) -> Future[dict[str, Any]]:
        return self._threads.submit(self.ask, headers)

    def ask_and_leave(self) -> None:
        """Send a request whose connection breaks before its answer."""
        with pytest.raises(httpx.ReadTimeout):
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            httpx.post(self.server.url + self._path, json=body, headers=self.key, timeout=0.2)
        # what comes in the same turn of its event loop is a second client to the server, not the same again
        self.server.get("/runs/run")


@pytest.fixture
def agent(tmp_path: Path, model_dir: str, renderer: Renderer) -> Iterator[Agent]:
    with planes.running_app(grace_s=30.0) as url, agent_of(url, tmp_path, model_dir, renderer) as agent:
        yield agent


@contextlib.contextmanager
def agent_of(url: str, folder: Path, model_dir: str, renderer: Renderer) -> Iterator[Agent]:
    with planes.operator_client(url) as http:
        plane = planes.ServedPlane(url, http, folder, model_dir)
        plane.register(group_size=1, groups_per_batch=1)
        plane.connect(lambda prompt, seed: planes.say(renderer, f"answer {seed % 1000}"))
        yield Agent(plane)
        http.post("/runs/run/release")
        waits.join(plane.threads[0])


def said(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer without its time."""
    return {name: value for name, value in answer.items() if name != "created"}


def wait_for_requests(plane: planes.ServedPlane, count: int) -> None:
    waits.wait_until(lambda: plane.get("/runs/run")["requests_waiting"] == count)


def test_a_request_sent_again_after_its_connection_broke_joins_the_turn(agent: Agent) -> None:
    agent.server.post("/runs/run/pause")
    agent.ask_and_leave()
    again = agent.start()
    agent.server.post("/runs/run/resume")
    assert again.result(waits.patience())["id"].endswith(".0.0")
    assert len(agent.server.asked) == 1


def test_an_answer_that_its_client_did_not_wait_for_is_given_to_the_next_one(agent: Agent) -> None:
    agent.server.post("/runs/run/pause")
    agent.ask_and_leave()
    agent.server.post("/runs/run/resume")
    waits.wait_until(lambda: agent.server.get("/runs/run")["engines"][0]["tokens"] > 0)
    assert agent.ask()["id"].endswith(".0.0")
    assert agent.ask()["id"].endswith(".0.1"), "that answer was delivered: this asks for another sample"
    assert len(agent.server.asked) == 2


def test_a_retry_joins_although_the_first_connection_looks_alive(agent: Agent) -> None:
    agent.server.post("/runs/run/pause")
    first = agent.start()
    wait_for_requests(agent.server, 1)
    second = agent.start(dataplane.served_runs.RETRY)
    agent.server.post("/runs/run/resume")
    assert said(first.result(waits.patience())) == said(second.result(waits.patience()))
    assert len(agent.server.asked) == 1


def test_equal_requests_of_two_waiting_clients_are_two_samples(agent: Agent) -> None:
    agent.server.post("/runs/run/pause")
    answers = [agent.start(), agent.start()]
    wait_for_requests(agent.server, 2)
    agent.server.post("/runs/run/resume")
    assert len({answer.result(waits.patience())["id"] for answer in answers}) == 2


def test_a_retry_after_the_end_gets_the_same_answer(agent: Agent) -> None:
    first = agent.ask()
    assert said(agent.ask(dataplane.served_runs.RETRY)) == said(first)
    assert agent.ask()["id"] != first["id"]


def test_an_idempotency_key_stands_for_one_sample(agent: Agent) -> None:
    first, again, other = (agent.ask({"Idempotency-Key": key}) for key in "aab")
    assert said(first) == said(again)
    assert other["id"] != first["id"]
    assert len(agent.server.asked) == 2


def test_an_answer_that_was_continued_is_not_given_again(agent: Agent) -> None:
    """Whoever extends an answer has it; the same first request later is another sample."""
    first = agent.ask()
    message = first["choices"][0]["message"]
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "go on"}],
    }
    path = f"/sessions/{agent.claim['session_id']}/v1/chat/completions"
    agent.server.post(path, body)
    assert agent.ask(dataplane.served_runs.RETRY)["id"] != first["id"]


def test_an_answer_nobody_got_is_not_trained(agent: Agent) -> None:
    plane = agent.server
    plane.post("/runs/run/pause")
    agent.ask_and_leave()
    plane.post("/runs/run/resume")
    waits.wait_until(lambda: plane.get("/runs/run")["engines"][0]["tokens"] > 0)
    answer = agent.ask(content="something else")
    report = {"status": "finished", "reward": 1.0, "task_id": "t", "environment": "e"}
    plane.post(f"/sessions/{agent.claim['session_id']}/finish", report)
    sealed = plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    assert sealed["sampled_tokens"] == answer["usage"]["completion_tokens"]
    assert plane.get("/runs/run")["counters"]["abandoned_turns"] == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_a_retry_of_several_samples_gets_the_same_ones(agent: Agent, streamed: bool) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "n": 2, "stream": streamed}
    path = f"/sessions/{agent.claim['session_id']}/v1/chat/completions"
    post = agent.server.http.post
    first, again, other = (
        texts(post(path, json=body, headers=agent.key | headers))
        for headers in ({}, dataplane.served_runs.RETRY, {})
    )
    assert len(set(first)) == 2
    assert again == first
    assert not set(other) & set(first)
    assert len(agent.server.asked) == 4


def texts(response: httpx.Response) -> list[str]:
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [choice["message"]["content"] for choice in response.json()["choices"]]
    found: dict[int, str] = {}
    for line in response.text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            found[choice["index"]] = found.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}),
        ("responses", {"input": "hi"}),
        ("completions", {"prompt": ["hi", "ho"], "n": 2}),
    ],
)
def test_a_retry_gets_the_same_answer_in_every_dialect(
    agent: Agent, route: str, body: dict[str, Any]
) -> None:
    path = f"/sessions/{agent.claim['session_id']}/v1/{route}"
    first, again, other = (
        agent.server.http.post(path, json={"model": "policy"} | body, headers=headers).json()
        for headers in ({}, dataplane.served_runs.RETRY, {})
    )
    parts = ("content", "output", "choices")
    assert [again.get(name) for name in parts] == [first.get(name) for name in parts]
    assert (again["id"] == first["id"], other["id"] == first["id"]) == (True, False)


def test_a_request_that_is_refused_begins_none_of_its_turns(agent: Agent) -> None:
    body = {"model": "policy", "prompt": ["hi", "the " * 3000]}
    path = f"/sessions/{agent.claim['session_id']}/v1/completions"
    assert agent.server.http.post(path, json=body).status_code == 400
    agent.ask()
    assert len(agent.server.asked) == 1


ANSWER = list(range(10, 50))
"""Token ids of the answer, which an engine reports in parts."""


@dataclass
class Asked:
    """A session of a run without HTTP, and repeated requests for one turn of it."""

    journal: Path
    run: ServedRun
    session: Session

    @classmethod
    async def begin(cls, folder: Path, model_dir: str) -> Asked:
        folders = {"run_dir": str(folder), "model_dir": model_dir}
        spec = RunSpec.model_validate(
            dataplane.specs.changed(dataplane.specs.SPEC, **folders, group_size=1, max_tokens=len(ANSWER))
        )
        path = folder / "run.journal"
        run = await open_run(spec, Journal(path), 10.0, MemoryBudget())
        [session], _ = await claiming.claim(run, ClaimBody(runner="a0", max=1))
        return cls(path, run, session)

    async def restart(self) -> None:
        await self.run.journal.close()
        reopened = await reopen_run(Journal(self.journal), 10.0, MemoryBudget())
        assert reopened is not None
        self.run = reopened
        self.session = self.run.sessions[self.session.session_id]

    def connect(self) -> dataplane.router.ClusterEngine:
        engine = dataplane.router.ClusterEngine(
            self.run.router, "e0", dataplane.router.scripted(lambda prompt, seed: ANSWER), 8
        )
        engine.act()
        return engine

    async def ask(self, request: TurnRequest, content: bytes = b"") -> Answer:
        identity = RequestFingerprint.from_request([], content)
        [subscriber] = await open_turns(self.run.turns, self.session, [request], identity)
        try:
            async for _ in subscriber.pieces():
                pass
            return subscriber.turn.answer()
        finally:
            subscriber.leave()

    async def refuse(self, request: TurnRequest) -> int:
        """The engine dies in the middle of the turn, and none comes in time; returns how many tokens are
        kept."""
        engine = self.connect()
        asking = asyncio.ensure_future(self.ask(request))
        await waits.until(lambda: bool(engine.asked))
        [generation] = self.session.running
        while len(generation.token_ids) < 20:
            engine.act()
            await asyncio.sleep(0)
        if request.stop:  # what is read one by one, each after the last is on the disk
            [turn] = self.run.turns.in_flight[self.session.session_id]
            await waits.until(lambda: turn.reader.num_read == len(generation.token_ids))
        engine.die()
        self.run.router.limits = replace(self.run.router.limits, patience_s=-1.0)
        self.run.router.enforce_limits()
        with pytest.raises(ApiError, match="no engine is connected"):
            await asking
        self.run.router.limits = limits_of(self.run.spec)
        [recorded] = self.session.recorded
        return len(recorded.tokens.ids)


REQUESTS = [
    TurnRequest([dataplane.conversations.user("hi")]),
    TurnRequest([dataplane.conversations.user("hi")], stream=True),
    TurnRequest([dataplane.conversations.user("hi")], stop=["no such text"]),
]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("request_", REQUESTS, ids=["whole", "streamed", "with a stop string"])
async def test_a_turn_that_no_engine_took_in_time_goes_on_when_it_is_asked_for_again(
    tmp_path: Path, model_dir: str, renderer: Renderer, request_: TurnRequest, restarted: bool
) -> None:
    asked = await Asked.begin(tmp_path, model_dir)
    num_sampled = await asked.refuse(request_)
    assert num_sampled >= 20
    if restarted:
        await asked.restart()
    engine = asked.connect()
    asking = asyncio.ensure_future(asked.ask(request_))
    while not asking.done():
        await asyncio.sleep(0)
        engine.act()
    answer = await asking
    assert answer.content == renderer.decode(ANSWER)
    assert [(sent.position, sent.max_tokens) for sent in engine.asked] == [
        (num_sampled, len(ANSWER) - num_sampled)
    ]
    [turn] = asked.session.turns
    assert (turn.ids.tolist(), turn.sample) == (ANSWER, 0)
    assert asked.run.counters["abandoned_turns"] == 0
    await asked.restart()
    assert [turn.ids.tolist() for turn in asked.session.turns] == [ANSWER]


async def test_a_turn_that_is_put_off_before_it_is_read_again_is_recorded_once(
    tmp_path: Path, model_dir: str
) -> None:
    """Its reader, which reads token by token for a stop string, has read nothing of what was recorded."""
    asked = await Asked.begin(tmp_path, model_dir)
    [_, _, request] = REQUESTS
    num_sampled = await asked.refuse(request)
    router = asked.run.router
    router.close(asked.run.refusal())
    with pytest.raises(ApiError, match="its flow has stopped"):
        await asked.ask(request)
    router.closed = None
    engine = asked.connect()
    asking = asyncio.ensure_future(asked.ask(request))
    while not asking.done():
        await asyncio.sleep(0)
        engine.act()
    await asking
    assert [sent.position for sent in engine.asked] == [num_sampled]
    await asked.restart()
    assert [turn.ids.tolist() for turn in asked.session.turns] == [ANSWER]


async def test_a_turn_that_was_refused_and_is_not_asked_for_again_is_abandoned_in_the_end(
    tmp_path: Path, model_dir: str
) -> None:
    asked = await Asked.begin(tmp_path, model_dir)
    await asked.refuse(REQUESTS[0])
    assert asked.run.counters["abandoned_turns"] == 0
    await endings.finish(asked.run, asked.session, FinishBody(status="failed"))
    assert asked.run.counters["abandoned_turns"] == 1
