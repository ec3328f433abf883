"""One request that ends every engine among others that do not: over the real WebSocket, with engines in
processes of their own and in this one."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.routing.wait_queue import MAX_FAULTS
from sf_core.engines.protocol import Engine
from sf_core.engines.wire import Hello
from tests.bench import engines, waits
from tests.bench.dataplane import planes

FATAL_TOKEN = 33
BAD_TOKEN = 34
NUM = 64
MOST_ENDED = int(math.log2(NUM)) + MAX_FAULTS
"""Engines that one request among so many may cost."""


def ask(plane: planes.ServedPlane, prompts: list[list[int]], path: str = "") -> list[httpx.Response]:
    """Answers to these prompts, which are sent at once."""

    def post(prompt: list[int]) -> httpx.Response:
        body = {"model": "policy", "prompt": prompt, "max_tokens": 8}
        headers = plane.agent_headers(path)
        url = f"{plane.url}{path}/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=waits.patience())

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(post, prompts))


def prompts_of(poisoned: int, token: int = FATAL_TOKEN) -> list[list[int]]:
    return [[5, 6, token if number == poisoned else 7] for number in range(NUM)]


def check_refused_alone(responses: list[httpx.Response], poisoned: int) -> dict[str, Any]:
    """Check that one request alone was refused; returns its error."""
    assert [r.status_code for r in responses] == [502 if i == poisoned else 200 for i in range(NUM)]
    error = responses[poisoned].json()["error"]
    assert error["code"] == "engine_failed"
    return dict(error)


def connect(plane: planes.ServedPlane, engine: Engine, lease: str = "r0") -> None:
    plane.lend(engine, Hello("run", 1, lease, 0, lease, lease, NUM))


@pytest.mark.parametrize("kind", ["scripted", "self-running", "torch"])
def test_one_request_that_ends_processes_is_refused_and_63_are_answered(
    served_plane: planes.ServedPlane, renderer: Renderer, small_policy: str, kind: engines.fatal.Kind
) -> None:
    answer = planes.say(renderer, "xy")
    if kind == "torch":
        served_plane.model_dir = small_policy
    served_plane.register(context_length=64, weights_uri=small_policy)
    options = kind, small_policy, answer, FATAL_TOKEN, NUM
    workers = [engines.fatal.FatalWorker(served_plane.url, lease, *options) for lease in ("r0", "r1")]
    waits.wait_until(lambda: len(served_plane.live_engines()) == 2)
    responses = ask(served_plane, prompts_of(poisoned=20))
    error = check_refused_alone(responses, 20)
    assert error["message"].endswith(" ended while it worked on this request, as an engine did before.")
    assert responses[20].headers["x-should-retry"] == "false"
    assert MAX_FAULTS <= sum(worker.num_ended for worker in workers) <= MOST_ENDED
    served_plane.post("/runs/run/release")
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("drive", [lambda engine: engine, engines.self_running.SelfRunningEngine])
def test_a_step_that_a_request_makes_fail_costs_that_request_and_no_lease(
    served_plane: planes.ServedPlane, renderer: Renderer, drive: Any
) -> None:
    served_plane.register()
    engine = engines.fatal.FatalEngine(
        lambda prompt, seed: planes.say(renderer, "xy"),
        engines.fatal.fail,
        FATAL_TOKEN,
        BAD_TOKEN,
        max_running=NUM,
    )
    connect(served_plane, drive(engine))
    error = check_refused_alone(ask(served_plane, prompts_of(poisoned=20)), 20)
    told = "engine r0 failed (RuntimeError: the forward pass failed) while it worked on this request"
    assert told in error["message"]
    responses = ask(served_plane, prompts_of(3, BAD_TOKEN))
    assert "engine r0 failed (a bad row)" in check_refused_alone(responses, 3)["message"]
    assert "r0" not in served_plane.reasons, "its lease goes on"


def test_the_session_of_such_a_request_fails_and_is_tried_again_with_other_draws(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    engine = engines.fatal.FatalEngine(
        lambda prompt, seed: planes.say(renderer, "xy"), engines.fatal.fail, FATAL_TOKEN
    )
    connect(served_plane, engine)
    [claim] = served_plane.claim()
    path = f"/sessions/{claim['session_id']}"
    [answered] = ask(served_plane, [[5]], path)
    assert answered.status_code == 200
    [refused] = ask(served_plane, [[5, FATAL_TOKEN]], path)
    assert refused.status_code == 502
    waits.wait_until(lambda: served_plane.get("/runs/run")["counters"].get("failures.agent_error"))
    status = served_plane.get("/runs/run")
    assert status["last_error"] == f"session {claim['session_id']}: {refused.json()['error']['message']}"
    [repeated] = ask(served_plane, [[5, FATAL_TOKEN]], path)
    assert repeated.status_code == 404, "no engine is asked again"
    again = [one for one in served_plane.claim(4) if one["session_id"].endswith(".a1")]
    assert [one["session_id"] for one in again] == [claim["session_id"].removesuffix(".a0") + ".a1"]
    [answered] = ask(served_plane, [[5]], f"/sessions/{again[0]['session_id']}")
    assert answered.status_code == 200
    assert engine.seeds[-1] not in engine.seeds[:-1], "the same prompt is drawn otherwise"


def test_a_session_that_somebody_opened_stays_open(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    connect(
        served_plane,
        engines.fatal.FatalEngine(
            lambda prompt, seed: planes.say(renderer, "xy"), engines.fatal.fail, FATAL_TOKEN
        ),
    )
    opened = served_plane.client.post("/sessions", {"run_id": "run"})
    path = f"/sessions/{opened['session_id']}"
    responses = ask(served_plane, [[5, FATAL_TOKEN]], path) + ask(served_plane, [[5]], path)
    assert [response.status_code for response in responses] == [502, 200]
    assert opened["session_id"] in served_plane.get("/runs/run")["last_error"]
