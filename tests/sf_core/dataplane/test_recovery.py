"""Invariants 4 and 9 with real processes: the data plane is killed with SIGKILL and started again on the same
port, under agents that hold an OpenAI client and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from sf_core.dataplane.export import export_session
from sf_core.dataplane.journal import Journal, kind_of
from sf_core.dataplane.memory import Memory
from sf_core.dataplane.recovery import reopen_run
from sf_core.dataplane.rendering import Renderer
from sf_core.dataplane.run import Run
from sf_core.dataplane.session_tree import session_tree
from sf_core.dataplane.turn import turn_seed
from storage.trajectories import read_trajectories, to_rows
from tests.sf_core.dataplane.stand import CALC, Server, running_process, say
from tests.sf_core.dataplane.test_opened import stored

BUDGET = 300
STOP = 1
"""<|im_end|> of the test tokenizer."""


def script(prompt_ids: list[int], seed: int) -> list[int]:
    """Up to 400 random tokens: some answers end by themselves, some by their budget."""
    generator = np.random.default_rng([seed, len(prompt_ids)])
    return [*generator.integers(2, 300, generator.integers(50, 400)).tolist(), STOP]


@dataclass
class Restarts:
    """A data plane that can be killed and started again, and the one engine and client that outlive it."""

    folder: Path
    model_dir: str
    options: tuple[str, ...] = ()
    process: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    server: Server = field(init=False)

    def start(self) -> None:
        port = int(self.server.url.rsplit(":", 1)[1]) if hasattr(self, "server") else 0
        options = ("--journal-dir", str(self.folder / "journal"), *self.options)
        url = self.process.enter_context(running_process(self.folder / "port", port, *options))
        if not hasattr(self, "server"):
            self.server = Server(url, httpx.Client(base_url=url, timeout=30), self.folder, self.model_dir)

    def kill(self) -> None:
        self.process.close()

    def restart(self) -> None:
        self.kill()
        self.start()

    @property
    def journal(self) -> Path:
        return self.folder / "run" / "journal" / "run.journal"


@pytest.fixture
def plane(tmp_path: Path, model_dir: str) -> Iterator[Restarts]:
    with serving(Restarts(tmp_path, model_dir)) as plane:
        yield plane


@contextlib.contextmanager
def serving(plane: Restarts) -> Iterator[Restarts]:
    plane.start()
    yield plane
    with contextlib.suppress(httpx.HTTPError):
        plane.server.http.post("/runs/run/release")
    for thread in plane.server.threads:
        thread.join(10)
    plane.kill()
    plane.server.http.close()


def converse(server: Server, claim: dict[str, Any], num_turns: int, streamed: bool) -> list[str]:
    """What an agent does that knows nothing of restarts, but asks again when a stream breaks: no SDK can."""
    messages: Any = []
    answers = []
    base = f"{server.url}/sessions/{claim['session_id']}/v1"
    with OpenAI(base_url=base, api_key="none", max_retries=20, timeout=30) as agent:
        for turn in range(num_turns):
            messages.append({"role": "user", "content": f"{turn}?"})
            answers.append(ask_stream(agent, messages) if streamed else ask(agent, messages))
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def ask(agent: OpenAI, messages: Any) -> str:
    answer = agent.chat.completions.create(model="policy", messages=messages, max_tokens=BUDGET)
    return answer.choices[0].message.content or ""


def ask_stream(agent: OpenAI, messages: Any) -> str:
    seen = ""
    while True:
        text = ""
        try:
            for chunk in agent.chat.completions.create(
                model="policy", messages=messages, max_tokens=BUDGET, stream=True
            ):
                text += chunk.choices[0].delta.content or ""
                seen = max(seen, text, key=len)
            assert text.startswith(seen), "the answer begins with all that was seen of it before it broke"
            return text
        except openai.APIStatusError:
            raise
        except (httpx.TransportError, openai.APIError):  # of a stream that broke off, or says why it ends
            continue


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_killed_at_random_moments_agents_see_whole_answers_and_the_record_is_exact(
    plane: Restarts, renderer: Renderer, seed: int
) -> None:
    agents_see_whole_answers(plane, renderer, seed, lambda moments: plane.restart())


def agents_see_whole_answers(
    plane: Restarts, renderer: Renderer, seed: int, kill: Callable[[random.Random], None]
) -> None:
    """Two agents, two kills at random moments, and a record that is exact."""
    server = plane.server
    server.register(groups_per_batch=1, max_tokens=BUDGET, context_length=100_000)
    server.connect(script)
    claims = server.claim(2)
    answers: dict[str, list[str]] = {}
    num_turns = 6

    def agent(claim: dict[str, Any], streamed: bool) -> None:
        answers[claim["session_id"]] = converse(server, claim, num_turns, streamed)

    agents = [
        threading.Thread(target=agent, args=(claim, streamed))
        for claim, streamed in zip(claims, (True, False), strict=True)
    ]
    for thread in agents:
        thread.start()
    moments = random.Random(seed)
    for _ in range(2):
        threading.Event().wait(moments.uniform(0.05, 0.5))
        kill(moments)
    for thread in agents:
        thread.join(60)
    for claim in claims:
        report = {"status": "finished", "reward": 1.0, "task_id": "t", "environment": "e"}
        server.post(f"/sessions/{claim['session_id']}/finish", report)
    sealed = server.post("/runs/run/batches/0/seal", {"attempt": 1})
    rows = to_rows(read_trajectories(str(Path(plane.folder, "run", sealed["files"][0]["uri"]))))

    assert [row.session_id for row in rows] == [claim["session_id"] for claim in claims]
    for row, claim in zip(rows, claims, strict=True):
        ids = row.token_ids.tolist()
        spans = [span for span in row.turns if span.role == "assistant"]
        for turn, (span, text) in enumerate(zip(spans, answers[row.session_id], strict=True)):
            seed_of_turn = turn_seed(7, ("train", claim["group"], claim["member"]), turn, 0)
            expected = script(ids[: span.start], seed_of_turn)[:BUDGET]
            assert ids[span.start : span.end] == expected
            assert text == renderer.decode([token for token in expected if token != STOP])
        assert sum(row.loss_mask) == sum(span.end - span.start for span in spans)
    for request in server.asked:
        assert request.position + request.max_tokens == BUDGET


def test_a_restarted_process_goes_on_without_its_flow(plane: Restarts) -> None:
    server = plane.server
    server.register(groups_per_batch=1, group_size=1, max_tokens=4)
    server.connect(script)
    server.post("/runs/run/evaluations/0", {"num_tasks": 2})
    claims = server.claim(3)
    assert [claim["session_id"] for claim in claims] == ["run.e0.0.a0", "run.e0.1.a0", "run.g0.0.a0"]
    running = [claim["session_id"] for claim in claims]
    for claim in claims:
        converse(server, claim, 1, streamed=False)
    finish(server, claims[2])
    sealed = server.post("/runs/run/batches/0/seal", {"attempt": 1})
    server.post("/runs/run/weights", {"version": 1, "uri": "w1"})
    finish(server, claims[0])
    server.post("/runs/run/leases/later/revoke")

    plane.restart()
    assert server.get("/runs/run/evaluations/0")["finished"] == 1
    assert server.claim(1, running=running[1:2])[0]["session_id"] == "run.g1.0.a0"
    server.wait_for(lambda: bool(server.live_engines()))
    assert server.get("/runs/run")["version"] == 1
    assert server.post("/runs/run/batches/0/seal", {"attempt": 1}) == sealed
    converse(server, claims[1], 2, streamed=False)
    finish(server, claims[1])
    assert server.post("/runs/run/evaluations/0/seal", {"attempt": 1})["sessions"] == 2
    server.connect(script, lease="later")
    assert server.reasons["later"] == "revoked"
    # the flow's next attempt finds the run where it was
    server.register(attempt=2, iteration=1, version=1, done_groups=[0], groups_per_batch=1, group_size=1)
    assert server.claim(1, runner="a1")[0]["session_id"] == "run.g1.0.a1"


def finish(server: Server, claim: dict[str, Any]) -> None:
    report = {"status": "finished", "reward": 1.0, "task_id": "t", "environment": "test"}
    server.post(f"/sessions/{claim['session_id']}/finish", report)


def test_an_answer_that_did_not_arrive_is_given_again_after_a_restart(plane: Restarts) -> None:
    server = plane.server
    server.register(max_tokens=8)
    server.connect(script)
    [claim] = server.claim()
    first = post_chat(server, claim)
    plane.restart()
    again = post_chat(server, claim, {"x-stainless-retry-count": "1"})
    assert (again["id"], again["choices"]) == (first["id"], first["choices"])
    server.wait_for(lambda: bool(server.live_engines()))
    other = post_chat(server, claim)
    assert other["id"] != first["id"]
    assert len(server.asked) == 2


def post_chat(server: Server, claim: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    path = f"/sessions/{claim['session_id']}/v1/chat/completions"
    response = server.http.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_a_session_that_an_agent_opened_survives_a_restart_until_it_is_finished(plane: Restarts) -> None:
    server = plane.server
    server.http.headers["Authorization"] = "Bearer key-of-the-run"
    server.register(max_tokens=8, key="key-of-the-run")
    server.connect(script)
    opened = server.post("/sessions", {"run_id": "run", "task_id": "t7", "metadata": {"seed": 3}})
    path = f"/sessions/{opened['session_id']}"
    body = {"model": "policy", "instructions": "be brief", "input": "hi"}
    first = server.post(f"{path}/v1/responses", body)
    server.post(path + "/reward", {"reward": 0.5, "reward_parts": {"style": 0.5}})
    tree = server.get(path)
    plane.restart()
    assert server.get(path) == tree
    server.wait_for(lambda: bool(server.live_engines()))
    server.post(f"{path}/v1/responses", body | {"previous_response_id": first["id"], "input": "more"})
    assert server.get(path)["prompts"][1]["parent_turn"] == 0
    server.register(max_tokens=8, key="key-of-the-run", attempt=2)
    server.get(path)
    server.post(path + "/finish", {"status": "finished"})
    plane.restart()
    assert server.http.get(path).status_code == 404
    server.wait_for(lambda: bool(stored(plane.folder / "run")))
    [(_, row)] = stored(plane.folder / "run")
    assert (row.task_id, row.reward, dict(row.reward_parts)) == ("t7", 0.5, {"style": 0.5})
    assert [span.role for span in row.turns].count("assistant") == 2


def test_killed_at_random_moments_what_agents_opened_is_stored_once(plane: Restarts) -> None:
    """Four agents open, use and finish one session after the other, until two kills are over."""
    server = plane.server
    server.register()
    server.connect(lambda prompt, seed: [*range(2, 12), STOP])
    finished: list[str] = []
    is_over = threading.Event()

    def agent(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            while not is_over.is_set():
                opened = insist(http, "/sessions", {"run_id": "run", "group": f"g{number}"}).json()
                converse(server, opened, 1, streamed=number % 2 == 0)
                report = {"status": "finished", "reward": float(number)}
                insist(http, f"/sessions/{opened['session_id']}/finish", report)
                finished.append(opened["session_id"])

    agents = [threading.Thread(target=agent, args=(number,)) for number in range(4)]
    for thread in agents:
        thread.start()
    moments = random.Random(0)
    for kill in (1, 2):
        server.wait_for(lambda kill=kill: len(finished) > 10 * kill)  # type: ignore[misc]
        # what has finished is stored once a second
        threading.Event().wait(moments.uniform(0.0, 1.0))
        plane.restart()
    is_over.set()
    for thread in agents:
        thread.join(60)
    server.post("/runs/run/release")
    rows = [row for _, row in stored(plane.folder / "run")]
    assert sorted(row.session_id for row in rows) == sorted(finished)
    for row in rows:
        assert row.group_id == f"g{row.reward:.0f}"
        assert row.token_ids[row.loss_mask].tolist() == [*range(2, 12), STOP]


def insist(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """Ask until there is an answer. A session that is over has been finished by a request before."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            answer = http.post(path, json=body)
            assert answer.status_code in (200, 404), answer.text
            return answer
        threading.Event().wait(0.05)


def test_a_pause_of_the_run_and_one_of_an_engine_outlive_a_restart(plane: Restarts) -> None:
    server = plane.server
    server.register(max_tokens=8)
    for lease in ("r0", "r1"):
        server.connect(script, lease=lease)

    def states() -> dict[str, str]:
        return {engine["id"]: engine["state"] for engine in server.live_engines()}

    server.post("/runs/run/pause", {"engine": "r0"})
    server.post("/runs/run/pause")
    plane.restart()
    assert server.get("/runs/run")["paused"]
    server.wait_for(lambda: states() == {"r0": "paused", "r1": "paused"})
    server.post("/runs/run/resume")
    plane.restart()
    assert not server.get("/runs/run")["paused"]
    server.wait_for(lambda: states() == {"r0": "paused", "r1": "serving"})
    server.post("/runs/run/resume", {"engine": "r0"})
    server.wait_for(lambda: states() == {"r0": "serving", "r1": "serving"})


def test_the_journal_of_a_long_run_stays_bounded(server: Server, renderer: Renderer) -> None:
    """Turns of sealed sessions are dropped; what is left is enough for a restart."""
    server.register(groups_per_batch=1, group_size=1)
    server.connect(lambda prompt, seed: say(renderer, "ok"))
    journal = server.run_dir / "run" / "journal" / "run.journal"
    sizes = []
    for batch in range(6):
        [claim, *_] = server.claim(1)
        converse(server, claim, 5, streamed=True)
        finish(server, claim)
        server.post(f"/runs/run/batches/{batch}/seal", {"attempt": 1})
        server.post("/runs/run/weights", {"version": batch + 1, "uri": "w"})
        sizes.append(journal.stat().st_size)
    assert sizes[-1] < 1.2 * sizes[1]
    [open_claim] = server.claim(1)
    converse(server, open_claim, 2, streamed=True)
    run = reopened(journal)
    assert (run.manager.next_batch, run.router.weights.version) == (6, 6)
    assert list(run.sessions) == [open_claim["session_id"]]
    assert len(run.sessions[open_claim["session_id"]].turns) == 2
    assert run.manager.done_before(6) == list(range(6))
    assert "run" in asyncio.run(first_kinds(journal, 2))


async def first_kinds(journal: Path, num: int) -> list[str]:
    return [kind_of(record) async for record in Journal(journal).replay()][:num]


def test_a_reopened_session_is_trained_on_as_the_living_one(server: Server, renderer: Renderer) -> None:
    """The whole tree comes back: extensions, edited histories, repeated requests, several samples, calls that
    were asked for, prompts of ids, and what was shared with a prompt that was refused."""
    server.register(group_size=1, groups_per_batch=1)
    server.connect(lambda prompt, seed: say(renderer, f"answer {seed % 1000}"))
    [claim] = server.claim()
    one = [{"role": "user", "content": "one"}]
    with OpenAI(base_url=f"{server.url}/sessions/{claim['session_id']}/v1", api_key="none") as agent:
        first = [{"role": "assistant", "content": ask(agent, one)}]
        ask_stream(agent, [*one, *first, *one])
        ask(agent, [*one, *first, *one, *first, *one])
        ask_stream(agent, [*one, *first, {"role": "user", "content": "two"}])
        ask(agent, one)
        ask(agent, [{"role": "system", "content": "other"}, *one])
        agent.chat.completions.create(model="policy", messages=one, n=2)
        calc: Any = {"tools": [CALC], "tool_choice": "required"}
        agent.chat.completions.create(model="policy", messages=one, **calc)
        with pytest.raises(openai.BadRequestError):
            agent.completions.create(model="policy", prompt=[5] * 3000)
        agent.completions.create(model="policy", prompt=[5] * 30)
        agent.completions.create(model="policy", prompt=list(server.asked[1].prompt_ids)[:-2])
    tree = server.get(f"/sessions/{claim['session_id']}")
    run = reopened(server.run_dir / "run" / "journal" / "run.journal")
    session = run.sessions[claim["session_id"]]
    assert session_tree(run, session) == tree
    assert [prompt["num_tokens"] for prompt in tree["prompts"]].count(3000) == 1
    facts = {"task_id": "t", "environment": "test", "reward": 1.0, "reward_parts": {}}
    exported = export_session(
        session, policy="policy", group_id="run.g0", stop_ids=renderer.stop_token_ids, **facts
    )
    finish(server, claim)
    counters = server.get("/runs/run")["counters"]
    assert {f"branches.{name}": n for name, n in session.branch_reasons.items()} == {
        name: n for name, n in counters.items() if name.startswith("branches.")
    }
    sealed = server.post("/runs/run/batches/0/seal", {"attempt": 1})
    rows = to_rows(read_trajectories(str(Path(server.run_dir, "run", sealed["files"][0]["uri"]))))
    assert len(rows) == len(exported) == len(tree["turns"]) - 1
    for row, again in zip(rows, exported, strict=True):
        for name in ("token_ids", "loss_mask", "logprobs", "policy_versions"):
            np.testing.assert_array_equal(getattr(row, name), getattr(again, name))
        for name in ("branch_id", "parent_branch_id", "shared_prefix", "messages", "interruptions"):
            assert getattr(row, name) == getattr(again, name)


def reopened(journal: Path) -> Run:
    async def reopen() -> Run:
        result = await reopen_run(Journal(journal), 10.0, Memory())
        assert result is not None
        return result[0]

    return asyncio.run(reopen())


def test_a_turn_nobody_waits_for_is_kept_but_never_trained(server: Server, renderer: Renderer) -> None:
    server.register(group_size=1, groups_per_batch=1, max_tokens=2000, context_length=10_000)
    long = renderer.encode("the " * 500).tolist() * 4
    server.connect(lambda prompt, seed: long if len(server.asked) == 1 else say(renderer, "short"))
    [claim] = server.claim()
    base = f"{server.url}/sessions/{claim['session_id']}/v1"
    with OpenAI(base_url=base, api_key="none", max_retries=0) as agent:
        hello: Any = [{"role": "user", "content": "hello"}]
        chunks = iter(agent.chat.completions.create(model="policy", messages=hello, stream=True))
        next(chunks)
        next(chunks)
    server.wait_for(lambda: server.get("/runs/run")["counters"].get("abandoned_turns") == 1)
    converse(server, claim, 2, streamed=False)
    session = reopened(server.run_dir / "run" / "journal" / "run.journal").sessions[claim["session_id"]]
    [abandoned] = session.abandoned
    assert 0 < len(abandoned.ids) < len(long)
    assert abandoned.ids.tolist() == long[: len(abandoned.ids)]
    assert abandoned.finish_reason == "abort"
    finish(server, claim)
    sealed = server.post("/runs/run/batches/0/seal", {"attempt": 1})
    assert sealed["sampled_tokens"] == 2 * len(say(renderer, "short"))
