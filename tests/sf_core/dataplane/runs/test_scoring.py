"""Answers on their way from the runners of agents to the runners that score them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.runs import claiming
from sf_core.types import Task
from tests.bench.dataplane import planes, served_runs
from tests.bench.waits import wait_until


@pytest.fixture
def scored_plane(served_plane: planes.ServedPlane, renderer: Renderer) -> planes.ServedPlane:
    """A data plane with a run, whose engine gives the answer of every task."""
    served_plane.register()
    served_plane.connect(lambda prompt, seed: planes.say(renderer, "answer"))
    return served_plane


def test_agents_are_told_whether_others_score_and_those_get_the_answers_only(
    scored_plane: planes.ServedPlane,
) -> None:
    assert not served_runs.claim(scored_plane, "a0", 0)["scored_elsewhere"]
    assert served_runs.sessions(served_runs.claim(scored_plane, "s0", 9, "reward")) == []
    claimed = served_runs.claim(scored_plane, "a0", 4)
    assert claimed["scored_elsewhere"]
    names = served_runs.answer_all(scored_plane, claimed)
    assert scored_plane.get("/runs/run")["work"] == {"agent": 4, "reward": 4}
    to_score = served_runs.claim(scored_plane, "s0", 3, "reward")
    assert [session["answer"] for session in to_score["sessions"]] == [f'"{name}"' for name in names[:3]]
    served_runs.score(
        scored_plane,
        [
            *served_runs.sessions(to_score),
            *served_runs.sessions(served_runs.claim(scored_plane, "s0", 3, "reward", *names[:3])),
        ],
    )
    assert scored_plane.post("/runs/run/batches/0/seal", {"attempt": 1})["reward_mean"] == 0.5


def test_an_answer_reported_twice_is_scored_once(scored_plane: planes.ServedPlane) -> None:
    served_runs.claim(scored_plane, "s0", 0, "reward")
    [name] = served_runs.answer_all(scored_plane, served_runs.claim(scored_plane, "a0", 1))
    scored_plane.post(f"/sessions/{name}/finish", {"status": "answered", "answer": "0"})
    assert served_runs.sessions(served_runs.claim(scored_plane, "s0", 2, "reward")) == [name]


def test_a_report_that_is_refused_costs_those_beside_it_nothing(scored_plane: planes.ServedPlane) -> None:
    bad, good = served_runs.sessions(served_runs.claim(scored_plane, "a0", 2))
    served_runs.ask(scored_plane, good)
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
    scored_plane: planes.ServedPlane,
) -> None:
    for runner in ("s0", "s1"):
        served_runs.claim(scored_plane, runner, 0, "reward")
    names = served_runs.answer_all(scored_plane, served_runs.claim(scored_plane, "a0", 2))
    assert served_runs.sessions(served_runs.claim(scored_plane, "s0", 2, "reward")) == names
    served_runs.claim(scored_plane, "s0", 0, "reward", names[0])
    assert served_runs.sessions(served_runs.claim(scored_plane, "s1", 2, "reward")) == names[1:]
    served_runs.score(scored_plane, names)


def test_without_a_scorer_left_agents_score(
    scored_plane: planes.ServedPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_runs.claim(scored_plane, "s0", 0, "reward")
    names = served_runs.answer_all(scored_plane, served_runs.claim(scored_plane, "a0", 2))
    with monkeypatch.context() as patch:
        patch.setattr(claiming, "RUNNER_SILENCE_S", -1.0)
        wait_until(lambda: not scored_plane.get("/runs/run")["runners"], "the loss of s0")
    again = served_runs.claim(scored_plane, "a0", 3)
    assert not again["scored_elsewhere"]
    assert served_runs.sessions(again)[:2] == names and again["sessions"][2]["answer"] is None


def test_a_run_that_starts_over_scores_nothing_of_before(scored_plane: planes.ServedPlane) -> None:
    served_runs.claim(scored_plane, "s0", 0, "reward")
    served_runs.answer_all(scored_plane, served_runs.claim(scored_plane, "a0", 2))
    scored_plane.register(attempt=2, iteration=3, version=3, done_groups=[0, 1, 2, 3, 4, 5])
    assert served_runs.sessions(served_runs.claim(scored_plane, "s1", 5, "reward")) == []


@dataclass
class NotJson:
    text: str


def test_runners_of_both_kinds_make_a_batch_together(scored_plane: planes.ServedPlane) -> None:
    scored = []

    def reward(task: Task, answer: dict[str, str]) -> float:
        scored.append(answer["text"] == task.answer)
        return 1.0

    served_runs.run_runner(scored_plane, "s0", "reward", reward=reward)
    served_runs.run_runner(scored_plane, "a0", "agent")
    wait_until(lambda: bool(scored_plane.get("/runs/run/batches/0")["ready"]))
    assert scored_plane.post("/runs/run/batches/0/seal", {"attempt": 1})["reward_mean"] == 1.0
    assert len(scored) >= 4 and all(scored)


def test_an_answer_that_cannot_be_sent_fails_its_session_with_a_sentence(
    scored_plane: planes.ServedPlane,
) -> None:
    served_runs.claim(scored_plane, "s0", 0, "reward")
    served_runs.run_runner(scored_plane, "a0", "agent", agent=lambda task, endpoint: NotJson("x"))
    wait_until(lambda: "must be" in scored_plane.get("/runs/run")["last_error"])
    assert (
        "the agent returned NotJson, which cannot be written as JSON"
        in scored_plane.get("/runs/run")["last_error"]
    )
