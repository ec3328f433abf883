"""A data plane whose sessions do not fit its memory: agents, runners and flows notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sf_core.dataplane.bodies import ClaimBody, FinishBody, RunSpec
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.journal.memory import Memory
from sf_core.dataplane.sessions.turn_records import TurnKey, begun_record, turn_record
from storage.trajectories import read_trajectories, to_rows
from tests.sf_core.dataplane.conversations import state_of
from tests.sf_core.dataplane.gateway.test_observed import figures
from tests.sf_core.dataplane.runs.test_replay import SPEC
from tests.sf_core.dataplane.sessions.test_session import sample, user
from tests.sf_core.dataplane.stand import Server, running_app, say

KB = 1 / 1024
"""A kilobyte in MB."""

Plane = Callable[[float, Path], AbstractContextManager[str]]
"""Function that runs a data plane with a memory bound in MB; yields its URL."""

NOTHING = 0.001 * KB
"""Memory bound in MB with which every idle session is on disk."""


def in_one_process(memory_mb: float, folder: Path) -> AbstractContextManager[str]:
    return running_app(memory_mb=memory_mb, grace_s=30.0)


@pytest.fixture
def plane() -> Plane:
    return in_one_process


@contextlib.contextmanager
def serving(
    plane: Plane, tmp_path: Path, model_dir: str, renderer: Renderer, memory_mb: float
) -> Iterator[Server]:
    tmp_path.mkdir(exist_ok=True)
    with plane(memory_mb, tmp_path) as url, httpx.Client(base_url=url, timeout=30) as http:
        server = Server(url, http, tmp_path, model_dir)
        server.register(groups_per_batch=10, max_tokens=32)
        server.connect(lambda prompt, seed: say(renderer, f"answer {seed % 1000} {'jumps ' * 4}"))
        yield server
        http.post("/runs/run/release")
        server.threads[0].join(10)


@pytest.fixture
def server(plane: Plane, tmp_path: Path, model_dir: str, renderer: Renderer) -> Iterator[Server]:
    with serving(plane, tmp_path, model_dir, renderer, NOTHING) as server:
        yield server


@pytest.fixture
def session(server: Server) -> str:
    """Path of a claimed session."""
    return f"/sessions/{server.claim()[0]['session_id']}"


def ask(server: Server, session: str, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    body = {"model": "policy", "messages": messages} | body
    answer: dict[str, Any] = server.post(f"{session}/v1/chat/completions", body)["choices"][0]["message"]
    return answer


def finish(server: Server, session: str) -> None:
    report = {"status": "finished", "reward": 1.0, "task_id": "t", "environment": "e"}
    server.post(f"{session}/finish", report)


def wait_until_on_disk(server: Server, kind: str = "session", count: int = 1) -> None:
    server.wait_for(lambda: figures(server)["sf_held", "disk", kind] == count)


def spilled(server: Server) -> list[Path]:
    return list((server.run_dir / "run" / "journal").rglob("*.spill/*"))


def test_memory_stays_below_its_bound_under_many_sessions(
    plane: Plane, tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    num_turns, bound_mb = 4, 200 * KB
    with serving(plane, tmp_path, model_dir, renderer, bound_mb) as server:
        sessions = [f"/sessions/{claim['session_id']}" for claim in server.claim(20)]
        histories: list[list[dict[str, Any]]] = [[user(f"{i} {'fox ' * 100}")] for i in range(20)]
        seen = []

        def turn(i: int) -> None:
            answer = ask(server, sessions[i], histories[i])
            histories[i] += [answer, user("and then?")]
            seen.append(figures(server)["sf_memory_bytes",])

        with ThreadPoolExecutor(4) as agents:
            for _ in range(num_turns):
                list(agents.map(turn, range(20)))
        held = figures(server)
        assert held["sf_loads_total",] >= 20
        assert held["sf_spills_total",] >= 20
        assert held["sf_held", "memory", "session"] + held["sf_held", "disk", "session"] == 20
        for session in sessions:
            finish(server, session)
            seen.append(figures(server)["sf_memory_bytes",])
        in_flight = 4 * 10_000
        assert max(seen) <= held["sf_memory_bound_bytes",] + in_flight
        assert held["sf_memory_bound_bytes",] == pytest.approx(bound_mb * 2**20, abs=3)
        assert figures(server)["sf_held", "disk", "result"] > 0
        sealed = server.post("/runs/run/batches/0/seal", {"attempt": 1})
        rows = to_rows(read_trajectories(str(tmp_path / "run" / sealed["files"][0]["uri"])))
        assert len(rows) == 20, "no turn opened a branch"
        assert sealed["sampled_tokens"] == figures(server)["sf_sampled_tokens_total", "run"]
        for row, history in zip(rows, histories, strict=True):
            text = renderer.decode(row.token_ids.tolist())
            assert all(message["content"] in text for message in history[:-1])
        server.wait_for(lambda: spilled(server) == [])
        assert figures(server)["sf_memory_bytes",] == 0


def test_the_tree_the_reasons_and_the_rest_of_the_conversation_are_as_if_it_had_stayed(
    plane: Plane, tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    def live(memory_mb: float, folder: Path) -> list[Any]:
        with serving(plane, folder, model_dir, renderer, memory_mb) as server:
            session = f"/sessions/{server.claim()[0]['session_id']}"
            one = [user("one")]
            for messages in (
                [*one, ask(server, session, one), user("two")],
                one,
                [{"role": "system", "content": "other"}, *one],
                [user("another")],
                [*one, {"role": "assistant", "content": "edited"}, user("two")],
            ):
                if memory_mb == NOTHING:
                    wait_until_on_disk(server)
                ask(server, session, messages)
            server.post(f"{session}/reward", {"reward": 0.5})
            tree = server.get(session)
            return [{**tree, "started_at": 0}, [request.prompt_ids for request in server.asked]]

    spilling = live(NOTHING, tmp_path / "a")
    assert spilling == live(2048, tmp_path / "b")
    reasons = {"asked_again": 1, "other_system": 2, "edited_history": 1}
    assert spilling[0]["branch_reasons"] == reasons


def test_a_retry_joins_the_answer_of_a_session_on_disk(server: Server, session: str) -> None:
    body = {"model": "policy", "messages": [user("hi")]}

    def ask_from_disk(headers: dict[str, str]) -> Any:
        wait_until_on_disk(server)
        return server.http.post(f"{session}/v1/chat/completions", json=body, headers=headers).json()

    first, again, other = (ask_from_disk(headers) for headers in ({}, {"x-stainless-retry-count": "1"}, {}))
    assert (again["id"], again["choices"]) == (first["id"], first["choices"])
    assert other["id"] != first["id"]
    assert len(server.asked) == 2


def test_an_answer_nobody_got_is_not_trained_although_it_was_on_disk(server: Server, session: str) -> None:
    server.register(groups_per_batch=1, group_size=1, attempt=1)
    body = {"model": "policy", "messages": [user("hi")]}
    server.post("/runs/run/pause")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{session}/v1/chat/completions", json=body, timeout=0.05)
    server.post("/runs/run/resume")
    server.wait_for(lambda: server.get("/runs/run")["tokens_total"] > 0)
    wait_until_on_disk(server)
    ask(server, session, [user("something else")])
    finish(server, session)
    assert server.get("/runs/run")["counters"]["abandoned_turns"] == 1


def test_a_session_whose_file_is_broken_is_an_error_and_then_another_attempt(
    server: Server, session: str
) -> None:
    ask(server, session, [user("hi")])
    wait_until_on_disk(server)
    [file] = spilled(server)
    file.write_bytes(file.read_bytes()[:-1])
    body = {"model": "policy", "messages": [user("hi")]}
    for refused in (
        server.http.post(f"{session}/v1/chat/completions", json=body),
        server.http.get(session),
        server.http.post(f"{session}/finish", json={"status": "finished", "reward": 1.0}),
    ):
        assert refused.status_code == 500
        assert "cannot be read back" in refused.json()["error"]["message"]
    [again] = server.claim()
    assert again["attempt"] == 1
    ask(server, f"/sessions/{again['session_id']}", [user("hi")])


def test_where_nothing_can_be_written_sessions_stay_in_memory_and_go_on(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    (server.run_dir / "run" / "journal" / "run.spill").touch()
    with caplog.at_level(logging.WARNING):
        sessions = [f"/sessions/{claim['session_id']}" for claim in server.claim(3)]
        for session in sessions * 2:
            ask(server, session, [user("hi")])
    for session in sessions:
        finish(server, session)
    assert figures(server)["sf_spills_total",] == 0
    assert caplog.text.count("they cannot be written") == 1


def test_a_session_that_ends_takes_its_file_along(server: Server) -> None:
    claims = server.claim(4)
    sessions = [f"/sessions/{claim['session_id']}" for claim in claims]
    for session in sessions:
        ask(server, session, [user("hi")])
    wait_until_on_disk(server, count=4)
    assert len(spilled(server)) == 4
    server.claim(0, running=[claim["session_id"] for claim in claims[1:]])
    finish(server, sessions[1])
    server.post(f"{sessions[2]}/finish", {"status": "failed"})
    wait_until_on_disk(server, "result")
    server.wait_for(lambda: len(spilled(server)) == 2)
    server.post("/runs/run/release")
    # the result still counts
    server.wait_for(lambda: len(spilled(server)) == 1)


class Played:
    """A run played without HTTP: sessions of some turns each, round by round; one in three is finished."""

    def __init__(self, folder: Path, model_dir: str, renderer: Renderer) -> None:
        self.folder, self.renderer = folder, renderer
        self.spec = SPEC | {
            **{"run_dir": str(folder / "run"), "model_dir": model_dir, "group_size": 3},
            **{"groups_per_batch": 4, "gate": "all", "context_length": 10_000},
        }

    async def play(self, num_turns: int = 4) -> None:
        plane = DataPlane(str(self.folder / "plane"))
        run = await plane.register(RunSpec.model_validate(self.spec))
        sessions, _ = await run.claim(ClaimBody(runner="a", max=12))
        histories = [[user(f"{i} {'fox ' * 100}")] for i in range(len(sessions))]
        for _ in range(num_turns):
            for session, history in zip(sessions, histories, strict=True):
                turn = sample(session, self.renderer, list(history), say(self.renderer, "yes " * 9))
                history += [turn.message, user("more")]
                key = TurnKey(session.session_id, turn.prompt.index, turn.sample)
                run.journal.note(begun_record(key, 0, b"%d" % len(history), session.take_unrecorded()))
                await run.journal.append(turn_record(key, turn, 0))
        for session in sessions[::3]:
            await run.finish(session, FinishBody(status="finished", reward=1.0))
        await plane.close()

    async def reopened(self, memory_mb: float) -> DataPlane:
        plane = DataPlane(str(self.folder / "plane"), memory_mb=memory_mb)
        await plane.reopen()
        return plane


def test_a_restart_holds_the_bound_while_it_replays_and_finds_the_same(
    tmp_path: Path, model_dir: str, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    use = Memory.use

    def noting(memory: Memory, item: Any) -> None:
        use(memory, item)
        seen.append(memory.num_bytes)

    async def scenario() -> None:
        played = Played(tmp_path, model_dir, renderer)
        await played.play()
        roomy = await played.reopened(2048)
        assert roomy.memory.num_spills == 0
        run = roomy.runs["run"]
        expected = {name: state_of(session) for name, session in run.sessions.items()}
        members = [group.members for group in run.manager.groups.values()]
        results = {place: result.trajectories for place, result in run.results.by_place.items()}
        whole = roomy.memory.num_bytes
        await roomy.close()

        (tmp_path / "run" / "journal" / "run.spill").mkdir()
        (tmp_path / "run" / "journal" / "run.spill" / "left-over").touch()
        monkeypatch.setattr(Memory, "use", noting)
        narrow = await played.reopened(whole / 3 / 2**20)
        run = narrow.runs["run"]
        assert not (run.spill_dir / "left-over").exists()
        assert narrow.memory.num_spills > 0
        assert max(seen) <= narrow.memory.bound_bytes
        assert [group.members for group in run.manager.groups.values()] == members
        again = run.results.by_place.items()
        assert {place: len(run.results.reader_of(result)()) for place, result in again} == {
            place: len(rows) for place, rows in results.items()
        }
        for name, session in list(run.sessions.items()):
            await run.bring_back(session)
            assert state_of(session) == expected[name]
        await narrow.close()

    asyncio.run(scenario())


def test_a_run_that_starts_over_from_its_journal_finds_its_results(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    async def scenario() -> None:
        played = Played(tmp_path, model_dir, renderer)
        await played.play()
        plane = DataPlane(str(tmp_path / "another"), memory_mb=NOTHING)
        await plane.register(RunSpec.model_validate(played.spec | {"attempt": 2, "iteration": 5}))
        run = plane.runs["run"]
        assert len(run.results.by_place) == 4
        assert all(len(run.results.reader_of(result)()) == 1 for result in run.results.by_place.values())
        assert len(plane.memory._entries) == 4
        await plane.close()
        # what that attempt left in the journal starts over while it is replayed
        again = DataPlane(str(tmp_path / "third"), memory_mb=NOTHING)
        async with asyncio.timeout(20):
            await again.register(RunSpec.model_validate(played.spec | {"attempt": 3, "iteration": 5}))
        assert again.runs["run"].results.by_place.keys() == run.results.by_place.keys()
        await again.close()

    asyncio.run(scenario())


def test_after_a_restart_a_second_conversation_is_known_as_one(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    async def scenario() -> None:
        played = Played(tmp_path, model_dir, renderer)
        await played.play(1)
        plane = await played.reopened(2048)
        session = next(iter(plane.runs["run"].sessions.values()))
        first = session.prompts[0].messages[0]
        system = {"role": "system", "content": "be brief"}
        asked = [[user("other")], [first, user("and")], [system, first]]
        reasons = [session.open_prompt(messages, [], renderer).branch_reason for messages in asked]
        assert reasons == ["other_system", "new_conversation", "other_system"]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        assert session.open_prompt([first], tools, renderer).branch_reason == "other_tools"
        await plane.close()

    asyncio.run(scenario())
