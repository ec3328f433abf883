"""The API for flows and agent runners: registration, sessions, batches, evaluations, recovery."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sf_core import waits
from sf_core.dataplane.api_schemas import ClaimBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.client import DataplaneClient
from sf_core.dataplane.control.plane import sweep_run
from sf_core.dataplane.runs import claiming
from sf_core.engines import wire
from sf_core.engines.scripted import scripted_logprob
from storage.tables.trajectories import read_trajectories
from tests import bench
from tests.bench.dataplane import planes, small_runs


def fail(plane: planes.ServedPlane, claim: dict[str, Any]) -> None:
    plane.post(f"/sessions/{claim['session_id']}/finish", {"status": "failed", "error": "KeyError: x"})


def test_the_session_that_runs_longest_is_in_the_status(answering_plane: planes.ServedPlane) -> None:
    assert answering_plane.get("/runs/run")["straggler"] is None
    claims = answering_plane.claim(3)
    straggler = answering_plane.get("/runs/run")["straggler"]
    assert (straggler["session"], straggler["group"]) == (claims[0]["session_id"], 0)
    assert straggler["age_s"] >= 0.0


def test_a_long_wait_is_in_the_status_until_the_next_stage(
    answering_plane: planes.ServedPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "FIRST_S", 0.05)
    client = DataplaneClient(answering_plane.url, "run", answering_plane.key)
    client.report_stage(0, "rollout")
    with pytest.raises(TimeoutError, match=r"waited \d+ s, since .*, for batch 0: 2 of 2 groups"):
        client.wait_for_batch(0, timeout_s=0.3, absence_timeout_s=60)
    status = answering_plane.get("/runs/run")
    assert (status["stage"], status["wait"]["what"]) == ("rollout", "batch 0")
    assert status["wait"]["until"] > status["wait"]["since"]
    client.report_stage(0, "filter")
    assert "wait" not in answering_plane.get("/runs/run")


def test_a_batch_that_nobody_works_on_is_given_up_by_a_setting_that_is_named(
    answering_plane: planes.ServedPlane,
) -> None:
    absent = (
        r"batch 0: no engine or no agent runner was connected for 0\.02 s, the most that "
        r"rollout\.absence_timeout_s allows; 2 of 2 groups; .*no agent runner is connected"
    )
    with pytest.raises(TimeoutError, match=absent):
        DataplaneClient(answering_plane.url, "run", answering_plane.key).wait_for_batch(
            0, timeout_s=60, absence_timeout_s=0.02
        )


def test_an_engine_that_loads_is_not_absent(served_plane: planes.ServedPlane) -> None:
    served_plane.register()
    served_plane.claim(1)
    with served_plane.dial() as engine:
        engine.send(wire.pack(wire.Hello("run", 1, "r0", 0, "r0", "r0", 8)))
        engine.recv()
        with pytest.raises(TimeoutError, match=r"waited .* for batch 0: .*; no engine is loaded yet"):
            DataplaneClient(served_plane.url, "run", served_plane.key).wait_for_batch(
                0, timeout_s=0.1, absence_timeout_s=0.02
            )


def test_a_batch_goes_from_claims_to_trajectories_in_the_run_directory(
    answering_plane: planes.ServedPlane,
) -> None:
    claims = answering_plane.claim(4)
    assert [c["session_id"] for c in claims] == [f"run.g{g}.{m}.a0" for g in (0, 1) for m in (0, 1)]
    before = answering_plane.get("/runs/run/batches/0")
    assert (before["ready"], before["accepted"], before["needed"], before["in_flight"]) == (False, 0, 2, 2)
    assert before["waiting_for"] == "2 of 2 groups; 2 are in flight"
    for i, claim in enumerate(claims):
        small_runs.work(answering_plane, claim, reward=float(i))
    assert answering_plane.get("/runs/run/batches/0", wait_s=5)["ready"]
    sealed = small_runs.seal(answering_plane, 0)
    assert sealed == small_runs.seal(answering_plane, 0)
    assert (sealed["groups"], sealed["rejected"], sealed["sessions"]) == ([0, 1], {}, 4)
    assert (sealed["reward_mean"], sealed["max_lag"]) == (1.5, 0)
    [file] = sealed["files"]
    table = read_trajectories(f"{answering_plane.run_dir}/run/{file['uri']}")
    assert table["session_id"].to_pylist() == [c["session_id"] for c in claims]
    assert table["group_id"].to_pylist() == ["run.g0", "run.g0", "run.g1", "run.g1"]
    assert table["reward"].to_pylist() == [0.0, 1.0, 2.0, 3.0]
    assert sealed["sampled_tokens"] == sum(map(sum, table["loss_mask"].to_pylist()))
    for request, ids, logprobs in zip(
        answering_plane.asked, table["token_ids"].to_pylist(), table["logprobs"].to_pylist(), strict=True
    ):
        start = len(request.prompt_ids)
        assert ids[:start] == request.prompt_ids
        assert logprobs[start:] == [scripted_logprob(t, i, 0) for i, t in enumerate(ids[start:])]


def test_a_runner_that_waits_gets_sessions_as_soon_as_there_are_some(
    answering_plane: planes.ServedPlane,
) -> None:
    answering_plane.claim(8)
    answers: list[Any] = []
    body = {"runner": "b0", "max": 1, "wait_s": 20.0, "running": []}
    waiting = threading.Thread(target=lambda: answers.append(answering_plane.post("/runs/run/claim", body)))
    waiting.start()
    answering_plane.post("/runs/run/evaluations/0", {"num_tasks": 1})
    bench.waits.join(waiting)
    assert answers[0]["sessions"][0]["session_id"] == "run.e0.0.a0"


def test_sessions_a_runner_does_not_know_of_are_given_out_again(answering_plane: planes.ServedPlane) -> None:
    known, unknown = answering_plane.claim(2)
    again = answering_plane.claim(1, running=[known["session_id"]])
    assert (again[0]["session_id"], again[0]["attempt"]) == ("run.g0.1.a1", 1)
    response = answering_plane.http.post(
        f"/sessions/{unknown['session_id']}/finish", json={"status": "failed"}
    )
    assert response.status_code == 404


def test_a_session_that_keeps_failing_excludes_its_group(answering_plane: planes.ServedPlane) -> None:
    claims = answering_plane.claim(6)
    fail(answering_plane, claims[0])
    [again] = answering_plane.claim(1, running=[c["session_id"] for c in claims])
    fail(answering_plane, again)
    for claim in claims[2:]:
        small_runs.work(answering_plane, claim)
    status = answering_plane.get("/runs/run")
    assert status["counters"]["rejected_groups.agent_error"] == 1
    assert status["counters"]["failures.agent_error"] == 2
    assert status["last_error"] == "KeyError: x"
    sealed = small_runs.seal(answering_plane, 0)
    assert (sealed["groups"], sealed["rejected"]) == ([1, 2], {"0": "agent_error"})
    # its other member was told to stop
    response = answering_plane.http.post(
        f"/sessions/{claims[1]['session_id']}/finish", json={"status": "failed"}
    )
    assert response.status_code == 404


def test_a_session_without_any_turn_counts_as_failed(answering_plane: planes.ServedPlane) -> None:
    [claim] = answering_plane.claim(1)
    small_runs.finish(answering_plane, claim)
    assert "without an answer from the policy" in answering_plane.get("/runs/run")["last_error"]


def test_a_report_that_cannot_be_read_changes_nothing(answering_plane: planes.ServedPlane) -> None:
    [claim] = answering_plane.claim(1)
    for report in ({"status": "done"}, {"status": "finished", "reward": "high"}):
        response = answering_plane.http.post(f"/sessions/{claim['session_id']}/finish", json=report)
        assert response.status_code == 400, response.text
    small_runs.work(answering_plane, claim)


def test_a_session_whose_reward_is_no_finite_number_counts_as_failed(
    answering_plane: planes.ServedPlane,
) -> None:
    for reward in ({"reward": None}, {"reward": 1.0, "reward_parts": {"style": None}}):
        [claim] = answering_plane.claim(1)
        report = {"status": "finished", **reward}
        response = answering_plane.http.post(f"/sessions/{claim['session_id']}/finish", json=report)
        assert (response.status_code, "finite number" in response.text) == (400, True)
    assert answering_plane.get("/runs/run")["counters"]["rejected_groups.reward_error"] == 1


def test_rewards_of_answers_that_a_session_did_not_get_fail_it_with_the_reason(
    answering_plane: planes.ServedPlane,
) -> None:
    claims = answering_plane.claim(2)
    for claim, other in (claims, claims[::-1]):
        steps = {f"chatcmpl-{claim['session_id']}.0.0": 0.5, f"chatcmpl-{other['session_id']}.0.0": 0.5}
        report = {"status": "finished", "reward": 1.0, "step_rewards": steps}
        response = answering_plane.http.post(f"/sessions/{claim['session_id']}/finish", json=report)
        assert response.status_code == 400
        assert (
            f"{other['session_id']}.0.0', which is not the id of an answer of this session" in response.text
        )
    assert answering_plane.get("/runs/run")["counters"]["failures.reward_error"] == 2


def test_evaluations_never_train(answering_plane: planes.ServedPlane) -> None:
    answering_plane.post("/runs/run/evaluations/0", {"num_tasks": 3})
    claims = answering_plane.claim(4)
    assert [c["split"] for c in claims] == ["holdout", "holdout", "holdout", "train"]
    assert [c["task_index"] for c in claims[:3]] == [0, 1, 2]
    assert (
        answering_plane.get("/runs/run/evaluations/0")["waiting_for"] == "3 of 3 held-out sessions are left"
    )
    for i, claim in enumerate(claims[:3]):
        small_runs.work(answering_plane, claim, reward=float(i))
    assert answering_plane.get("/runs/run/evaluations/0", wait_s=5)["done"]
    sealed = answering_plane.post("/runs/run/evaluations/0/seal", {"attempt": 1})
    assert (sealed["reward_mean"], sealed["by_environment"], sealed["failed"]) == (1.0, {"test": 1.0}, 0)
    [file] = sealed["files"]
    table = read_trajectories(f"{answering_plane.run_dir}/run/{file['uri']}")
    assert table["group_id"].to_pylist() == [None] * 3
    assert answering_plane.get("/runs/run/batches/0")["accepted"] == 0


def test_a_new_attempt_keeps_finished_sessions_and_fences_the_old_one(
    answering_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    claims = answering_plane.claim(4)
    for claim in claims[:3]:
        small_runs.work(answering_plane, claim)
    answering_plane.register(attempt=2)
    assert answering_plane.post("/runs/run/claim", {"runner": "a0", "max": 4})["released"]
    answering_plane.connect(lambda prompt, seed: planes.say(renderer, "new"), lease="r1", attempt=2)
    [claim] = answering_plane.claim(1, runner="a1")
    assert claim["session_id"] == "run.g1.1.a1"
    small_runs.work(answering_plane, claim)
    response = answering_plane.http.post("/runs/run/batches/0/seal", json={"attempt": 1})
    assert (response.status_code, "superseded" in response.text) == (409, True)
    assert small_runs.seal(answering_plane, 0, attempt=2)["groups"] == [0, 1]
    # the flow died before it committed the batch: its next attempt asks for the same one
    answering_plane.register(attempt=3)
    assert answering_plane.get("/runs/run/batches/0")["ready"]
    assert small_runs.seal(answering_plane, 0, attempt=3)["groups"] == [0, 1]


def test_release_sends_everyone_home(answering_plane: planes.ServedPlane) -> None:
    [claim] = answering_plane.claim(1)
    answering_plane.post("/runs/run/release")
    assert answering_plane.post("/runs/run/claim", {"runner": "a0", "max": 1})["released"]
    assert answering_plane.http.post(
        f"/sessions/{claim['session_id']}/finish", json={"status": "failed"}
    ).is_error
    bench.waits.join(answering_plane.threads[0])
    assert answering_plane.reasons == {"r0": "released"}


def test_who_waits_for_a_batch_or_an_evaluation_is_told_of_the_release(
    answering_plane: planes.ServedPlane,
) -> None:
    client = DataplaneClient(answering_plane.url, "run", answering_plane.key)
    client.start_evaluation(0, 2)
    with ThreadPoolExecutor() as pool:
        waits = [
            pool.submit(client.wait_for_batch, 0, timeout_s=60, absence_timeout_s=60),
            pool.submit(client.wait_for_evaluation, 0, timeout_s=60, absence_timeout_s=60),
        ]
        answering_plane.post("/runs/run/release")
        for wait in waits:
            with pytest.raises(
                RuntimeError, match="the data plane has released the run, so no worker works on it"
            ):
                wait.result(timeout=bench.waits.patience())


def test_a_superseded_attempt_releases_nothing(answering_plane: planes.ServedPlane) -> None:
    answering_plane.register(attempt=2)
    answering_plane.post("/runs/run/release", {"attempt": 1})
    assert not answering_plane.post("/runs/run/claim", {"runner": "a0", "max": 0})["released"]
    answering_plane.post("/runs/run/release", {"attempt": 2})
    assert answering_plane.post("/runs/run/claim", {"runner": "a0", "max": 0})["released"]


def test_paused_requests_wait_with_their_connection_open(answering_plane: planes.ServedPlane) -> None:
    [claim] = answering_plane.claim(1)
    answering_plane.post("/runs/run/pause")
    agent = threading.Thread(target=small_runs.work, args=(answering_plane, claim))
    agent.start()
    bench.waits.wait_until(lambda: answering_plane.get("/runs/run")["requests_waiting"] == 1)
    status = answering_plane.get("/runs/run")
    assert status["paused"]
    # as whoever waits for the batch is told
    awaited = answering_plane.get("/runs/run/batches/0")["waiting_for"]
    assert status["waiting_for"] == awaited == "2 of 2 groups; 1 are in flight; the run is paused"
    answering_plane.post("/runs/run/resume")
    bench.waits.join(agent)
    assert answering_plane.get("/runs/run")["reward_recent"] == 1.0


def test_the_flow_can_say_what_it_does(answering_plane: planes.ServedPlane) -> None:
    answering_plane.post("/runs/run/stage", {"iteration": 3, "stage": "train", "step": 7})
    status = answering_plane.get("/runs/run")
    assert (status["iteration"], status["stage"], status["step"]) == (3, "train", 7)


def test_bad_control_calls_get_a_sentence(answering_plane: planes.ServedPlane) -> None:
    for path, body, status, sentence in [
        ("/runs", {"run_id": "x"}, 400, "run_dir: Field required"),
        ("/runs/other/claim", {}, 400, "runner: Field required"),
        ("/runs/other/claim", {"runner": "a", "max": 1}, 404, "Run other is not registered"),
        ("/runs/run/batches/0/seal", {"attempt": 1}, 409, "batch 0 is not ready: waiting for 2 of 2 groups"),
        ("/runs/run/evaluations/9/seal", {"attempt": 1}, 409, "the evaluation of version 9 is not done"),
    ]:
        response = answering_plane.http.post(path, json=body)
        assert (response.status_code, sentence in response.text) == (status, True), response.text
    assert answering_plane.http.get("/runs/run/batches/0?wait_s=soon").status_code == 400


async def test_a_silent_runner_loses_its_sessions(
    driver: bench.dataplane.run_driver.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await driver.register()
    await driver.claim()
    await sweep_run(driver.run, 1.0)
    assert len(driver.run.sessions) == 3
    monkeypatch.setattr(claiming, "RUNNER_SILENCE_S", -1.0)
    await sweep_run(driver.run, 1.0)
    assert driver.run.sessions == {}
    [session] = await driver.claimed("b", 1)
    assert session.session_id == "run.g0.0.a1"


async def test_a_runner_of_an_earlier_attempt_is_sent_home_however_long_it_was_silent(
    driver: bench.dataplane.run_driver.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await driver.register()
    old = ClaimBody(runner="a0", max=1, attempt=1)
    sessions, released = await claiming.claim(driver.run, old)
    assert (len(sessions), released) == (1, False)
    monkeypatch.setattr(claiming, "RUNNER_SILENCE_S", -1.0)
    await sweep_run(driver.run, 1.0)
    await driver.begin_attempt()
    assert await claiming.claim(driver.run, old) == ([], True)


async def test_a_session_expires_by_the_time_engines_served(
    driver: bench.dataplane.run_driver.Driver,
) -> None:
    await driver.register()
    await driver.claim()
    await sweep_run(driver.run, 14.0)
    assert len(driver.run.sessions) == 3, "no engine served, so no time passed for the sessions"
    driver.run.state.serving_s = 10.5
    await sweep_run(driver.run, 0.0)
    assert driver.run.sessions == {}
    assert driver.run.state.recent.last_error == "ran longer than 10 s"


async def test_failures_of_an_earlier_attempt_are_not_held_against_a_later_one(
    driver: bench.dataplane.run_driver.Driver,
) -> None:
    await driver.register()
    await driver.claim()
    await driver.report(driver.given_out[0], status="failed", error="KeyError: x")
    await driver.register()
    recent = driver.run.state.recent
    assert (recent.failures_in_a_row, recent.last_error) == (1, "KeyError: x")
    await driver.begin_attempt()
    assert (recent.failures_in_a_row, recent.last_error) == (0, "")
