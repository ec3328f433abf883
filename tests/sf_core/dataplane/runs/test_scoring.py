"""Answers on their way from the runners of agents to the runners that score them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from sf_core.agents.runner import AgentRunner
from sf_core.config import RolloutConfig
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.runs import claiming
from sf_core.types import Endpoint, Task
from tests.bench.dataplane.planes import ServedPlane, say
from tests.patience import wait_until


@pytest.fixture
def scored_plane(served_plane: ServedPlane, renderer: Renderer) -> ServedPlane:
    """A data plane with a run, whose engine gives the answer of every task."""
    served_plane.register()
    served_plane.connect(lambda prompt, seed: say(renderer, "answer"))
    return served_plane


def claim(plane: ServedPlane, runner: str, count: int, work: str = "agent", *running: str) -> dict[str, Any]:
    body = {"runner": runner, "work": work, "max": count, "running": list(running)}
    return plane.note_keys(plane.post("/runs/run/claim", body))


def sessions(answer: dict[str, Any]) -> list[str]:
    return [session["session_id"] for session in answer["sessions"]]


def ask(plane: ServedPlane, session_id: str) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
    plane.post(f"/sessions/{session_id}/v1/chat/completions", body, plane.agent_key(session_id))


def answer_all(plane: ServedPlane, claimed: dict[str, Any]) -> list[str]:
    """Answer as agents and their runner do if other runners score."""
    for name in (names := sessions(claimed)):
        ask(plane, name)
    reports = [{"session_id": name, "status": "answered", "answer": f'"{name}"'} for name in names]
    assert plane.post("/runs/run/finished", {"sessions": reports})["finished"] == names
    return names


def score(plane: ServedPlane, names: list[str]) -> None:
    reports = [{"session_id": name, "status": "finished", "reward": 0.5} for name in names]
    assert plane.post("/runs/run/finished", {"sessions": reports})["finished"] == names


def test_agents_are_told_whether_others_score_and_those_get_the_answers_only(
    scored_plane: ServedPlane,
) -> None:
    assert not claim(scored_plane, "a0", 0)["scored_elsewhere"]
    assert sessions(claim(scored_plane, "s0", 9, "reward")) == []
    claimed = claim(scored_plane, "a0", 4)
    assert claimed["scored_elsewhere"]
    names = answer_all(scored_plane, claimed)
    assert scored_plane.get("/runs/run")["work"] == {"agent": 4, "reward": 4}
    to_score = claim(scored_plane, "s0", 3, "reward")
    assert [session["answer"] for session in to_score["sessions"]] == [f'"{name}"' for name in names[:3]]
    score(
        scored_plane,
        [*sessions(to_score), *sessions(claim(scored_plane, "s0", 3, "reward", *names[:3]))],
    )
    assert scored_plane.post("/runs/run/batches/0/seal", {"attempt": 1})["reward_mean"] == 0.5


def test_an_answer_reported_twice_is_scored_once(scored_plane: ServedPlane) -> None:
    claim(scored_plane, "s0", 0, "reward")
    [name] = answer_all(scored_plane, claim(scored_plane, "a0", 1))
    scored_plane.post(f"/sessions/{name}/finish", {"status": "answered", "answer": "0"})
    assert sessions(claim(scored_plane, "s0", 2, "reward")) == [name]


def test_a_report_that_is_refused_costs_those_beside_it_nothing(scored_plane: ServedPlane) -> None:
    bad, good = sessions(claim(scored_plane, "a0", 2))
    ask(scored_plane, good)
    reports = {
        "sessions": [
            {"session_id": bad, "status": "finished", "reward": None},
            {"session_id": good, "status": "finished", "reward": 1.0},
        ]
    }
    refusal = "A finished session needs a reward that is a finite number."
    assert scored_plane.post("/runs/run/finished", reports) == {
        "finished": [good],
        "refused": {bad: refusal},
    }
    # sent again, the same reports are recognised: each has ended its session
    assert scored_plane.post("/runs/run/finished", reports) == {"finished": [bad, good], "refused": {}}
    assert scored_plane.get("/runs/run")["reward_recent"] == 1.0


def test_what_a_scorer_does_not_know_of_is_scored_by_another_and_not_sampled_again(
    scored_plane: ServedPlane,
) -> None:
    for runner in ("s0", "s1"):
        claim(scored_plane, runner, 0, "reward")
    names = answer_all(scored_plane, claim(scored_plane, "a0", 2))
    assert sessions(claim(scored_plane, "s0", 2, "reward")) == names
    claim(scored_plane, "s0", 0, "reward", names[0])
    assert sessions(claim(scored_plane, "s1", 2, "reward")) == names[1:]
    score(scored_plane, names)


def test_without_a_scorer_left_agents_score(
    scored_plane: ServedPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(scored_plane, "s0", 0, "reward")
    names = answer_all(scored_plane, claim(scored_plane, "a0", 2))
    with monkeypatch.context() as patch:
        patch.setattr(claiming, "RUNNER_SILENCE_S", -1.0)
        wait_until(lambda: not scored_plane.get("/runs/run")["runners"], "the loss of s0")
    again = claim(scored_plane, "a0", 3)
    assert not again["scored_elsewhere"]
    assert sessions(again)[:2] == names and again["sessions"][2]["answer"] is None


def test_a_run_that_starts_over_scores_nothing_of_before(scored_plane: ServedPlane) -> None:
    claim(scored_plane, "s0", 0, "reward")
    answer_all(scored_plane, claim(scored_plane, "a0", 2))
    scored_plane.register(attempt=2, iteration=3, version=3, done_groups=[0, 1, 2, 3, 4, 5])
    assert sessions(claim(scored_plane, "s1", 5, "reward")) == []


@dataclass
class NotJson:
    text: str


async def ask_for_an_answer(task: Task, endpoint: Endpoint) -> dict[str, str]:
    async with endpoint.client() as client:
        messages: Any = [{"role": "user", "content": task.prompt}]
        answer = await client.chat.completions.create(model="policy", messages=messages)
    return {"text": answer.choices[0].message.content or ""}


def run_runner(
    plane: ServedPlane,
    name: str,
    work: Literal["agent", "reward"],
    rules: RolloutConfig | None = None,
    **code: Any,
) -> None:
    def tasks(split: str, index: int) -> Task:
        return Task(f"{split}-{index}", "test", "?", "answer")

    given: dict[str, Any] = {"agent": ask_for_an_answer, "reward": lambda task, answer: 0.0} | code
    runner = AgentRunner(
        url=plane.url,
        key=plane.key,
        run_id="run",
        runner_id=name,
        tasks=tasks,
        rules=rules or RolloutConfig(concurrency=4),
        seed=0,
        work=work,
        **given,
    )
    plane.threads.append(threading.Thread(target=lambda: asyncio.run(runner.run()), daemon=True))
    plane.threads[-1].start()
    wait_until(lambda: name in plane.get("/runs/run")["runners"])


def test_runners_of_both_kinds_make_a_batch_together(scored_plane: ServedPlane) -> None:
    scored = []

    def reward(task: Task, answer: dict[str, str]) -> float:
        scored.append(answer["text"] == task.answer)
        return 1.0

    run_runner(scored_plane, "s0", "reward", reward=reward)
    run_runner(scored_plane, "a0", "agent")
    wait_until(lambda: bool(scored_plane.get("/runs/run/batches/0")["ready"]))
    assert scored_plane.post("/runs/run/batches/0/seal", {"attempt": 1})["reward_mean"] == 1.0
    assert len(scored) >= 4 and all(scored)


def test_an_answer_that_cannot_be_sent_fails_its_session_with_a_sentence(
    scored_plane: ServedPlane,
) -> None:
    claim(scored_plane, "s0", 0, "reward")
    run_runner(scored_plane, "a0", "agent", agent=lambda task, endpoint: NotJson("x"))
    wait_until(lambda: "must be" in scored_plane.get("/runs/run")["last_error"])
    assert (
        "the agent returned NotJson, which cannot be written as JSON"
        in scored_plane.get("/runs/run")["last_error"]
    )
