"""What failed sessions are worth, and that a session without a runner delays nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control import plane
from sf_core.dataplane.sessions import finished
from storage.tables.schema import Trajectory
from storage.tables.trajectories import read_trajectories, to_rows
from tests.bench.dataplane import planes
from tests.bench.waits import wait_until

HI = {"role": "user", "content": "hi"}
LONG = {"role": "user", "content": "the " * 3000}
UNPARSED = '<tool_call>\n{"name": "calc", "arguments": 47*\n</tool_call>'


def serve(served_plane: planes.ServedPlane, renderer: Renderer, text: str = "hello", **spec: Any) -> None:
    """Serve a run whose groups and batches have one session each."""
    served_plane.register(**{"group_size": 1, "groups_per_batch": 1, "failed_reward": -0.5} | spec)
    served_plane.connect(lambda prompt, seed: planes.say(renderer, text))


def ask(served_plane: planes.ServedPlane, claim: dict[str, Any], *messages: Any) -> int:
    """Send a request; returns the HTTP status."""
    body = {"model": "policy", "messages": list(messages), "tools": [planes.CALC]}
    path = f"/sessions/{claim['session_id']}/v1/chat/completions"
    headers = served_plane.agent_headers(path)
    return served_plane.http.post(path, json=body, headers=headers).status_code


def end(served_plane: planes.ServedPlane, claim: dict[str, Any], **report: Any) -> None:
    if "reward" in report:
        report["status"] = "finished"
    told = {"status": "failed", "error": "KeyError: x", "task_id": "t", "environment": "e"}
    served_plane.post(f"/sessions/{claim['session_id']}/finish", told | report)


def overflow(served_plane: planes.ServedPlane, claim: dict[str, Any]) -> None:
    assert (ask(served_plane, claim, HI), ask(served_plane, claim, LONG)) == (200, 400)


def sealed_rows(
    served_plane: planes.ServedPlane, kind: str = "batches", index: int = 0
) -> tuple[dict[str, Any], list[Trajectory]]:
    sealed = served_plane.post(f"/runs/run/{kind}/{index}/seal", {"attempt": 1})
    return sealed, to_rows(
        read_trajectories(str(Path(served_plane.run_dir, "run", sealed["files"][0]["uri"])))
    )


def test_a_session_that_ran_out_of_context_trains_with_the_reward_of_a_failed_one(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    serve(served_plane, renderer)
    [claim] = served_plane.claim()
    assert ask(served_plane, claim, HI) == 200
    overflow(served_plane, claim)
    end(served_plane, claim)
    sealed, rows = sealed_rows(served_plane)
    assert (sealed["failures"], sealed["rejected"]) == ({"context_overflow": 1}, {})
    assert sealed["reward_mean"] == -0.5
    for row in rows:
        assert (row.status, row.reward, dict(row.reward_parts)) == ("context_overflow", -0.5, {})
        assert (row.task_id, row.environment) == ("t", "e")
    # all that was sampled before, each token once, with its log-prob and version
    answer = planes.say(renderer, "hello")
    assert [row.token_ids[row.loss_mask].tolist() for row in rows] == [answer] * 2
    assert all((row.logprobs[row.loss_mask] <= 0).all() for row in rows)
    assert all((row.policy_versions[row.loss_mask] == 0).all() for row in rows)
    counters = served_plane.get("/runs/run")["counters"]
    assert (counters["failed_sessions"], counters["failures.context_overflow"]) == (1, 1)
    assert "finished_sessions" not in counters


@pytest.mark.parametrize(
    ("again", "report", "status", "reward"),
    [
        pytest.param(
            False, {"reward": 0.75}, "finished_after_overflow", 0.75, id="the agent ends with what it has"
        ),
        pytest.param(True, {"reward": 0.75}, "finished", 0.75, id="the agent copes with it"),
        pytest.param(False, {}, "context_overflow", -0.5, id="the agent raises"),
        pytest.param(True, {}, None, None, id="the agent copes with it and raises later"),
        pytest.param(False, {"cause": "reward"}, None, None, id="the reward function raises"),
    ],
)
def test_a_session_says_that_its_last_request_did_not_fit(
    served_plane: planes.ServedPlane,
    renderer: Renderer,
    again: bool,
    report: dict[str, Any],
    status: str | None,
    reward: float | None,
) -> None:
    serve(served_plane, renderer, session_attempts=1)
    [claim] = served_plane.claim()
    overflow(served_plane, claim)
    if again:
        assert ask(served_plane, claim, HI, {"role": "assistant", "content": "hello"}, HI) == 200
    end(served_plane, claim, **report)
    if status is None:
        reason = f"{report.get('cause', 'agent')}_error"
        assert served_plane.get("/runs/run")["counters"][f"rejected_groups.{reason}"] == 1
        return
    sealed, rows = sealed_rows(served_plane)
    assert {(row.status, row.reward) for row in rows} == {(status, reward)}
    assert sealed["failures"] == ({status: 1} if report == {} else {})


@pytest.mark.parametrize("text", [UNPARSED, "no call"])
def test_an_agent_that_ends_in_an_error_after_a_call_that_does_not_parse_failed_by_that(
    served_plane: planes.ServedPlane, renderer: Renderer, text: str
) -> None:
    serve(served_plane, renderer, text, session_attempts=1, was_warmed=True)
    [claim] = served_plane.claim()
    assert ask(served_plane, claim, HI) == 200
    end(served_plane, claim)
    if text == "no call":
        assert served_plane.get("/runs/run")["counters"]["rejected_groups.agent_error"] == 1
        return
    [row] = sealed_rows(served_plane)[1]
    assert (row.status, row.reward) == ("unparsed_call", -0.5)
    [other] = served_plane.claim()
    assert ask(served_plane, other, HI) == 200
    end(served_plane, other, reward=1.0)
    served_plane.post("/runs/run/weights", {"version": 1, "uri": "w"})
    [row] = sealed_rows(served_plane, index=1)[1]
    assert (row.status, row.reward) == ("finished", 1.0)


def test_a_session_that_ran_too_long_trains_with_what_was_answered_and_names_its_task(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    # the clock is looked at once a second, and then jumps by two at most
    serve(served_plane, renderer, session_timeout_s=2.5)
    [claim] = served_plane.claim()
    assert ask(served_plane, claim, HI) == 200
    named = {claim["session_id"]: {"task_id": "t7", "environment": "shop"}}
    running = [claim["session_id"]]
    served_plane.post("/runs/run/claim", {"runner": "a0", "max": 0, "running": running, "tasks": named})
    wait_until(lambda: served_plane.get("/runs/run/batches/0")["ready"])
    sealed, [row] = sealed_rows(served_plane)
    assert (row.status, row.reward, row.task_id, row.environment) == ("timeout", -0.5, "t7", "shop")
    assert row.token_ids[row.loss_mask].tolist() == planes.say(renderer, "hello")
    assert sealed["failures"] == {"timeout": 1}
    assert served_plane.get("/runs/run")["last_error"] == "ran longer than 2.5 s"


def test_an_answer_that_is_scored_too_late_is_no_fault_of_the_policy(
    served_plane: planes.ServedPlane, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane, "SWEEP_S", 0.02)
    serve(served_plane, renderer, score_timeout_s=0.5, session_attempts=1)
    [claim] = served_plane.claim()
    assert ask(served_plane, claim, HI) == 200
    end(served_plane, claim, status="answered", answer='"42"')
    wait_until(lambda: "rejected_groups.reward_error" in served_plane.get("/runs/run")["counters"])
    assert served_plane.get("/runs/run")["last_error"] == "got no reward within 0.5 s of its answer"


@pytest.mark.parametrize(
    ("rule", "status"), [("retry_then_zero", "agent_error"), ("retry_then_exclude", None)]
)
def test_what_is_tried_again_ends_as_its_rule_says(
    served_plane: planes.ServedPlane, renderer: Renderer, rule: str, status: str | None
) -> None:
    serve(served_plane, renderer, on_failure={"agent_error": rule}, session_attempts=2, groups_per_batch=2)
    for attempt in range(2):
        [claim] = served_plane.claim()
        assert claim["session_id"] == f"run.g0.0.a{attempt}"
        assert ask(served_plane, claim, HI) == 200
        end(served_plane, claim)
    if status is None:
        assert served_plane.get("/runs/run")["counters"]["rejected_groups.agent_error"] == 1
    else:
        [claim] = served_plane.claim()
        assert ask(served_plane, claim, HI) == 200
        end(served_plane, claim, reward=1.0)
        sealed, [row, _] = sealed_rows(served_plane)
        assert (row.session_id, row.status) == ("run.g0.0.a1", status)
        assert sealed["failures"] == sealed["discarded"] == {"agent_error": 1}
        assert sealed["last_error"] == "KeyError: x"


@pytest.mark.parametrize("finishes", [False, True])
def test_without_a_sampled_token_there_is_nothing_to_train(
    served_plane: planes.ServedPlane, renderer: Renderer, finishes: bool
) -> None:
    serve(served_plane, renderer, session_attempts=2)
    for _ in range(2):
        [claim] = served_plane.claim()
        assert ask(served_plane, claim, LONG) == 400
        end(served_plane, claim, **({"reward": 1.0} if finishes else {}))
    assert served_plane.get("/runs/run")["counters"]["rejected_groups.context_overflow"] == 1
    [claim] = served_plane.claim()
    ask(served_plane, claim, HI)
    end(served_plane, claim, reward=1.0)
    assert sealed_rows(served_plane)[0]["rejected"] == {"0": "context_overflow"}


def test_held_out_sessions_fail_by_the_same_rule(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    serve(served_plane, renderer, num_batches=0, session_attempts=2)
    served_plane.post("/runs/run/evaluations/0", {"num_tasks": 4})
    good, overflowed, never_asked, raised = served_plane.claim(4)
    for claim in (good, raised):
        assert ask(served_plane, claim, HI) == 200
    end(served_plane, good, reward=1.0)
    overflow(served_plane, overflowed)
    end(served_plane, overflowed)
    end(served_plane, never_asked)
    end(served_plane, raised)
    for claim in served_plane.claim(2):
        assert claim["attempt"] == 1
        if claim["task_index"] == raised["task_index"]:
            assert ask(served_plane, claim, HI) == 200
        end(served_plane, claim)
    sealed, rows = sealed_rows(served_plane, "evaluations")
    assert (sealed["failed"], sealed["failures"]) == (3, {"context_overflow": 1, "agent_error": 2})
    assert sealed["reward_mean"] == sealed["by_environment"]["e"] == (1.0 - 3 * 0.5) / 4
    statuses = {row.session_id: row.status for row in rows}
    assert statuses == {
        "run.e0.0.a0": "finished",
        "run.e0.1.a0": "context_overflow",
        "run.e0.3.a1": "agent_error",
    }


def test_what_failed_is_tried_with_other_draws_and_what_was_lost_with_the_same(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    serve(served_plane, renderer, group_size=2, session_attempts=4)
    failing, lost = served_plane.claim(2)
    for _ in range(2):
        ask(served_plane, failing, HI)
        ask(served_plane, lost, HI)
        end(served_plane, failing)
        # the runner does not name the other one any more
        [failing, lost] = served_plane.claim(2)
    ask(served_plane, failing, HI)
    ask(served_plane, lost, HI)
    seeds = [request.sampling.seed for request in served_plane.asked]
    assert len({seeds[0], seeds[2], seeds[4]}) == 3
    assert seeds[1] == seeds[3] == seeds[5]


def fail_to_export(monkeypatch: pytest.MonkeyPatch, session_id: str) -> None:
    """Make the export of this session fail."""
    export: Callable[..., list[Trajectory]] = finished.export_session

    def failing(session: Any, *facts: Any, **more: Any) -> list[Trajectory]:
        if session.session_id.startswith(session_id):
            raise ValueError("could not broadcast input array from shape (3,) into shape (4,)")
        return export(session, *facts, **more)

    monkeypatch.setattr(finished, "export_session", failing)


@pytest.mark.parametrize("is_over_time", [False, True])
def test_a_session_that_cannot_be_exported_is_given_out_again_and_then_excludes_its_group(
    served_plane: planes.ServedPlane, renderer: Renderer, monkeypatch: pytest.MonkeyPatch, is_over_time: bool
) -> None:
    monkeypatch.setattr(plane, "SWEEP_S", 0.02)
    serve(
        served_plane,
        renderer,
        lag_bound=0,
        session_attempts=2,
        session_timeout_s=0.5 if is_over_time else 60.0,
    )
    fail_to_export(monkeypatch, "run.g0.0.")
    sentence = "could not be recorded: ValueError: could not broadcast"
    name = ""
    for attempt in range(2):
        name = next_claim(served_plane, name)
        assert name == f"run.g0.0.a{attempt}"
        assert ask(served_plane, {"session_id": name}, HI) == 200
        if not is_over_time:
            report = {"session_id": name, "status": "finished", "reward": 1.0}
            answer = served_plane.post("/runs/run/finished", {"sessions": [report]})
            assert (answer["finished"], list(answer["refused"])) == ([], [name])
            assert sentence in answer["refused"][name]
    # nobody waits for it: the next group takes its place
    assert next_claim(served_plane, name) == "run.g1.0.a0"
    status = served_plane.get("/runs/run")
    assert status["counters"]["rejected_groups.not_recorded"] == 1
    assert sentence in status["last_error"]


def next_claim(served_plane: planes.ServedPlane, running: str) -> str:
    """Id of the next session given out; `running` occupies the only place until it is over."""
    found: list[dict[str, Any]] = []
    wait_until(lambda: bool(found.extend(served_plane.claim(1, running=[running])) or found))
    return str(found[0]["session_id"])


def test_a_held_out_session_that_cannot_be_exported_does_not_hold_back_the_others(
    served_plane: planes.ServedPlane, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(served_plane, renderer, num_batches=0, session_attempts=1)
    served_plane.post("/runs/run/evaluations/0", {"num_tasks": 2})
    fail_to_export(monkeypatch, "run.e0.0.")
    for claim in served_plane.claim(2):
        assert ask(served_plane, claim, HI) == 200
        report = {"status": "finished", "reward": 1.0}
        answer = served_plane.http.post(f"/sessions/{claim['session_id']}/finish", json=report)
        assert answer.status_code == (500 if claim["member"] == 0 else 200)
    sealed, _ = sealed_rows(served_plane, "evaluations")
    assert (sealed["failures"], sealed["reward_mean"]) == ({"not_recorded": 1}, 0.25)


def test_a_session_that_an_agent_opened_and_that_cannot_be_exported_ends(
    served_plane: planes.ServedPlane, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(served_plane, renderer)
    opened = served_plane.client.post("/sessions", {"run_id": "run"})
    fail_to_export(monkeypatch, opened["session_id"])
    assert ask(served_plane, opened, HI) == 200
    path = f"/sessions/{opened['session_id']}"
    client = served_plane.client.http
    answer = client.post(path + "/finish", json={"status": "finished", "reward": 1.0})
    assert (answer.status_code, "ValueError" in answer.text) == (500, True)
    assert client.get(path).status_code == 404
    assert served_plane.get("/runs/run")["sessions_running"] == 0


@pytest.mark.parametrize("status", ["agent_error", "reward_error", "unparsed_call"])
def test_a_batch_of_failures_ends_the_attempt_and_a_later_one_begins_new_groups(
    served_plane: planes.ServedPlane, renderer: Renderer, status: str
) -> None:
    rules = {"on_failure": {"agent_error": "zero", "reward_error": "zero"}, "groups_per_batch": 2}
    serve(served_plane, renderer, UNPARSED if status == "unparsed_call" else "hello", **rules)
    cause = {"cause": "reward"} if status == "reward_error" else {}
    for claim in served_plane.claim(2):
        assert ask(served_plane, claim, HI) == 200
        end(served_plane, claim, **cause)
    refused = served_plane.http.post("/runs/run/batches/0/seal", json={"attempt": 1})
    sentence = f"every session of batch 0 failed ({status} 2); last error: KeyError: x"
    assert refused.status_code == 409 and refused.json()["error"]["message"] == sentence
    awaited = served_plane.get("/runs/run/batches/0", wait_s=0.0)
    assert (awaited["ready"], awaited["fault"]) == (False, sentence)
    assert served_plane.get("/runs/run")["counters"]["rejected_groups.all_failed"] == 2

    served_plane.register(group_size=1, attempt=2, **rules)
    served_plane.connect(lambda prompt, seed: planes.say(renderer, "hello"), lease="r1", attempt=2)
    assert served_plane.get("/runs/run/batches/0", wait_s=0.0)["fault"] == ""
    for claim in served_plane.claim(2, runner="a1"):
        assert ask(served_plane, claim, HI) == 200
        end(served_plane, claim, reward=1.0)
    sealed = served_plane.post("/runs/run/batches/0/seal", {"attempt": 2})
    assert (sealed["groups"], sealed["failures"]) == ([2, 3], {})


@pytest.mark.parametrize(
    ("cause", "text", "spec"),
    [
        ("time", "hello", {}),
        ("agent", UNPARSED, {"was_warmed": True}),
        ("agent", "hello " * 40, {"max_tokens": 4}),
    ],
)
def test_a_batch_that_failed_by_what_the_policy_did_is_trained_on(
    served_plane: planes.ServedPlane, renderer: Renderer, cause: str, text: str, spec: dict[str, Any]
) -> None:
    serve(served_plane, renderer, text, on_failure={"agent_error": "zero"}, **spec)
    [claim] = served_plane.claim()
    assert ask(served_plane, claim, HI) == 200
    end(served_plane, claim, cause=cause)
    sealed, [row] = sealed_rows(served_plane)
    assert row.reward == -0.5 and sum(sealed["failures"].values()) == 1


def test_an_error_of_its_code_is_the_agents_whatever_the_policy_answered(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    serve(served_plane, renderer, UNPARSED, session_attempts=1, was_warmed=True)
    [claim] = served_plane.claim()
    assert ask(served_plane, claim, HI) == 200
    end(served_plane, claim, cause="code", error="NameError: name 'json' is not defined")
    assert served_plane.get("/runs/run")["counters"]["rejected_groups.agent_error"] == 1
