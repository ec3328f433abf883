"""Invariants 4 and 9 with real processes: the data plane is killed with SIGKILL and started again on the same
port, under agents that hold an OpenAI client and nothing else."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from typing import Any

import httpx
import pytest

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench import dataplane, waits
from tests.bench.dataplane import served_runs


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_killed_at_random_moments_agents_see_whole_answers_and_the_record_is_exact(
    restarts: dataplane.restarts.Restarts, renderer: Renderer, seed: int
) -> None:
    served_runs.agents_see_whole_answers(restarts, renderer, seed, lambda moments: restarts.restart())


def test_a_restarted_process_goes_on_without_its_flow(restarts: dataplane.restarts.Restarts) -> None:
    plane = restarts.plane
    plane.register(groups_per_batch=1, group_size=1, max_tokens=4)
    plane.connect(served_runs.script)
    plane.post("/runs/run/evaluations/0", {"num_tasks": 2})
    claims = plane.claim(3)
    assert [claim["session_id"] for claim in claims] == ["run.e0.0.a0", "run.e0.1.a0", "run.g0.0.a0"]
    running = [claim["session_id"] for claim in claims]
    for claim in claims:
        dataplane.planes.converse(plane, claim, 1, streamed=False)
    dataplane.planes.finish(plane, claims[2])
    sealed = plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    plane.post("/runs/run/weights", {"version": 1, "uri": "w1"})
    dataplane.planes.finish(plane, claims[0])
    plane.post("/runs/run/leases/later/revoke")

    restarts.restart()
    assert plane.get("/runs/run/evaluations/0")["finished"] == 1
    assert plane.claim(1, running=running[1:2])[0]["session_id"] == "run.g1.0.a0"
    waits.wait_until(lambda: bool(plane.live_engines()))
    assert plane.get("/runs/run")["version"] == 1
    assert plane.post("/runs/run/batches/0/seal", {"attempt": 1}) == sealed
    dataplane.planes.converse(plane, claims[1], 2, streamed=False)
    dataplane.planes.finish(plane, claims[1])
    assert plane.post("/runs/run/evaluations/0/seal", {"attempt": 1})["sessions"] == 2
    plane.connect(served_runs.script, lease="later")
    assert plane.reasons["later"] == "revoked"
    # the flow's next attempt finds the run where it was
    plane.register(attempt=2, iteration=1, version=1, done_groups=[0], groups_per_batch=1, group_size=1)
    assert plane.claim(1, runner="a1")[0]["session_id"] == "run.g1.0.a1"


def test_an_answer_that_did_not_arrive_is_given_again_after_a_restart(
    restarts: dataplane.restarts.Restarts,
) -> None:
    plane = restarts.plane
    plane.register(max_tokens=8)
    plane.connect(served_runs.script)
    [claim] = plane.claim()
    first = post_chat(plane, claim)
    restarts.restart()
    again = post_chat(plane, claim, {"x-stainless-retry-count": "1"})
    assert (again["id"], again["choices"]) == (first["id"], first["choices"])
    waits.wait_until(lambda: bool(plane.live_engines()))
    other = post_chat(plane, claim)
    assert other["id"] != first["id"]
    assert len(plane.asked) == 2


def post_chat(
    plane: dataplane.planes.ServedPlane, claim: dict[str, Any], headers: dict[str, str] | None = None
) -> dict[str, Any]:
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    path = f"/sessions/{claim['session_id']}/v1/chat/completions"
    response = plane.http.post(path, json=body, headers=plane.agent_headers(path) | (headers or {}))
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_a_session_that_an_agent_opened_survives_a_restart_until_it_is_finished(
    restarts: dataplane.restarts.Restarts,
) -> None:
    plane = restarts.plane
    client = plane.client
    client.http.headers["Authorization"] = "Bearer key-of-the-run"
    plane.register(max_tokens=8, key="key-of-the-run")
    plane.connect(served_runs.script)
    opened = client.post("/sessions", {"run_id": "run", "task_id": "t7", "metadata": {"seed": 3}})
    path = f"/sessions/{opened['session_id']}"
    tools = [{"type": "function", **dataplane.planes.CALC["function"]}]
    body = {"model": "policy", "instructions": "be brief", "input": "hi", "tools": tools}
    first = client.post(f"{path}/v1/responses", body)
    given = {"reward": 0.5, "reward_parts": {"style": 0.5}, "step_rewards": {first["id"]: 0.25}}
    client.post(path + "/reward", given)
    tree = client.get(path)
    restarts.restart()
    assert client.get(path) == tree
    waits.wait_until(lambda: bool(plane.live_engines()))
    client.post(f"{path}/v1/responses", body | {"previous_response_id": first["id"], "input": "more"})
    assert client.get(path)["prompts"][1]["parent_turn"] == 0
    plane.register(max_tokens=8, key="key-of-the-run", attempt=2)
    client.get(path)
    client.post(path + "/finish", {"status": "finished"})
    restarts.restart()
    assert client.http.get(path).status_code == 404
    waits.wait_until(lambda: bool(served_runs.stored(restarts.folder / "run")))
    [(_, row)] = served_runs.stored(restarts.folder / "run")
    assert (row.task_id, row.reward, dict(row.reward_parts)) == ("t7", 0.5, {"style": 0.5})
    assert [span.reward for span in row.turns if span.role == "assistant"] == [0.25, None]
    assert json.loads(row.tools or "") == [dataplane.planes.CALC]


def test_killed_at_random_moments_what_agents_opened_is_stored_once(
    restarts: dataplane.restarts.Restarts,
) -> None:
    """Four agents open, use and finish one session after the other, until two kills are over."""
    plane = restarts.plane
    plane.register()
    plane.connect(lambda prompt, seed: [*range(2, 12), served_runs.STOP])
    finished: list[str] = []
    is_over = threading.Event()

    def agent(number: int) -> None:
        with httpx.Client(base_url=plane.url, timeout=waits.patience()) as http:
            while not is_over.is_set():
                opened = insist(http, "/sessions", {"run_id": "run", "group": f"g{number}"}).json()
                dataplane.planes.converse(plane, opened, 1, streamed=number % 2 == 0)
                report = {"status": "finished", "reward": float(number)}
                insist(http, f"/sessions/{opened['session_id']}/finish", report)
                finished.append(opened["session_id"])

    agents = [threading.Thread(target=agent, args=(number,)) for number in range(4)]
    for thread in agents:
        thread.start()
    moments = random.Random(0)
    for kill in (1, 2):
        waits.wait_until(lambda kill=kill: len(finished) > 10 * kill)  # type: ignore[misc]
        # what has finished is stored once a second
        threading.Event().wait(moments.uniform(0.0, 1.0))
        restarts.restart()
    is_over.set()
    for thread in agents:
        waits.join(thread)
    plane.post("/runs/run/release")
    rows = [row for _, row in served_runs.stored(restarts.folder / "run")]
    assert sorted(row.session_id for row in rows) == sorted(finished)
    for row in rows:
        assert row.group_id == f"g{row.reward:.0f}"
        assert row.token_ids[row.loss_mask].tolist() == [*range(2, 12), served_runs.STOP]


def insist(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """Ask until there is an answer, also if an earlier try has finished the session."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer
        threading.Event().wait(0.05)
